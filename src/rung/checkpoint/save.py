"""Saving beside training: the step waits for a copy to host memory, a thread does the rest.

Each rank copies and writes its own part: of what several ranks have alike, each writes some. The ranks' threads talk
over a process group of their own. The manifest is written last, so a save that is cut short leaves nothing that could
be taken for a checkpoint. Where ranks share no disk, each file also goes to the next site.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rung.checkpoint.manifest import folder_of, partial_of, prune, put_in_place, remove, write_manifest
from rung.checkpoint.plan import join
from rung.checkpoint.share import Position, Share, Stager, merge
from rung.checkpoint.sites import Sites, gather_in, host_group, mirror
from rung.disk import free_bytes, is_full, reason, room
from rung.errors import CheckpointError
from rung.runtime.mesh import MeshRuntime


@dataclass(frozen=True)
class SaveRecord:
    step: int
    stall_seconds: float  # for which training stood still
    write_seconds: float  # in the background
    num_bytes: int  # over all ranks
    error: str | None = None
    best: bool = False  # of the best evaluation so far


class Saver:
    """Writes checkpoints of one runtime into a folder. All ranks call the same methods in the same steps."""

    def __init__(
        self,
        folder: Path,
        runtime: MeshRuntime,
        *,
        sites: Sites | None = None,
        settings: Mapping[str, Any] | None = None,
        keep: int = 3,
        keep_every: int | None = None,
        background: bool = True,
        touch: Callable[[], None] = lambda: None,
    ) -> None:
        """`touch` is called whenever some of it has reached the disk: a slow disk is no hang."""
        self._folder, self._world = folder, runtime.world
        self._sites = sites or Sites(self._world, folder)
        self._stager = Stager(runtime, settings or {})
        self._keep, self._keep_every, self._background = keep, keep_every, background
        self._touch = touch
        self._group = host_group(self._world)
        self._thread: threading.Thread | None = None
        self.error: str | None = None  # of the newest save, once it has ended
        self._records: list[SaveRecord] = []
        self._kept: Position | None = None  # of the newest save that is on the disk
        self.last: Position | None = None  # of the newest save that is on the disk or on its way there

    def save(self, position: Position, *, wait: bool = False) -> None:
        """Begin to save the state after a step. `wait` until it is on the disk, and raise if that failed."""
        started = time.perf_counter()
        self.wait()
        share = self._stager.stage(position)
        self.last, self.error = position, None
        if self._background and not wait:
            stall = time.perf_counter() - started
            self._thread = threading.Thread(target=self._write, args=(share, stall), name="rung-save")
            self._thread.start()
            return
        self._write(share, None, started)
        self._settle()
        if wait and self.error is not None:
            raise CheckpointError(self.error)

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._settle()

    def _settle(self) -> None:
        """Take the end of a save into account: after the thread's end, never in it. Ranks decide by `last` whether to
        save again, which all of them must do together, and their threads do not end at the same moment."""
        self._kept = self.last = self.last if self.error is None else self._kept

    def starts_from(self, position: Position) -> None:
        """The state of a position is on the disk already."""
        self._kept = self.last = position

    def has(self, position: Position) -> bool:
        """Whether the state of a position is whole on the disk. Waits for nothing."""
        return self._thread is None and self._kept == position

    @property
    def good_state(self) -> str:
        """What can be gone on from, for a message that says why something newer cannot."""
        if self._kept is None:
            return "There is no whole checkpoint."
        return f"The newest whole checkpoint is {folder_of(self._folder, self._kept.step)}."

    def finished(self) -> list[SaveRecord]:
        """Saves that came to their end since the last call."""
        records, self._records = self._records, []
        return records

    def _write(self, share: Share, stall: float | None, began: float = 0.0) -> None:
        started = time.perf_counter()
        error, num_bytes = None, 0
        try:
            num_bytes = self._write_all(share)
        except Exception as problem:
            error = f"the checkpoint of step {share.step} could not be written: {str(problem).rstrip('.')}."
            self.error = error
            with contextlib.suppress(OSError):
                if self._sites.is_leader:
                    remove(partial_of(self._folder, share.step))
        now = time.perf_counter()
        stood = stall if stall is not None else now - began
        best = share.facts["best"]
        is_best = best is not None and best["step"] == share.step
        self._records.append(SaveRecord(share.step, stood, now - started, num_bytes, error, is_best))

    def _write_all(self, share: Share) -> int:
        # Beside the folder that it will be: there may be a whole checkpoint of this step already.
        folder = partial_of(self._folder, share.step)
        rooms = self._together("make its folder", lambda: self._clear(folder, share))
        parts = self._together("write its part", lambda: share.write(folder, self._touch), rooms)
        content = merge(parts, join([part["tensors"] for part in parts]))
        self._together("copy its part", lambda: mirror(self._sites, self._group, folder, [share.file]), rooms)
        self._together("write the manifest", lambda: self._finish(folder, share.step, content), rooms)
        return sum(int(told["bytes"]) for told in content["files"].values())

    def _clear(self, folder: Path, share: Share) -> tuple[int, int | None]:
        """The bytes of this rank's part, and the room that there is."""
        if self._sites.is_leader:
            if folder.exists():  # of a save that was cut short
                remove(folder)
            folder.mkdir(parents=True, exist_ok=True)
        return share.num_bytes, free_bytes(folder)

    def _finish(self, folder: Path, step: int, content: Mapping[str, Any]) -> None:
        if self._sites.is_leader:
            write_manifest(folder, content)
            put_in_place(folder, folder_of(self._folder, step))
            best = content["best"]["step"] if content["best"] is not None else None
            prune(self._folder, self._keep, self._keep_every, newest=step, best=best)

    def _together(self, what: str, action: Callable[[], Any], rooms: list[Any] | None = None) -> list[Any]:
        """An action on every rank, and what each one got from it. If one fails, all do. `rooms` are those of all ranks
        before anything was written."""
        result, error = None, None
        try:
            result = action()
        except OSError as problem:
            error = reason(problem)
            if is_full(problem) and rooms is not None:
                error += f"; {self._room_of_site(rooms, quota=problem.errno == errno.EDQUOT)}"
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
        told = gather_in(self._group, (result, error))
        failed = [f"rank {rank} could not {what}: {error}" for rank, (_, error) in enumerate(told) if error is not None]
        if failed:
            raise CheckpointError(failed[0])
        return [result for result, _ in told]

    def _room_of_site(self, rooms: list[Any], *, quota: bool) -> str:
        """What all of the checkpoint needs on this rank's disk, and what was free: with the neighbours' copies."""
        own, sites = self._sites.own, self._sites
        parts = [
            rank for rank, site in enumerate(sites.of_rank) if own in (site, sites.of_rank[sites.neighbour_of(rank)])
        ]
        return room(sum(rooms[rank][0] for rank in parts), rooms[own][1], quota=quota)
