"""One rank of a layout in a pretend world: built by the functions that train, and traced while it takes two steps.

Nothing here knows how a strategy works.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from rung.batches import Batches
from rung.config import RunConfig
from rung.errors import ModelError
from rung.nested import tensors_in
from rung.parallel.materialize import is_absent
from rung.parallel.rehearsal import user_line
from rung.planner.repeat import Repeats
from rung.runtime import build_runtime
from rung.runtime.mesh import MeshRuntime
from rung.status import StatusWriter
from rung.strategy import Layout
from rung.task import Task
from rung.trace import Trace, Tracer
from rung.train import make_batches
from rung.windows import Window
from rung.world import World, pretend_world


@dataclass(frozen=True)
class DryRun:
    """What one rank would do."""

    layout: Layout
    rank: int
    trace: Trace
    second_step: int  # the event with which the second step, the one that stands for all, begins
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
    repeats: Repeats | None = None,
) -> DryRun:
    """Two steps of one rank, traced. No tensor holds data. `proofs` are those of tensor plans of the same task.

    With `repeats`, blocks that are alike are run once, in this dry run and the others that are given the same.
    """
    config = replace(config, steps=2, epochs=None, compile=False, eval_every="never", workers=0)
    with pretend_world(layout, rank=rank, device=device, proofs=proofs) as world:
        status = StatusWriter()
        batches = make_batches(task, config, world)
        if repeats is not None:
            repeats.setting = (layout.tp, device, config.activation_checkpointing, config.sequence_parallel)
            world.wrap_block = repeats.wrap
        tracer = Tracer(world, status)
        try:
            with world.tensors(), tracer:  # what building leaves behind decides where later memory comes from
                runtime = build_runtime(task, world, config, total_steps=2, status=status)
            return take_two_steps(runtime, world, status, batches, repeats, tracer)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            line = user_line(traceback.extract_tb(error.__traceback__))
            raise ModelError(
                f"{line or task.name}\nthe model or the loss looks at the values of tensors here ({error}), and in a "
                "pretended step there are none. `rung train` can run it; it cannot be planned."
            ) from error


def take_two_steps(
    runtime: MeshRuntime,
    world: World,
    status: StatusWriter,
    batches: Batches,
    repeats: Repeats | None = None,
    tracer: Tracer | None = None,
) -> DryRun:
    """The first also sets things up: optimizer state, buckets, buffers of a pipeline."""
    window: Window = next(iter(runtime.place(batches)))
    # One micro-batch is enough for that, but a pipeline greets its neighbours anew for each number of them.
    first = window if world.layout.pp > 1 else replace(window, micro_batches=window.micro_batches[:1])
    tracer = tracer or Tracer(world, status)
    tracer.gradients = lambda: gradients_of(runtime)
    with world.tensors(), repeats.told_to(tracer) if repeats is not None else nullcontext():
        tracer.imagine(t for t in (*runtime.model.parameters(), *runtime.model.buffers()) if is_absent(t))
        tracer.know(parameters_of(runtime), "parameters")
        tracer.know((b for b in runtime.model.buffers() if not is_absent(b)), "buffers")
        tracer.know(tensors_in([micro.data for micro in window.micro_batches]), "batch")
        tracer.mark("step")
        with tracer:
            runtime.step(first, want_norm=True)
        tracer.know(optimizer_state_of(runtime), "optimizer")
        second = len(tracer.trace.events)
        tracer.mark("step")
        with tracer:
            runtime.step(window, want_norm=True)
    tracer.trace.settle()
    return DryRun(world.layout, world.rank, tracer.trace, second, runtime.state_bytes(), list(runtime.notes))


def parameters_of(runtime: MeshRuntime) -> Iterator[Tensor]:
    for parameter in runtime.model.parameters():
        if not is_absent(parameter):
            yield parameter.detach()


def gradients_of(runtime: MeshRuntime) -> Iterator[Tensor]:
    for parameter in runtime.model.parameters():
        if parameter.grad is not None:
            yield parameter.grad


def optimizer_state_of(runtime: MeshRuntime) -> Iterator[Tensor]:
    for values in runtime.optimizer.state.values():
        for value in values.values():
            if isinstance(value, Tensor):
                yield value
