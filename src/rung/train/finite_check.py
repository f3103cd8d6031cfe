"""What a run does about a loss or a gradient norm that is not finite: warn, or end at the last good checkpoint."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

from rung.checkpoint import Position
from rung.distributed.world import World
from rung.errors import NonFiniteError
from rung.spec.config import RunConfig
from rung.train.checkpointing import Checkpointing
from rung.train.records import StepRecord

log = logging.getLogger("rung")

# fp16: after so many skipped steps in a row the scale has gone from 2**16 to 2**-34. The scale is not the cause then.
_MAX_SKIPPED = 50


class FiniteCheck:
    """Checks the figures of each step. They are the same on all ranks, so all ranks decide alike."""

    def __init__(self, config: RunConfig, world: World, checkpointing: Checkpointing | None) -> None:
        self._config, self._world, self._checkpointing = config, world, checkpointing
        self._first: StepRecord | None = None  # of the present run of steps without finite figures
        self._num_steps = 0  # in that run

    def check(self, record: StepRecord, position: Position) -> Position:
        """The position, marked as finite or not if the record is of its step."""
        # fp16 skips a step whose gradients overflow: its loss may not be finite although the weights are.
        is_fp16 = self._config.precision == "fp16"
        norm = None if is_fp16 else record.grad_norm
        bad = [] if math.isfinite(record.loss) else [f"loss {record.loss}"]
        if norm is not None and not math.isfinite(norm):
            bad.append(f"gradient norm {norm}")
        if record.step == position.step:
            is_known = is_fp16 or record.grad_norm is not None
            position = replace(position, finite=False if bad else True if is_known else None)
        if not bad:
            if self._first is not None and self._world.is_main:
                log.warning("step %d: the loss is finite again, %.4g.", record.step, record.loss)
            self._first, self._num_steps = None, 0
            return position
        self._num_steps += 1
        stops = self._config.on_nan == "stop" and (not is_fp16 or self._num_steps >= _MAX_SKIPPED)
        if self._first is None:
            self._first = record
            if self._world.is_main:
                goes_on = "fp16 leaves such a step out" if is_fp16 else "training goes on: on_nan=warn"
                log.warning("step %d: %s%s.", record.step, ", ".join(bad), "" if stops else f"; {goes_on}")
        if stops:
            self.refuse_non_finite(position)
        return position

    def refuse_non_finite(self, position: Position) -> None:
        """Raise if the last step was not finite, with the way back. All ranks call it together.

        Copies in memory are dropped: they may be of later steps than the last good one.
        """
        record = self._first
        if record is None or self._checkpointing is None:
            return
        good = self._checkpointing.last_good()
        self._checkpointing.close()
        norm = f", the gradient norm {record.grad_norm}" if record.grad_norm is not None else ""
        since = f" and no later one is finite, up to step {position.step}" if self._num_steps > 1 else ""
        lines = [f"the loss of step {record.step} is {record.loss}{norm}{since}."]
        if good is None:
            lines.append("there is no checkpoint to go on from: --checkpoint-every N writes them.")
        else:
            lines.append(f"the last good checkpoint is {good}: --resume {good.parent.parent} goes on from it.")
        lines.append(
            "The same settings would end the same way: resume with --clip or another --precision, or start a new run "
            "with a lower learning rate."
        )
        if self._config.on_nan == "stop":
            lines.append("--set on_nan=warn goes on in spite of such a step.")
        raise NonFiniteError("\n".join(lines))
