"""`--profile`: traces of chosen steps by torch's profiler, one for each rank, and memory snapshots on a GPU.

A trace is Chrome's JSON, which Perfetto and chrome://tracing open. It starts at the end of the step before the first,
so that it includes the wait for data, and has a range for each step and each phase. No flag, no profiler.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from rung.distributed.status_board import StatusWriter
from rung.distributed.torch_private import start_memory_history, write_memory_history
from rung.distributed.world import World
from rung.system.processes import machine_name

log = logging.getLogger("rung")

_ROUNDS = 5  # barriers after which all ranks read their clocks
_MEMORY_EVENTS = 200_000


class Profiler:
    """Profiles one rank. All ranks must call `between` after the same steps: it contains barriers."""

    def __init__(self, folder: Path, steps: range, world: World, status: StatusWriter) -> None:
        self._folder, self._steps, self._world, self._status = folder, steps, world, status
        self._on_device = world.trains_on_gpu
        self._profile: Any = None
        self._first = self._last = 0
        self._marks: _Marks | None = None

    def changes_after(self, step: int, *, is_last: bool = False) -> bool:
        """Whether `between` will start or end the recording."""
        if self._profile is not None:
            return step >= self._steps[-1] or is_last
        return step + 1 in self._steps and not is_last

    def between(self, step: int, *, is_last: bool = False) -> bool:
        """Called between `step` and the next. Returns whether it wrote a trace, which takes time."""
        changes = self.changes_after(step, is_last=is_last)
        if self._profile is not None:
            self._last = step
            if changes:
                return self.finish()
            assert self._marks is not None
            self._marks.begin_step(step + 1)
        elif changes:
            self._start(step + 1)
        return False

    def finish(self) -> bool:
        """Write the trace, if one is being recorded. Returns whether it did."""
        if self._profile is None:
            return False
        self._status.phase("logging")
        self._status.listener = None
        assert self._marks is not None
        self._marks.end_step()
        recorded, self._profile = self._profile, None
        recorded.stop()
        name = f"rank-{self._world.rank}-steps-{self._first}-{self._last}"
        partial = self._folder / f".{name}.json.gz"
        recorded.export_chrome_trace(str(partial))
        partial.replace(self._folder / f"{name}.json.gz")
        if self._on_device:
            write_memory_history(str(self._folder / f"{name}-memory.pickle"))
        if self._world.is_main:
            steps = f"step {self._first}" if self._first == self._last else f"steps {self._first} to {self._last}"
            log.info("  traces of %s: %s", steps, self._folder)
        return True

    def _start(self, step: int) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._first = self._last = step
        clocks = self._read_clocks()
        if self._on_device:
            start_memory_history(_MEMORY_EVENTS)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_device else [])]
        self._profile = profile(activities=activities, acc_events=True)  # without acc_events, torch warns of cycles
        self._profile.start()
        facts = {
            "rank": self._world.rank,
            "ranks": self._world.size,
            "strategy": self._world.layout.name,
            "machine": machine_name(),
            "clocks_ns": clocks,
        }
        self._profile.add_metadata_json("rung", json.dumps(facts))
        self._marks = _Marks(self._status)
        self._marks.begin_step(step)

    def _read_clocks(self) -> list[int]:
        """This rank's clock after each of several barriers; `rung profile merge` aligns machines' clocks by them."""
        found = []
        for _ in range(_ROUNDS):
            self._world.barrier()
            found.append(time.time_ns())
        return found


class _Marks:
    """Opens a range of the trace for each step and phase of the training thread."""

    def __init__(self, status: StatusWriter) -> None:
        self._thread = threading.get_ident()
        self._step: Any = None
        self._phase: Any = None
        self._status = status
        status.listener = self._enter

    def begin_step(self, step: int) -> None:
        self.end_step()
        self._step = _open(f"step {step}")
        self._enter(self._status.current().phase)

    def end_step(self) -> None:
        for opened in (self._phase, self._step):
            _close(opened)
        self._phase = self._step = None

    def _enter(self, phase: str) -> None:
        if threading.get_ident() == self._thread:
            _close(self._phase)
            self._phase = _open(phase)


def _open(name: str) -> Any:
    opened: Any = record_function(name)
    opened.__enter__()
    return opened


def _close(opened: Any) -> None:
    if opened is not None:
        opened.__exit__(None, None, None)
