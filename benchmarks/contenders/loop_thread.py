"""Blocks of steps from a library that owns its training loop, whose one call does not return between blocks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from statistics import fmean

import torch

from benchmarks.contenders.common import LOG_EVERY, Stopwatch


class LoopThread:
    """Calls the library's loop once, in a thread that computes only while `run` waits for it.

    The library's callback calls `after_steps` whenever it has read the loss. At the end of a block the thread waits
    there, inside the library's step, for the next call of `run`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._num_threads = torch.get_num_threads()
        self._resume, self._block_end = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        self._num_steps, self._step = 0, 0  # of the block: asked for, and taken
        self._losses: list[float] = []
        self._stopwatch = Stopwatch(device)

    def start(self, loop: Callable[[], object]) -> None:
        """Start the thread; it calls `loop` with the first block. The loop must go on for ever."""
        # A daemon, since it still waits when the process ends.
        threading.Thread(target=self._call, args=(loop,), daemon=True).start()

    def run(self, num_steps: int, stopwatch: Stopwatch) -> float:
        if num_steps % LOG_EVERY:
            raise ValueError(
                f"the loop stops only where the loss is read, every {LOG_EVERY} steps; not after {num_steps}"
            )
        self._num_steps, self._step, self._losses, self._stopwatch = num_steps, 0, [], stopwatch
        if self._error is None:
            self._resume.release()
            self._block_end.acquire()
        if self._error is not None:
            raise RuntimeError(f"the library's loop failed after step {self._step} of the block") from self._error
        return fmean(self._losses)

    def after_steps(self, loss: float) -> None:
        """To be called by the library's callback after every LOG_EVERY steps, with the loss read from the device."""
        self._step += LOG_EVERY
        self._losses.append(loss)
        self._stopwatch.mark(self._step)
        if self._step == self._num_steps:
            self._block_end.release()
            self._resume.acquire()

    def _call(self, loop: Callable[[], object]) -> None:
        self._resume.acquire()
        try:
            # Both are settings of a thread, not of the process.
            torch.set_num_threads(self._num_threads)
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            loop()
            raise RuntimeError("the loop ended by itself")
        except BaseException as error:  # SystemExit, too, would otherwise leave `run` waiting for ever
            self._error = error
        self._block_end.release()
