"""States that each rank writes on its own: copies in memory after every step, and emergency saves on failure.

No rank waits for another here, so no manifest can be written. Each rank writes a note beside its file: see `notes.py`.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rung.checkpoint.manifest import folder_of, steps_in
from rung.checkpoint.notes import UNREPORTED, Unreported, write_note
from rung.checkpoint.plan import SharePlan
from rung.checkpoint.rank_local_state import common_tensors, has_rank_local_state
from rung.checkpoint.share import Position, Share, Stager, make_share
from rung.checkpoint.sites import StorageTopology, host_group, mirror
from rung.data.rng import GeneratorMarks
from rung.distributed.torch_private import buffers_of, foreach_copy_, version
from rung.parallel.materialize import is_absent
from rung.runtime.base import Runtime

log = logging.getLogger("rung")

_SMALL = 2**16  # elements: smaller buffers may be running statistics, larger ones are constant tables


class Replicator:
    """Copies the state after every step into memory that outlives the ranks, and to another machine if there is one.

    A step's copy is complete before the step after the next starts, so a killed rank costs at most one step.
    """

    def __init__(self, folder: Path, runtime: Runtime, sites: StorageTopology, settings: Mapping[str, Any]) -> None:
        self._folder, self._sites = folder, sites
        self.unreported: Callable[[], Unreported] = lambda: list
        self._stager = Stager(runtime, settings)
        self._group = host_group(runtime.world) if not sites.is_shared else None
        self._thread: threading.Thread | None = None
        self._failed = False

    def keep(self, position: Position) -> None:
        """Copy the state after a step. Waits for the copy of the step before."""
        self.wait()
        share, figures = self._stager.stage(position), self.unreported()
        self._thread = threading.Thread(target=self._write, args=(share, figures), name="rung-replicate")
        self._thread.start()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, share: Share, figures: Unreported) -> None:
        try:
            folder = folder_of(self._folder, share.step)
            folder.mkdir(exist_ok=True)
            content = {**share.write(folder), UNREPORTED: figures()}
            note = write_note(folder, share.rank, content, needs_all=True)
            mirror(self._sites, self._group, folder, [share.file, note])
            if self._sites.is_leader:
                for step, path in steps_in(self._folder).items():
                    if step < share.step - 2:
                        shutil.rmtree(path, ignore_errors=True)
        except Exception as error:
            if not self._failed:
                log.warning("the state could not be copied into memory: %s. Training goes on without copies.", error)
            self._failed = True


class EmergencySaver:
    """Saves this rank's state on failure, as it was after the last complete step.

    Gradients of the failed step are not part of it. A forward pass also changes random generators and running
    statistics: these are recorded before each step and put back.
    """

    def __init__(
        self,
        folder: Path,
        runtime: Runtime,
        settings: Mapping[str, Any],
        position: Position,
        *,
        is_kept: bool = False,
    ) -> None:
        """`is_kept`: the state at `position`, the start of the run, is already on disk."""
        self._folder, self._runtime, self._settings = folder, runtime, settings
        self.position, self._is_kept = position, is_kept
        self.unreported: Callable[[], Unreported] = lambda: list
        self._on_gpu = runtime.world.device.type == "cuda"
        self._places = [
            (buffers_of(module), key)
            for module in runtime.model.modules()
            for key, buffer in buffers_of(module).items()
            if buffer is None or not is_absent(buffer)
        ]
        self._remembered: list[tuple[Tensor | None, int]] = []  # each buffer and its version
        self._small: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._first, self._marks = GeneratorMarks(), GeneratorMarks()
        self._cuda_first = self._cuda = self._cuda_state()
        self._updates: int | None = None  # the runtime's count before the current step; None between steps

    @torch.no_grad()
    def before_step(self) -> None:
        self._marks, self._cuda = GeneratorMarks(), self._cuda_state()
        if self._places:
            buffers = [registry.get(key) for registry, key in self._places]
            self._remembered = [(buffer, version(buffer) if buffer is not None else 0) for buffer in buffers]
            small = [b for b in buffers if b is not None and b.numel() <= _SMALL]
            if len(small) != len(self._small) or any(a is not b for a, b in zip(small, self._small, strict=True)):
                self._small, self._copies = small, [torch.empty_like(buffer) for buffer in small]
            if small:
                foreach_copy_(self._copies, small)
        self._updates = self._runtime.updates.count

    def after_step(self, position: Position) -> None:
        if position != self.position:
            self._is_kept = False
        self.position, self._updates = position, None

    @torch.no_grad()
    def rescue(self) -> bool:
        """Write this rank's state, if it is consistent. Returns whether the state of `position` is on disk afterwards.

        No communication: other ranks may be gone.
        """
        runtime, world = self._runtime, self._runtime.world
        if self.position.step == 0 or self._is_kept:
            return self._is_kept  # step 0 needs no save; a state that was resumed from is on disk
        if self._updates is not None:
            if runtime.updates.is_running or runtime.updates.count != self._updates or not self._put_buffers_back():
                return False  # part of the state is already that of the next step
            self._marks.restore()
            if self._cuda is not None:
                torch.cuda.set_rng_state(self._cuda, world.device)
        runtime.reshard()
        tensors = common_tensors(runtime, alone=True)
        plan = SharePlan(tensors, world, alone=True)
        values = [value.cpu() for value in plan.values(tensors)]
        share = make_share(runtime, self.position, plan, values, self._settings)
        folder = folder_of(self._folder, share.step)
        folder.mkdir(parents=True, exist_ok=True)
        # If no rank drew a random number since the start, generators need not be restored, and shards are enough.
        needs_all = has_rank_local_state(runtime) or not self._first.hold() or self._cuda_has_moved()
        try:
            content = share.write(folder)
            with contextlib.suppress(Exception):  # a device that has failed need not answer
                content[UNREPORTED] = self.unreported()()
            write_note(folder, share.rank, content, needs_all=needs_all)
        except OSError:
            (folder / share.file).unlink(missing_ok=True)  # a partial file is useless, and the disk may be full
            raise
        return True

    def _put_buffers_back(self) -> bool:
        """Restore buffers to their values before the step. False if a large one changed, which has no copy."""
        copies = {id(buffer): copy for buffer, copy in zip(self._small, self._copies, strict=True)}
        for (registry, key), (buffer, before) in zip(self._places, self._remembered, strict=True):
            registry[key] = buffer  # a forward pass may have replaced it
            if buffer is None or version(buffer) == before:
                continue
            if id(buffer) not in copies:
                return False
            buffer.copy_(copies[id(buffer)])
        return True

    def _cuda_state(self) -> Tensor | None:
        return torch.cuda.get_rng_state(self._runtime.world.device) if self._on_gpu else None

    def _cuda_has_moved(self) -> bool:
        now = self._cuda_state()
        return now is not None and self._cuda_first is not None and not torch.equal(now, self._cuda_first)
