"""`workers=auto`: how many processes must read the data so that a step does not wait for it."""

from __future__ import annotations

import math
from collections.abc import Callable

_LEFT_OUT = 2  # windows, in which caches fill, code is compiled and processes start
_MEASURED = 6  # windows
_SMALL = 0.02  # a share of the time that is not worth a process
_ROOM = 1.25  # samples take unequal times, and processes that read slow each other down


class WorkerChoice:
    """Measures how long reading takes beside the rest of a step: first in the rank's own process, which decides on the
    number of processes, and then with these."""

    def __init__(self, most: int, say: Callable[[str], None]) -> None:
        self._most, self.say = most, say
        self._num_windows, self._read, self._whole = 0, 0.0, 0.0
        self.num_workers: int | None = None  # once it is known
        self._is_settled = False

    def see(self, read: float, whole: float) -> bool:
        """Note the seconds that a window took to read, and those since the one before. Returns whether the number of
        processes has just been chosen."""
        self._num_windows += 1
        if self._is_settled or self._num_windows <= _LEFT_OUT:
            return False
        self._read += read
        self._whole += whole
        if self._num_windows < _LEFT_OUT + _MEASURED:
            return False
        share = self._read / max(self._whole, 1e-9)
        self._num_windows, spent, whole, self._read, self._whole = 0, self._read, self._whole, 0.0, 0.0
        if self.num_workers is not None:
            self._judge(share)
            return False
        self.num_workers = self._needed(spent, whole)
        self._is_settled = self.num_workers == 0
        self._tell(share)
        return True

    def _needed(self, read: float, whole: float) -> int:
        if read <= _SMALL * whole:
            return 0
        needed = math.ceil(_ROOM * read / max(whole - read, 1e-3 * whole))
        return min(needed, self._most)

    def _tell(self, share: float) -> None:
        takes = f"workers=auto: reading takes {share:.0%} of a step"
        if self.num_workers:
            processes = "process reads" if self.num_workers == 1 else "processes read"
            self.say(f"{takes}; {self.num_workers} {processes} for each rank from now on")
        elif share > _SMALL:
            self.say(f"{takes}, and no core is left for processes that would read")
        else:
            self.say(f"{takes}; the rank reads by itself")

    def _judge(self, share: float) -> None:
        self._is_settled = True
        if share > _SMALL:
            many = "1 process" if self.num_workers == 1 else f"{self.num_workers} processes"
            limit = "all that the cores allow" if self.num_workers == self._most else "which should be enough"
            self.say(
                f"workers=auto: with {many}, {limit}, a rank still waits for data in {share:.0%} "
                "of the time: reading is the limit"
            )
