"""Steps whose figures are still on the device.

Every step has a record, but figures are copied from the device only every few steps: `StepBuffer` holds those that are
still there and turns them into records together.
"""

from __future__ import annotations

import math
import resource
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from rung.checkpoint.notes import Unreported
from rung.data.batch_shard import LocalBatch
from rung.distributed.collectives import start_gather, start_sum
from rung.distributed.torch_private import compile_seconds, graph_breaks
from rung.distributed.world import World
from rung.errors import TaskError
from rung.runtime.base import LocalStep, LoggedValue
from rung.train.figures import FigureColumns, Sums, fetch_sums
from rung.train.lost_figures import OwnFigures
from rung.train.records import StepRecord

_SHORT_STEP = 0.02  # seconds
_READ_SECONDS = 0.1  # between two reads, if steps are quicker: each costs about half a millisecond
_MAX_STEPS = 100  # between two reads: bounds the delay if steps suddenly become slow


class _Step(NamedTuple):
    """A step without its samples, which would stay on the device."""

    number: int
    epoch: int
    num_samples: int
    wait_seconds: float
    result: LocalStep
    start: Any  # time marks
    end: Any
    compile_seconds: float
    graph_breaks: list[str] | None


@dataclass(frozen=True)
class PendingFetch:
    """Steps whose figures are on their way: from the device, and between the ranks."""

    steps: list[_Step]
    # Of each rank: losses, waits for data, columns of logged figures, gradient norms, seconds, memory.
    rows: Callable[[], list[list[float]]]
    logged: Callable[[], list[Sums]] = list  # by the task on this rank
    experts: Callable[[], list[float]] = list  # the sums over all ranks of the rows of experts, step by step


