"""ps-async: who computes which window, and which gradient is applied next. Kept by the first server.

Trainers ask for errands and come back with gradients, each at its own pace. The windows of the data are handed out in
their order, each to one trainer; a window whose trainer is lost goes to another. A gradient is late by the updates that
were applied between its errand and its own turn. An errand is handed out only if, whatever the order in which trainers
come back, none that is out can become later than the bound. With a bound of 0 that is one after the other: the same
numbers as one process.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.futures import Future

TRAIN, EVALUATE = "train", "evaluate"


@dataclass(frozen=True)
class Errand:
    """What a trainer is asked to do."""

    ticket: int
    kind: str
    number: int  # of the window
    version: int  # updates that the parameters must have seen at least


@dataclass(frozen=True)
class Delivery:
    """What a trainer brought back."""

    errand: Errand
    content: Any
    staleness: int = 0


class NoTrainers(RuntimeError):
    """Nobody is left to compute."""


class Office:
    """Threads of the RPC's ask and deliver; the thread of the loop takes and applies."""

    def __init__(self, trainers: list[int], *, staleness: int, applied: int, discard: Callable[[int], None]) -> None:
        """`discard` is told the tickets whose gradients nobody wants any more."""
        self._staleness, self._discard = staleness, discard
        self._applied = applied
        self._next = applied + 1
        self._limit = applied  # windows up to here may be handed out
        self._living = set(trainers)
        self._leaving = set(trainers)  # those that have not said goodbye
        self._again: list[int] = []  # windows of lost trainers
        self._measured_again: list[int] = []
        self._to_measure: deque[int] = deque()
        self._out: dict[int, tuple[int, Errand]] = {}  # by ticket: the trainer, and what it is at
        self._waiting: dict[int, Future[Errand | str]] = {}
        self._delivered: deque[Delivery] = deque()
        self._results: dict[int, Any] = {}
        self._tickets = itertools.count(1)
        self._last_word: str | None = None
        self._changed = threading.Condition()

    # -- what trainers call --------------------------------------------------------------------------------------

    def ask(self, trainer: int) -> Future[Errand | str]:
        """The next errand, once there is one; a word instead when there is nothing more to do."""
        future: Future[Errand | str] = Future()
        with self._changed:
            self._waiting[trainer] = future
            answers = self._hand_out()
        _give(answers)
        return future

    def deliver(self, ticket: int, content: Any) -> bool:
        """False if the errand was given to another meanwhile."""
        with self._changed:
            if ticket not in self._out:
                return False
            _, errand = self._out[ticket]
            if errand.kind == EVALUATE:
                del self._out[ticket]
                self._results[errand.number] = content
            else:
                self._delivered.append(Delivery(errand, content))
            self._changed.notify_all()
        return True

    def goodbye(self, trainer: int) -> None:
        with self._changed:
            self._leaving.discard(trainer)
            self._changed.notify_all()

    # -- what the server calls -----------------------------------------------------------------------------------

    def take(self, limit: int) -> Delivery:
        """The next gradient to apply. Windows up to `limit` are handed out meanwhile."""
        with self._changed:
            self._limit = limit
            answers = self._hand_out()
        _give(answers)
        with self._changed:
            self._wait(lambda: bool(self._delivered))
            delivery = self._delivered.popleft()
            late = self._applied - delivery.errand.version
            assert late <= self._staleness, "an errand was handed out that could become so late"
            return Delivery(delivery.errand, delivery.content, late)

    def applied(self, delivery: Delivery) -> None:
        with self._changed:
            self._applied += 1
            del self._out[delivery.errand.ticket]
            answers = self._hand_out()
        _give(answers)

    def measure(self, numbers: list[int]) -> dict[int, Any]:
        """What trainers measure on the windows of an evaluation, by their numbers."""
        with self._changed:
            self._results = {}
            self._to_measure.extend(numbers)
            answers = self._hand_out()
        _give(answers)
        with self._changed:
            self._wait(lambda: len(self._results) == len(numbers))
            return dict(self._results)

    def close_door(self) -> int:
        """Hand nothing more out. Returns the last window that was."""
        with self._changed:
            self._limit = self._next - 1
            return self._limit

    @property
    def is_settled(self) -> bool:
        """Whether the parameters are those after some window and all before it."""
        with self._changed:
            return not self._out and not self._again

    def lose(self, trainer: int) -> None:
        """A trainer is gone: what it was at goes to others."""
        with self._changed:
            self._living.discard(trainer)
            self._leaving.discard(trainer)
            self._waiting.pop(trainer, None)
            delivered = {delivery.errand.ticket for delivery in self._delivered}
            lost = [e for t, (who, e) in self._out.items() if who == trainer and t not in delivered]
            for errand in lost:
                del self._out[errand.ticket]
                heapq.heappush(self._again if errand.kind == TRAIN else self._measured_again, errand.number)
            answers = self._hand_out()
            self._changed.notify_all()
        _give(answers)
        for errand in lost:
            self._discard(errand.ticket)

    @property
    def living(self) -> set[int]:
        with self._changed:
            return set(self._living)

    def dismiss(self, word: str, seconds: float) -> None:
        """There is nothing more to do: send everyone home, and wait until they have heard it."""
        with self._changed:
            self._last_word = word
            answers = self._hand_out()
        _give(answers)
        with self._changed:
            self._changed.wait_for(lambda: not self._leaving, timeout=seconds)

    # -- inside --------------------------------------------------------------------------------------------------

    def _wait(self, condition: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: condition() or not self._living)
        if not condition():
            raise NoTrainers("every trainer is gone; nobody is left to compute gradients.")

    def _hand_out(self) -> list[tuple[Future[Errand | str], Errand | str]]:
        """What those who wait are to be told. The caller tells it without the lock, which futures may want."""
        answers: list[tuple[Future[Errand | str], Errand | str]] = []
        for trainer in list(self._waiting):
            answer: Errand | str | None = self._last_word or self._new_errand(trainer)
            if answer is None:
                break
            answers.append((self._waiting.pop(trainer), answer))
        return answers

    def _new_errand(self, trainer: int) -> Errand | None:
        kind, number = EVALUATE, 0
        if self._measured_again:
            number = heapq.heappop(self._measured_again)
        elif self._to_measure:
            number = self._to_measure.popleft()
        else:
            versions = [errand.version for _, errand in self._out.values() if errand.kind == TRAIN]
            latest = self._applied + len(versions) - min([*versions, self._applied])
            if latest > self._staleness:
                return None
            kind = TRAIN
            if self._again:
                number = heapq.heappop(self._again)
            elif self._next <= self._limit:
                number = self._next
                self._next += 1
            else:
                return None
        errand = Errand(next(self._tickets), kind, number, self._applied)
        self._out[errand.ticket] = trainer, errand
        return errand


def _give(answers: list[tuple[Future[Errand | str], Errand | str]]) -> None:
    for future, answer in answers:
        future.set_result(answer)
