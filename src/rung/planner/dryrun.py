"""Dry-run one rank of a layout: build it in a fake world with the training code, and trace two steps.

This module has no code for single strategies.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rung.data.batch_shard import LocalBatch
from rung.data.batches import Batches
from rung.data.pytree import tensors_in
from rung.distributed import fake_world
from rung.distributed.offload_emulation import offloading
from rung.distributed.status_board import StatusWriter
from rung.distributed.world import World, open_fake_world
from rung.errors import ModelError, RungError
from rung.parallel.blocks import BlockReuse
from rung.parallel.materialize import is_absent
from rung.parallel.trace_errors import user_line
from rung.planner.block_cache import BlockTraceCache
from rung.planner.trace import Trace
from rung.planner.tracer import Tracer
from rung.runtime import Runtime, build_runtime
from rung.spec.compatibility import fit_settings
from rung.spec.config import RunConfig
from rung.spec.strategy import Layout
from rung.spec.task import Task
from rung.train.worker import make_batches


@dataclass(frozen=True)
class DryRun:
    """The trace of one rank."""

    layout: Layout
    rank: int
    trace: Trace
    second_step: int  # index of the first event of the second step, which represents all later steps
    state_bytes: dict[str, int]
    notes: list[str]


def dry_run(
    task: Task,
    layout: Layout,
    config: RunConfig,
    *,
    rank: int = 0,
    device: str = "cpu",
    proofs: dict[Any, Any] | None = None,
    repeats: BlockTraceCache | None = None,
) -> DryRun:
    """Trace two steps of one rank on fake tensors. `proofs` caches checks of tensor plans of the same task.

    With `repeats`, identical blocks run once in all dry runs that share this cache. Blocks that this cannot repeat are
    traced as they are.
    """
    failure: Exception = AssertionError("no way was tried")
    # Where blocks cannot be repeated, they are traced as they are; where values that are known lead a model to ask for
    # others that are not, it may do without: transformers does.
    ways = [(repeats, True), (None, True), (None, False)]
    for cache, knows_indices in ways if repeats is not None else ways[1:]:
        try:
            return _dry_run(task, layout, config, rank, device, proofs, cache, knows_indices=knows_indices)
        except RungError:
            raise
        except Exception as error:
            failure = error if knows_indices else failure
    line = user_line(traceback.extract_tb(failure.__traceback__)) or task.name
    if isinstance(failure, fake_world.NEEDS_VALUES):
        raise ModelError(
            f"{line}\nthe model or the loss reads tensor values here ({failure}), which fake tensors do not have. "
            "`rung train` can run it; it cannot be planned."
        ) from failure
    raise ModelError(
        f"{line}\na step on fake tensors fails here with {type(failure).__name__}: {failure}. If `rung train` runs it, "
        "it cannot be planned."
    ) from failure


def _dry_run(
    task: Task,
    layout: Layout,
    config: RunConfig,
    rank: int,
    device: str,
    proofs: dict[Any, Any] | None,
    repeats: BlockTraceCache | None,
    *,
    knows_indices: bool,
) -> DryRun:
    reuse = BlockReuse(proofs if proofs is not None else {}, repeats.wrap if repeats is not None else None)
    config = replace(config, steps=2, epochs=None, compile=False, eval_every="never", workers=0)
    with open_fake_world(layout, rank=rank, device=device) as world, ExitStack() as shims:
        status = StatusWriter()
        batches = make_batches(task, config, world)
        if repeats is not None:
            cut = layout.tp, layout.cp, layout.ep, config.cp_form, config.sequence_parallel
            repeats.setting = (*cut, device, config.activation_checkpointing)
        tracer = Tracer(world, status)
        if config.offload == "cpu" and device == "cuda":
            shims.enter_context(offloading(tracer.host.copy, tracer.host.move))
        with world.tensors.mode(), tracer:  # segments that building leaves in the allocator serve later requests
            runtime = build_runtime(task, world, config, total_steps=2, status=status, reuse=reuse)
        with fake_world.known_indices(world.tensors.fake_mode) if knows_indices else nullcontext():
            return take_two_steps(runtime, world, status, batches, repeats, tracer)


def whole_state(task: Task, config: RunConfig, device: str) -> dict[str, int]:
    """Bytes of parameters, gradients, optimizer state and buffers of the whole model, each trained parameter used."""
    layout = Layout("single")
    config = fit_settings(replace(config, compile=False, chunked_loss="never"), layout)
    try:
        return _state_after_update(task, layout, config, device)
    except RungError:
        raise
    except Exception:
        # An optimizer may refuse made-up gradients (SparseAdam takes sparse ones only). A dry run has the model's own,
        # and says what is wrong with a model.
        return dry_run(task, layout, config, device=device).state_bytes


def _state_after_update(task: Task, layout: Layout, config: RunConfig, device: str) -> dict[str, int]:
    with open_fake_world(layout, device=device) as world, world.tensors.mode():
        runtime = build_runtime(task, world, config, total_steps=2)
        _pretend_values(runtime, world)
        for parameter in runtime.model.parameters():
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        runtime.optimizer.step()
        return runtime.state_bytes()


def take_two_steps(
    runtime: Runtime,
    world: World,
    status: StatusWriter,
    batches: Batches,
    repeats: BlockTraceCache | None = None,
    tracer: Tracer | None = None,
) -> DryRun:
    """Trace two steps: the first also creates optimizer state, buckets and pipeline buffers."""
    tracer = tracer or Tracer(world, status)
    window: LocalBatch = next(iter(runtime.place(batches)))
    # One micro-batch is enough, except for a pipeline: there is one torch schedule for each number of micro-batches,
    # and its first step warms up the connections.
    first = window if world.layout.num_stages > 1 else replace(window, micro_batches=window.micro_batches[:1])
    _pretend_values(runtime, world)
    tracer.gradients = lambda: gradients_of(runtime)
    tracer.follow(runtime)
    with world.tensors.mode(), repeats.recording(tracer) if repeats is not None else nullcontext():
        tracer.memory.ignore(t for t in (*runtime.model.parameters(), *runtime.model.buffers()) if is_absent(t))
        tracer.memory.classify(parameters_of(runtime), "parameters")
        tracer.memory.classify((b for b in runtime.model.buffers() if not is_absent(b)), "buffers")
        tracer.memory.classify(tensors_in([micro.data for micro in window.micro_batches]), "batch")
        tracer.mark("step")
        with tracer:
            runtime.step(first, want_norm=True)
        tracer.memory.classify(optimizer_state_of(runtime), "optimizer")
        second = len(tracer.trace.events)
        tracer.mark("step")
        with tracer:
            runtime.step(window, want_norm=True)
    tracer.trace.settle()
    return DryRun(world.layout, world.rank, tracer.trace, second, runtime.state_bytes(), list(runtime.notes))


def _pretend_values(runtime: Runtime, world: World) -> None:
    """In steps, for numbers that a model draws by itself; in updates, for those that an optimizer reads."""
    if world.tensors.fake_mode is None:
        return
    world.tensors.fake_mode.pretends_draws = True
    values = ExitStack()
    runtime.optimizer.register_step_pre_hook(
        lambda *_: values.enter_context(fake_world.pretended_values(world.tensors.fake_mode))
    )
    runtime.optimizer.register_step_post_hook(lambda *_: values.close())


def parameters_of(runtime: Runtime) -> Iterator[Tensor]:
    for parameter in runtime.model.parameters():
        if not is_absent(parameter):
            yield parameter.detach()


def gradients_of(runtime: Runtime) -> Iterator[Tensor]:
    for parameter in runtime.model.parameters():
        if parameter.grad is not None:
            yield parameter.grad


def optimizer_state_of(runtime: Runtime) -> Iterator[Tensor]:
    for values in runtime.optimizer.state.values():
        for value in values.values():
            if isinstance(value, Tensor):
                yield value