class StepBuffer:
    """Steps whose figures are still on the device.

    `seal` starts the copy to the host and `records` waits for it. The caller launches the next step between the two, so
    that the device is not idle while figures are read and written, and no rank waits for a slower one. On the CPU this
    is so if steps are short; else a user would see the loss of a step when the next one has ended.
    """

    def __init__(self, world: World, samples: int = 0, *, is_patient: bool = True, compiles: bool = False) -> None:
        """If not patient, every step that is logged is read, and on the CPU at once, however short it is."""
        self._world, self._is_patient, self._compiles = world, is_patient, compiles
        self._clock = _StepClock(world)
        self._pending: list[_Step] = []
        self._logged: list[list[LoggedValue]] = []  # by the task, in each of them
        self._sealed: deque[tuple[list[_Step], list[list[LoggedValue]]]] = deque(maxlen=2)
        self._columns = FigureColumns(world)
        self._samples = samples
        self._breaks: set[str] = set()  # that have been told
        self.skip()
        # The same on all ranks.
        self._wanted = 1  # so many steps are worth a read
        self.reports_at_once = world.device.type == "cpu"

    @property
    def is_worth_reading(self) -> bool:
        """Whether enough steps wait here. The same on all ranks."""
        return len(self._pending) >= self._wanted

    def add(self, window: LocalBatch, result: LocalStep) -> None:
        start, compiled = self._last_mark, self._compiled
        self.skip()
        compiled = self._compiled - compiled
        breaks = self._new_breaks() if self._compiles else None  # giving up takes no time
        count, waited = window.num_global_samples, window.wait_seconds
        step = _Step(window.step, window.epoch, count, waited, result, start, self._last_mark, compiled, breaks)
        self._pending.append(step)
        self._logged.append(list(result.logged))

    def log(self, values: list[LoggedValue]) -> None:
        """Add what a hook logs after the last step, under names of its own: it has no weight as a micro-batch has."""
        before = {one.name: one.function for one in self._logged[-1]}
        both = next((one for one in values if one.name in before), None)
        if both is not None:
            raise TaskError(
                f"log({both.name!r}) is called in {before[both.name]}() and in {both.function}(). Rename one of them."
            )
        self._logged[-1] += values

    def _new_breaks(self) -> list[str] | None:
        new = [reason for reason in graph_breaks() if reason not in self._breaks]
        self._breaks.update(new)
        return new or None

    def skip(self) -> None:
        """Exclude the time since the last step (an evaluation) from the next step's time."""
        self._last_mark: Any = self._clock.mark()
        self._compiled = compile_seconds() if self._compiles else 0.0

    def seal(self) -> PendingFetch:
        steps, self._pending = self._pending, []
        if steps:
            self._sealed.append((steps, self._logged))
        logged, self._logged = fetch_sums(self._world, self._logged), []
        if not steps:
            return PendingFetch([], list)
        results = [step.result for step in steps]
        losses = self._world.tensors.fetch([result.loss_share for result in results])
        norms = self._world.tensors.fetch([result.grad_norm for result in results if result.grad_norm is not None])
        counted = [result.rows.counts for result in results if result.rows is not None]  # the same on all ranks
        own = self._world.tensors.fetch_all(torch.cat(counted)) if counted else list
        size = self._world.size
        if self._world.device.type == "cpu":
            row = self._row(steps, losses(), logged(), norms())
            return PendingFetch(steps, start_gather(row, size), logged, start_sum(own(), size))
        return PendingFetch(
            steps,
            lambda: self._world.gather(self._row(steps, losses(), logged(), norms())),
            logged,
            lambda: start_sum(own(), size)(),
        )

    def _row(self, steps: list[_Step], losses: list[float], logged: list[Sums], norms: list[float]) -> list[float]:
        waits = [step.wait_seconds for step in steps]
        seconds = self._clock.between(steps[0].start, steps[-1].end) / len(steps)
        memory = float(peak_memory_bytes(self._world))
        return [*losses, *waits, *self._columns.columns(logged), *norms, seconds, memory]

    def unreported(self) -> Unreported:
        """The last steps on this rank. Those that were sealed last are among them: the main rank may have failed before
        it had their figures."""
        groups = [*self._sealed, (list(self._pending), list(self._logged))]
        steps = [step for some, _ in groups for step in some]
        logged = [values for _, some in groups for values in some]

        def read() -> list[dict[str, Any]]:
            memory, sums, found = peak_memory_bytes(self._world), fetch_sums(self._world, logged)(), []
            for step, own in zip(steps, sums, strict=True):
                result = step.result
                figures = OwnFigures(
                    step=step.number,
                    epoch=step.epoch,
                    num_samples=step.num_samples,
                    loss=self._world.tensors.read([result.loss_share])[0],
                    grad_norm=None if result.grad_norm is None else self._world.tensors.read([result.grad_norm])[0],
                    lr=result.learning_rate,
                    lrs=result.learning_rates,
                    seconds=self._seconds(step),
                    compile_seconds=step.compile_seconds,
                    wait_seconds=step.wait_seconds,
                    memory_bytes=memory,
                    staleness=result.staleness,
                    logged=own,
                )
                found.append(figures.as_json())
            return found

        return read

    def records(self, sealed: PendingFetch) -> list[StepRecord]:
        """The records of sealed steps. Collective: all ranks call it at the same steps."""
        count = len(sealed.steps)
        if not count:
            return []
        rows = sealed.rows()
        # Norms and seconds of the main rank: all ranks must decide alike whether to stop, and when to report.
        start, stop = 2 * count, 2 * count + self._columns.width(count)
        norms = iter(rows[0][stop:-2])
        figures = self._columns.figures([row[start:stop] for row in rows], sealed.logged())
        counts = sealed.experts()
        mean = rows[0][-2]
        if self._is_patient:
            self._wanted = min(_MAX_STEPS, math.ceil(_READ_SECONDS / max(mean, 1e-9)))
        if self._world.device.type == "cpu":
            self.reports_at_once = len(rows) == 1 or not self._is_patient or mean >= _SHORT_STEP
        records, memory = [], int(max(row[-1] for row in rows))
        for index, step in enumerate(sealed.steps):
            result = step.result
            self._samples += step.num_samples
            seconds = self._seconds(step)
            experts: dict[str, dict[str, Any]] = {}
            if result.rows is not None:
                own, counts = counts[: len(result.rows.counts)], counts[len(result.rows.counts) :]
                experts = result.rows.named(own)
            waits = [row[count + index] for row in rows]
            longest = max(waits)
            records.append(
                StepRecord(
                    step=step.number,
                    epoch=step.epoch,
                    samples=self._samples,
                    loss=math.fsum(row[index] for row in rows),
                    grad_norm=next(norms) if result.grad_norm is not None else None,
                    lr=result.learning_rate,
                    step_seconds=seconds,
                    samples_per_second=step.num_samples / seconds if seconds > 0 else math.nan,
                    data_wait_seconds=longest,
                    slowest_reader=waits.index(longest),
                    peak_memory_bytes=memory,
                    lrs=result.learning_rates or None,
                    compile_seconds=step.compile_seconds or None,
                    graph_breaks=step.graph_breaks,
                    staleness=result.staleness,
                    logged=figures[index],
                    experts=experts,
                )
            )
        return records

    def _seconds(self, step: _Step) -> float:
        """Compiling is no part of a step that says how long others will take."""
        return max(0.0, self._clock.between(step.start, step.end) - step.compile_seconds)


class _StepClock:
    """Time marks: CUDA events on a GPU, so that timing a step does not synchronize."""

    def __init__(self, world: World) -> None:
        self._on_device = world.trains_on_gpu

    def mark(self) -> Any:
        if not self._on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between(self, start: Any, stop: Any) -> float:
        if not self._on_device:
            return float(stop - start)
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1000


def peak_memory_bytes(world: World) -> int:
    """Peak memory so far: allocated by torch on a GPU, resident set size of the process on the CPU."""
    if world.device.type == "cuda":
        return torch.cuda.max_memory_allocated(world.device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
