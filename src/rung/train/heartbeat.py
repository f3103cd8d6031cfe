"""Agreement of ranks beside training: whether to stop, and each rank's own seconds per phase of a step.

A request to stop reaches ranks at different moments, but they must leave after the same step. So the ranks all-gather a
few numbers in the background, on a separate process group, and each derives the same decision from them in the same
call. The numbers also set the interval. With quick steps it is many steps, because even a small message costs a
fraction of a millisecond; with slow steps the ranks exchange in every step and wait for the result.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rung.distributed.live_status import JobSnapshot, RankFigures, StragglerStatus
from rung.distributed.status_board import StatusWriter
from rung.distributed.world import World
from rung.spec.abilities import cuts_only_batch, peer_group
from rung.spec.strategy import Layout

PHASES = ("data", "forward", "backward", "update")
_EXCHANGE_SECONDS = 0.25  # target time between exchanges, if steps are quicker
_MAX_CALLS = 64  # between exchanges: bounds the delay if steps suddenly become slow
_SYNC_SECONDS = 0.5  # between calls: from here on, wait for the result in the same call
# The row a rank sends: stop requested, seconds per call, steps, steps measured by phase, seconds and samples of all
# steps, memory, and last the sums of seconds per phase.
_STOP, _ELAPSED, _BEATS, _MEASURED, _SPAN, _SAMPLES, _MEMORY, _SUMS = range(8)
# A rank is slow in a phase if, in _MIN_SLOW of the last _WINDOW exchanges, it takes _FACTOR times as long as the median
# of its peers, and longer by more than the floor and by more than that part of a step.
_FLOOR_SECONDS = 0.005
_FACTOR = 1.5
_FACTOR_OF_STAGES = 2.5  # between stages, whose work differs
_PART_OF_STEP = 0.1
_WINDOW = 6
_MIN_SLOW = 4
_REPEAT_SECONDS = 60.0  # before the same rank and phase are reported again
_REPORT_SECONDS = 1.0  # between two checks for slow ranks


@dataclass(frozen=True)
class Straggler:
    """A rank whose own time in a phase clearly exceeds its peers'. Waiting for other ranks does not count."""

    rank: int
    phase: str
    seconds: float
    others_seconds: float  # the median of its peers

    def __str__(self) -> str:
        own, others = _milliseconds(self.seconds), _milliseconds(self.others_seconds)
        return f"rank {self.rank} is slow: {own} ms in {self.phase}, the others take {others} ms"


