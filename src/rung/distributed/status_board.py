"""The current step and phase of each rank, in a small memory-mapped file that outlives the rank.

A rank killed by a signal can write no report; the launcher reads here which step and phase it was in, and when it last
made progress. In the other direction, the launcher posts requests to all ranks. A write copies 24 bytes into shared
memory, cheap enough for every phase of every step.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rung.spec.task import HOOKS
from rung.system.untrusted import read_regular

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
    "stopped",  # exited cleanly with its state saved; the job is not finished
    "spare",  # not part of this world; waits until another needs it
    *HOOKS,  # in the task's own code
)
REQUESTS = ("", "stop", "hang up")  # hang up: close all connections, which ends waits for other ranks
_SLOT = struct.Struct("<qiid")  # step, phase, pid, when
_REQUEST = struct.Struct("<i")
_MAX_BOARD = 2**26  # a million ranks
_SLOT_BYTES = 64  # one cache line per rank avoids false sharing. The first slot holds the request.


@dataclass(frozen=True)
class RankStatus:
    step: int
    phase: str
    pid: int
    changed: float = field(default=0.0, compare=False)  # time.monotonic(), which all processes of a Linux machine share

    @property
    def finished(self) -> bool:
        return self.phase == "finished"

    @property
    def left(self) -> bool:
        """Whether it exited cleanly: the launcher does not wait for it any more."""
        return self.phase in ("finished", "stopped")


def _write_empty(path: Path, size: int) -> None:
    """Make the file, or clear it for those who have it open. Nobody may find it too short, not for a moment."""
    if path.exists():
        with path.open("r+b") as file:
            file.truncate(size)
            file.write(b"\0" * size)
    else:
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        unfinished.write_bytes(b"\0" * size)
        unfinished.replace(path)


class StatusBoard:
    """One slot for each rank of this job, and one for the launcher's request."""

    def __init__(self, path: str | Path, num_ranks: int, *, create: bool = False) -> None:
        size = max(_offset(num_ranks), mmap.PAGESIZE)
        if create:
            _write_empty(Path(path), size)
        descriptor = os.open(path, os.O_RDWR)
        try:
            self._memory = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self.num_ranks = num_ranks

    def read(self, rank: int) -> RankStatus:
        return _status(self._memory, rank)

    def writer(self, rank: int) -> StatusWriter:
        return StatusWriter(self._memory, rank)

    def request(self, what: str) -> None:
        """Post a request to all ranks, also those that start later; "" clears it."""
        _REQUEST.pack_into(self._memory, 0, _REQUEST_CODES[what])


def read_statuses(path: str | Path) -> dict[int, RankStatus]:
    """The statuses in a board that another process writes, and may replace meanwhile: read, not mapped. Empty if there
    is no board."""
    try:
        content = read_regular(Path(path), _MAX_BOARD)
    except OSError:
        return {}
    found = {rank: _status(content, rank) for rank in range(len(content) // _SLOT_BYTES - 1)}
    return {rank: status for rank, status in found.items() if status.pid}


class StatusWriter:
    """Writes the slot of one rank. Without a board, the status stays in this process."""

    def __init__(self, memory: mmap.mmap | bytearray | None = None, rank: int = 0) -> None:
        self._memory: mmap.mmap | bytearray = bytearray(_offset(rank + 1)) if memory is None else memory
        self._offset = _offset(rank)
        self._pid = os.getpid()
        self._step = 0
        self._phase = 0
        self._stop_requested = False
        self.listener: Callable[[str], None] | None = None  # called with each phase, in this process

    def step(self, step: int) -> None:
        self._step = step

    def phase(self, phase: str) -> None:
        self._phase = _PHASE_CODES[phase]
        self.touch()
        if self.listener is not None:
            self.listener(phase)

    def touch(self) -> None:
        """Record progress within a phase of many parts, so that a long phase is not taken for a hang."""
        _SLOT.pack_into(self._memory, self._offset, self._step, self._phase, self._pid, time.monotonic())

    def current(self) -> RankStatus:
        return RankStatus(self._step, PHASES[self._phase], self._pid)

    def ask_to_stop(self) -> None:
        """Request a stop of this rank, from a signal. Safe in a signal handler."""
        self._stop_requested = True

    def stop_requested(self) -> bool:
        """Whether a stop of this rank or of all ranks is requested. Ranks may see it at different times: see
        `Heartbeat`."""
        return self._stop_requested or self.is_requested("stop")

    def is_requested(self, what: str) -> bool:
        return bool(_REQUEST.unpack_from(self._memory, 0)[0] == _REQUEST_CODES[what])


def _status(memory: mmap.mmap | bytes, rank: int) -> RankStatus:
    step, phase, pid, changed = _SLOT.unpack_from(memory, _offset(rank))
    # A board of another version, or a damaged one, may hold an unknown phase.
    return RankStatus(step, PHASES[phase] if 0 <= phase < len(PHASES) else f"phase {phase}", pid, changed)


def _offset(rank: int) -> int:
    return (rank + 1) * _SLOT_BYTES


_PHASE_CODES = {name: code for code, name in enumerate(PHASES)}
_REQUEST_CODES = {name: code for code, name in enumerate(REQUESTS)}
