"""Completes what was begun: MPI moves data only while somebody calls it.

Every operation is begun by the thread that asks for it, so that all ranks begin those of a group in the same order, and
that returns at once. One thread of the process then looks after all of them, so that messages travel while the model
computes. A thread that waits looks by itself, since waking another takes longer than a small message.
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

# Large operations consist of many small rounds, each of which waits for somebody to look. So who waits looks without a
# pause at first, as MPI itself does; not for long where ranks share cores, since others then need this one.
_EAGER_SECONDS = 2e-2
_SHORTLY_SECONDS = 2e-4
_SHORTEST_PAUSE, _LONGEST_PAUSE = 5e-5, 1e-3
_PATIENCE = 1e-3  # of the time waited so far, which the next pause takes


class MpiWork(dist.Work):
    """An operation under way. It holds the memory that MPI reads and writes until that is over."""

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
        """`endings` are called when MPI is done. `what` names operation and rank, for errors."""
        super().__init__()
        self._what, self._requests, self._result, self._endings, self._holds = what, requests, result, endings, holds
        self._progress, self._timeout = progress, timeout
        self._deadline = time.monotonic() + timeout.total_seconds()
        self._status = MPI.Status()
        self._error: RuntimeError | None = None
        self._done = threading.Event()
        self._future: Future[Any] = Future()

    def test(self) -> bool:
        """Whether there is no more to come from MPI."""
        try:
            if all(request.Test(self._status) for request in self._requests):
                return True
        except MPI.Exception as error:
            self._error = RuntimeError(f"mpi: {self._what} failed: {error}")
            return True
        if time.monotonic() > self._deadline:
            seconds = self._timeout.total_seconds()
            self._error = RuntimeError(f"mpi: {self._what} timed out: not all ranks came to it within {seconds:g} s")
            return True
        return False

    @property
    def is_lost(self) -> bool:
        """Whether MPI may still write into the memory of an operation that nobody waits for any more."""
        return self._error is not None

    def complete(self) -> None:
        """The last of it, once `test` was true."""
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

    # -- torch's side ------------------------------------------------------------------------------------------------

    def wait(self, timeout: timedelta | None = None) -> bool:
        limit = timeout.total_seconds() if timeout else 0.0
        if not self._progress.wait(self._done, limit):
            raise RuntimeError(f"mpi: {self._what} timed out: it was waited for {limit:g} s")
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
    """Looks after the operations of all groups of this process."""

    def __init__(self, *, has_own_core: bool) -> None:
        """`has_own_core`: ranks do not share cores."""
        self._eager_seconds = _EAGER_SECONDS if has_own_core else _SHORTLY_SECONDS
        self._pending: list[MpiWork] = []
        self._lost: list[MpiWork] = []
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def follow(self, work: MpiWork) -> MpiWork:
        with self._lock:
            self._pending.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._look_after, name="rung-mpi", daemon=True)
                self._thread.start()
        self._wake.set()
        return work

    def wait(self, done: threading.Event, limit: float) -> bool:
        """Until an operation is complete, but no longer than `limit` seconds if it is not 0."""
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

    def _look_after(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            changed = time.monotonic()
            while self._pending:
                if self._poll():
                    changed = time.monotonic()
                time.sleep(_pause_after(10 * (time.monotonic() - changed)))  # the model computes meanwhile

    def _poll(self) -> bool:
        """Look at each operation once. Whether any came to its end; False if another thread is looking."""
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
        # Not under the lock: what waits for a future may begin the next operation.
        for work in ready:
            work.complete()
        return bool(ready)


def _pause_after(seconds: float) -> float:
    return min(_LONGEST_PAUSE, max(_SHORTEST_PAUSE, _PATIENCE * seconds))