class Heartbeat:
    """One rank's side of the exchange. Collective: all ranks construct it and make the same calls in the same order."""

    def __init__(self, world: World, status: StatusWriter, memory: Callable[[], int] = lambda: 0) -> None:
        """`memory` returns this rank's peak memory in bytes."""
        self._world, self._status, self._memory = world, status, memory
        self._exchange = _Exchange(world) if world.has_peers else None
        self._agreed = False
        self._calls, self._every, self._waits = 0, 1, True
        self._sums = [0.0] * len(PHASES)
        self._beats, self._measured, self._samples, self._span = 0, 0, 0, 0.0
        self._started = self._step_started = time.perf_counter()
        self._rows: deque[list[list[float]]] = deque(maxlen=_WINDOW)  # by exchange and rank, as sent
        self._checked = self._shown = -_REPORT_SECONDS
        self._peers = Peers(world.layout, world.size, on_host=world.device.type == "cpu")
        self._found: list[Straggler] | None = None  # since the last exchange
        self._slow: set[tuple[int, str]] = set()
        self._reported_at: dict[tuple[int, str], float] = {}

    def after_step(self, step: int, seconds: Mapping[str, float], samples: int = 0) -> bool:
        """Add this rank's own seconds by phase (only "data" if the phases were not measured) and samples of a step.
        Returns True, in the same call on every rank, if all shall stop."""
        for phase, own in seconds.items():
            self._sums[PHASES.index(phase)] += own
        self._beats += 1
        self._measured += len(seconds) > 1
        self._samples += samples
        now = time.perf_counter()
        self._span, self._step_started = self._span + now - self._step_started, now
        return self._call(due=self._calls + 1 >= self._every)

    def check(self) -> bool:
        """The same decision outside of steps, at points that all ranks pass: evaluation batches, before a step."""
        self._status.touch()  # progress, for the launcher's hang detection
        agreed = self._call(due=True)
        self._every = 1  # this interval may not suit the calls that follow
        return agreed

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside from the step: an evaluation, a save."""
        started = time.perf_counter()
        yield
        self._step_started += time.perf_counter() - started

    def slow(self) -> list[Straggler]:
        """The ranks that are slow now."""
        if self._found is None:
            self._found = self._peers.compare(np.array([[_step_seconds(row) for row in rows] for rows in self._rows]))
        return self._found

    def slow_lines(self) -> list[str]:
        """On the main rank: a line for each rank that has become slow since the last call."""
        now = time.monotonic()
        if not self._world.is_main or now < self._checked + _REPORT_SECONDS:
            return []
        self._checked = now
        before, found = self._slow, self.slow()
        self._slow = {(slow.rank, slow.phase) for slow in found}
        lines = []
        for slow in found:
            key = (slow.rank, slow.phase)
            if key not in before and now >= self._reported_at.get(key, -_REPEAT_SECONDS) + _REPEAT_SECONDS:
                self._reported_at[key] = now
                lines.append(str(slow))
        return lines

    def seconds(self) -> list[dict[str, float]]:
        """Each rank's own seconds per step and phase, of the last exchange. Empty before the first."""
        last = self._rows[-1] if self._rows else []
        return [dict(zip(PHASES, _step_seconds(row), strict=True)) for row in last]

    def live(self, step: int, *, at_once: bool = False) -> JobSnapshot | None:
        """A snapshot of all ranks for observers. Main rank only, at most once a second unless `at_once`."""
        now = time.monotonic()
        is_due = at_once or now >= self._shown + _REPORT_SECONDS
        if not (self._world.is_main and self._rows and is_due):
            return None
        self._shown = now
        last = self._rows[-1]
        ranks = [
            RankFigures(seconds, row[_SAMPLES] / row[_SPAN] if row[_SPAN] > 0 else 0.0, int(row[_MEMORY]))
            for row, seconds in zip(last, self.seconds(), strict=True)
        ]
        slow = [StragglerStatus(s.rank, s.phase, s.seconds, s.others_seconds, str(s)) for s in self.slow()]
        step_seconds = max(row[_SPAN] / row[_BEATS] for row in last)
        return JobSnapshot(step, time.time(), step_seconds, ranks, slow)

    def settle(self) -> None:
        """Finish a pending exchange. All ranks call it at the same point: before they leave, since none may while
        another waits in the all-gather, and before torch's profiler starts or stops, which takes no operation well
        that began before and ends after."""
        if self._exchange is not None and self._exchange.pending:
            self._conclude(self._exchange.finish())

    def _call(self, *, due: bool) -> bool:
        if self._world.is_dry_run:
            return False
        if self._exchange is None:
            self._agreed = self._agreed or self._status.stop_requested()
            if self._measured and time.perf_counter() >= self._started + _EXCHANGE_SECONDS:
                self._rows.append([self._row()])
                self._found = None
                self._reset()
            return self._agreed
        self._calls += 1
        if self._exchange.pending:
            self._conclude(self._exchange.finish())
        if due or self._waits:
            self._exchange.start(self._row())
            self._reset()
            if self._waits:
                self._conclude(self._exchange.finish())
        return self._agreed

    def _row(self) -> list[float]:
        elapsed = (time.perf_counter() - self._started) / max(self._calls, 1)
        row = [self._status.stop_requested(), elapsed, self._beats, self._measured, self._span, self._samples]
        return [*map(float, row), float(self._memory()), *self._sums]

    def _reset(self) -> None:
        self._calls, self._beats, self._measured, self._samples, self._span = 0, 0, 0, 0, 0.0
        self._sums = [0.0] * len(PHASES)
        self._started = time.perf_counter()

    def _conclude(self, rows: list[list[float]]) -> None:
        """Decide from the gathered rows alone: anything local would make the ranks disagree."""
        self._agreed = self._agreed or any(row[_STOP] > 0 for row in rows)
        longest = max(row[_ELAPSED] for row in rows)
        self._waits = longest >= _SYNC_SECONDS
        self._every = max(1, min(_MAX_CALLS, int(_EXCHANGE_SECONDS / max(longest, 1e-9))))
        if all(row[_MEASURED] for row in rows):
            self._rows.append(rows)
            self._found = None


