"""What each rank is doing right now, in a small memory-mapped file that outlives the rank.

A rank killed by a signal can write no report; the launcher reads here which step and phase it was in. Writing is a
copy of 16 bytes into shared memory, cheap enough for every phase of every step.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

PHASES = (
    "not started",
    "starting",
    "building",
    "reading data",
    "forward",
    "backward",
    "update",
    "logging",
    "evaluating",
    "saving",
    "finished",
)
_SLOT = struct.Struct("<qii")  # step, phase, pid
_SLOT_BYTES = 64  # a cache line each, so that ranks do not disturb each other


@dataclass(frozen=True)
class RankStatus:
    step: int
    phase: str
    pid: int

    @property
    def finished(self) -> bool:
        return self.phase == "finished"


class StatusBoard:
    """One slot for each rank of this job."""

    def __init__(self, path: str | Path, num_ranks: int, *, create: bool = False) -> None:
        size = max(num_ranks * _SLOT_BYTES, mmap.PAGESIZE)
        if create:
            Path(path).write_bytes(b"\0" * size)
        descriptor = os.open(path, os.O_RDWR)
        try:
            self._memory = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self.num_ranks = num_ranks

    def read(self, rank: int) -> RankStatus:
        step, phase, pid = _SLOT.unpack_from(self._memory, rank * _SLOT_BYTES)
        return RankStatus(step, PHASES[phase], pid)

    def writer(self, rank: int) -> StatusWriter:
        return StatusWriter(self._memory, rank)


class StatusWriter:
    """The slot of one rank. Without a board it remembers the status for this process alone."""

    def __init__(self, memory: mmap.mmap | bytearray | None = None, rank: int = 0) -> None:
        self._memory: mmap.mmap | bytearray = bytearray(_SLOT_BYTES * (rank + 1)) if memory is None else memory
        self._offset = rank * _SLOT_BYTES
        self._pid = os.getpid()
        self._step = 0
        self._phase = 0

    def step(self, step: int) -> None:
        self._step = step

    def phase(self, phase: str) -> None:
        self._phase = _PHASE_CODES[phase]
        _SLOT.pack_into(self._memory, self._offset, self._step, self._phase, self._pid)

    def current(self) -> RankStatus:
        return RankStatus(self._step, PHASES[self._phase], self._pid)


_PHASE_CODES = {name: code for code, name in enumerate(PHASES)}
