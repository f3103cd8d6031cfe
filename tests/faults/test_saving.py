"""Killed while saving: whatever the moment, the newest checkpoint is whole and loads."""

from __future__ import annotations

import multiprocessing
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rung.checkpoint import Position, Saver, StorageTopology, choose, newest, restore
from rung.distributed.world import open_world
from rung.runtime import build_runtime
from rung.spec.config import RunConfig
from rung.spec.strategy import parse
from rung.system.launcher_env import environment_size
from tests.harness import SEED, _rank, on_ranks
from tests.marks import slow
from tests.tasks import image_task


class _Wide(nn.Module):
    """Large enough for a save to take a while."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(36, 700), nn.ReLU(), nn.Linear(700, 700), nn.ReLU(), nn.Linear(700, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.flatten(1))


def _task() -> Any:
    return image_task(model=_Wide, optimizer=lambda m: torch.optim.AdamW(m.parameters(), 0.01))


def _save_for_ever(strategy: str, folder: str, first: int) -> None:
    config = RunConfig(batch_size=8, steps=10**6, device="cpu")
    with open_world(parse(strategy, environment_size()), device="cpu", timeout_seconds=60) as world:
        runtime = build_runtime(_task(), world, config, total_steps=config.steps)
        saver = Saver(Path(folder), runtime, keep=2)
        with torch.no_grad():
            for step in range(first, first + 10**6):
                for parameter in runtime.model.parameters():
                    parameter.fill_(float(step))
                saver.save(Position(step, 0, step, step))


def _load(strategy: str, folder: str) -> tuple[int, float, float]:
    config = RunConfig(batch_size=8, steps=10, device="cpu")
    with open_world(parse(strategy, environment_size()), device="cpu", timeout_seconds=60) as world:
        found = choose({"checkpoints": Path(folder)}, world, StorageTopology(world, Path(folder)))
        assert found is not None
        runtime = build_runtime(_task(), world, config, total_steps=10, seeded=False)
        restore(runtime, found, seed=0)
        values = torch.cat([value.flatten() for _, value in runtime.named_weights()])
        if not world.is_main:
            return found.step, 0.0, 0.0  # only the main rank has whole tensors
        return found.step, float(values.min()), float(values.max())


def kill_while_saving(folder: Path, times: int, seed: int) -> dict[str, int]:
    """Kill all ranks of a job that saves without a pause, `times` times; each time the newest checkpoint must load."""
    chance = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    reached, hit, strategies = 0, 0, ["ddp", "zero3", "pp2", "zero1"]
    for number in range(times):
        strategy = strategies[number % len(strategies)]
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        results: Any = context.Queue()
        ranks = [
            context.Process(
                target=_rank, args=(_save_for_ever, rank, 2, store.port, results, (strategy, str(folder), reached + 1))
            )
            for rank in range(2)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + 60
        while (newest(folder)[0] is None or newest(folder)[0].step <= reached) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(chance.random() * 0.2)
        first = chance.randrange(2)  # one rank first, or both at once
        for rank in (first, 1 - first):
            ranks[rank].kill()
            time.sleep(chance.choice([0.0, 0.0, 0.02]))
        for process in ranks:
            process.join()
        hit += any(folder.glob(".step-*"))
        with_ranks = chance.choice([("single", 1), ("zero3", 2)])
        step, low, high = on_ranks(_load, with_ranks[1], with_ranks[0], str(folder))[0]
        assert step > reached, f"seed {seed}: nothing new after {reached}"
        assert low == high == float(step), f"seed {seed}: step {step} holds {low}..{high}"
        reached = step
    return {"kills": times, "in_the_middle_of_a_save": hit, "loaded": times}


@pytest.mark.parametrize("kills", [6, slow(50)])
def test_the_newest_checkpoint_always_loads(tmp_path: Path, kills: int) -> None:
    found = kill_while_saving(tmp_path / "run", kills, SEED)
    print(found)
    assert found["loaded"] == kills
