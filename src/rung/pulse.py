"""What ranks tell each other beside the training: whether to stop, and how long each took for its own part of a step.

A request to stop reaches ranks at different moments, but they must leave after the same step. So the ranks exchange a
few numbers, in the background and on a process group of their own, and every rank draws the same conclusion from them
in the same call. How often they do so follows from the numbers themselves: with quick steps not in each one, because
even a small message costs a fraction of a millisecond; with slow ones in each, and the answer is waited for.
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

from rung.live import Live, RankFigures, Slowness
from rung.status import StatusWriter
from rung.strategy import Layout
from rung.world import World

PHASES = ("data", "forward", "backward", "update")
_RHYTHM_SECONDS = 0.25  # how far apart exchanges are about to be, where steps are quicker than that
_MAX_CALLS = 32  # between two exchanges, in case steps become slow all at once
_LONG_SECONDS = 0.5  # of a call: then the answer is waited for, since the next call is far away
# What a rank sends: whether to stop, the seconds of a call, its steps, the time and the samples of all of them, its
# memory, and last the sums of its phases' seconds.
_STOP, _ELAPSED, _BEATS, _SPAN, _SAMPLES, _MEMORY, _SUMS = range(7)
# A rank is slow in a phase if it takes so much longer than its peers, in most of the last exchanges.
_FLOOR_SECONDS = 0.005
_FACTOR = 1.5
_FACTOR_OF_STAGES = 2.5  # between ranks that do not do the same work
_PART_OF_STEP = 0.1
_WINDOW = 6
_MOST = 4
_SILENT_SECONDS = 60.0  # before the same thing is said again
_LOOK_SECONDS = 1.0  # between two looks at who is slow


@dataclass(frozen=True)
class SlowRank:
    """A rank that takes clearly longer than its peers, in time of its own: waiting for others does not count."""

    rank: int
    phase: str
    seconds: float
    others_seconds: float  # the median of its peers

    def __str__(self) -> str:
        own, others = _milliseconds(self.seconds), _milliseconds(self.others_seconds)
        return f"rank {self.rank} is slow: {own} ms in {self.phase}, the others take {others} ms"


class Pulse:
    """One rank's part in the exchange. All ranks make it at the same place, and call it at the same places."""

    def __init__(self, world: World, status: StatusWriter, memory: Callable[[], int] = lambda: 0) -> None:
        """`memory` gives the bytes that this rank needed so far."""
        self._world, self._status, self._memory = world, status, memory
        self._exchange = _Exchange(world) if world.size > 1 and not world.pretend else None
        self._agreed = False
        self._calls, self._every, self._waits = 0, 1, True
        self._sums = [0.0] * len(PHASES)
        self._beats, self._samples, self._span = 0, 0, 0.0
        self._started = self._step_started = time.perf_counter()
        self._rows: deque[list[list[float]]] = deque(maxlen=_WINDOW)  # of each exchange and rank, as they were sent
        self._looked = self._shown = -_LOOK_SECONDS
        self._peers = Peers(world.layout, world.size, on_host=world.device.type == "cpu")
        self._slow: set[tuple[int, str]] = set()
        self._said: dict[tuple[int, str], float] = {}

    def beat(self, step: int, seconds: Mapping[str, float], samples: int = 0) -> bool:
        """Once a step: this rank's own seconds by phase, and samples. True, in the same call on every rank, when all
        shall stop."""
        for index, phase in enumerate(PHASES):
            self._sums[index] += seconds.get(phase, 0.0)
        self._beats += 1
        self._samples += samples
        now = time.perf_counter()
        self._span, self._step_started = self._span + now - self._step_started, now
        return self._call(due=self._calls + 1 >= self._every)

    def check(self) -> bool:
        """The same agreement at other places that all ranks pass alike: windows of an evaluation, before a step."""
        self._status.touch()  # whoever watches sees that this rank came forward
        agreed = self._call(due=True)
        self._every = 1  # the calls that follow may be of another kind
        return agreed

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Around what is no part of a step: an evaluation, a save."""
        started = time.perf_counter()
        yield
        self._step_started += time.perf_counter() - started

    def slow(self) -> list[SlowRank]:
        """Who is slow just now."""
        return self._peers.compare(np.array([[_of_a_step(row) for row in rows] for rows in self._rows]))

    def slow_lines(self) -> list[str]:
        """What is to be said of slow ranks since the last call, on the main rank: one line when it begins."""
        now = time.monotonic()
        if not self._world.is_main or now < self._looked + _LOOK_SECONDS:
            return []
        self._looked = now
        before, found = self._slow, self.slow()
        self._slow = {(slow.rank, slow.phase) for slow in found}
        lines = []
        for slow in found:
            key = (slow.rank, slow.phase)
            if key not in before and now >= self._said.get(key, -_SILENT_SECONDS) + _SILENT_SECONDS:
                self._said[key] = now
                lines.append(str(slow))
        return lines

    def seconds(self) -> list[dict[str, float]]:
        """Each rank's own seconds by phase, of a step as of the last exchange. Empty before the first."""
        last = self._rows[-1] if self._rows else []
        return [dict(zip(PHASES, _of_a_step(row), strict=True)) for row in last]

    def live(self, step: int, *, at_once: bool = False) -> Live | None:
        """What all ranks do, for whoever watches: on the main rank, and at most once a second unless `at_once`."""
        now = time.monotonic()
        is_due = at_once or now >= self._shown + _LOOK_SECONDS
        if not (self._world.is_main and self._rows and is_due):
            return None
        self._shown = now
        last = self._rows[-1]
        ranks = [
            RankFigures(seconds, row[_SAMPLES] / row[_SPAN] if row[_SPAN] > 0 else 0.0, int(row[_MEMORY]))
            for row, seconds in zip(last, self.seconds(), strict=True)
        ]
        slow = [Slowness(one.rank, one.phase, one.seconds, one.others_seconds, str(one)) for one in self.slow()]
        step_seconds = max(row[_SPAN] / row[_BEATS] for row in last)
        return Live(step, time.time(), step_seconds, ranks, slow)

    def close(self) -> None:
        """At the end, by all ranks, so that none goes while another still listens."""
        if self._exchange is not None and self._exchange.pending:
            self._exchange.finish()

    def _call(self, *, due: bool) -> bool:
        if self._world.pretend:
            return False
        if self._exchange is None:
            self._agreed = self._agreed or self._status.stop_requested()
            if self._beats and time.perf_counter() >= self._started + _RHYTHM_SECONDS:
                self._rows.append([self._row()])
                self._begin_anew()
            return self._agreed
        self._calls += 1
        if self._exchange.pending:
            self._take(self._exchange.finish())
        if due or self._waits:
            self._exchange.start(self._row())
            self._begin_anew()
            if self._waits:
                self._take(self._exchange.finish())
        return self._agreed

    def _row(self) -> list[float]:
        elapsed = (time.perf_counter() - self._started) / max(self._calls, 1)
        told = [self._status.stop_requested(), elapsed, self._beats, self._span, self._samples]
        return [*map(float, told), float(self._memory()), *self._sums]

    def _begin_anew(self) -> None:
        self._calls, self._beats, self._samples, self._span = 0, 0, 0, 0.0
        self._sums = [0.0] * len(PHASES)
        self._started = time.perf_counter()

    def _take(self, rows: list[list[float]]) -> None:
        """Conclude from what all ranks have. Nothing here may depend on anything else, or they would disagree."""
        self._agreed = self._agreed or any(row[_STOP] > 0 for row in rows)
        longest = max(row[_ELAPSED] for row in rows)
        self._waits = longest >= _LONG_SECONDS
        self._every = max(1, min(_MAX_CALLS, int(_RHYTHM_SECONDS / max(longest, 1e-9))))
        if rows[0][_BEATS]:
            self._rows.append(rows)


