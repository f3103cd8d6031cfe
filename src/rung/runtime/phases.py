"""How long this rank itself took for each phase of a step: the time that passed, without that spent waiting for others.

When one rank is slow, all ranks need the same time for a step, because the others wait for it in the next collective.
What tells it from them is its time before it comes there. So waits are measured while a step runs: those of Python
pass through two functions of torch, which are exchanged for that long, and DDP's, in C++, begin when backward has
nothing left to compute. On a GPU these are figures of the host, which goes ahead of its device.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.autograd import Variable


class PhaseClock:
    """Use as a context manager around each step. With `waits` off, nobody is waited for and nothing is exchanged."""

    def __init__(self, *, waits: bool, functional_waits: bool) -> None:
        self._waits = waits
        self.waited_seconds = 0.0  # in the last step, for others
        # Stretches of a step, if anyone wants them: a phase or "wait", its start and its end.
        self.log: list[tuple[str, float, float]] | None = None
        self._seconds: dict[str, float] = {}
        self._phase: str | None = None
        self._runs = False
        self._since = 0.0
        self._waited = 0.0
        self._computed: float | None = None
        self._threads: set[int] = set()  # whose waits are those of the step
        self._is_waiting = False
        # Where each function that waits is found. A backend made in Python has one of its own.
        places: list[tuple[Any, str]] = [(dist.Work, "wait")]
        places += [(kind, "wait") for kind in dist.Work.__subclasses__() if "wait" in vars(kind)]
        places += [(functional, "wait_tensor")] if functional_waits else []
        # Bound once: what is exchanged in each step is the same object.
        originals = [(where, name, getattr(where, name)) for where, name in (places if waits else [])]
        self._exchanged = [(where, name, found, self._timed(found)) for where, name, found in originals]

    def seconds(self) -> dict[str, float]:
        """Of the last step, by phase."""
        return dict(self._seconds)

    def enter(self, phase: str) -> None:
        if not self._runs:  # a pipeline passes its phases in evaluation, too
            return
        now = self._now()
        self._close(now)
        self._phase, self._since, self._waited = phase, now, 0.0

    def begin(self, data_seconds: float) -> PhaseClock:
        self._seconds = {"data": data_seconds, "forward": 0.0, "backward": 0.0, "update": 0.0}
        self.waited_seconds = 0.0
        return self

    def __enter__(self) -> PhaseClock:
        self._runs, self._phase, self._computed = True, None, None
        self._threads.add(get_ident())
        for where, name, _, replacement in self._exchanged:
            setattr(where, name, replacement)
        return self

    def __exit__(self, *error: object) -> None:
        for where, name, original, _ in self._exchanged:
            setattr(where, name, original)
        self._close(self._now() if error[:1] == (None,) else time.perf_counter())
        self._runs = False

    def follow_backward(self, loss: Tensor, *, reduces: bool) -> None:
        """Before a backward. If DDP waits for all ranks at its end (`reduces`), follow it by `reduced`.

        The engine calls what was queued during backward at its end, in the order in which it was queued. Ours is queued
        at the very beginning, DDP's, which waits, when the last gradient is there. On a GPU a thread of torch's runs
        backward, and so the waits of FSDP.
        """
        if self._waits and loss.requires_grad and (reduces or loss.is_cuda):
            loss.register_hook(self._queue_mark if reduces else self._note_thread)  # type: ignore[no-untyped-call]

    def reduced(self) -> None:
        if self._computed is not None:
            self._note_wait(self._computed)
            self._computed = None

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait that nothing else here knows of."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._note_wait(started)

    def add(self, phase: str, seconds: float) -> None:
        """What this rank computed for a phase in other threads, while the one of the step waited."""
        self._seconds[phase] += seconds

    def _note_thread(self, gradient: Tensor) -> None:
        self._threads.add(get_ident())

    def _queue_mark(self, gradient: Tensor) -> None:
        self._note_thread(gradient)
        Variable._execution_engine.queue_callback(self._mark)

    def _mark(self) -> None:
        self._computed = time.perf_counter()

    def _now(self) -> float:
        if self.log is not None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()  # what is logged is what the device does
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

    def _timed(self, wait: Any) -> Any:
        clock = time.perf_counter

        def timed_wait(*args: Any, **kwargs: Any) -> Any:
            # Neither a thread that saves in the background, nor a wait inside of another.
            if get_ident() not in self._threads or self._is_waiting:
                return wait(*args, **kwargs)
            started, self._is_waiting = clock(), True
            try:
                return wait(*args, **kwargs)
            finally:
                self._is_waiting = False
                self._note_wait(started)

        return timed_wait
