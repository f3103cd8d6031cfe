"""The runtime of layouts with stages: pp, and its compositions with data and tensor parallelism.

A step is the same as without stages; only forward and backward of its micro-batches are driven by a schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rung.parallel.schedule import Stage, forward_only, make_schedule, run_schedule
from rung.parallel.sharding import hold_gradients, set_gradient_sync
from rung.runtime.staged import StagedRuntime
from rung.windows import MicroBatch, Window


class PipelineRuntime(StagedRuntime):
    """Stages that send to their neighbours, in the order of one of torch's schedules."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        world, layout = self.world, self.world.layout
        self.stages = [
            Stage(
                part,
                layout.num_stages,
                world.device,
                self._group,
                self._before_backward,
                self._enter,
                takes_apart=layout.schedule == "zb",
            )
            for part in self.spread.parts
        ]
        self._schedules: dict[int, Any] = {}
        if self._scaler is not None:
            self._scaler.scale(torch.zeros((), device=world.device))  # ranks without a loss need the factor, too

    # -- training -----------------------------------------------------------------------------------------------

    def _accumulate(
        self, micro_batches: list[MicroBatch], shares: list[float | Tensor], averaging: float
    ) -> tuple[Tensor, set[str]]:
        losses: list[Tensor] = []
        chunks = self._chunks(micro_batches, self._loss_bodies(micro_batches, shares, averaging, losses))
        for stage in self.stages:
            stage.begin(chunks[stage.stage_index])
        run_schedule(self.schedule_for(len(micro_batches)), len(micro_batches))
        for stage in self.stages:
            stage.clear_runtime_states()
            stage.part.show_parameters()
        return (torch.stack(losses).sum() if losses else torch.zeros((), device=self.world.device)), set()

    def schedule_for(self, num_chunks: int) -> Any:
        """torch's schedule object for so many micro-batches."""
        if num_chunks not in self._schedules:
            chosen = self.world.layout.schedule
            made = make_schedule(chosen, self.stages, num_chunks)
            self._schedules[num_chunks] = made
            if not made.is_as_asked:
                several = "es" if num_chunks > 1 else ""
                self.notes.append(
                    f"{chosen} cannot take {num_chunks} micro-batch{several} on {self.world.layout.num_stages} stages; "
                    f"steps with so many run as {made.runs_as}, with the same numbers"
                )
        return self._schedules[num_chunks].schedule

    def _before_backward(self, part: nn.Module, is_last: bool) -> None:
        self._enter("backward")
        if not isinstance(part, FSDPModule):
            return
        if self.world.layout.schedule == "zb":
            hold_gradients(part)
        else:
            set_gradient_sync(part, self.world, is_last=is_last)

    # -- evaluation ---------------------------------------------------------------------------------------------

    def _measure_window(self, window: Window) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
        micro_batches = window.micro_batches
        chunks = self._chunks(micro_batches, self._measure_bodies(micro_batches), training=False)
        for stage in self.stages:
            stage.begin(chunks[stage.stage_index], has_backward=False)
        yield from forward_only(self.stages, len(micro_batches))
        for stage in self.stages:
            stage.clear_runtime_states()
