"""The load-balancing loss of a mixture of experts is that of the whole micro-batch of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from torch import Tensor, nn
from torch.nn import functional as F

from rung.distributed.world import open_fake_world, open_world
from rung.errors import ModelError
from rung.runtime import build_runtime
from rung.spec.config import RunConfig
from rung.spec.strategy import parse
from rung.spec.task import Task
from rung.train.first_step import check_first_step
from rung.train.worker import make_batches
from tests.expert_models import transformers_task
from tests.harness import RankFailed, on_ranks
from tests.marks import slow
from tests.parallel.experts.test_experts_ranks import CONFIG, HAS_TRANSFORMERS, difference
from tests.parity import largest_difference, with_rung, with_rung_traced
from tests.tasks import Mixture, text_data, text_task

needs_transformers = pytest.mark.skipif(not HAS_TRANSFORMERS, reason="not installed: pip install 'rung[models]'")


def balanced_task(kind: str) -> Task:
    """So few samples for evaluation that they are one micro-batch, of which the loss is no mean over samples."""
    return replace(transformers_task(kind, balance=0.5), eval_data=lambda: text_data(11))


def mixtral_task() -> Task:
    return balanced_task("Mixtral")


def qwen_task() -> Task:
    return balanced_task("Qwen3Moe")


@needs_transformers
@pytest.mark.parametrize(
    ("make_task", "strategy", "micro_batch"),
    [
        (mixtral_task, "ddp2", 24),
        slow(mixtral_task, "ddp4", 24),
        slow(mixtral_task, "fsdp2,ep2", None),
        slow(mixtral_task, "zero1x4", 24),
        slow(mixtral_task, "zero2x2", 24),
        slow(mixtral_task, "fsdp4", 24),
        slow(qwen_task, "ep4", 24),
        slow(qwen_task, "fsdp4,ep2", 24),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_loss_of_transformers(make_task: Callable[[], Task], strategy: str, micro_batch: int | None) -> None:
    """transformers computes it in fp32, also in a model of float64: hence eight digits."""
    assert difference(make_task, strategy, replace(CONFIG, micro_batch=micro_batch)) < 1e-8


@needs_transformers
@pytest.mark.parametrize(("strategy", "message"), [slow("cp2", "hands on a tensor"), ("pp2", "did not return")])
def test_layouts_without_all_rows_on_a_rank_refuse_it(strategy: str, message: str) -> None:
    """The router's logits leave a block by a hook: those of a part of the positions, or of one stage's layers."""
    with open_fake_world(parse(strategy, 2)) as world, pytest.raises(ModelError, match=message):
        build_runtime(mixtral_task(), world, CONFIG, total_steps=1)


@needs_transformers
def test_compiled_models_gather_rows_too() -> None:
    config = replace(CONFIG, compile=True, steps=2)
    found = on_ranks(with_rung_traced, 2, mixtral_task, "ddp2", config)
    assert largest_difference(with_rung(mixtral_task, "single", replace(config, compile=False)), found[0]) < 1e-8


class Balanced(Mixture):
    """Returns the probabilities of a router beside the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(23, 4)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = super().forward(tokens)
        return logits, self.gate(logits).softmax(-1)


def balanced_loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """A product of means, by hand."""
    logits, probabilities = output
    chosen = F.one_hot(probabilities.topk(2, dim=-1).indices, probabilities.shape[-1]).sum(-2).to(logits.dtype)
    balance = (chosen.mean((0, 1)) * probabilities.mean((0, 1))).sum()
    return F.cross_entropy(logits.flatten(0, 1), target.flatten()) + 4 * balance


def by_hand_task(scope: str) -> Task:
    return text_task(
        model=Balanced,
        eval_data=lambda: text_data(11),
        loss=balanced_loss,
        metrics=lambda output, target: {"accuracy": (output[0].argmax(-1) == target).float().mean(1)},
        loss_scope=scope,
    )


@pytest.mark.parametrize("strategy", [slow("ddp2"), slow("ep2"), "fsdp4,ep2"])
def test_a_loss_by_hand_is_exact_over_the_whole_micro_batch(strategy: str) -> None:
    config = replace(CONFIG, micro_batch=24)
    assert difference(partial(by_hand_task, "batch"), strategy, config) < 1e-9


def check(strategy: str, scope: str) -> None:
    task = by_hand_task(scope)
    config = RunConfig(batch_size=16, steps=1, device="cpu")
    with open_world(parse(strategy, 2), device="cpu", timeout_seconds=60) as world:
        batches = make_batches(task, config, world)
        check_first_step(build_runtime(task, world, config, total_steps=1), task, config, batches)


@pytest.mark.parametrize("strategy", ["ep2", slow("ddp2"), slow("fsdp2")])
def test_a_loss_by_hand_from_a_rank_s_own_rows_is_refused(strategy: str) -> None:
    on_ranks(check, 2, strategy, "batch")
    with pytest.raises(RankFailed, match="the loss is no mean over samples"):
        on_ranks(check, 2, strategy, "samples")
