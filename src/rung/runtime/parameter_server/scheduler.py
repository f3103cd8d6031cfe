"""ps-async: the first server's queue, which assigns windows to trainers and orders their gradients.

Trainers request work items and return gradients, each at its own pace. Windows of the data are dispatched in order,
each to one trainer; the window of a lost trainer goes to another. The staleness of a gradient is the number of updates
applied between its dispatch and its own update. An item is dispatched only if no item in flight can exceed the bound,
in whatever order trainers return. A bound of 0 means one window at a time: the same numbers as one process.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.futures import Future

TRAIN, EVALUATE = "train", "evaluate"


@dataclass(frozen=True)
class WorkItem:
    """One window for a trainer to compute."""

    ticket: int  # new for each dispatch: a repeated window gets another
    kind: str
    number: int  # of the window
    version: int  # the least number of updates in the parameters to be pulled


@dataclass(frozen=True)
class WorkResult:
    item: WorkItem
    content: Any
    staleness: int = 0


class NoTrainers(RuntimeError):
    """Every trainer was lost."""


class WorkScheduler:
    """Thread-safe: RPC threads call `ask` and `deliver`, the loop's thread `take` and `applied`."""

    def __init__(self, trainers: list[int], *, staleness: int, applied: int, discard: Callable[[int], None]) -> None:
        """`discard` is called with the tickets of lost trainers, whose gradients the other servers may hold."""
        self._staleness, self._discard = staleness, discard
        self._applied = applied
        self._next = applied + 1
        self._limit = applied  # the last window that may be dispatched
        self._alive = set(trainers)
        self._unacknowledged = set(trainers)  # trainers that have not confirmed the exit reason
        self._retry_train: list[int] = []  # windows of lost trainers, a heap
        self._retry_evaluate: list[int] = []
        self._to_evaluate: deque[int] = deque()
        self._in_flight: dict[int, tuple[int, WorkItem]] = {}  # by ticket: the trainer and its item
        self._waiting: dict[int, Future[WorkItem | str]] = {}
        self._delivered: deque[WorkResult] = deque()
        self._results: dict[int, Any] = {}
        self._tickets = itertools.count(1)
        self._exit_reason: str | None = None
        self._changed = threading.Condition()

    # -- called by trainers --------------------------------------------------------------------------------------

    def ask(self, trainer: int) -> Future[WorkItem | str]:
        """The next item, once there is one, or the exit reason after `close`."""
        future: Future[WorkItem | str] = Future()
        with self._dispatching():
            self._waiting[trainer] = future
        return future

    def deliver(self, ticket: int, content: Any) -> bool:
        """False if the item was reassigned meanwhile, because its trainer was taken for lost."""
        with self._changed:
            if ticket not in self._in_flight:
                return False
            _, item = self._in_flight[ticket]
            if item.kind == EVALUATE:
                del self._in_flight[ticket]
                self._results[item.number] = content
            else:
                self._delivered.append(WorkResult(item, content))
            self._changed.notify_all()
        return True

    def acknowledge_exit(self, trainer: int) -> None:
        with self._changed:
            self._unacknowledged.discard(trainer)
            self._changed.notify_all()

    # -- called by the server ------------------------------------------------------------------------------------

    def take(self, limit: int) -> WorkResult:
        """The next gradient to apply. Windows up to `limit` are dispatched meanwhile."""
        with self._dispatching():
            self._limit = limit
        with self._changed:
            self._wait(lambda: bool(self._delivered))
            result = self._delivered.popleft()
            late = self._applied - result.item.version
            assert late <= self._staleness, "an item was dispatched that could exceed the bound"
            return WorkResult(result.item, result.content, late)

    def applied(self, result: WorkResult) -> None:
        with self._dispatching():
            self._applied += 1
            del self._in_flight[result.item.ticket]

    def measure(self, numbers: list[int]) -> dict[int, Any]:
        """The trainers' results for these evaluation windows, by window number."""
        with self._dispatching():
            self._results = {}
            self._to_evaluate.extend(numbers)
        with self._changed:
            self._wait(lambda: len(self._results) == len(numbers))
            return dict(self._results)

    def pause_dispatch(self) -> int:
        """Stop dispatching. Returns the last window that was dispatched."""
        with self._changed:
            self._limit = self._next - 1
            return self._limit

    @property
    def is_consistent(self) -> bool:
        """Whether the parameters are those after some window and all windows before it."""
        with self._changed:
            return not self._in_flight and not self._retry_train

    def remove_trainer(self, trainer: int) -> None:
        """Requeue the items of a trainer that is gone, except those that it has delivered."""
        with self._dispatching():
            self._alive.discard(trainer)
            self._unacknowledged.discard(trainer)
            self._waiting.pop(trainer, None)
            delivered = {result.item.ticket for result in self._delivered}
            lost = [item for t, (rank, item) in self._in_flight.items() if rank == trainer and t not in delivered]
            for item in lost:
                del self._in_flight[item.ticket]
                heapq.heappush(self._retry_train if item.kind == TRAIN else self._retry_evaluate, item.number)
            self._changed.notify_all()
        for item in lost:
            self._discard(item.ticket)

    @property
    def alive(self) -> set[int]:
        with self._changed:
            return set(self._alive)

    def close(self, reason: str, seconds: float) -> None:
        """Answer every request with `reason` from now on; wait up to `seconds` until all trainers have confirmed."""
        with self._dispatching():
            self._exit_reason = reason
        with self._changed:
            self._changed.wait_for(lambda: not self._unacknowledged, timeout=seconds)

    # -- internal ------------------------------------------------------------------------------------------------

    def _wait(self, condition: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: condition() or not self._alive)
        if not condition():
            raise NoTrainers("every trainer is gone; none is left to compute gradients.")

    @contextlib.contextmanager
    def _dispatching(self) -> Iterator[None]:
        """Holds the lock, then answers waiting trainers without it: callbacks of their futures may take it."""
        answers: list[tuple[Future[WorkItem | str], WorkItem | str]] = []
        with self._changed:
            yield
            for trainer in list(self._waiting):
                answer: WorkItem | str | None = self._exit_reason or self._next_item(trainer)
                if answer is None:
                    break
                answers.append((self._waiting.pop(trainer), answer))
        for future, content in answers:
            future.set_result(content)

    def _next_item(self, trainer: int) -> WorkItem | None:
        kind, number = EVALUATE, 0
        if self._retry_evaluate:
            number = heapq.heappop(self._retry_evaluate)
        elif self._to_evaluate:
            number = self._to_evaluate.popleft()
        else:
            # The worst case: all others in flight, the new item included, are applied before the oldest.
            versions = [item.version for _, item in self._in_flight.values() if item.kind == TRAIN]
            latest = self._applied + len(versions) - min([*versions, self._applied])
            if latest > self._staleness:
                return None
            kind = TRAIN
            if self._retry_train:
                number = heapq.heappop(self._retry_train)
            elif self._next <= self._limit:
                number = self._next
                self._next += 1
            else:
                return None
        item = WorkItem(next(self._tickets), kind, number, self._applied)
        self._in_flight[item.ticket] = trainer, item
        return item
