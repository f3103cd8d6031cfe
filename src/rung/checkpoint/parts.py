"""States that ranks write each for themselves: every step into memory, or when a run comes to grief.

No rank waits for another here, so there is nobody to write a manifest. Each rank leaves a note beside its file, and
whoever starts the next attempt finds out whether the notes of a step make up a whole.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rung.checkpoint.manifest import are_sizes, folder_of, steps_in, write_whole
from rung.checkpoint.own import common_tensors, has_own_state
from rung.checkpoint.plan import SharePlan, holes, join
from rung.checkpoint.share import Position, Share, Stager, make_share, merge
from rung.checkpoint.sites import Sites, host_group, mirror
from rung.errors import CheckpointError
from rung.generators import Marks
from rung.parallel.materialize import is_absent
from rung.runtime.mesh import MeshRuntime
from rung.untrusted import read_json

log = logging.getLogger("rung")

_MAX_NOTE = 2**28
_MOST_RANKS = 2**20
_SMALL = 2**16  # elements of a buffer that may be running statistics; larger ones are tables, which nobody changes


def write_note(folder: Path, share: Share, told: Mapping[str, Any], *, needs_all: bool) -> str:
    """After a rank's file: what it holds. The note makes the file count."""
    name = f"rank-{share.rank:05d}.json"
    write_whole(folder / name, json.dumps({**told, "needs_all": needs_all}).encode())
    return name


def read_notes(folder: Path) -> list[dict[str, Any]]:
    notes = []
    for path in sorted(folder.glob("rank-*.json")):
        try:
            notes.append(read_json(path, _MAX_NOTE))
        except (OSError, ValueError):
            continue  # of no use; the others may do
    return notes


