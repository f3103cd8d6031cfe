"""`build_runtime`: from a task, a world and settings to something that takes steps.

One of the two places (the other is `parallelize`) where the strategy is looked at. Training calls it in a real world, a
dry run in a pretend one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from rung.agreement import refuse_contradictions
from rung.config import RunConfig
from rung.nested import map_tensors
from rung.parallel import parallelize
from rung.parallel.materialize import Weights
from rung.parallel.zero1 import ShardedUpdate
from rung.reading import example_batch
from rung.runtime.base import LocalStep, ModelFacts, Runtime
from rung.runtime.compressed import CompressedRuntime, HalvedRuntime
from rung.runtime.data_parallel import DataParallelRuntime
from rung.runtime.forward import autocast, call_model, default_type, laid_out
from rung.runtime.local_steps import LocalStepsRuntime
from rung.runtime.mesh import MeshRuntime
from rung.runtime.optimizer import make_optimizer, make_schedule
from rung.runtime.pipeline import PipelineRuntime
from rung.status import StatusWriter
from rung.task import Task
from rung.world import World

__all__ = ["LocalStep", "Runtime", "build_runtime"]


def build_runtime(
    task: Task,
    world: World,
    config: RunConfig,
    *,
    total_steps: int | None = None,
    status: StatusWriter | None = None,
    dataset: Any = None,
    seeded: bool = True,
) -> MeshRuntime:
    """Model on meta -> parallelize, filling with the seeded weights -> optimizer -> runtime.

    Where the model is cut, a sample shows how its forward goes: from `dataset`, or else from the task's training data.
    With `seeded` off the weights are left as memory comes, for a checkpoint to fill: no rank holds the whole model.
    """
    layout = world.layout
    refuse_contradictions(config, layout)
    dtype = torch.float64 if config.precision == "fp64" else None
    last = config.memory_format == "channels_last"
    weights = Weights(task, world, config.seed, dtype, seeded=seeded, channels_last=last)
    assert weights.model is not None
    facts = ModelFacts.of(weights.model)
    example = None
    if layout.is_composed:
        example = example_batch(dataset if dataset is not None else task.train_data(), task.collate)
        example = map_tensors(example, lambda t: t.to(dtype) if dtype is not None and t.is_floating_point() else t)
        example = map_tensors(example, lambda t: laid_out(config, t))

    def run(model: torch.nn.Module, batch: Any) -> Any:
        with autocast(config, world.device), default_type(dtype) if dtype is not None else nullcontext():
            return call_model(task, model, batch)[0]

    places, remote = _place_on_servers(weights, world, task) if layout.servers else ({}, {})
    spread = parallelize(weights, world, config, task, run, example)
    spread.places, spread.remote = places, remote
    with world.tensors():
        if layout.zero == 1 and not layout.uses_fully_shard:
            update = ShardedUpdate(spread.model, world.axis("dp_shard"))
            with update.as_parameters():
                optimizer = make_optimizer(task, spread.model, fused=config.fused)
        else:
            update = None
            optimizer = make_optimizer(task, spread.model, fused=config.fused)
        schedule = make_schedule(task, optimizer, total_steps)
    runtime = _kind(world, config, total_steps)(
        task=task,
        world=world,
        config=config,
        spread=spread,
        optimizer=optimizer,
        schedule=schedule,
        sharded_update=update,
        facts=facts,
        status=status or StatusWriter(),
    )
    runtime.total_steps = total_steps
    return runtime


def _kind(world: World, config: RunConfig, total_steps: int | None) -> Callable[..., MeshRuntime]:
    """The class of runtime for a rank. What calls others is imported where it is wanted: RPC takes its time."""
    layout = world.layout
    if config.local_steps > 1:
        return LocalStepsRuntime
    if config.compress in ("fp16", "bf16"):
        return HalvedRuntime
    if config.compress != "none":
        return partial(CompressedRuntime, total_steps=total_steps)
    if layout.kind == "ps":
        from rung.runtime import parameter_server

        return parameter_server.ParameterServer if world.is_server else parameter_server.Trainer
    if layout.kind == "ps-async":
        from rung.runtime import async_server, async_trainer

        return async_server.AsyncServer if world.is_server else async_trainer.AsyncTrainer
    if layout.kind == "ddp+ps":
        from rung.runtime import hybrid

        return hybrid.RemoteServer if world.is_server else hybrid.RemoteTrainer
    if layout.kind == "rpc-pp":
        from rung.runtime import rpc_pipeline

        return rpc_pipeline.RpcPipelineRuntime
    if layout.kind == "dp":
        return DataParallelRuntime
    return PipelineRuntime if layout.pp > 1 else MeshRuntime


def _place_on_servers(weights: Weights, world: World, task: Task) -> tuple[dict[str, int], dict[str, int]]:
    """The server of each tensor and module that lives on one; this rank gets storage for its own only."""
    if world.layout.kind == "ddp+ps":
        from rung.runtime import hybrid

        return hybrid.keep_own_modules(weights, world, task)
    from rung.runtime import async_server, parameter_server

    if world.layout.kind == "ps-async":
        return async_server.keep_own_state(weights, world), {}
    return parameter_server.keep_own_parameters(weights, world), {}
