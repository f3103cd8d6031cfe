"""A slow rank is named with its phase, whatever the strategy: the others, which wait for it, are not."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import rung.train.heartbeat
from rung.distributed.status_board import StatusWriter
from rung.distributed.world import open_world
from rung.runtime import build_runtime
from rung.spec.config import RunConfig
from rung.spec.strategy import parse
from rung.spec.task import Task
from rung.system.launcher_env import environment_rank, environment_size
from rung.train.heartbeat import Heartbeat
from rung.train.worker import make_batches
from tests.harness import on_ranks
from tests.marks import slow

SECONDS = 0.04
PLACES = ("data", "forward", "backward", "update")
slow_at = {"place": "", "rank": 0}


def strike(place: str, seconds: float = SECONDS) -> None:
    if slow_at["place"] == place and environment_rank() == slow_at["rank"]:
        time.sleep(seconds)


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        strike("backward")
        return gradient


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        strike("forward")
        return SlowBackward.apply(self.down(self.up(x).relu()))


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> Any:
        strike("data", SECONDS / 2)
        return torch.full((8,), index / 400), torch.zeros(8)


class SlowSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        strike("update")
        return super().step(closure)


def slow_task() -> Task:
    return Task(
        model=lambda: nn.Sequential(Layer(), Layer()),
        train_data=Numbers,
        loss=lambda output, target: ((output - target) ** 2).mean(),
        optimizer=lambda model: SlowSGD(model.parameters(), lr=1e-3),
    )


def name_slow_ranks(strategy: str, slow_rank: int, changes: dict[str, Any]) -> list[Any]:
    """For each place: who was found slow while the rank slept there, and what all ranks took."""
    size = environment_size()
    rung.train.heartbeat._EXCHANGE_SECONDS = 0.0  # an exchange in each step
    config = RunConfig(**{"batch_size": 4, "steps": 100, "device": "cpu", "clip": 1.0, **changes})
    task, found = slow_task(), []
    with open_world(parse(strategy, size, size), device=config.device, backend=config.backend) as world:
        batches = make_batches(task, config, world)
        runtime = build_runtime(task, world, config, total_steps=100)
        slow_at["rank"] = slow_rank
        windows = runtime.place(batches)
        for place in PLACES:
            slow_at["place"] = place
            next(windows)  # the one that was read ahead
            heartbeat = Heartbeat(world, StatusWriter())
            for step in range(20):  # until it is sure of it, which a busy machine delays
                runtime.step(next(windows))
                heartbeat.after_step(step, runtime.phase_seconds())
                if [(slow.rank, slow.phase) for slow in heartbeat.slow()] == [(slow_rank, place)]:
                    break
            found.append(([(slow.rank, slow.phase) for slow in heartbeat.slow()], heartbeat.seconds()))
            heartbeat.settle()
    return found


@pytest.mark.parametrize(
    ("strategy", "size", "slow_rank", "changes"),
    [
        ("ddp", 3, 2, {}),
        slow("ddp", 2, 0, {"micro_batch": 1}),
        ("ddp", 2, 1, {"unused_parameters": "allow"}),
        slow("zero1", 2, 1, {}),
        ("fsdp", 2, 1, {}),
        slow("fsdp", 2, 0, {"micro_batch": 1}),
        slow("zero2", 2, 1, {"micro_batch": 1}),
        slow("tp", 2, 1, {}),
        slow("pp", 2, 1, {"micro_batch": 2}),
        slow("pp2,ddp", 4, 3, {"micro_batch": 1}),
    ],
)
def test_the_slow_rank_is_named_with_its_phase(
    strategy: str, size: int, slow_rank: int, changes: dict[str, Any]
) -> None:
    outcomes = on_ranks(name_slow_ranks, size, strategy, slow_rank, changes)
    for found in outcomes:
        for place, (named, seconds) in zip(PLACES, found, strict=True):
            assert named == [(slow_rank, place)], (place, named, seconds)