def compose(notes: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The manifest's content of a step from its ranks' notes; None if they do not make a whole."""
    try:
        return _compose(notes) if notes else None
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"the ranks' notes make no sense: {type(error).__name__}: {error}.") from error


def _compose(notes: list[dict[str, Any]]) -> dict[str, Any] | None:
    by_rank = {int(note["rank"]): note for note in notes}
    facts = next(iter(by_rank.values()))["facts"]
    same = [note for note in by_rank.values() if note["facts"]["topology"] == facts["topology"]]
    present = {int(note["rank"]) for note in same}
    if not are_sizes([facts["ranks"]]) or facts["ranks"] > _MOST_RANKS:
        raise ValueError(f"{facts['ranks']!r:.60} ranks")
    everyone = set(range(facts["ranks"]))
    # Where random numbers are drawn, each rank's own generators are part of the whole.
    if any(note["needs_all"] for note in same):
        if present != everyone:
            return None
    elif facts["topology"].get("servers"):
        servers = set(range(int(facts["topology"]["servers"])))  # with the state, and no trainer has it
        if not servers <= present or present == servers:
            return None
    elif {_kept_alike(facts["topology"]["axes"], rank) for rank in present} != {
        _kept_alike(facts["topology"]["axes"], rank) for rank in everyone
    }:
        return None
    tensors = join([note["tensors"] for note in same])
    return None if holes(tensors) else merge(same, tensors)


def _kept_alike(axes: Mapping[str, int], rank: int) -> tuple[int, ...]:
    """Ranks with the same answer keep the same state: all coordinates but that among replicas."""
    found = []
    for axis in reversed(list(axes)):
        rank, place = divmod(rank, axes[axis])
        if axis != "dp_replicate":
            found.append(place)
    return tuple(found)


class Replicator:
    """Copies the state into memory that outlives the ranks, in every step, and to another machine if there is one.

    A step's copy is complete before the step after the next begins, so a rank that is killed costs one step at most.
    """

    def __init__(self, folder: Path, runtime: MeshRuntime, sites: Sites, settings: Mapping[str, Any]) -> None:
        self._folder, self._sites = folder, sites
        self._stager = Stager(runtime, settings)
        self._group = host_group(runtime.world) if not sites.is_shared else None
        self._thread: threading.Thread | None = None
        self._failed = False
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # other users have no business with it

    def keep(self, position: Position) -> None:
        """After a step; waits for the copy of the step before."""
        self.wait()
        share = self._stager.stage(position)
        self._thread = threading.Thread(target=self._write, args=(share,), name="rung-replicate")
        self._thread.start()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, share: Share) -> None:
        try:
            folder = folder_of(self._folder, share.step)
            folder.mkdir(exist_ok=True)
            told = share.write(folder)
            note = write_note(folder, share, told, needs_all=True)
            mirror(self._sites, self._group, folder, [share.file, note])
            if self._sites.is_leader:
                for step, path in steps_in(self._folder).items():
                    if step < share.step - 2:
                        shutil.rmtree(path, ignore_errors=True)
        except Exception as error:
            if not self._failed:
                log.warning("the state could not be copied into memory: %s. Training goes on without.", error)
            self._failed = True


class Rescuer:
    """Saves this rank's state when a run comes to grief: as it was after the last whole step.

    Gradients of a step that failed are no part of it. What a forward pass changes besides (random generators, running
    statistics) is remembered before each step.
    """

    def __init__(
        self,
        folder: Path,
        runtime: MeshRuntime,
        settings: Mapping[str, Any],
        position: Position,
        *,
        is_kept: bool = False,
    ) -> None:
        """`is_kept`: the state at `position`, where the run begins, lies on the disk already."""
        self._folder, self._runtime, self._settings = folder, runtime, settings
        self.position, self._is_kept = position, is_kept
        self._on_gpu = runtime.world.device.type == "cuda"
        self._places = [
            (module._buffers, key)
            for module in runtime.model.modules()
            for key, buffer in module._buffers.items()
            if buffer is None or not is_absent(buffer)
        ]
        self._remembered: list[tuple[Tensor | None, int]] = []  # each buffer, and its version
        self._small: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._first, self._marks = Marks(), Marks()
        self._cuda_first = self._cuda = self._cuda_state()
        self._updates: int | None = None  # that the runtime had made before the step it is in

    @torch.no_grad()
    def before_step(self) -> None:
        self._marks, self._cuda = Marks(), self._cuda_state()
        if self._places:
            buffers = [registry.get(key) for registry, key in self._places]
            self._remembered = [(buffer, buffer._version if buffer is not None else 0) for buffer in buffers]
            small = [b for b in buffers if b is not None and b.numel() <= _SMALL]
            if len(small) != len(self._small) or any(a is not b for a, b in zip(small, self._small, strict=True)):
                self._small, self._copies = small, [torch.empty_like(buffer) for buffer in small]
            if small:
                torch._foreach_copy_(self._copies, small)
        self._updates = self._runtime.num_updates

    def after_step(self, position: Position) -> None:
        if position != self.position:
            self._is_kept = False
        self.position, self._updates = position, None

    @torch.no_grad()
    def rescue(self) -> bool:
        """Write what this rank has; False if that is no whole state. It is on its own: nobody is waited for."""
        runtime, world = self._runtime, self._runtime.world
        if self.position.step == 0 or self._is_kept:
            return self._is_kept  # a new start gives the same; or it is where the run began, and nothing was added
        if self._updates is not None:
            if runtime.is_updating or runtime.num_updates != self._updates or not self._put_buffers_back():
                return False  # some of it is of the next step already
            self._marks.restore()
            if self._cuda is not None:
                torch.cuda.set_rng_state(self._cuda, world.device)
        runtime.tidy_up()
        tensors = common_tensors(runtime, alone=True)
        plan = SharePlan(tensors, world, alone=True)
        values = [value.cpu() for value in plan.values(tensors)]
        share = make_share(runtime, self.position, plan, values, self._settings)
        folder = folder_of(self._folder, share.step)
        folder.mkdir(parents=True, exist_ok=True)
        needs_all = has_own_state(runtime) or not self._first.hold() or self._cuda_has_moved()
        try:
            write_note(folder, share, share.write(folder), needs_all=needs_all)
        except OSError:
            (folder / share.file).unlink(missing_ok=True)  # half of it is of no use, and the disk may be full
            raise
        return True

    def _put_buffers_back(self) -> bool:
        """Buffers as they were before the step. False for a large one that was changed: there is no copy of it."""
        copies = {id(buffer): copy for buffer, copy in zip(self._small, self._copies, strict=True)}
        for (registry, key), (buffer, version) in zip(self._places, self._remembered, strict=True):
            registry[key] = buffer  # a forward pass may have put another in its place
            if buffer is None or buffer._version == version:
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
