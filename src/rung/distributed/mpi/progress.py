"""Polls MPI operations to completion: MPI moves data only while the process calls it.

The calling thread starts every operation, so that all ranks start those of a group in the same order, and returns at
once. One background thread then polls all of them, so that messages travel while the model computes. A thread that
waits polls itself, since waking another takes longer than a small message.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from mpi4py import MPI
from torch.futures import Future

# Large operations consist of many small rounds, each of which needs a poll. So a waiting thread first polls without
# pause, as MPI itself does; only briefly where ranks share cores, since others then need this one.
_EAGER_SECONDS = 2e-2
_SHORTLY_SECONDS = 2e-4
_SHORTEST_PAUSE, _LONGEST_PAUSE = 5e-5, 1e-3
_PATIENCE = 1e-3  # the next pause as a fraction of the time waited so far


class MpiWork(dist.Work):
    """An operation in flight. Keeps the memory that MPI reads and writes alive until it completes."""

    def __init__(
        self,
        what: str,
        requests: Sequence[MPI.Request],
        result: list[Any],
        *,
        progress: Progress,
        timeout: timedelta,
        endings: Sequence[Callable[[], None]] = (),
        holds: Sequence[Any] = (),
    ) -> None:
        """`endings` are called when MPI has completed. `what` names operation and rank, for errors."""
        super().__init__()
        self._what, self._requests, self._result, self._endings, self._holds = what, requests, result, endings, holds
        self._progress, self._timeout = progress, timeout
        self._deadline = time.monotonic() + timeout.total_seconds()
        self._status = MPI.Status()
        self._error: RuntimeError | None = None
        self._done = threading.Event()
        self._future: Future[Any] = Future()

    def test(self) -> bool:
        """Whether MPI has completed, failed or timed out."""
        try:
            if all(request.Test(self._status) for request in self._requests):
                return True
        except MPI.Exception as error:
            self._error = RuntimeError(f"mpi: {self._what} failed: {error}")
            return True
        if time.monotonic() > self._deadline:
            seconds = self._timeout.total_seconds()
            self._error = RuntimeError(f"mpi: {self._what} timed out: not all ranks joined it within {seconds:g} s")
            return True
        return False

    @property
    def is_lost(self) -> bool:
        """Whether the operation failed: MPI may still write into its memory, which is never freed then."""
        return self._error is not None

    def complete(self) -> None:
        """Finish the operation, after `test` has returned true."""
        if not self.is_lost:
            try:
                for end in self._endings:
                    end()
            except Exception as error:
                self._error = RuntimeError(f"mpi: {self._what} failed: {error}")
            self._endings = self._holds = ()
        self._done.set()
        if self._error is None:
            self._future.set_result(self._result)
        else:
            self._future.set_exception(self._error)

    # -- torch's interface -------------------------------------------------------------------------------------------

    def wait(self, timeout: timedelta | None = None) -> bool:
        limit = timeout.total_seconds() if timeout else 0.0
        if not self._progress.wait(self._done, limit):
            raise RuntimeError(f"mpi: {self._what} timed out: wait() was limited to {limit:g} s")
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self._done.is_set() and self._error is None

    def exception(self) -> Any:
        return self._error

    def result(self) -> list[Any]:
        return self._result

    def get_future(self) -> Future[Any]:
        return self._future

    def source_rank(self) -> int:
        return int(self._status.Get_source())

    _source_rank = source_rank


class Progress:
    """Polls the operations of all groups of this process."""

    def __init__(self, *, has_own_core: bool) -> None:
        """`has_own_core`: there is a core for each rank of this machine."""
        self._eager_seconds = _EAGER_SECONDS if has_own_core else _SHORTLY_SECONDS
        self._pending: list[MpiWork] = []
        self._lost: list[MpiWork] = []  # keeps memory alive that MPI may still write to
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def follow(self, work: MpiWork) -> MpiWork:
        with self._lock:
            self._pending.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._poll_pending, name="rung-mpi", daemon=True)
                self._thread.start()
        self._wake.set()
        return work

    def wait(self, done: threading.Event, limit: float) -> bool:
        """Wait until an operation is complete, at most `limit` seconds unless that is 0; whether it is."""
        started = time.monotonic()
        while not done.is_set():
            self._poll()
            elapsed = time.monotonic() - started
            if limit and elapsed > limit:
                return done.is_set()
            if elapsed < self._eager_seconds:
                os.sched_yield()
            else:
                done.wait(_pause_after(elapsed))
        return True

    def _poll_pending(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            changed = time.monotonic()
            while self._pending:
                if self._poll():
                    changed = time.monotonic()
                time.sleep(_pause_after(10 * (time.monotonic() - changed)))  # the model computes meanwhile

    def _poll(self) -> bool:
        """Test each operation once. Whether any completed; False if another thread is polling."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            ready = [work for work in self._pending if work.test()]
            if ready:
                done = set(map(id, ready))
                self._pending = [work for work in self._pending if id(work) not in done]
                self._lost += [work for work in ready if work.is_lost]
        finally:
            self._lock.release()
        # Without the lock: a callback of a future may start the next operation.
        for work in ready:
            work.complete()
        return bool(ready)


def _pause_after(seconds: float) -> float:
    return min(_LONGEST_PAUSE, max(_SHORTEST_PAUSE, _PATIENCE * seconds))
