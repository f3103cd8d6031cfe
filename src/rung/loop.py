"""The loop: steps, evaluations and saves to the end of the data, or until asked to stop; for every strategy alike."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rung.batches import Batches
from rung.best import Best
from rung.checkpoint import Position
from rung.config import RunConfig
from rung.errors import NonFiniteError
from rung.generators import DeviceGenerators
from rung.keeper import Keeper
from rung.metrics import EvalRecord, Ledger, Observer, Sealed, StepRecord, peak_memory_bytes
from rung.profiling import Profiler
from rung.pulse import Pulse
from rung.runtime import Runtime
from rung.status import StatusWriter
from rung.windows import Window
from rung.world import World

log = logging.getLogger("rung")

# fp16: after so many steps in a row without a finite loss the scale has gone from 2**16 to 2**-34. It is not the scale.
_MOST_SKIPPED = 50


@dataclass(frozen=True)
class Summary:
    steps: int
    last: StepRecord | None
    evaluation: EvalRecord | None
    stopped: bool = False  # asked to leave: state saved, not at the end
    best: Best | None = None  # evaluation, by the setting keep_best

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Summary:
        """From what `asdict` makes of one."""
        kinds: dict[str, type] = {"last": StepRecord, "evaluation": EvalRecord, "best": Best}
        return cls(**{k: kinds[k](**v) if k in kinds and v is not None else v for k, v in told.items()})


def run(
    runtime: Runtime,
    batches: Batches,
    *,
    world: World,
    config: RunConfig,
    observers: list[Observer] | None = None,
    evaluation: Callable[[], Batches] | None = None,
    facts: Mapping[str, Any] | None = None,
    status: StatusWriter | None = None,
    keeper: Keeper | None = None,
    start: Position | None = None,
    at_end: Callable[[int], None] | None = None,
    profiler: Profiler | None = None,
) -> Summary:
    """Train to the end of `batches`, or until asked to stop. The same for every strategy, and for a pretend world."""
    status = status or StatusWriter()
    loop = _Loop(runtime, batches, world, config, observers or [], evaluation, status, keeper, start, profiler)
    summary = loop.run({"total_steps": batches.total_steps, **(facts or {})}, at_end)
    loop.close()
    return summary


class _Loop:
    """One run of `run`: what is known between two steps."""

    def __init__(
        self,
        runtime: Runtime,
        batches: Batches,
        world: World,
        config: RunConfig,
        observers: list[Observer],
        evaluation: Callable[[], Batches] | None,
        status: StatusWriter,
        keeper: Keeper | None,
        start: Position | None,
        profiler: Profiler | None,
    ) -> None:
        self._runtime, self._batches, self._world, self._config = runtime, batches, world, config
        self._observers, self._evaluation, self._status, self._keeper = observers, evaluation, status, keeper
        self._profiler = profiler
        self._start = start or Position(0, 0, 0, 0)
        self._position = self._start
        self._pulse = Pulse(world, status, lambda: peak_memory_bytes(world))
        self._ledger = Ledger(world, self._start.samples)
        self._sealed: Sealed | None = None
        self._last: StepRecord | None = None
        self._measured: EvalRecord | None = None
        self._lost: StepRecord | None = None  # the first of the last steps without finite figures, and how many
        self._num_lost = 0

    def run(self, facts: dict[str, Any], at_end: Callable[[int], None] | None) -> Summary:
        config, status, total = self._config, self._status, self._batches.total_steps
        for observer in self._observers:
            observer.on_start(facts, self._start.step)
        started = time.perf_counter()
        if self._is_stopped(self._pulse.check()) or (self._start.evaluation_due and not self._evaluate()):
            return self._stop()
        if self._keeper is not None and self._keeper.is_best(self._position):
            self._save_if_due()  # what was measured just now, or before a rescue
        self._profile(self._start.step)
        status.phase("reading data")
        for window in self._runtime.place(self._batches):
            step = window.step
            status.step(step)
            is_last = step == total
            # The first step is shown at once; after that, figures are read every so many steps.
            logs = step == self._start.step + 1 or is_last or step % config.log_every == 0
            if self._keeper is not None:
                self._keeper.before_step()
            saves = config.checkpoint_every is not None and step % config.checkpoint_every == 0
            # The norm of a step that is saved tells whether its update was finite: the loss is that before it.
            self._ledger.add(window, self._runtime.step(window, want_norm=logs or saves))
            evaluates = self._evaluation is not None and _is_due(config.eval_every, step, window.ends_epoch, is_last)
            self._position = replace(self._after(window), evaluation_due=evaluates)
            if self._keeper is not None:
                self._keeper.after_step(self._position)
            self._tell()  # of the step before: the device has this one to work on meanwhile
            saves = self._keeper is not None and self._keeper.is_due(self._position)  # or it is the best
            if logs or evaluates or saves:
                status.phase("logging")
                self._sealed = self._ledger.seal()
                if evaluates or saves or self._world.device.type == "cpu":
                    self._tell()  # before a save: what counts from then on is told
            if evaluates and not self._evaluate():
                return self._stop()
            self._save_if_due()
            asked = self._is_stopped(self._pulse.beat(step, self._runtime.phase_seconds(), window.num_samples))
            if asked and not is_last and self._runtime.is_settled():
                return self._stop()
            for line in self._pulse.slow_lines():
                log.info(line)
            self._show_ranks(step, at_once=is_last)
            self._profile(step, is_last=is_last)
            status.phase("reading data")
        self._tell()
        self._sealed = self._ledger.seal()
        self._tell()
        wanted = self._evaluation is not None and config.eval_every != "never"
        if wanted and (self._measured is None or self._measured.step != self._position.step) and not self._evaluate():
            return self._stop()
        self._finish_saving()
        if self._lost is not None and self._keeper is not None:
            raise self._give_up(self._lost)
        if at_end is not None:
            at_end(self._position.step)
        state = self._world.gather([float(count) for count in self._runtime.state_bytes().values()])
        kept = [dict(zip(self._runtime.state_bytes(), map(int, row), strict=True)) for row in state]
        sent = self._world.gather_objects({name: t.as_json() for name, t in self._runtime.traffic().items()})
        facts = {"steps": self._position.step, "seconds": time.perf_counter() - started, "state_bytes": kept}
        told: dict[str, Any] = {"traffic": sent} if any(sent) else {}
        if self._runtime.device_0_bytes():
            told["device_0_bytes"] = self._runtime.device_0_bytes()
        for observer in self._observers:
            observer.on_end({**facts, **told})
        return Summary(self._position.step, self._last, self._measured, best=self._position.best)

    def close(self) -> None:
        """In good order, on all ranks."""
        if self._profiler is not None:
            self._profiler.finish()
        self._pulse.close()

    def _tell(self) -> None:
        records = self._ledger.records(self._sealed) if self._sealed is not None else []
        self._sealed = None
        for observer in self._observers:
            if records:
                observer.on_steps(records)
        self._last = records[-1] if records else self._last
        if not self._world.pretend:
            for record in records:
                self._judge(record)

    def _judge(self, record: StepRecord) -> None:
        """Look at the figures of a step, which are the same on all ranks, so that all decide alike."""
        # fp16 leaves a step out whose gradients overflow; its loss may be lost without that the weights are.
        is_fp16 = self._config.precision == "fp16"
        figures = {"loss": record.loss, "gradient norm": None if is_fp16 else record.grad_norm}
        bad = [f"{name} {value}" for name, value in figures.items() if value is not None and not math.isfinite(value)]
        if record.step == self._position.step:
            is_known = is_fp16 or record.grad_norm is not None
            self._position = replace(self._position, finite=False if bad else True if is_known else None)
        if not bad:
            if self._lost is not None and self._world.is_main:
                log.warning("step %d: the loss is finite again, %.4g.", record.step, record.loss)
            self._lost, self._num_lost = None, 0
            return
        self._num_lost += 1
        stops = self._config.on_nan == "stop" and (not is_fp16 or self._num_lost >= _MOST_SKIPPED)
        if self._lost is None:
            self._lost = record
            if self._world.is_main:
                goes_on = "fp16 leaves such a step out" if is_fp16 else "training goes on: on_nan=warn"
                log.warning("step %d: %s%s.", record.step, ", ".join(bad), "" if stops else f"; {goes_on}")
        if stops and self._keeper is not None:
            raise self._give_up(self._lost)

    def _give_up(self, record: StepRecord) -> NonFiniteError:
        """On all ranks, in the same call. States that were kept in memory may be of later steps than this one."""
        assert self._keeper is not None
        good = self._keeper.last_good()
        self._keeper.close()
        norm = f", the gradient norm {record.grad_norm}" if record.grad_norm is not None else ""
        since = f" and no later one is finite, up to step {self._position.step}" if self._num_lost > 1 else ""
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
        return NonFiniteError("\n".join(lines))

    def _show_ranks(self, step: int, *, at_once: bool) -> None:
        live = self._pulse.live(step, at_once=at_once) if self._observers else None
        if live is not None:
            for observer in self._observers:
                observer.on_ranks(live)

    def _profile(self, step: int, *, is_last: bool = False) -> None:
        if self._profiler is None:
            return
        with self._pulse.paused():
            if self._profiler.between(step, is_last=is_last):
                self._ledger.skip()  # what it took to write is no part of the next step

    def _after(self, window: Window) -> Position:
        before, count = self._position, window.num_global_samples
        same_epoch = window.epoch == before.epoch
        epoch, sample = window.epoch, (before.sample if same_epoch else 0) + count
        if window.ends_epoch:
            epoch, sample = window.epoch + 1, 0
        return Position(window.step, epoch, before.samples + count, sample, best=before.best)

    # -- evaluation ---------------------------------------------------------------------------------------------

    def _evaluate(self) -> bool:
        """Evaluate after the present step. False if asked to stop meanwhile: it is then still to be done."""
        assert self._evaluation is not None
        self._status.phase("evaluating")
        position = self._position
        epoch = position.epoch - 1 if position.sample == 0 and position.epoch > 0 else position.epoch
        started = time.perf_counter()
        generators = DeviceGenerators(self._world.device)
        try:
            with self._pulse.paused():
                metrics = self._runtime.evaluate(self._interruptible(self._evaluation()))
        except BaseException as error:
            # It will be done again from its beginning, here or, after a failure, from the state that is rescued.
            generators.restore()
            self._position = replace(position, evaluation_due=True)
            if not isinstance(error, _AskedToStop):
                raise
            return False
        self._position = replace(position, evaluation_due=False)
        if self._keeper is not None:
            self._position = self._keeper.after_evaluation(position, metrics)
        self._measured = EvalRecord(position.step, epoch, metrics, time.perf_counter() - started)
        for observer in self._observers:
            observer.on_evaluation(self._measured)
        self._ledger.skip()
        return True

    def _interruptible(self, windows: Batches) -> Iterator[Window]:
        for window in windows:
            if self._is_stopped(self._pulse.check()):
                raise _AskedToStop
            yield window

    # -- saving -------------------------------------------------------------------------------------------------

    def _is_stopped(self, asked: bool) -> bool:
        return asked and self._keeper is not None

    def _save_if_due(self) -> None:
        if self._keeper is None:
            return
        if self._keeper.is_due(self._position):
            self._status.phase("saving")
            with self._pulse.paused():
                self._keeper.save(self._position)
            self._ledger.skip()
        self._tell_of_saves()

    def _tell_of_saves(self) -> None:
        assert self._keeper is not None
        for record in self._keeper.finished():
            if record.error is not None and self._world.is_main:
                log.warning("%s Training goes on.", record.error)
            for observer in self._observers:
                observer.on_checkpoint(record)

    def _finish_saving(self) -> None:
        if self._keeper is None:
            return
        self._status.phase("saving")
        self._keeper.finish(self._position)
        self._tell_of_saves()

    def _stop(self) -> Summary:
        """Asked to leave: the state goes to the disk first."""
        assert self._keeper is not None
        self._status.phase("saving")
        self._tell()
        self._sealed = self._ledger.seal()
        self._tell()
        self._keeper.stop(self._position)
        self._tell_of_saves()
        return Summary(self._position.step, self._last, self._measured, stopped=True)


class _AskedToStop(Exception):
    """In the middle of an evaluation."""


def _is_due(every: str, step: int, ends_epoch: bool, is_last: bool) -> bool:
    if every == "never":
        return False
    return is_last or (ends_epoch if every == "epoch" else step % int(every) == 0)
