"""Detects that a job hangs, and reports which ranks wait for which others in which operation, and what those do.

A rank makes progress with every phase of a step, which it writes to the status board. When no rank has made progress
for the timeout, the monitor takes the stack of each.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rung.distributed.status_board import RankStatus, StatusBoard
from rung.launch.diagnostics.stack_analysis import RankActivity, describe
from rung.launch.diagnostics.stacks import ThreadStack, take_stacks
from rung.system.processes import is_running

# The job must have ended when the timeout expires: this much of it is kept for taking stacks and ending ranks.
_MARGIN = 0.1
_MARGIN_SECONDS = 2.0
_MAX_LINES = 24


@dataclass(frozen=True)
class HangReport:
    """The final report of a job that hangs; its first line is the cause."""

    text: str
    missing: tuple[int, ...]  # ranks that others wait for


class HangMonitor:
    """Watches the ranks of this machine. `check` is cheap and meant to be called several times a second."""

    def __init__(self, board: StatusBoard, ranks: Iterable[int], state: Path, timeout: float, logs: Path) -> None:
        self._board, self._ranks, self._state, self._logs = board, list(ranks), state, logs
        self._timeout = timeout
        self._started = time.monotonic()

    def check(self) -> HangReport | None:
        """A report if no rank has made progress for the timeout, apart from spares and ranks that have finished."""
        statuses = self._active()
        if not statuses:
            return None
        newest = max(self._started, *(status.changed for status in statuses.values()))
        limit = self._timeout - min(_MARGIN_SECONDS, _MARGIN * self._timeout)
        return self.report() if time.monotonic() - newest > limit else None

    def report(self) -> HangReport:
        """Report what the ranks do now, whether or not they hang."""
        statuses = self._active()
        has_others = self._board.num_ranks > len(self._ranks)
        stacks = take_stacks(self._state, _pids(statuses))
        return make_report(statuses, stacks, self._timeout, self._logs, has_others=has_others)

    def places(self) -> dict[int, str]:
        """What each rank that is still alive does now, in a few words."""
        pids = {rank: pid for rank, pid in _pids(self._active()).items() if is_running(pid)}
        stacks = take_stacks(self._state, pids, is_urgent=True)
        return {rank: describe(stack).text for rank, stack in stacks.items()}

    def _active(self) -> dict[int, RankStatus]:
        found = {rank: self._board.read(rank) for rank in self._ranks}
        return {rank: status for rank, status in found.items() if not status.left and status.phase != "spare"}


def _pids(statuses: dict[int, RankStatus]) -> dict[int, int]:
    return {rank: status.pid for rank, status in statuses.items() if status.pid}


def make_report(
    statuses: dict[int, RankStatus],
    stacks: dict[int, ThreadStack],
    timeout: float,
    logs: Path | None = None,
    *,
    has_others: bool = False,
) -> HangReport:
    """Make the report from statuses and stacks. Ranks that do the same share a line. `has_others`: other machines have
    ranks, too, of which nothing is known here."""
    activities = {rank: describe(stacks[rank]) if rank in stacks else RankActivity("not started") for rank in statuses}
    waiting: dict[RankActivity, list[int]] = {}
    for rank, activity in activities.items():
        if activity.operation is not None:
            waiting.setdefault(activity, []).append(rank)
    missing = [rank for rank, activity in activities.items() if activity.operation is None]
    step = max(map(_step_of, statuses.values()), default=0)
    when = f"in step {step}" if step else "before the first step"
    lines = [f"the job hangs {when}: {_conclude(waiting, missing, has_others)}", ""]
    alike: dict[str, list[int]] = {}
    for rank, status in statuses.items():
        alike.setdefault(f"{where(status)}: {activities[rank].text}", []).append(rank)
    details = [f"  {name_ranks(ranks)}, {text}" for text, ranks in alike.items()]
    lines += details[:_MAX_LINES]
    if len(details) > _MAX_LINES:
        lines.append(f"  ... {len(details) - _MAX_LINES} more lines like these ...")
    lines += ["", f"no rank made progress for {timeout:g} s, the limit that --timeout sets"]
    lines += [f"logs: {logs}"] if logs is not None else []
    return HangReport("\n".join(lines), tuple(missing))


def _conclude(waiting: dict[RankActivity, list[int]], missing: list[int], has_others: bool) -> str:
    """The cause in one line."""
    everyone = sorted(rank for ranks in waiting.values() for rank in ranks)
    operations = " and ".join(dict.fromkeys(map(_short, waiting)))
    waits = "wait" if len(everyone) > 1 else "waits"
    if missing and everyone:
        have = "have" if len(missing) > 1 else "has"
        return f"{name_ranks(missing)} {have} not reached {operations}, in which {name_ranks(everyone)} {waits}"
    if missing:
        return f"{name_ranks(missing)} {'make' if len(missing) > 1 else 'makes'} no progress"
    if len(waiting) > 1:
        few, *others = sorted(waiting, key=lambda activity: len(waiting[activity]))
        rest = sorted(rank for activity in others for rank in waiting[activity])
        names = " and ".join(dict.fromkeys(map(_short, others)))
        return (
            f"{name_ranks(waiting[few])} {'wait' if len(waiting[few]) > 1 else 'waits'} in {_short(few)} at "
            f"{few.where}, {name_ranks(rest)} in {names}; all must call the same operations in the same order"
        )
    if has_others:
        return f"{name_ranks(everyone)} {waits} in {operations} for ranks of other machines"
    return f"all ranks wait in {operations} at the same place; do sizes or groups differ, or is the network cut?"


def _short(activity: RankActivity) -> str:
    return (activity.operation or "").partition(" (")[0]


def _step_of(status: RankStatus) -> int:
    return status.step + 1 if status.phase == "reading data" else status.step  # it reads for the next step


def where(status: RankStatus) -> str:
    """The step and phase that a rank is in."""
    step = _step_of(status)
    return f"step {step}, phase {status.phase}" if step else f"phase {status.phase}"


def name_ranks(ranks: list[int]) -> str:
    """rank 3; ranks 0, 2; ranks 0-3, 7"""
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
