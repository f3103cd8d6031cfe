"""What the launcher makes of signals.

Ctrl-C and a closed terminal end the job where it stands. SIGTERM and SIGUSR1 are what a scheduler sends when it wants
the machine back: the job saves its state and leaves with an exit code that means "resume me". A second SIGTERM, sent
by somebody who would not wait, ends it at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from rung.errors import RESUME_EXIT_CODE
from rung.launch.server import cool_down, remove_sockets

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
POLITE = (signal.SIGTERM, signal.SIGUSR1)
# Some schedulers signal a process and its group, which is one wish told twice.
_ECHO_SECONDS = 1.0
_SLOW_SECONDS = 3.0
T = TypeVar("T")


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, or another signal that ends the job where it stands. Its ranks are gone when this leaves `launch`."""

    def __init__(self, signal_number: int, step: int = 0) -> None:
        super().__init__(f"interrupted in step {step}" if step else "interrupted before the first step")
        self.signal_number = signal_number


class Asked(Exception):
    """A polite signal came while the launcher waited for others."""


class Signals:
    """The launcher's handlers while ranks may run. Use as a context manager.

    Signals that end the job become an exception of the main thread. With `polite`, SIGTERM and SIGUSR1 only set
    `asked`, which whoever waits for something must look at.
    """

    def __init__(self, *, polite: bool = False) -> None:
        self.asked: int | None = None
        self._asked_at = 0.0
        self._polite = POLITE if polite else ()
        self._before: dict[signal.Signals, Any] = {}
        self._hold = False
        self._waiting: int | None = None

    def __enter__(self) -> Signals:
        # torch's agent would install handlers of its own, and cannot be interrupted while it does.
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""
        if threading.current_thread() is threading.main_thread():
            numbers = dict.fromkeys([*ENDING, *self._polite])
            self._before = {number: signal.signal(number, self._take) for number in numbers}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            # The job is over. Who would still end this process where it stands only cuts its last words short.
            signal.signal(number, signal.SIG_IGN if isinstance(handler, _Leaving) else handler)

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

    def aside(self, work: Callable[[], T], on_slow: Callable[[], None]) -> T:
        """Do something that may wait for the network, in a thread: handlers of signals run in the main one only.

        Raises Asked when a polite signal comes meanwhile; the work is then left to itself. `on_slow` is called once,
        when it takes its time.
        """
        results: list[T] = []
        errors: list[BaseException] = []

        def call() -> None:
            try:
                results.append(work())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=call, name="rung-aside", daemon=True)
        thread.start()
        slow_at: float | None = time.monotonic() + _SLOW_SECONDS
        while thread.is_alive():
            thread.join(0.05)
            if self.asked is not None and thread.is_alive():
                raise Asked
            if slow_at is not None and time.monotonic() > slow_at:
                slow_at = None
                on_slow()
        if errors:
            raise errors[0]
        return results[0]

    def _take(self, number: int, frame: object) -> None:
        if number in self._polite:
            impatient = number == signal.SIGTERM and time.monotonic() > self._asked_at + _ECHO_SECONDS
            if self.asked is None:
                self.asked, self._asked_at = number, time.monotonic()
                return
            if not impatient:
                return
        patient = self._hold and self._waiting is None
        self._waiting = number
        if not patient:
            raise Interrupted(number)


@contextlib.contextmanager
def leaving_at_once(*, resumable: bool = False) -> Iterator[None]:
    """While no rank exists yet: a signal ends this process where it stands.

    An exception would not do. Imports of large libraries catch and forget it, and the job would start after all. With
    `resumable`, who is politely asked to leave says that the job can be started again: nothing was done yet.
    """
    numbers = dict.fromkeys([signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *(POLITE if resumable else ())])
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Inside another such stretch the outer one decides.
    numbers = {n: None for n in numbers if not isinstance(signal.getsignal(n), _Leaving)}
    before = {n: signal.signal(n, _Leaving(resumable and n in POLITE)) for n in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Leaving:
    """A handler that ends the process."""

    def __init__(self, resumable: bool) -> None:
        self._resumable = resumable

    def __call__(self, number: int, frame: object) -> None:
        os.write(2, b"stopped before the start: nothing was done yet\n" if self._resumable else b"interrupted\n")
        cool_down()
        remove_sockets()
        os._exit(RESUME_EXIT_CODE if self._resumable else 128 + number)
