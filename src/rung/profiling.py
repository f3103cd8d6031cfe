"""`--profile`: traces of chosen steps by torch's profiler, one for each rank, and on a GPU what filled the memory.

A trace is Chrome's JSON, which Perfetto and chrome://tracing open. It begins when the step before the first is over, so
that the reading of data is in it, and marks each step and each of its phases. A run without it has no profiler at all.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from rung.processes import machine_name
from rung.status import StatusWriter
from rung.world import World

log = logging.getLogger("rung")

_ROUNDS = 5  # moments at which all ranks look at their clocks
_MEMORY_EVENTS = 200_000


class Profiler:
    """One rank's part. All ranks call it at the same places."""

    def __init__(self, folder: Path, steps: range, world: World, status: StatusWriter) -> None:
        self._folder, self._steps, self._world, self._status = folder, steps, world, status
        self._on_device = world.device.type == "cuda" and not world.pretend
        self._profile: Any = None
        self._first = self._last = 0
        self._marks: _Marks | None = None

    def between(self, step: int, *, is_last: bool = False) -> bool:
        """When `step` is over and the next has not begun. Whether it took time of its own, to write what was seen."""
        if self._profile is not None:
            self._last = step
            if step >= self._steps[-1] or is_last:
                return self.finish()
            assert self._marks is not None
            self._marks.begin_step(step + 1)
        elif step + 1 in self._steps and not is_last:
            self._start(step + 1)
        return False

    def finish(self) -> bool:
        """Write what was seen so far, if anything is."""
        if self._profile is None:
            return False
        self._status.phase("logging")
        self._status.listener = None
        assert self._marks is not None
        self._marks.end_step()
        seen, self._profile = self._profile, None
        seen.stop()
        name = f"rank-{self._world.rank}-steps-{self._first}-{self._last}"
        partial = self._folder / f".{name}.json.gz"
        seen.export_chrome_trace(str(partial))
        partial.replace(self._folder / f"{name}.json.gz")
        if self._on_device:
            dump: Any = torch.cuda.memory._dump_snapshot
            dump(str(self._folder / f"{name}-memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        if self._world.is_main:
            told = f"step {self._first}" if self._first == self._last else f"steps {self._first} to {self._last}"
            log.info("  traces of %s: %s", told, self._folder)
        return True

    def _start(self, step: int) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._first = self._last = step
        clocks = self._look_at_clocks()
        if self._on_device:
            torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS, stacks="python")
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_device else [])]
        self._profile = profile(activities=activities, acc_events=True)  # without it, torch warns of cycles
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

    def _look_at_clocks(self) -> list[int]:
        """What this rank's clock says at moments that are the same for all: clocks of several machines differ, and
        `rung profile merge` puts the traces right by them."""
        found = []
        for _ in range(_ROUNDS):
            self._world.barrier()
            found.append(time.time_ns())
        return found


class _Marks:
    """Steps and phases as ranges of the trace, those of the thread that takes the steps."""

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
