"""The loop: steps, evaluations and saves to the end of the data, or until asked to stop; for every strategy alike."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rung.checkpoint import Position
from rung.data.batch_shard import LocalBatch
from rung.data.batches import Batches
from rung.data.rng import DeviceGenerators
from rung.distributed.status_board import StatusWriter
from rung.distributed.world import World
from rung.runtime import Runtime
from rung.spec.config import RunConfig
from rung.spec.task import Task
from rung.train.checkpointing import Checkpointing
from rung.train.finite_check import FiniteCheck
from rung.train.heartbeat import Heartbeat
from rung.train.hooks import Hooks
from rung.train.metrics import Observer
from rung.train.profiler import Profiler
from rung.train.records import EvalRecord, StepRecord, Summary
from rung.train.replica_check import ReplicaCheck
from rung.train.resume_check import ResumeCheck
from rung.train.same_windows import SameWindows
from rung.train.step_buffer import PendingFetch, StepBuffer, peak_memory_bytes

log = logging.getLogger("rung")


@dataclass(frozen=True)
class Outputs:
    """Where a run reports to."""

    observers: Sequence[Observer] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)  # of the run, for observers
    status: StatusWriter = field(default_factory=StatusWriter)
    profiler: Profiler | None = None


@dataclass(frozen=True)
class Persistence:
    """Where a run starts, and how it saves its state; without `checkpointing`, not at all."""

    start: Position = field(default_factory=lambda: Position(0, 0, 0, 0))
    checkpointing: Checkpointing | None = None
    at_end: Callable[[int], None] | None = None  # is called with the last step, after all saves
    resume_check: ResumeCheck | None = None
    lost: Sequence[StepRecord] = ()  # steps up to the start whose lines a failed run did not write


def run(
    runtime: Runtime,
    batches: Batches,
    *,
    world: World,
    config: RunConfig,
    evaluation: Callable[[], Batches] | None = None,
    outputs: Outputs | None = None,
    persistence: Persistence | None = None,
    task: Task | None = None,
) -> Summary:
    """Train to the end of `batches`, or until asked to stop. The same for every strategy, and for a dry run.

    With `task`, its hooks are called.
    """
    outputs, persistence = outputs or Outputs(), persistence or Persistence()
    hooks = Hooks(task, runtime, outputs.status, persistence.start, batches.total_steps)
    loop = _Loop(runtime, batches, world, config, evaluation, outputs, persistence, hooks)
    summary = loop.run()
    loop.close()
    return summary


class _Loop:
    """The state of one run between two steps."""

    def __init__(
        self,
        runtime: Runtime,
        batches: Batches,
        world: World,
        config: RunConfig,
        evaluation: Callable[[], Batches] | None,
        outputs: Outputs,
        persistence: Persistence,
        hooks: Hooks,
    ) -> None:
        self._hooks = hooks
        self._runtime, self._batches, self._world, self._config = runtime, batches, world, config
        self._evaluation, self._facts = evaluation, outputs.facts
        self._observers, self._status, self._profiler = outputs.observers, outputs.status, outputs.profiler
        self._start, self._at_end, self._resume_check = persistence.start, persistence.at_end, persistence.resume_check
        self._checkpointing, self._lost = persistence.checkpointing, persistence.lost
        self._position = self._start
        self._heartbeat = Heartbeat(world, self._status, lambda: peak_memory_bytes(world))
        self._buffer = StepBuffer(world, self._start.samples, is_patient=config.log_every > 1, compiles=config.compile)
        self._pending: PendingFetch | None = None
        self._last: StepRecord | None = None
        self._measured: EvalRecord | None = None
        self._told_of_draws = False
        if self._checkpointing is not None:
            for saver in self._checkpointing.own_savers:
                saver.unreported = self._buffer.unreported
        self._finite_check = FiniteCheck(config, world, self._checkpointing)
        self._same_windows = SameWindows(world, batches)
        self._replica_check = ReplicaCheck(runtime, config, self._checkpointing)

    def run(self) -> Summary:
        for observer in self._observers:
            observer.on_start({"total_steps": self._batches.total_steps, **self._facts}, self._start.step)
            if self._lost:
                observer.on_steps(list(self._lost))
        started, config = time.perf_counter(), self._config
        self._hooks.call("on_start", self._observers)
        self._buffer.skip()
        if self._is_stopped(self._heartbeat.check()) or (self._start.evaluation_due and not self._evaluate()):
            return self._stop()
        if self._checkpointing is not None and self._checkpointing.is_best(self._position):
            self._save_if_due()  # evaluated just now, or before an emergency save
        self._profile(self._start.step)
        self._status.phase("reading data")
        is_over = self._hooks.is_stopped or _is_settled(self._position, config, self._world)
        for window in self._runtime.place(self._batches) if not is_over else ():
            self._same_windows.check(window)
            is_last = window.step == self._batches.total_steps
            self._log_if_due(logs=self._take_step(window, is_last=is_last))
            if self._position.evaluation_due and not self._evaluate():
                return self._stop()
            is_saved = self._checkpointing is not None and self._checkpointing.is_due(self._position)
            self._replica_check.after_step(self._position, is_saved=is_saved)
            self._save_if_due()
            asked = self._heartbeat.after_step(window.step, self._runtime.phase_seconds(), window.num_samples)
            if self._is_stopped(asked) and not is_last and self._runtime.is_consistent():
                return self._stop()
            self._show_ranks(window.step, at_once=is_last)
            self._profile(window.step, is_last=is_last)
            if self._hooks.is_stopped or _is_settled(self._position, config, self._world):
                break
            self._status.phase("reading data")
        self._report_all_steps()
        wanted = self._evaluation is not None and self._config.eval_every != "never"
        if wanted and (self._measured is None or self._measured.step != self._position.step) and not self._evaluate():
            return self._stop()
        if self._checkpointing is not None:
            self._status.phase("saving")
            is_new = self._checkpointing.finish(self._position)
            self._report_saves()
            if is_new:
                self._hooks.call("on_checkpoint", self._observers)
        self._finite_check.refuse_non_finite(self._position)
        if self._at_end is not None:
            self._at_end(self._position.step)
        self._hooks.call("on_end", self._observers)
        facts = {"steps": self._position.step, "seconds": time.perf_counter() - started}
        facts |= _state_and_traffic(self._runtime, self._world)
        for observer in self._observers:
            observer.on_end(facts)
        return Summary(self._position.step, self._last, self._measured, best=self._position.best)

    def close(self) -> None:
        """Not after an error: all ranks take part."""
        self._heartbeat.settle()
        if self._profiler is not None:
            self._profiler.finish()

    def _take_step(self, window: LocalBatch, *, is_last: bool) -> bool:
        """Train on one window. Returns whether its figures are to be logged."""
        step, config = window.step, self._config
        self._status.step(step)
        # The first step is shown at once; after that, figures are read at such steps, if they are not too quick.
        logs = step == self._start.step + 1 or is_last or step % config.log_every == 0
        if self._checkpointing is not None:
            self._checkpointing.before_step()
        saves = config.checkpoint_every is not None and step % config.checkpoint_every == 0
        # Whether the update of a saved step was finite shows in its gradient norm: the loss was computed before it.
        result = self._runtime.step(window, want_norm=logs or saves)
        self._buffer.add(window, result)
        evaluates = self._evaluation is not None and _is_due(config.eval_every, step, window.ends_epoch, is_last)
        self._position = _position_after(self._position, window, evaluates)
        if self._checkpointing is not None:
            self._checkpointing.after_step(self._position)
        self._buffer.log(self._hooks.after_step(step, window.epoch, result))
        return logs

    def _log_if_due(self, *, logs: bool) -> None:
        self._report_steps()  # of the step before, while the device works on this one
        saves = self._checkpointing is not None and self._checkpointing.is_due(self._position)  # or it is the best
        evaluates = self._position.evaluation_due
        if (logs and self._buffer.is_worth_reading) or evaluates or saves:
            self._status.phase("logging")
            self._pending = self._buffer.seal()
            if evaluates or saves or self._buffer.reports_at_once:
                self._report_steps()  # a save commits the metrics written before it

    def _report_steps(self) -> None:
        records = self._buffer.records(self._pending) if self._pending is not None else []
        self._pending = None
        if self._resume_check is not None:
            for record in records:
                self._resume_check.check(record)  # before it replaces the step's earlier record
        for observer in self._observers:
            if records:
                observer.on_steps(records)
        self._last = records[-1] if records else self._last
        if self._world.tensors.has_values:
            for record in records:
                self._position = self._finite_check.check(record, self._position)

    def _report_all_steps(self) -> None:
        self._report_steps()
        self._pending = self._buffer.seal()
        self._report_steps()

    def _show_ranks(self, step: int, *, at_once: bool) -> None:
        for line in self._heartbeat.slow_lines():
            log.info(line)
        live = self._heartbeat.live(step, at_once=at_once) if self._observers else None
        if live is not None:
            for observer in self._observers:
                observer.on_ranks(live)

    def _profile(self, step: int, *, is_last: bool = False) -> None:
        if self._profiler is None:
            return
        with self._heartbeat.paused():
            if self._profiler.changes_after(step, is_last=is_last):
                self._heartbeat.settle()
            if self._profiler.between(step, is_last=is_last):
                self._buffer.skip()  # writing a profile does not count as time of the next step

    # -- evaluation ---------------------------------------------------------------------------------------------

    def _evaluate(self) -> bool:
        """Evaluate after the present step. Returns False if the run was asked to stop before the end of it."""
        assert self._evaluation is not None
        self._status.phase("evaluating")
        position = self._position
        epoch = position.epoch - 1 if position.sample == 0 and position.epoch > 0 else position.epoch
        started = time.perf_counter()
        generators = DeviceGenerators(self._world.device)
        try:
            with self._heartbeat.paused():
                metrics = self._runtime.evaluate(self._interruptible(self._evaluation()))
        except BaseException as error:
            # Evaluated again from its beginning after a resume, also from the state that an emergency save keeps.
            generators.restore()
            self._position = replace(position, evaluation_due=True)
            if not isinstance(error, _AskedToStop):
                raise
            return False
        self._position = replace(position, evaluation_due=False)
        if self._checkpointing is not None:
            self._position = self._checkpointing.after_evaluation(position, metrics)
        self._measured = EvalRecord(position.step, epoch, metrics, time.perf_counter() - started)
        for observer in self._observers:
            observer.on_evaluation(self._measured)
        self._hooks.state.metrics = metrics
        with self._heartbeat.paused():
            self._hooks.call("on_evaluation", self._observers)
        self._buffer.skip()
        return True

    def _interruptible(self, windows: Batches) -> Iterator[LocalBatch]:
        for window in windows:
            if self._is_stopped(self._heartbeat.check()):
                raise _AskedToStop
            if not self._told_of_draws and any(micro.collate_draws for micro in window.micro_batches):
                self._told_of_draws = True
                if self._world.is_main:
                    log.info(
                        "  collate draws random numbers in evaluations, too, so their figures depend on the number of "
                        "ranks. eval_collate(samples) can leave evaluation data as they are"
                    )
            yield window

    # -- saving -------------------------------------------------------------------------------------------------

    def _is_stopped(self, asked: bool) -> bool:
        return asked and self._checkpointing is not None

    def _save_if_due(self) -> None:
        if self._checkpointing is None:
            return
        if self._checkpointing.is_due(self._position):
            self._status.phase("saving")
            with self._heartbeat.paused():
                self._checkpointing.save(self._position)
                self._hooks.call("on_checkpoint", self._observers)
            self._buffer.skip()
        self._report_saves()

    def _report_saves(self) -> None:
        assert self._checkpointing is not None
        for record in self._checkpointing.finished():
            if record.error is not None and self._world.is_main:
                log.warning("%s %s", record.error, self._checkpointing.after_failure)
            for observer in self._observers:
                observer.on_checkpoint(record)

    def _stop(self) -> Summary:
        """Save the state and end the run early."""
        assert self._checkpointing is not None
        self._status.phase("saving")
        self._report_all_steps()
        if self._checkpointing.stop(self._position):
            self._hooks.call("on_checkpoint", self._observers)
        self._report_saves()
        self._hooks.state.stopped = True
        self._hooks.call("on_end", self._observers)
        return Summary(self._position.step, self._last, self._measured, stopped=True)


class _AskedToStop(Exception):
    """Raised in the middle of an evaluation."""


def _is_settled(position: Position, config: RunConfig, world: World) -> bool:
    """Whether the last evaluations brought nothing better (`--patience`). The same on all ranks."""
    best, patience = position.best, config.patience
    if patience is None or best is None or best.since < patience or position.evaluation_due:
        return False
    if world.is_main:
        log.info(
            "  ends after step %d: the last %d evaluations gave no better %s than %.4g, of step %d (--patience)",
            position.step, best.since, best.metric, best.value, best.step,
        )  # fmt: skip
    return True


def _position_after(before: Position, window: LocalBatch, evaluation_due: bool) -> Position:
    count = window.num_global_samples
    same_epoch = window.epoch == before.epoch
    epoch, sample = window.epoch, (before.sample if same_epoch else 0) + count
    if window.ends_epoch:
        epoch, sample = window.epoch + 1, 0
    skipped = window.skipped or before.skipped
    samples = before.samples + count
    return Position(
        window.step, epoch, samples, sample, evaluation_due, best=before.best, stream=window.place, skipped=skipped
    )


def _state_and_traffic(runtime: Runtime, world: World) -> dict[str, Any]:
    """The bytes of state that each rank keeps and the messages it sent. All ranks call it."""
    state = world.gather([float(count) for count in runtime.state_bytes().values()])
    facts: dict[str, Any] = {
        "state_bytes": [dict(zip(runtime.state_bytes(), map(int, row), strict=True)) for row in state]
    }
    traffic = world.gather_objects({name: t.as_json() for name, t in runtime.traffic().items()})
    if any(traffic):
        facts["traffic"] = traffic
    if runtime.device_0_bytes():
        facts["device_0_bytes"] = runtime.device_0_bytes()
    return facts


def _is_due(every: str, step: int, ends_epoch: bool, is_last: bool) -> bool:
    if every == "never":
        return False
    return is_last or (ends_epoch if every == "epoch" else step % int(every) == 0)
