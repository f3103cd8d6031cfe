"""`build_runtime`: builds the runtime of this rank from a task, a world and settings.

One of the two places that depend on the strategy; the other is `parallelize`. Training calls it in a real world, a dry
run in a fake one.
"""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from rung.data.pytree import map_tensors
from rung.data.sample_reader import example_batch
from rung.distributed.status_board import StatusWriter
from rung.distributed.world import World
from rung.parallel import parallelize
from rung.parallel.blocks import BlockReuse
from rung.parallel.float8 import as_plain_layers
from rung.parallel.materialize import Weights
from rung.parallel.output_head import large_heads
from rung.parallel.sharding import HALF_TYPES
from rung.parallel.zero1 import ShardedUpdate
from rung.runtime.base import LocalStep, ModelFacts, Runtime
from rung.runtime.compressed import compressed_parts, half_gradient_parts
from rung.runtime.context import RuntimeContext
from rung.runtime.forward import autocast, call_model, default_type, laid_out
from rung.runtime.local_steps import local_steps_parts
from rung.runtime.mesh import mesh_parts
from rung.runtime.optimizer import make_optimizer, make_schedule, takes_closure
from rung.runtime.pipeline import pipeline_parts
from rung.runtime.step import StepRuntime
from rung.runtime.update import refuse_closure
from rung.runtime.weight_average import averages_of
from rung.spec.compatibility import refuse_task, validate_config
from rung.spec.config import RunConfig
from rung.spec.lora import parse_lora
from rung.spec.presets import PRESETS
from rung.spec.strategy import Layout
from rung.spec.task import Task

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
    reuse: BlockReuse | None = None,
    blocks_on_host: bool = False,
) -> Runtime:
    """Model on meta -> parallelize, with the seeded weights -> optimizer -> runtime.

    Where the model is cut, its forward is traced on a sample of `dataset`, or else of the task's training data. Without
    `seeded` the weights stay uninitialised, for a checkpoint to fill: no rank holds the whole model. Dry runs of the
    same task share `reuse`. With `blocks_on_host`, one process computes a model that does not fit on its device.
    """
    layout = world.layout
    validate_config(config, layout)
    refuse_task(task, layout)
    dtype = torch.float64 if config.precision == "fp64" else None
    last = config.memory_format == "channels_last"
    masters = config.precision in HALF_TYPES
    weights = Weights(
        task,
        world,
        config.seed,
        dtype,
        seeded=seeded,
        channels_last=last,
        masters=masters,
        init=config.init,
        init_partial=config.init_partial,
        lora=parse_lora(config.lora) if config.lora is not None else None,
    )
    assert weights.model is not None
    facts = ModelFacts.of(weights.model)  # before the model is cut
    example = None
    if layout.is_composed or layout.cp > 1 or large_heads(weights.model, layout, config, task):
        data = dataset if dataset is not None else task.train_data()
        example = example_batch(data, task.collate, num_skipped=config.skip_bad_samples)
        example = map_tensors(example, lambda t: t.to(dtype) if dtype is not None and t.is_floating_point() else t)
        example = map_tensors(example, lambda t: laid_out(config, t))

    def run(model: torch.nn.Module, batch: Any) -> Any:
        with autocast(config, world.device), default_type(dtype) if dtype is not None else nullcontext():
            return call_model(task, model, batch)[0]

    places, remote = _module_of(layout).place(weights, world, task) if layout.servers else ({}, {})
    parallel = parallelize(weights, world, config, task, run, example, reuse, blocks_on_host=blocks_on_host)
    parallel.places, parallel.remote = places, remote
    parallel.base = weights.share_base()
    parallel.notes += weights.notes
    if weights.widened is not None:
        kind = str(weights.widened).removeprefix("torch.")
        parallel.notes.append(
            f"the model comes in {kind}; its weights are kept in fp32, as under --precision bf16, fp16, fp8"
        )
    allow_unused = config.unused_parameters == "allow"
    make = partial(
        make_optimizer, fused=config.fused, device=world.device, num_ranks=world.size, allow_unused=allow_unused
    )
    with world.tensors.mode(), as_plain_layers(parallel.model):
        if layout.zero == 1 and not layout.uses_fully_shard:
            update = ShardedUpdate(parallel.model, world.axis("dp_shard"))
            with update.as_parameters():  # the task's optimizer gets this rank's slices
                optimizer, groups = make(task, parallel.model)
        else:
            update = None
            optimizer, groups = make(task, parallel.model)
        schedule = make_schedule(task, optimizer, total_steps)
    context = RuntimeContext(
        task, world, config, parallel, optimizer, groups, schedule, update, facts, status or StatusWriter(), total_steps
    )
    return _assemble(context)


def _assemble(context: RuntimeContext) -> Runtime:
    """The runtime of this rank: from the strategy's own module, or else from parts for the settings and the mesh."""
    runtime = _of_strategy(context)
    average = averages_of(context, runtime.share_weights)
    if average is not None:
        runtime.averaged = average.in_place
        if context.config.eval_weights == "average" and context.task.eval_data is not None:
            runtime.evaluated_weights = runtime.averaged
            context.notes.append("evaluation takes the average of the weights, eval_weights=own the last ones")
    return runtime


def _of_strategy(context: RuntimeContext) -> Runtime:
    config, layout = context.config, context.world.layout
    if takes_closure(context.optimizer):
        refuse_closure(context)
    if (module := _module_of(layout)) is not None:
        runtime: Runtime = module.build(context)
        return runtime
    if config.local_steps > 1:
        parts = local_steps_parts(context)
    elif config.compress in ("fp16", "bf16"):
        parts = half_gradient_parts(context)
    elif config.compress != "none":
        parts = compressed_parts(context)
    else:
        parts = pipeline_parts(context) if layout.pp > 1 else mesh_parts(context)
    return StepRuntime(context, parts)


def _module_of(layout: Layout) -> Any:
    """The module of a strategy with a runtime of its own. Imported here, because importing RPC takes half a second.

    It has `build(context) -> Runtime`. With servers it also has `place(weights, world, task)`, which keeps storage for
    this rank's own tensors and returns the server of each tensor and of each module that is not on trainers.
    """
    preset = PRESETS.get(layout.kind)
    return importlib.import_module(f"rung.runtime.{preset.runtime}") if preset is not None and preset.runtime else None
