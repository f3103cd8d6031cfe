"""One process with the whole model on its device, or with the blocks in host memory; and what it computes."""

from __future__ import annotations

import torch

from rung.data.batch_shard import BatchPartition
from rung.data.batches import Batches
from rung.distributed.world import World
from rung.runtime import Runtime, build_runtime
from rung.spec.config import RunConfig
from rung.spec.strategy import parse
from rung.spec.task import Task


def build(task: Task, device: str, *, blocks_on_host: bool = False) -> Runtime:
    world = World(parse("single", 1), 0, 1, 0, torch.device(device), "none", None)
    config = RunConfig(batch_size=6, precision="fp64")
    return build_runtime(task, world, config, total_steps=1, blocks_on_host=blocks_on_host)


def gradients(runtime: Runtime, task: Task) -> dict[str, float]:
    """The loss of two micro-batches, the second shorter, and the square of each gradient."""
    batches = Batches(task.train_data(), BatchPartition(6, 1, 0, 4), seed=0, num_steps=1, collate=task.collate)
    probe = runtime.probe(next(iter(runtime.place(batches))))
    assert probe.gradients is not None
    squares = {name: float(square) for name, square in probe.gradients.squares.items()}
    return {"loss": float(probe.loss_share), **squares}
