"""`build_runtime`: from a task, a world and settings to something that takes steps.

One of the two places (the other is `parallelize`) where the strategy is looked at. Training calls it in a real world, a
dry run in a pretend one.
"""

from __future__ import annotations

import torch

from rung.config import RunConfig, refuse_contradictions
from rung.parallel import parallelize
from rung.parallel.materialize import Weights
from rung.parallel.zero1 import ShardedUpdate
from rung.runtime.base import LocalStep, Runtime
from rung.runtime.mesh import MeshRuntime
from rung.runtime.optimizer import make_optimizer, make_schedule
from rung.status import StatusWriter
from rung.task import Task
from rung.world import World

__all__ = ["LocalStep", "Runtime", "build_runtime"]


def build_runtime(
    task: Task, world: World, config: RunConfig, *, total_steps: int | None = None, status: StatusWriter | None = None
) -> MeshRuntime:
    """Model on meta -> parallelize, filling with the seeded weights -> optimizer -> runtime."""
    refuse_contradictions(config, world.layout)
    dtype = torch.float64 if config.precision == "fp64" else None
    weights = Weights(task, world, config.seed, dtype)
    model, notes = parallelize(weights, world, config, task.blocks)
    with world.tensors():
        if world.layout.zero == 1:
            update = ShardedUpdate(model, world.axis("dp_shard"))
            with update.as_parameters():
                optimizer = make_optimizer(task, model, fused=config.fused)
        else:
            update = None
            optimizer = make_optimizer(task, model, fused=config.fused)
        schedule = make_schedule(task, optimizer, total_steps)
    return MeshRuntime(
        task=task,
        world=world,
        config=config,
        model=model,
        optimizer=optimizer,
        schedule=schedule,
        sharded_update=update,
        notes=notes,
        status=status or StatusWriter(),
    )