class _Exchange:
    """A small all-gather in the background. Its tensors are used in turn, since one of them may still be in flight."""

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
        # The group's own method: what `dist.all_gather` does around it costs as much again.
        self._work = self._group.allgather([self._parts[self._turn]], [self._own[self._turn]])

    def finish(self) -> list[list[float]]:
        assert self._work is not None
        self._work.wait()
        self._work = None
        rows: list[list[float]] = self._all[self._turn].tolist()
        return rows


class Peers:
    """Who is compared with whom: ranks of the same stage, which do the same work; all, where a stage has but one."""

    def __init__(self, layout: Layout, size: int, *, on_host: bool = False) -> None:
        """`on_host` says that the ranks compute on the CPU."""
        # There nothing runs ahead of the host, and where the model is not cut, all waits for others are measured.
        self._knows_waits = on_host and not layout.is_composed and not layout.uses_rpc
        stages = [layout.team(rank) for rank in range(size)]
        groups = [[r for r, stage in enumerate(stages) if stage == wanted] for wanted in sorted(set(stages))]
        self._groups = [(group, _FACTOR) for group in groups]
        if all(len(group) == 1 for group in groups):
            self._groups = [(list(range(size)), _FACTOR_OF_STAGES if len(groups) > 1 else _FACTOR)]

    def compare(self, seconds: np.ndarray[Any, Any]) -> list[SlowRank]:
        """From (exchanges, ranks, phases). Where a rank may have to wait inside a phase for another in ways that nobody
        measures, it gains in one what it loses elsewhere: there a phase counts if the step as a whole is longer by it,
        too. Where all waits are known, two ranks may be slow, each in another phase, and both are named."""
        if len(seconds) < _MOST:
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
                slow = ((excess > floor) & (own > factor * others)).sum(axis=0) >= _MOST
                if not self._knows_waits:
                    slow &= whole > 0.5 * np.median(excess, axis=0)
                for index in np.flatnonzero(slow):
                    own_median, others_median = float(np.median(own[:, index])), float(np.median(others[:, index]))
                    found.append(SlowRank(rank, PHASES[index], own_median, others_median))
        return found


def _of_a_step(row: list[float]) -> list[float]:
    """A rank's seconds by phase, from what it sent."""
    return [total / row[_BEATS] for total in row[_SUMS:]]


def _milliseconds(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"
