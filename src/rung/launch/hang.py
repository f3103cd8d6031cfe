"""Notices that a job hangs, and says why: who waits for whom in which operation, and what the missing one does.

A rank comes forward with every phase of a step, which the status board shows. When none has for as long as the timeout,
each is asked for its stack.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rung.launch.places import Doing, describe
from rung.launch.stacks import Stand, take_stands
from rung.processes import is_running
from rung.status import RankStatus, StatusBoard

# The job has ended within the timeout: so much of it is left for taking stacks and for ending ranks.
_MARGIN = 0.1
_MARGIN_SECONDS = 2.0
_MAX_LINES = 24


@dataclass(frozen=True)
class HangReport:
    """The closing screenful of a job that hangs; its first line is the cause."""

    text: str
    missing: tuple[int, ...]  # ranks that others wait for


class HangWatch:
    """Watches the ranks of this machine. `look` is cheap; call it several times a second while they run."""

    def __init__(self, board: StatusBoard, ranks: Iterable[int], state: Path, timeout: float, logs: Path) -> None:
        self._board, self._ranks, self._state, self._logs = board, list(ranks), state, logs
        self._timeout = timeout
        self._started = time.monotonic()

    def look(self) -> HangReport | None:
        """A report when no rank has come forward for the timeout. Ranks that have left and spares are not waited for,
        but at least one other must be there to hang."""
        statuses = self._active()
        if not statuses:
            return None
        newest = max(self._started, *(status.changed for status in statuses.values()))
        limit = self._timeout - min(_MARGIN_SECONDS, _MARGIN * self._timeout)
        return self.report() if time.monotonic() - newest > limit else None

    def report(self) -> HangReport:
        """What the ranks do just now, at once."""
        statuses = self._active()
        has_others = self._board.num_ranks > len(self._ranks)
        stands = take_stands(self._state, _pids(statuses))
        return make_report(statuses, stands, self._timeout, self._logs, has_others=has_others)

    def places(self) -> dict[int, str]:
        """What each rank that is still there does just now, in a few words."""
        pids = {rank: pid for rank, pid in _pids(self._active()).items() if is_running(pid)}
        stands = take_stands(self._state, pids, is_urgent=True)
        return {rank: describe(stand).text for rank, stand in stands.items()}

    def _active(self) -> dict[int, RankStatus]:
        found = {rank: self._board.read(rank) for rank in self._ranks}
        return {rank: status for rank, status in found.items() if not status.left and status.phase != "spare"}


def _pids(statuses: dict[int, RankStatus]) -> dict[int, int]:
    return {rank: status.pid for rank, status in statuses.items() if status.pid}


def make_report(
    statuses: dict[int, RankStatus],
    stands: dict[int, Stand],
    timeout: float,
    logs: Path | None = None,
    *,
    has_others: bool = False,
) -> HangReport:
    """From what is known of each rank. Those that do the same thing share a line. `has_others`: there are ranks
    elsewhere, of which nothing is known."""
    doing = {rank: describe(stands[rank]) if rank in stands else Doing("not started") for rank in statuses}
    waiting: dict[Doing, list[int]] = {}
    for rank, done in doing.items():
        if done.operation is not None:
            waiting.setdefault(done, []).append(rank)
    missing = [rank for rank, done in doing.items() if done.operation is None]
    step = max((status.step for status in statuses.values()), default=0)
    when = f"in step {step}" if step else "before the first step"
    lines = [f"the job hangs {when}: {_conclude(waiting, missing, has_others)}", ""]
    told: dict[str, list[int]] = {}
    for rank, status in statuses.items():
        told.setdefault(f"{where(status)}: {doing[rank].text}", []).append(rank)
    details = [f"  {name_ranks(ranks)}, {text}" for text, ranks in told.items()]
    lines += details[:_MAX_LINES]
    if len(details) > _MAX_LINES:
        lines.append(f"  ... {len(details) - _MAX_LINES} more lines like these ...")
    lines += ["", f"no rank came forward for {timeout:g} s, the limit that --timeout sets"]
    lines += [f"logs: {logs}"] if logs is not None else []
    return HangReport("\n".join(lines), tuple(missing))


def _conclude(waiting: dict[Doing, list[int]], missing: list[int], has_others: bool) -> str:
    everyone = sorted(rank for ranks in waiting.values() for rank in ranks)
    operations = " and ".join(dict.fromkeys(_short(done) for done in waiting))
    waits = "wait" if len(everyone) > 1 else "waits"
    if missing and everyone:
        absent, they = ("are not there", "them") if len(missing) > 1 else ("is not there", "it")
        return f"{name_ranks(missing)} {absent}, {name_ranks(everyone)} {waits} for {they} in {operations}"
    if missing:
        return f"{name_ranks(missing)} {'do' if len(missing) > 1 else 'does'} not come forward"
    if len(waiting) > 1:
        few, *others = sorted(waiting, key=lambda done: len(waiting[done]))
        rest = sorted(rank for done in others for rank in waiting[done])
        names = " and ".join(dict.fromkeys(_short(done) for done in others))
        return (
            f"{name_ranks(waiting[few])} {'wait' if len(waiting[few]) > 1 else 'waits'} in {_short(few)} at "
            f"{few.where}, {name_ranks(rest)} in {names}; all must call the same operations in the same order"
        )
    if has_others:
        return f"{name_ranks(everyone)} {waits} in {operations} for ranks of other machines"
    return f"all ranks wait in {operations} at the same place; do sizes or groups differ, or is the network cut?"


def _short(done: Doing) -> str:
    return (done.operation or "").partition(" (")[0]


def where(status: RankStatus) -> str:
    """The step and phase that a rank is in."""
    step = status.step + 1 if status.phase == "reading data" else status.step  # the step that is to come
    return f"step {step}, phase {status.phase}" if step else f"phase {status.phase}"


def name_ranks(ranks: list[int]) -> str:
    """rank 3; ranks 0 and 2; ranks 0-3, 7"""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}-{b}" for a, b in runs]
    return f"ranks {', '.join(parts)}"
