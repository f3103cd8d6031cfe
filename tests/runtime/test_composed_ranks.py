"""Settings and odd models under strategies that cut the model: each agrees with one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import rung
from rung.data.permutation import Permutation
from rung.distributed.world import open_world
from rung.runtime import build_runtime
from rung.spec.compatibility import micro_batch_size
from rung.spec.config import RunConfig
from rung.spec.strategy import parse, required_num_ranks
from rung.spec.task import Task
from rung.system.launcher_env import environment_size
from rung.train.worker import make_batches
from tests.harness import RankFailed, on_ranks
from tests.marks import slow
from tests.parity import by_hand, largest_difference, with_rung, with_rung_traced
from tests.tasks import TASKS, TinyGPT, text_task


def difference(strategy: str, model: str, **settings: Any) -> float:
    settings = {"batch_size": 25, "steps": 5, "precision": "fp64", "clip": 0.5, "device": "cpu", **settings}
    config = RunConfig(**settings)
    layout = parse(strategy, required_num_ranks(strategy) or 2)
    taken = micro_batch_size(config, layout)
    expected = by_hand(TASKS[model](), config, None if taken is None else taken * layout.num_data_ranks)
    found = on_ranks(with_rung, layout.num_ranks, TASKS[model], strategy, config)
    return largest_difference(expected, found[0])


@pytest.mark.parametrize(
    ("strategy", "model", "settings"),
    [
        slow("pp2,fsdp2", "gpt", {"activation_checkpointing": "full"}),
        ("pp2", "babycnn", {"activation_checkpointing": "full", "micro_batch": 12}),
        slow("fsdp2,tp2", "gpt", {"activation_checkpointing": "selective"}),
        slow("pp2,tp2", "gpt", {"activation_checkpointing": "full", "micro_batch": 6}),
        slow("pp2,fsdp2", "gpt", {"offload": "cpu"}),
        slow("fsdp2,tp2", "gpt", {"offload": "cpu"}),
        ("pp2", "gpt", {"split": "blocks.1"}),
        slow("pp2", "text", {"split": "head"}),
        slow("pp2,tp2", "gpt", {"split": "blocks.0"}),  # what crosses is what hooks made of an embedding's partial sums
        ("pp2,fsdp2", "gpt", {"shard_by": "whole"}),
        slow("pp2,fsdp2", "gpt", {"shard_by": "size:500"}),
        ("tp2", "gpt", {"sequence_parallel": True}),
        ("tp2", "gpt", {"chunked_loss": "5", "micro_batch": 7}),
        slow("tp4", "text", {"chunked_loss": "5"}),
        slow("tp2", "gpt", {"chunked_loss": "5", "sequence_parallel": True, "activation_checkpointing": "full"}),
        slow("fsdp2,tp2", "gpt", {"chunked_loss": "5"}),
        slow("pp2,tp2", "gpt", {"chunked_loss": "5", "micro_batch": 6}),
        slow("pp2,fsdp2,tp2", "text", {"chunked_loss": "3", "micro_batch": 6}),
        slow("pp2,tp2", "gpt", {"sequence_parallel": True, "micro_batch": 6}),
        slow("fsdp2,tp2", "gpt", {"sequence_parallel": True}),
    ],
)
def test_settings(strategy: str, model: str, settings: dict[str, Any]) -> None:
    assert difference(strategy, model, **settings) < 1e-9


@pytest.mark.parametrize(
    ("strategy", "model"),
    [
        slow("pp2", "images"),  # a frozen layer, parameter groups, a schedule
        ("pp2:zb,ddp2", "images"),
        ("tp2", "images"),
        slow("pp2,ddp2", "recurrent"),
        ("tp2", "recurrent"),
        slow("tp2", "adamw"),
        ("fsdp2,tp2", "adamw"),
        slow("pp2:interleaved", "adamw"),
    ],
)
def test_models(strategy: str, model: str) -> None:
    assert difference(strategy, model, micro_batch=3) < 1e-9


@pytest.mark.parametrize("batch_size", [1, slow(3)])
@pytest.mark.parametrize("strategy", [slow("pp4"), slow("pp2:interleaved"), slow("pp2:zb,ddp2"), "pp2,fsdp2"])
def test_fewer_samples_than_stages_or_ranks(strategy: str, batch_size: int) -> None:
    assert difference(strategy, "text", batch_size=batch_size, micro_batch=1) < 1e-9


@pytest.mark.parametrize(
    ("strategy", "run"),
    [
        ("pp2", with_rung_traced),
        *(slow(strategy, with_rung) for strategy in ("tp2", "pp2", "pp2,fsdp2", "fsdp2,tp2")),
    ],
)
def test_compiled_blocks(strategy: str, run: Any) -> None:
    config = RunConfig(batch_size=24, micro_batch=6, steps=3, precision="fp64", compile=True, device="cpu")
    layout = parse(strategy, required_num_ranks(strategy) or 2)
    expected = by_hand(TASKS["gpt"](), config, 6 * layout.num_data_ranks)
    found = on_ranks(run, layout.num_ranks, TASKS["gpt"], strategy, config, timeout=600)
    assert largest_difference(expected, found[0]) < 1e-9


class Dropping(TinyGPT):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.token(tokens))
        for block in self.blocks:
            x = self.drop(block(x))
        return self.head(self.norm(x))


def _whole_parameters(make_task: Any, strategy: str) -> tuple[int, dict[str, list[float]], float]:
    task = make_task()
    config = RunConfig(batch_size=16, micro_batch=4, steps=4, device="cpu")
    with open_world(parse(strategy, environment_size()), device="cpu", timeout_seconds=60) as world:
        runtime = build_runtime(task, world, config, total_steps=4)
        torch.manual_seed(world.rank // world.layout.tp)
        loss = 0.0
        for window in runtime.place(make_batches(task, config, world)):
            loss = runtime.step(window).loss_share.item()
        whole = {
            name: parameter.flatten().tolist()
            for name, parameter in runtime.model.named_parameters()
            if not isinstance(parameter, DTensor) and not getattr(parameter, "is_absent", False)
        }
    return world.role.stage, whole, loss


def dropping_task() -> Task:
    return text_task(model=Dropping)


@pytest.mark.parametrize("strategy", ["tp2", "pp2,tp2"])
def test_ranks_that_share_activations_drop_alike(strategy: str) -> None:
    """What every tensor rank has whole stays the same on all of them, with dropout on."""
    found = on_ranks(_whole_parameters, required_num_ranks(strategy) or 2, dropping_task, strategy)
    for stage, whole, _ in found:
        partner = next(other for other in found if other[0] == stage)
        assert whole == partner[1]
        assert whole


def _session(strategy: str) -> tuple[list[float], dict[str, Any]]:
    data = TASKS["text"]().train_data()
    order = Permutation(len(data), 0, shuffle=True)
    losses = []
    with rung.open_session(
        TASKS["text"](), strategy=strategy, micro_batch=4, precision="fp64", device="cpu", clip=0.5
    ) as session:
        for step in range(4):
            rows = [data[index] for index in order.samples(0, step * 25, min((step + 1) * 25, 103))]
            stats = session.step((torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows])))
            losses.append(float(stats.loss))
        state = {name: value.numpy() for name, value in session.runtime.named_weights()}
    return losses, state


@pytest.mark.parametrize("strategy", ["pp2", "tp2"])
def test_a_session_takes_global_batches(strategy: str) -> None:
    config = RunConfig(batch_size=25, micro_batch=4, steps=4, precision="fp64", clip=0.5, device="cpu")
    expected = by_hand(TASKS["text"](), config, 4)
    for losses, _ in (found := on_ranks(_session, 2, strategy)):
        assert losses == pytest.approx(expected.losses, abs=1e-12)
    for name, value in found[0][1].items():
        assert torch.allclose(torch.as_tensor(value), expected.state[name], atol=1e-12)


class Unused(TinyGPT):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(3, 3)


def unused_task() -> Task:
    return text_task(model=Unused)


@pytest.mark.parametrize("strategy", ["pp2", "tp2"])
def test_an_unused_parameter_is_named(strategy: str) -> None:
    config = RunConfig(batch_size=24, micro_batch=6, steps=2, device="cpu")
    with pytest.raises(RankFailed, match=r"got no gradient in this step: spare\.weight"):
        on_ranks(with_rung, 2, unused_task, strategy, config)
