"""The rows of each expert are counted, and are those of one process under every strategy."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset, default_collate

from rung.distributed.world import open_world
from rung.runtime import build_runtime
from rung.spec.config import RunConfig
from rung.spec.strategy import parse, required_num_ranks
from rung.spec.task import Task
from rung.train.step_buffer import StepBuffer
from rung.train.worker import make_batches, make_eval_batches
from tests import expert_models as models
from tests.harness import on_ranks
from tests.marks import slow
from tests.parity import shuffled
from tests.tasks import text_task

HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None

# Windows of 49 and 49: in global micro-batches of 24, 24 and 1, which all ranks but one have no sample of.
CONFIG = RunConfig(batch_size=49, steps=2, precision="fp64", device="cpu", unused_parameters="allow")


def both_task() -> Task:
    """A layer whose experts are one module, and one whose experts are a list; few rows choose some of the list."""
    return text_task(model=Both, padded=True)


class Both(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.list = models.Mixture(7), models.ListMixture(7, is_dense=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.one(tokens) + self.list(tokens)
        return output


def even_mixtral_task() -> Task:
    """Eight tokens: each of two ranks of `cp` has four."""
    tokens = torch.randint(23, (103, 9), generator=torch.Generator().manual_seed(2))
    data = TensorDataset(tokens[:, :-1], tokens[:, 1:].clone())
    return replace(models.mixtral_task(), train_data=lambda: data, eval_data=lambda: data)


def by_hand(make_task: Callable[[], Task]) -> dict[str, list[int]]:
    """The rows of each expert in the first step, seen from outside of the modules."""
    task = make_task()
    torch.manual_seed(CONFIG.seed)
    model = task.model().double()
    found: dict[str, list[int]] = {}

    def count(name: str, numbers: list[int]) -> None:
        found[name] = [a + b for a, b in zip(found.get(name, [0] * len(numbers)), numbers, strict=True)]

    for name, module in model.named_modules():
        if not name.endswith("experts"):
            continue
        if not isinstance(module, torch.nn.ModuleList):
            size = len(next(module.parameters()))
            module.register_forward_pre_hook(
                lambda _, args, name=name, size=size: count(name, args[1].flatten().bincount(minlength=size).tolist())
            )
            continue
        for number, expert in enumerate(module):
            places = [int(place == number) for place in range(len(module))]
            expert.register_forward_pre_hook(
                lambda _, args, name=name, places=places: count(name, [place * len(args[0]) for place in places])
            )
    inputs, _ = default_collate(shuffled(task, CONFIG)[0])
    model(inputs)
    return found


def counted(make_task: Callable[[], Task], strategy: str, config: RunConfig) -> list[dict[str, Any]]:
    """What one rank knows of each step, of which the figures of the first are read."""
    layout = parse(strategy, required_num_ranks(strategy) or 1)
    if config.micro_batch:
        config = replace(config, micro_batch=config.micro_batch // layout.num_data_ranks)
    with open_world(layout, device="cpu", timeout_seconds=60) as world:
        task = make_task()
        batches = make_batches(task, config, world)
        runtime = build_runtime(task, world, config, total_steps=batches.total_steps)
        buffer = StepBuffer(world)
        for window in runtime.place(batches):
            buffer.add(window, runtime.step(window, want_norm=window.step == 1))
            runtime.evaluate(make_eval_batches(task, config, world))
        return [dict(record.experts) for record in buffer.records(buffer.seal())]


def rows(step: dict[str, Any]) -> dict[str, list[int]]:
    return {name: layer["rows"] for name, layer in step.items()}


@pytest.mark.parametrize(
    ("strategy", "micro_batch"),
    [
        ("ep2", 24),
        ("ddp2", 24),
        slow("fsdp2", None),
        slow("tp2", 24),
        slow("pp2", 24),
        slow("dp2", None),
        slow("fsdp4,ep2", 24),
        slow("pp2,fsdp2,ep2", 24),
        slow("fsdp2,tp2", None),
    ],
)
def test_rows_are_those_of_one_process(strategy: str, micro_batch: int | None) -> None:
    num_ranks = 1 if strategy == "dp2" else required_num_ranks(strategy) or 1
    found = on_ranks(counted, num_ranks, both_task, strategy, replace(CONFIG, micro_batch=micro_batch))
    expected = by_hand(both_task)
    assert len(expected) == 4
    assert {name: sum(counts) for name, counts in expected.items() if name.startswith("one.")} == {
        "one.blocks.0.experts": 49 * 6 * 2,
        "one.blocks.1.experts": 49 * 6 * 2,
    }
    for first, second in found:
        assert rows(first) == expected
        assert second == {}


@pytest.mark.parametrize("strategy", ["ep2", slow("fsdp2"), slow("pp2")])
def test_recomputed_activations_are_not_counted_again(strategy: str) -> None:
    config = replace(CONFIG, activation_checkpointing="full")
    found = on_ranks(counted, 2, both_task, strategy, config)
    assert rows(found[0][0]) == by_hand(both_task)


@pytest.mark.skipif(not HAS_TRANSFORMERS, reason="transformers not installed: pip install 'rung[models]'")
@pytest.mark.parametrize("strategy", ["cp2", slow("cp2,ep2"), slow("fsdp2,cp2")])
def test_rows_of_sequences_that_ranks_share(strategy: str) -> None:
    found = on_ranks(counted, required_num_ranks(strategy) or 1, even_mixtral_task, strategy, CONFIG)
    single = counted(even_mixtral_task, "single", CONFIG)
    assert [layer["choices"] for layer in single[0].values()] == [49 * 8 * 2] * 2
    assert found == [single] * len(found)


@pytest.mark.skipif(not HAS_TRANSFORMERS, reason="transformers not installed: pip install 'rung[models]'")
def test_rows_are_not_counted_where_a_rank_has_a_position_again() -> None:
    """Six tokens on two ranks, each of which has four."""
    assert on_ranks(counted, 2, models.mixtral_task, "cp2", CONFIG) == [[{}, {}]] * 2
