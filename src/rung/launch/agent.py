"""torch's elastic agent for the ranks of one machine, with an eye on the processes that is quicker and sees more.

The agent starts the ranks and gives them a store to meet at. Its own watch would hang on a rank that leaves early with
exit code 0, wait half a minute for one that ignores SIGTERM, and not know which of several dead ranks was the first.
Here a rank's word counts: it has finished when its slot of the status board says so, and one that ends before has
failed, whatever its exit code.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException

from rung.processes import is_running
from rung.status import RankStatus, StatusBoard

# How long after the first death the others may still fall by themselves: a rank that lost its connection to the dead
# one says so in its log, and two deaths that the system reports out of order are both seen.
_SETTLE_SECONDS = 0.25
# How long a finished rank may take to leave. Its results are written; threads of the task may be at their last words.
_LEAVE_SECONDS = 10.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Ranks:
    """The ranks' processes as the operating system knows them."""

    def __init__(self, board: StatusBoard) -> None:
        self.deaths: dict[int, float] = {}  # when each was first seen dead, of those that were not ended from here
        self._board = board
        self._pids: dict[int, int] = {}
        self._processes: dict[int, BaseProcess] = {}
        self._others = set(multiprocessing.active_children())
        self._ending = False

    def started(self, processes: dict[int, BaseProcess]) -> None:
        self._processes = processes
        self._pids = {rank: process.pid for rank, process in processes.items() if process.pid is not None}

    def look(self) -> None:
        """Note who has died since the last look."""
        if not self._ending:
            now = time.time()
            self.deaths |= {r: now for r, pid in self._pids.items() if r not in self.deaths and not is_running(pid)}

    def all_left(self) -> bool:
        return len(self.deaths) == len(self._pids)

    def lost(self) -> bool:
        """Whether a rank has ended that had not finished."""
        return any(not self._board.read(rank).finished for rank in self.deaths)

    def finished(self) -> bool:
        return all(status.finished for status in self.statuses())

    def statuses(self) -> list[RankStatus]:
        return [self._board.read(rank) for rank in range(self._board.num_ranks)]

    def exit_codes(self) -> dict[int, int | None]:
        """The exit codes of the ranks that ended by themselves; negative ones are signals."""
        for rank in self.deaths:
            self._processes[rank].join(1)
        return {rank: self._processes[rank].exitcode for rank in self.deaths}

    def end(self) -> None:
        """Kill what is left of every rank, and of the processes that it started.

        Not asked politely: a rank may be inside a collective that never returns, and its Python does not run there.
        """
        self.look()
        self._ending = True
        for rank, pid in self._pids.items():
            if rank not in self.deaths:
                _kill(os.kill, pid)
            _kill(os.killpg, pid)  # each rank leads a group of its own
        # A rank whose start was interrupted is known to nobody but the list of children.
        children = set(multiprocessing.active_children()) - self._others
        for child in children:
            child.kill()
        for child in children:
            child.join(_LEAVE_SECONDS)


class Signals:
    """Turns the signals that ask the launcher to end into an exception of its main thread. Use as a context manager."""

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self._hold = False
        self._waiting: int | None = None

    def __enter__(self) -> Signals:
        # The agent would install handlers of its own, and cannot be interrupted while it does.
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._take) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """A stretch that the first signal does not interrupt but follows. A second one means it."""
        self._hold = True
        try:
            yield
        finally:
            self._hold = False
        if self._waiting is not None:
            self._take(self._waiting, None)

    def ignore(self) -> None:
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    def _take(self, number: int, frame: object) -> None:
        patient = self._hold and self._waiting is None
        self._waiting = number
        if not patient:
            raise SignalException(f"got signal {number}", signal.Signals(number))


class RankAgent(LocalElasticAgent):
    """The elastic agent with `Ranks` as its eyes. No restarts: a rank that comes back has lost its state."""

    def __init__(self, ranks: Ranks, signals: Signals, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ranks = ranks
        self._signals = signals
        self._finished_at: float | None = None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with self._signals.held():  # a rank that is half started would be known to nobody
            pids: dict[int, Any] = super()._start_workers(worker_group)
        # The processes themselves, for their exit codes. Neither the agent nor multiprocessing gives them out: the list
        # of active children has forgotten a rank that is dead by now.
        context: Any = self._pcontext
        self._ranks.started(dict(enumerate(context._pc.processes)))
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        ranks = self._ranks
        ranks.look()
        if ranks.lost():
            deadline = time.monotonic() + _SETTLE_SECONDS
            while not ranks.all_left() and time.monotonic() < deadline:
                time.sleep(0.01)
                ranks.look()
            ranks.end()
            return RunResult(state=WorkerState.FAILED)
        if not ranks.finished():
            return RunResult(state=WorkerState.HEALTHY)
        self._finished_at = self._finished_at or time.monotonic()
        if not ranks.all_left() and time.monotonic() < self._finished_at + _LEAVE_SECONDS:
            return RunResult(state=WorkerState.HEALTHY)
        ranks.end()
        return RunResult(
            state=WorkerState.SUCCEEDED, return_values={worker.global_rank: None for worker in worker_group.workers}
        )

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:  # torch 2.11 and 2.13 differ in the arguments
        self._signals.ignore()  # a second Ctrl-C must not cut short what the first one began
        self._ranks.end()
        super()._shutdown(*args, **kwargs)

    def _record_worker_events(self, result: RunResult) -> None:
        """Nobody reads the agent's events, and each looks the host's name up: seconds, where names do not resolve."""


def _kill(how: Any, pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        how(pid, signal.SIGKILL)