class _Exchange:
    """A small asynchronous all-gather. Two sets of tensors alternate, since one may still be in flight."""

    def __init__(self, world: World) -> None:
        self._group = world.host_group()
        width = _SUMS + len(PHASES)
        self._own = [torch.zeros(width, dtype=torch.float64) for _ in range(2)]
        self._all = [torch.zeros(world.size, width, dtype=torch.float64) for _ in range(2)]
        self._parts = [list(rows.unbind()) for rows in self._all]
        self._work: dist.Work | None = None
        self._turn = 0

    @property
    def pending(self) -> bool:
        return self._work is not None

    def start(self, values: list[float]) -> None:
        assert self._work is None
        self._turn = 1 - self._turn
        self._own[self._turn].numpy()[:] = values
        # The group's own method: the wrapper `dist.all_gather` doubles the cost of the call.
        self._work = self._group.allgather([self._parts[self._turn]], [self._own[self._turn]])

    def finish(self) -> list[list[float]]:
        assert self._work is not None
        self._work.wait()
        self._work = None
        rows: list[list[float]] = self._all[self._turn].tolist()
        return rows


class Peers:
    """Groups of ranks to compare: the ranks of one stage, which do the same work; all ranks if each stage has one."""

    def __init__(self, layout: Layout, size: int, *, on_host: bool = False) -> None:
        """`on_host`: the ranks compute on the CPU."""
        # On the CPU nothing runs ahead of the host, so if the model is not cut every wait for other ranks is measured.
        self._measures_waits = on_host and cuts_only_batch(layout)
        stages = [peer_group(layout, rank) for rank in range(size)]
        groups = [[r for r, stage in enumerate(stages) if stage == wanted] for wanted in sorted(set(stages))]
        self._groups = [(group, _FACTOR) for group in groups]
        if all(len(group) == 1 for group in groups):
            self._groups = [(list(range(size)), _FACTOR_OF_STAGES if len(groups) > 1 else _FACTOR)]

    def compare(self, seconds: np.ndarray[Any, Any]) -> list[Straggler]:
        """Find slow ranks in an array of (exchanges, ranks, phases). If waits inside phases are not measured, a rank
        that is long in one phase may be short in another, where its peers wait: then a phase counts only if it makes
        the whole step longer. If all waits are measured, two ranks can be slow, each in another phase."""
        if len(seconds) < _MIN_SLOW:
            return []
        found = []
        for group, factor in self._groups:
            if len(group) == 1:
                continue
            for place, rank in enumerate(group):
                own = seconds[:, rank]
                others = np.median(seconds[:, group[:place] + group[place + 1 :]], axis=1)
                excess = own - others
                floor = max(_FLOOR_SECONDS, _PART_OF_STEP * float(np.median(others.sum(axis=1))))
                whole = float(np.median(excess.sum(axis=1)))
                slow = ((excess > floor) & (own > factor * others)).sum(axis=0) >= _MIN_SLOW
                if not self._measures_waits:
                    slow &= whole > 0.5 * np.median(excess, axis=0)
                for index in np.flatnonzero(slow):
                    own_median, others_median = float(np.median(own[:, index])), float(np.median(others[:, index]))
                    found.append(Straggler(rank, PHASES[index], own_median, others_median))
        return found


def _step_seconds(row: list[float]) -> list[float]:
    """A rank's seconds per step and phase, from the row it sent."""
    data, *others = row[_SUMS:]
    return [data / row[_BEATS], *(total / row[_MEASURED] for total in others)]


def _milliseconds(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"
