"""Failure detection for ranks that Rung's launcher did not start: they monitor each other and report a failure once.

Each rank has a thread that polls the status board of its machine. The lowest rank that is still alive writes the report
that the launcher would write, and exits. torchrun, mpirun or srun then ends the others: therefore a rank that has
failed waits for the report and does not exit first.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rung.distributed.status_board import RankStatus, StatusBoard
from rung.launch.diagnostics.failure import read_failures, report
from rung.launch.diagnostics.hang import HangMonitor
from rung.system.launcher_env import LauncherRank
from rung.system.processes import is_running

_POLL_SECONDS = 0.05
# How long after a failure other ranks may still fail by themselves. mpirun kills all within half a second of a death.
_SETTLE_SECONDS = 0.2
_FAR_SECONDS = 2.0  # the same if the cause may be on another machine, whose ranks then write the report
_REPORT_SECONDS = 30.0  # that a failed rank waits for the report
REPORTED = "reported"  # a file beside the ranks' records: the report has been written


class PeerMonitor:
    """The monitor thread of one rank. `show` prints the report of a failure, and the process exits after it."""

    def __init__(
        self,
        place: LauncherRank,
        board: StatusBoard,
        state: Path,
        logs: Path,
        timeout: float,
        show: Callable[[str], None],
    ) -> None:
        self._place, self._board, self._state, self._logs = place, board, state, logs
        self._timeout, self._show = timeout, show
        self._parent = os.getppid()
        self._deaths: dict[int, float] = {}
        self._hangs: HangMonitor | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rung-peers", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop monitoring: training is done, and ranks that exit from now on have not failed."""
        self._stop.set()
        self._thread.join()

    def wait_for_report(self) -> None:
        """In a rank that has failed and written its record: wait for the report, which may end this process."""
        self._thread.join(_REPORT_SECONDS)

    def _run(self) -> None:
        while not self._stop.wait(_POLL_SECONDS):
            local = self._poll()
            if os.getppid() != self._parent:  # the launcher is gone, and would not end this rank
                os._exit(1)
            is_reporter = self._place.rank == min((r for r in local if r not in self._deaths), default=-1)
            if not is_reporter:
                continue
            if self._deaths or read_failures(self._state):
                self._await_other_failures()
                self._report_and_exit(self._failure_report(self._poll()))
            hang = self._find_hang(local)
            if hang is not None:
                self._report_and_exit(hang)

    def _poll(self) -> dict[int, RankStatus]:
        """The ranks of this machine that have not finished. Records which of them died since the last call."""
        found = {rank: self._board.read(rank) for rank in range(self._board.num_ranks)}
        local = {rank: status for rank, status in found.items() if status.pid and not status.left}
        for rank, status in local.items():
            # Read again: the rank may have finished between the first read and its exit.
            if rank not in self._deaths and not is_running(status.pid) and not self._board.read(rank).left:
                self._deaths[rank] = time.time()
        return local

    def _await_other_failures(self) -> None:
        """Wait until no further rank fails, so that the report can tell the cause from lost connections."""
        seen, changed, patience = -1, time.monotonic(), _SETTLE_SECONDS
        while time.monotonic() < changed + patience:
            self._poll()
            failures = read_failures(self._state)
            if len(failures) + len(self._deaths) != seen:
                seen, changed = len(failures) + len(self._deaths), time.monotonic()
            lost = [record.lost_peer for record in failures.values()]
            if not self._place.is_one_machine and not self._deaths and all(lost):
                patience = _FAR_SECONDS
            time.sleep(_POLL_SECONDS / 5)

    def _failure_report(self, local: dict[int, RankStatus]) -> str:
        failures = read_failures(self._state)
        statuses = [self._board.read(rank) for rank in range(self._board.num_ranks)]
        elsewhere = {rank for rank, status in enumerate(statuses) if not status.pid}
        # After a death mpirun kills all ranks, and there is no time to take stacks.
        working = [rank for rank in local if rank not in failures] if not self._deaths else []
        places = HangMonitor(self._board, working, self._state, self._timeout, self._logs).places()
        return report(failures, statuses, {}, self._deaths, self._logs, elsewhere, places)

    def _find_hang(self, local: dict[int, RankStatus]) -> str | None:
        if self._hangs is None and len(local) == self._place.local_size:
            self._hangs = HangMonitor(self._board, list(local), self._state, self._timeout, self._logs)
        hang = self._hangs.check() if self._hangs is not None else None
        return hang.text if hang is not None else None

    def _report_and_exit(self, text: str) -> None:
        mark = self._state / REPORTED
        if not mark.exists():
            with contextlib.suppress(OSError):  # the failure may be a full disk
                mark.touch()
            self._show(text)
        os._exit(1)
