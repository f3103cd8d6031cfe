"""What ranks do for each other where no launcher of Rung's watches them: notice who failed, and say so once.

Each rank has a thread that looks at the status board of its machine. The lowest rank that is still there speaks: it
tells the failure as the launcher would, and ends. Whoever started the ranks then ends the others, which is why a rank
that has failed waits for that and does not leave first.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rung.environment import Place
from rung.launch.failure import read_failures, report
from rung.launch.hang import HangWatch
from rung.processes import is_running
from rung.status import RankStatus, StatusBoard

_POLL_SECONDS = 0.05
# How long after a failure others may still fall by themselves. mpirun ends all within half a second of a death.
_SETTLE_SECONDS = 0.2
_FAR_SECONDS = 2.0  # the same, where the cause may be on another machine, which then speaks
_REPORT_SECONDS = 30.0  # that a failed rank waits for somebody to speak
REPORTED = "reported"  # a mark beside the ranks' records, so that nobody says it again


class PeerWatch:
    """The thread of one rank. `speak` shows the report of a failure to the user; the process ends after it."""

    def __init__(
        self, place: Place, board: StatusBoard, state: Path, logs: Path, timeout: float, speak: Callable[[str], None]
    ) -> None:
        self._place, self._board, self._state, self._logs = place, board, state, logs
        self._timeout, self._speak = timeout, speak
        self._parent = os.getppid()
        self._deaths: dict[int, float] = {}
        self._hangs: HangWatch | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rung-peers", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """The work is done: whoever leaves now has not failed."""
        self._stop.set()
        self._thread.join()

    def wait_for_report(self) -> None:
        """In a rank that has failed and left its record: until somebody has told it, which ends the process."""
        self._thread.join(_REPORT_SECONDS)

    def _watch(self) -> None:
        while not self._stop.wait(_POLL_SECONDS):
            local = self._look()
            if os.getppid() != self._parent:  # whoever started the ranks is gone, and nobody would end them
                os._exit(1)
            speaks = self._place.rank == min((r for r in local if r not in self._deaths), default=-1)
            if not speaks:
                continue
            if self._deaths or read_failures(self._state):
                self._settle()
                self._end(self._describe(self._look()))
            hang = self._look_for_hang(local)
            if hang is not None:
                self._end(hang)

    def _look(self) -> dict[int, RankStatus]:
        """The ranks of this machine, those that have left excepted; who died since the last look is noted."""
        found = {rank: self._board.read(rank) for rank in range(self._board.num_ranks)}
        local = {rank: status for rank, status in found.items() if status.pid and not status.left}
        for rank, status in local.items():
            # Read once more: it may have left in good order since.
            if rank not in self._deaths and not is_running(status.pid) and not self._board.read(rank).left:
                self._deaths[rank] = time.time()
        return local

    def _settle(self) -> None:
        """Let the others fall, so that the first of them can be told from those that lost their connection to it."""
        seen, changed, patience = -1, time.monotonic(), _SETTLE_SECONDS
        while time.monotonic() < changed + patience:
            self._look()
            failures = read_failures(self._state)
            if len(failures) + len(self._deaths) != seen:
                seen, changed = len(failures) + len(self._deaths), time.monotonic()
            lost = [record.lost_peer for record in failures.values()]
            if not self._place.is_one_machine and not self._deaths and all(lost):
                patience = _FAR_SECONDS
            time.sleep(_POLL_SECONDS / 5)

    def _describe(self, local: dict[int, RankStatus]) -> str:
        failures = read_failures(self._state)
        statuses = [self._board.read(rank) for rank in range(self._board.num_ranks)]
        elsewhere = {rank for rank, status in enumerate(statuses) if not status.pid}
        working = [rank for rank in local if rank not in failures] if not self._deaths else []  # else there is no time
        places = HangWatch(self._board, working, self._state, self._timeout, self._logs).places()
        return report(failures, statuses, {}, self._deaths, self._logs, elsewhere, places)

    def _look_for_hang(self, local: dict[int, RankStatus]) -> str | None:
        if self._hangs is None and len(local) == self._place.local_size:
            self._hangs = HangWatch(self._board, list(local), self._state, self._timeout, self._logs)
        hang = self._hangs.look() if self._hangs is not None else None
        return hang.text if hang is not None else None

    def _end(self, text: str) -> None:
        mark = self._state / REPORTED
        if not mark.exists():
            with contextlib.suppress(OSError):  # a full disk may be what there is to say
                mark.touch()
            self._speak(text)
        os._exit(1)
