"""The ranks of this machine as the operating system knows them: who lives, who died when, and the end of all."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Collection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rung.processes import is_running
from rung.status import RankStatus, StatusBoard

# How long a finished rank may take to leave. Its results are written; threads of the task may be at their last words.
LEAVE_SECONDS = 10.0
_PROCESSES, _SHARED_MEMORY = Path("/proc"), Path("/dev/shm")


class Ranks:
    """The processes of one world on this machine.

    A rank's word counts: it has finished when its slot of the status board says so, and one that ends before has
    failed, whatever its exit code. Without the expendable ones a job goes on.
    """

    def __init__(self, board: StatusBoard, expendable: Collection[int] = ()) -> None:
        self.board = board
        self._expendable = set(expendable)
        self.deaths: dict[int, float] = {}  # when each was first seen dead, of those that were not ended from here
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

    @property
    def local(self) -> dict[int, RankStatus]:
        return {rank: self.board.read(rank) for rank in self._pids}

    def all_gone(self) -> bool:
        """Whether nobody is left, but for spares."""
        return all(rank in self.deaths or status.phase == "spare" for rank, status in self.local.items())

    def lost(self) -> bool:
        """Whether a rank has ended that had not left in good order. A spare is no loss."""
        return bool(set(self._fallen()) - set(self.missed()))

    def missed(self) -> list[int]:
        """Expendable ranks that have fallen. Not before they had joined: the others wait for all of them to come."""
        return sorted(r for r in self._fallen() if r in self._expendable and self.board.read(r).phase != "starting")

    def _fallen(self) -> list[int]:
        return [rank for rank in self.deaths if not (s := self.board.read(rank)).left and s.phase != "spare"]

    def all_left(self) -> bool:
        """Whether no rank works any more, and not because there was none to work."""
        found = self._workers()
        return bool(found) and all(status.left for status in found)

    def finished(self) -> bool:
        return self.all_left() and all(status.finished for status in self._workers())

    def _workers(self) -> list[RankStatus]:
        """Those that count: no spares, and none that the job goes on without."""
        missed = self.missed()
        return [s for rank, s in self.local.items() if s.phase != "spare" and rank not in missed]

    def only_spares(self) -> bool:
        return all(status.phase == "spare" for status in self.local.values())

    def may_still_leave(self) -> bool:
        """Whether a process that has said its last word is still there."""
        return any(self.board.read(rank).left for rank in set(self._pids) - set(self.deaths))

    def step(self) -> int:
        """How far the job has come."""
        return max((status.step for status in self.local.values()), default=0)

    def statuses(self) -> list[RankStatus]:
        return [self.board.read(rank) for rank in range(self.board.num_ranks)]

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
        members = _members_of(set(self._pids.values()))
        for rank, pid in self._pids.items():
            if rank not in self.deaths:
                _kill(os.kill, pid)
            _kill(os.killpg, pid)  # each rank leads a group of its own
        # A rank whose start was interrupted is known to nobody but the list of children.
        children = set(multiprocessing.active_children()) - self._others
        for child in children:
            child.kill()
        for child in children:
            child.join(LEAVE_SECONDS)
        _forget_shared_memory(members)


def _members_of(groups: set[int]) -> set[int]:
    """The processes of these process groups."""
    found = set(groups)
    for path in _PROCESSES.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            if int(path.read_text().rpartition(")")[2].split()[2]) in groups:
                found.add(int(path.parent.name))
    return found


def _forget_shared_memory(pids: Collection[int]) -> None:
    """Remove what killed processes have left. torch gives each tensor that a data worker sends a name there and removes
    it a moment later; a worker that is killed between the two cannot."""
    if not pids:
        return
    for path in _SHARED_MEMORY.glob("torch_*"):
        maker = path.name.split("_")[1]
        if maker.isdigit() and int(maker) in pids:
            with contextlib.suppress(OSError):
                path.unlink()


def _kill(how: Any, pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        how(pid, signal.SIGKILL)
