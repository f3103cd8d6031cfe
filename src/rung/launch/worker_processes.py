"""The processes of the ranks on this machine: which are alive, which died when, and how the launcher kills them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Collection, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

from rung.distributed.status_board import RankStatus, StatusBoard
from rung.launch.worker_spec import WorkerSpec
from rung.system.processes import SEMAPHORES, is_running
from rung.train.job import RankJob

# A finished rank gets this long to exit: its results are written, but threads of the task may still run.
LEAVE_SECONDS = 10.0
_PROCESSES, _SHARED_MEMORY = Path("/proc"), Path("/dev/shm")


def run_rank(environment: Mapping[str, str], job: RankJob, spec: WorkerSpec) -> NoReturn:
    """The target of a rank's process."""
    from rung.launch.entrypoint import rank_main  # what ranks compute with, which the launcher does not load

    rank_main(environment, job, spec)


class WorkerProcesses:
    """The processes of one world on this machine.

    A rank has finished when its slot of the status board says so. A process that exits before that has failed, whatever
    its exit code. The job continues without the optional ranks.
    """

    def __init__(self, board: StatusBoard, optional: Collection[int] = ()) -> None:
        self.board = board
        self._optional = set(optional)
        self.deaths: dict[int, float] = {}  # when each rank was first seen dead; without those that `end` killed
        self._pids: dict[int, int] = {}
        self._processes: dict[int, BaseProcess] = {}
        self._others = set(multiprocessing.active_children())
        self._ending = False

    def started(self, processes: dict[int, BaseProcess]) -> None:
        self._processes = processes
        self._pids = {rank: process.pid for rank, process in processes.items() if process.pid is not None}

    def look(self) -> None:
        """Record the ranks that have died since the last call."""
        if not self._ending:
            now = time.time()
            self.deaths |= {r: now for r, pid in self._pids.items() if r not in self.deaths and not is_running(pid)}

    @property
    def local(self) -> dict[int, RankStatus]:
        return {rank: self.board.read(rank) for rank in self._pids}

    def all_gone(self) -> bool:
        """Whether all ranks have exited, spares aside."""
        return all(rank in self.deaths or status.phase == "spare" for rank, status in self.local.items())

    def lost(self) -> bool:
        """Whether a rank died that had neither finished nor stopped, and without which the job cannot continue."""
        return bool(set(self._dead()) - set(self.missed()))

    def missed(self) -> list[int]:
        """Optional ranks that have died after they joined. Before that the others would wait for them."""
        return sorted(r for r in self._dead() if r in self._optional and self.board.read(r).phase != "starting")

    def _dead(self) -> list[int]:
        return [rank for rank in self.deaths if not (s := self.board.read(rank)).left and s.phase != "spare"]

    def all_left(self) -> bool:
        """Whether there are ranks that train, and all of them have finished or stopped."""
        found = self.workers()
        return bool(found) and all(status.left for status in found)

    def workers(self) -> list[RankStatus]:
        """The ranks that train: no spares, and no optional ranks that have died."""
        missed = self.missed()
        return [s for rank, s in self.local.items() if s.phase != "spare" and rank not in missed]

    def only_spares(self) -> bool:
        return all(status.phase == "spare" for status in self.local.values())

    def may_still_leave(self) -> bool:
        """Whether a process that has finished or stopped is still alive."""
        return any(self.board.read(rank).left for rank in set(self._pids) - set(self.deaths))

    def step(self) -> int:
        """The last step that any rank of this machine has begun."""
        return max((status.step for status in self.local.values()), default=0)

    def exit_codes(self) -> dict[int, int | None]:
        """The exit codes of the ranks that ended by themselves; negative ones are signals."""
        for rank in self.deaths:
            self._processes[rank].join(1)
        return {rank: self._processes[rank].exitcode for rank in self.deaths}

    def end(self) -> None:
        """Kill every rank that is left, and the processes that it started.

        SIGKILL, because a rank may be inside a collective that never returns, where Python handles no signal.
        """
        self.look()
        self._ending = True
        members = _members_of(set(self._pids.values()))
        for rank, pid in self._pids.items():
            if rank not in self.deaths:
                _kill(os.kill, pid)
            _kill(os.killpg, pid)  # each rank leads a group of its own
        # A rank whose start was interrupted is only in multiprocessing's list of children.
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
    """Remove the shared memory of killed processes.

    torch names each tensor that a data worker sends, and multiprocessing each semaphore, and both unlink the name a
    moment later; a process that is killed in between leaves it. glibc makes a semaphore under a name of its own first,
    and that name may be left beside the other one: both are links to one file.
    """
    left = [path for path in _SHARED_MEMORY.glob("torch_*") if _is_pid_of(path.name.split("_")[1], pids)]
    semaphores = list(_SHARED_MEMORY.glob("sem.*")) if pids else []
    own = [path for path in semaphores if _is_pid_of(path.name.removeprefix(f"sem.{SEMAPHORES}-").split("-")[0], pids)]
    with contextlib.suppress(OSError):
        files = {path.stat().st_ino for path in own}
        left += [path for path in semaphores if files and path.stat().st_ino in files]
    for path in left:
        with contextlib.suppress(OSError):
            path.unlink()


def _is_pid_of(text: str, pids: Collection[int]) -> bool:
    return text.isdigit() and int(text) in pids


def _kill(how: Any, pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        how(pid, signal.SIGKILL)
