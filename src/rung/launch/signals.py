"""The launcher's signal handlers.

Ctrl-C and a closed terminal end the job at once. SIGTERM and SIGUSR1 are polite: a scheduler sends them before it takes
the machine back, and the job saves its state and exits with the code that means "resume me". A second SIGTERM ends it
at once.
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
from rung.launch.fork_server import remove_sockets, stop_fork_server

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
POLITE = (signal.SIGTERM, signal.SIGUSR1)
# Some schedulers signal a process and its group, so that one request arrives twice.
_ECHO_SECONDS = 1.0
_SLOW_SECONDS = 3.0
T = TypeVar("T")


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, or another signal that ends the job at once. When `launch` raises this, its ranks are gone."""

    def __init__(self, signal_number: int, step: int = 0) -> None:
        super().__init__(f"interrupted in step {step}" if step else "interrupted before the first step")
        self.signal_number = signal_number


class StopRequested(Exception):
    """A polite signal arrived while the launcher waited for other launchers."""


class Signals:
    """The launcher's handlers while ranks may run. Use as a context manager.

    Signals that end the job raise Interrupted in the main thread. With `polite`, SIGTERM and SIGUSR1 only set `asked`,
    which code that waits must check.
    """

    def __init__(self, *, polite: bool = False) -> None:
        self.asked: int | None = None
        self._asked_at = 0.0
        self._polite = POLITE if polite else ()
        self._before: dict[signal.Signals, Any] = {}
        self._hold = False
        self._waiting: int | None = None

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            numbers = dict.fromkeys([*ENDING, *self._polite])
            self._before = {number: signal.signal(number, self._handle) for number in numbers}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            # The job is over. A handler that exits at once would only cut the final output short.
            signal.signal(number, signal.SIG_IGN if isinstance(handler, _Leaving) else handler)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Defer the first signal to the end of the block. A second one interrupts it."""
        self._hold = True
        try:
            yield
        finally:
            self._hold = False
        if self._waiting is not None:
            self._handle(self._waiting, None)

    def ignore(self) -> None:
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    def aside(self, work: Callable[[], T], on_slow: Callable[[], None]) -> T:
        """Run `work`, which may block on the network, in a thread: Python runs signal handlers in the main thread only.

        Raises StopRequested when a polite signal arrives meanwhile; the thread is then abandoned. `on_slow` is called
        once, if the work takes more than 3 s.
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
                raise StopRequested
            if slow_at is not None and time.monotonic() > slow_at:
                slow_at = None
                on_slow()
        if errors:
            raise errors[0]
        return results[0]

    def _handle(self, number: int, frame: object) -> None:
        if number in self._polite:
            is_second = number == signal.SIGTERM and time.monotonic() > self._asked_at + _ECHO_SECONDS
            if self.asked is None:
                self.asked, self._asked_at = number, time.monotonic()
                return
            if not is_second:
                return
        is_deferred = self._hold and self._waiting is None
        self._waiting = number
        if not is_deferred:
            raise Interrupted(number)


@contextlib.contextmanager
def leaving_at_once(*, resumable: bool = False) -> Iterator[None]:
    """While no rank exists yet: let a signal exit this process at once.

    An exception is not enough: imports of large libraries swallow it, and the job would start after all. With
    `resumable`, a polite signal exits with the code that means "resume me", since nothing was done yet.
    """
    numbers = dict.fromkeys([signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *(POLITE if resumable else ())])
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Inside another such block the outer one decides.
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
        stop_fork_server()
        remove_sockets()  # the server removes them when it exits by itself, but not when it is killed
        os._exit(RESUME_EXIT_CODE if self._resumable else 128 + number)
