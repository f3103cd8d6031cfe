"""Measures this rank's own time in each phase of a step: wall time minus the time spent waiting for other ranks.

When one rank is slow, all ranks take the same time for a step, because the others wait for it in the next collective.
Only the time before that collective identifies it. So waits are measured in sampled steps: waits in Python pass through
two functions of torch, which are replaced during the step; DDP's, in C++, begin when backward has nothing left to
compute. On a GPU these are times of the host, which runs ahead of its device.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rung.distributed.torch_private import call_after_backward, functional_collectives

# Steps this quick are sampled: 31 to 64 of them lie between two heartbeats, so a heartbeat averages 4 to 8 samples.
_QUICK_SECONDS = 0.008
_QUICK_STRIDE = 8


class PhaseClock:
    """A context manager around each step. Without `waits`, this rank has no peers and no function is replaced.

    Where steps are quick, one in eight is measured, unless `every_step` is set.
    """

    def __init__(self, *, waits: bool, functional_waits: bool) -> None:
        self.every_step = False
        self._num_steps, self._started = 0, -math.inf
        self.waited_seconds = 0.0  # for other ranks, in the last measured step
        # If set, the intervals of a step are appended: a phase or "wait", its start and its end.
        self.log: list[tuple[str, float, float]] | None = None
        self._seconds: dict[str, float] = {}
        self._phase: str | None = None
        self._runs = False
        self._since = 0.0
        self._waited = 0.0
        self._computed: float | None = None
        self._timed_waits = _TimedWaits(self._note_wait, functional=functional_waits) if waits else None

    def seconds(self) -> dict[str, float]:
        """Seconds of the last step by phase; only the wait for data if the step was not measured."""
        return dict(self._seconds)

    def enter(self, phase: str) -> None:
        if not self._runs:  # a pipeline also enters phases in evaluation
            return
        now = self._now()
        self._close(now)
        self._phase, self._since, self._waited = phase, now, 0.0

    def begin(self, data_seconds: float) -> PhaseClock:
        self._seconds = {"data": data_seconds}
        if self._is_sampled():
            self._seconds |= {"forward": 0.0, "backward": 0.0, "update": 0.0}
        self._num_steps += 1
        self.waited_seconds = 0.0
        return self

    def _is_sampled(self) -> bool:
        """Decides by the time between starts of steps: on a GPU the host may finish a slow step at once."""
        before, self._started = self._started, time.perf_counter()
        is_quick = self._timed_waits is not None and self._started - before < _QUICK_SECONDS
        return not is_quick or self.every_step or self.log is not None or self._num_steps % _QUICK_STRIDE == 0

    def __enter__(self) -> PhaseClock:
        self._runs, self._phase, self._computed = "forward" in self._seconds, None, None
        if self._runs and self._timed_waits is not None:
            self._timed_waits.install()
        return self

    def __exit__(self, *error: object) -> None:
        if self._runs and self._timed_waits is not None:
            self._timed_waits.remove()
        if self._runs:
            self._close(self._now() if error[:1] == (None,) else time.perf_counter())
        self._runs = False

    def follow_backward(self, loss: Tensor, *, reduces: bool) -> None:
        """Call before a backward. If DDP waits for all ranks at its end (`reduces`), call `reduced` after it.

        The engine runs callbacks queued during backward at its end, in the order of queueing. Ours is queued at the
        very beginning; DDP's, which waits, when the last gradient is ready. On a GPU one of torch's threads runs
        backward, and so the waits of FSDP.
        """
        waits = self._timed_waits
        if not self._runs or waits is None or not loss.requires_grad or not (reduces or loss.is_cuda):
            return

        def mark() -> None:
            self._computed = time.perf_counter()

        def on_backward(gradient: Tensor) -> None:
            waits.include_thread()
            if reduces:
                call_after_backward(mark)

        loss.register_hook(on_backward)  # type: ignore[no-untyped-call]

    def reduced(self) -> None:
        if self._computed is not None:
            self._note_wait(self._computed)
            self._computed = None

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Wraps a wait that is not one of the replaced functions."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._note_wait(started)

    def add(self, phase: str, seconds: float) -> None:
        """Add time that other threads of this rank computed for a phase, while the step's thread waited."""
        if phase in self._seconds:
            self._seconds[phase] += seconds

    def _now(self) -> float:
        if self.log is not None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()  # log times of the device, not of the host
        return time.perf_counter()

    def _close(self, now: float) -> None:
        if self._phase is not None:
            self._seconds[self._phase] += max(0.0, now - self._since - self._waited)
            if self.log is not None:
                self.log.append((self._phase, self._since, now))

    def _note_wait(self, started: float) -> None:
        now = time.perf_counter()
        self._waited += now - started
        self.waited_seconds += now - started
        if self.log is not None:
            self.log.append(("wait", started, now))


class _TimedWaits:
    """While installed, torch's waits in Python report how long they took. Nothing in public measures them."""

    def __init__(self, report: Callable[[float], None], *, functional: bool) -> None:
        """`report` is called with the start of each wait when it ends."""
        self._report = report
        self._threads: set[int] = set()  # whose waits belong to the step
        self._is_waiting = False
        # Every `wait` to replace. A backend written in Python has a Work class of its own.
        places: list[tuple[Any, str]] = [(dist.Work, "wait")]
        places += [(kind, "wait") for kind in dist.Work.__subclasses__() if "wait" in vars(kind)]
        places += [(functional_collectives, "wait_tensor")] if functional else []
        # Created once: each measured step installs the same wrappers.
        originals = [(where, name, getattr(where, name)) for where, name in places]
        self._replaced = [(where, name, found, self._timed(found)) for where, name, found in originals]

    def install(self) -> None:
        self.include_thread()
        for where, name, _, replacement in self._replaced:
            setattr(where, name, replacement)

    def remove(self) -> None:
        for where, name, original, _ in self._replaced:
            setattr(where, name, original)

    def include_thread(self) -> None:
        """Count the waits of the calling thread, too."""
        self._threads.add(get_ident())

    def _timed(self, wait: Any) -> Any:
        clock = time.perf_counter

        def timed_wait(*args: Any, **kwargs: Any) -> Any:
            # Skip threads that save in the background, and a wait within another.
            if get_ident() not in self._threads or self._is_waiting:
                return wait(*args, **kwargs)
            started, self._is_waiting = clock(), True
            try:
                return wait(*args, **kwargs)
            finally:
                self._is_waiting = False
                self._report(started)

        return timed_wait
