"""Layouts with stages: pp, and its compositions with data and tensor parallelism.

A step is the same as without stages, except that a schedule drives forward and backward of its micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rung.data.batch_shard import LocalBatch, MicroBatch
from rung.parallel.pipeline.schedule import Stage, forward_only, make_schedule, run_schedule
from rung.parallel.sharding import defer_gradient_sync, set_gradient_sync
from rung.runtime.context import RuntimeContext
from rung.runtime.measure import Measured
from rung.runtime.staged import StagedModel
from rung.runtime.step import StepParts


def pipeline_parts(context: RuntimeContext) -> StepParts:
    staged = StagedModel(context)
    passes = ScheduledPasses(context, staged)
    if context.scaler is not None:
        # `scale` initialises the factor lazily, and ranks without a loss need it, too.
        context.scaler.scale(torch.zeros((), device=context.world.device))
    parts = staged.parts(passes)
    parts.stages = passes.stages
    return parts


class ScheduledPasses:
    """Runs stages in the order of one of torch's schedules."""

    def __init__(self, context: RuntimeContext, staged: StagedModel) -> None:
        self._context, self._staged = context, staged
        world, layout = context.world, context.world.layout
        self.stages = [
            Stage(
                part,
                layout.num_stages,
                world.device,
                staged.group,
                self._before_backward,
                context.enter,
                splits_backward=layout.schedule == "zb",
            )
            for part in context.parallel.parts
        ]
        self._schedules: dict[int, Any] = {}
        self._used: set[str] = set()  # names of parameters on which what a stage sends depends, or the loss

    def run(
        self, micro_batches: list[MicroBatch], shares: list[float | Tensor], averaging: float
    ) -> tuple[Tensor, set[str]]:
        losses: list[Tensor] = []
        self._used = set()
        chunks = self._staged.training_chunks(micro_batches, shares, averaging, losses)
        for stage in self.stages:
            stage.begin(chunks[stage.stage_index])
        run_schedule(self._schedule_for(len(micro_batches)), len(micro_batches))
        for stage in self.stages:
            stage.clear_runtime_states()
            stage.part.show_parameters()
        return self._staged.sum_of(losses), self._used

    def measure(self, window: LocalBatch) -> Iterator[Measured]:
        chunks = self._staged.evaluation_chunks(window.micro_batches)
        for stage in self.stages:
            stage.begin(chunks[stage.stage_index], has_backward=False)
        yield from forward_only(self.stages, len(window.micro_batches))
        for stage in self.stages:
            stage.clear_runtime_states()

    def _schedule_for(self, num_chunks: int) -> Any:
        """torch's schedule object for `num_chunks` micro-batches, built once for each number."""
        if num_chunks not in self._schedules:
            layout = self._context.world.layout
            made = make_schedule(layout.schedule, self.stages, num_chunks)
            self._schedules[num_chunks] = made
            if not made.is_requested:
                several = "es" if num_chunks > 1 else ""
                self._context.notes.append(
                    f"{layout.schedule} cannot take {num_chunks} micro-batch{several} on {layout.num_stages} stages; "
                    f"such steps run as {made.runs_as}, with the same numbers"
                )
        return self._schedules[num_chunks].schedule

    def _before_backward(self, part: nn.Module, outputs: list[Tensor], is_last: bool) -> None:
        self._context.enter("backward")
        for output in outputs:
            self._used |= self._context.unused.reachable(output)
        if not isinstance(part, FSDPModule):
            return
        if self._context.world.layout.schedule == "zb":
            defer_gradient_sync(part)  # its split backward reduces when the schedule says so
        else:
            set_gradient_sync(part, self._context.world, is_last=is_last)
