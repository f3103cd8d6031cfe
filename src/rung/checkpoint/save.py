"""Asynchronous saving: training waits for a copy to host memory, and a thread writes it to disk.

Each rank writes its own part; state that several ranks hold is divided among them. The ranks' threads communicate over
a process group of their own. The manifest is written last, so an interrupted save leaves nothing that looks like a
checkpoint. If ranks share no disk, each file is also copied to the next site. A run in a store sends a checkpoint there
once it is on the disk.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rung.checkpoint.manifest import folder_of, partial_of, prune, put_in_place, remove, write_manifest
from rung.checkpoint.notes import join, merge
from rung.checkpoint.share import Position, Share, Stager
from rung.checkpoint.sites import StorageTopology, gather_in, host_group, mirror
from rung.checkpoint.stored import StoredCheckpoints
from rung.errors import CheckpointError, StoreError
from rung.runtime.base import Runtime
from rung.system.disk import free_bytes, is_full, reason, room

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0  # seconds between two attempts to send a checkpoint


@dataclass(frozen=True)
class SaveRecord:
    step: int
    stall_seconds: float  # that training waited
    write_seconds: float  # in the background
    num_bytes: int  # over all ranks
    error: str | None = None
    best: bool = False  # of the best evaluation so far


class Saver:
    """Writes checkpoints of a runtime into a folder. Collective: all ranks call the same methods in the same steps."""

    def __init__(
        self,
        folder: Path,
        runtime: Runtime,
        *,
        sites: StorageTopology | None = None,
        settings: Mapping[str, Any] | None = None,
        keep: int = 3,
        keep_every: int | None = None,
        background: bool = True,
        touch: Callable[[], None] = lambda: None,
        stored: StoredCheckpoints | None = None,
    ) -> None:
        """`touch` is called as data reaches the disk, so that a slow disk does not look like a hang. With `stored`, a
        checkpoint counts as saved when it is in that store, too."""
        self._folder, self._world = folder, runtime.world
        self._sites = sites or StorageTopology(self._world, folder)
        self._stager = Stager(runtime, settings or {})
        self._keep, self._keep_every, self._background = keep, keep_every, background
        self._touch, self._stored = touch, stored
        self._is_awaited = threading.Event()  # training waits for the thread, which then gives up a store that fails
        self._group = host_group(self._world)
        self._files: Mapping[str, Mapping[str, Any]] = {}  # of the newest save
        self._thread: threading.Thread | None = None
        self.error: str | None = None  # of the newest save, once it has finished
        self._records: deque[SaveRecord] = deque()  # the writing thread adds, the main thread takes
        self._on_disk: Position | None = None  # of the newest save that is on the disk
        self.last: Position | None = None  # of the newest save that is on the disk or on its way there

    def save(self, position: Position, *, wait: bool = False) -> None:
        """Start to save the state after a step. With `wait`, return when it is on disk, and raise if that failed."""
        started = time.perf_counter()
        self.wait()
        share = self._stager.stage(position)
        self.last, self.error = position, None
        if self._background and not wait:
            self._is_awaited.clear()
            stall = time.perf_counter() - started
            self._thread = threading.Thread(target=self._write, args=(share, stall), name="rung-save")
            self._thread.start()
            return
        self._is_awaited.set()
        self._write(share, None, started)
        self._note_end()
        if wait and self.error is not None:
            raise CheckpointError(self.error)

    def wait(self) -> None:
        if self._thread is not None:
            self._is_awaited.set()
            self._thread.join()
            self._thread = None
            self._note_end()

    def _note_end(self) -> None:
        """Record the result of a save. Called after the thread has ended, never in it: all ranks must agree on `last`,
        by which they decide whether to save again, and their threads end at different moments."""
        if self.error is not None:
            self.last = self._on_disk
        self._on_disk = self.last

    def starts_from(self, position: Position) -> None:
        """Note that the state of a position is already on disk."""
        self._on_disk = self.last = position

    def has(self, position: Position) -> bool:
        """Whether the state of a position is completely on disk. Does not wait."""
        return self._thread is None and self._on_disk == position

    @property
    def good_state(self) -> str:
        """The newest whole checkpoint, as a sentence for error messages."""
        if self._on_disk is None:
            return f"There is no whole checkpoint{f' in {self._stored.store.url}' if self._stored else ''}."
        where = folder_of(self._folder, self._on_disk.step)
        return f"The newest whole checkpoint is {self._stored.in_store(where) if self._stored else where}."

    def finished(self) -> list[SaveRecord]:
        """The saves that finished since the last call."""
        return [self._records.popleft() for _ in range(len(self._records))]

    def _write(self, share: Share, stall: float | None, began: float = 0.0) -> None:
        started = time.perf_counter()
        error, num_bytes = None, 0
        try:
            num_bytes = self._write_all(share)
        except Exception as problem:
            error = f"the checkpoint of step {share.step} could not be written: {str(problem).rstrip('.')}."
            with contextlib.suppress(OSError):
                if self._sites.is_leader:
                    remove(partial_of(self._folder, share.step))
        stalled = stall if stall is not None else time.perf_counter() - began

        def note(error: str | None) -> None:
            self.error = error
            best = share.facts["best"]
            is_best = best is not None and best["step"] == share.step
            seconds = time.perf_counter() - started
            self._records.append(SaveRecord(share.step, stalled, seconds, num_bytes, error, is_best))

        if error is None and self._stored is not None:
            self._send_until_there(share, self._stored, note)
        else:
            note(error)

    def _send_until_there(self, share: Share, stored: StoredCheckpoints, note: Callable[[str | None], None]) -> None:
        """Send a checkpoint to the store, again and again until it is there, or until training waits for this thread.
        A failure is noted once, and the success whenever it comes."""
        has_failed, pause = False, _FIRST_PAUSE
        while True:
            try:
                self._send(share, stored)
                note(None)
                return
            except Exception as problem:
                if not has_failed:
                    note(
                        f"the checkpoint of step {share.step} is on the disk here alone, and could not be sent to "
                        f"{stored.store.url}: {str(problem).rstrip('.')}."
                    )
                has_failed = True
            self._is_awaited.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            if any(gather_in(self._group, self._is_awaited.is_set())):  # all ranks go on alike
                return

    def _send(self, share: Share, stored: StoredCheckpoints) -> None:
        folder, content = folder_of(self._folder, share.step), share.facts
        files = self._files

        def begin() -> None:
            if self._world.is_main:
                stored.begin(share.step)

        def finish() -> None:
            if self._world.is_main:
                best = content["best"]["step"] if content["best"] is not None else None
                stored.finish(folder, share.step, files)
                with contextlib.suppress(StoreError):  # it is saved; the next save removes what is too much
                    stored.prune(self._keep, self._keep_every, newest=share.step, best=best)

        self._on_all_ranks("reach the store", begin)
        self._on_all_ranks("send its part", lambda: stored.send(folder, share.step, share.file))
        self._on_all_ranks("send the manifest", finish)

    def _write_all(self, share: Share) -> int:
        # Written under another name: a whole checkpoint of this step may exist already.
        folder = partial_of(self._folder, share.step)
        rooms = self._on_all_ranks("make its folder", lambda: self._make_folder(folder, share))
        parts = self._on_all_ranks("write its part", lambda: share.write(folder, self._touch), rooms)
        content = merge(parts, join([part["tensors"] for part in parts]))
        self._on_all_ranks("copy its part", lambda: mirror(self._sites, self._group, folder, [share.file]), rooms)
        self._on_all_ranks("write the manifest", lambda: self._finish(folder, share.step, content), rooms)
        self._files = content["files"]
        return sum(int(file["bytes"]) for file in self._files.values())

    def _make_folder(self, folder: Path, share: Share) -> tuple[int, int | None]:
        """Make an empty folder. Returns the bytes of this rank's part, and the free space."""
        if self._sites.is_leader:
            if folder.exists():  # left by an interrupted save
                remove(folder)
            folder.mkdir(parents=True, exist_ok=True)
        return share.num_bytes, free_bytes(folder)

    def _finish(self, folder: Path, step: int, content: Mapping[str, Any]) -> None:
        if self._sites.is_leader:
            write_manifest(folder, content)
            put_in_place(folder, folder_of(self._folder, step))
            best = content["best"]["step"] if content["best"] is not None else None
            prune(self._folder, self._keep, self._keep_every, newest=step, best=best)

    def _on_all_ranks(self, what: str, action: Callable[[], Any], rooms: list[Any] | None = None) -> list[Any]:
        """Run an action on every rank and gather the results. If it fails on one rank, all ranks raise.

        `rooms`: the results of `_make_folder` on all ranks, for the message of a full disk.
        """
        result, error = None, None
        try:
            result = action()
        except OSError as problem:
            error = reason(problem)
            if is_full(problem) and rooms is not None:
                error += f"; {_room_of_site(self._sites, rooms, quota=problem.errno == errno.EDQUOT)}"
        except StoreError as problem:
            error = str(problem)
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
        rows = gather_in(self._group, (result, error))
        failed = [f"rank {rank} could not {what}: {error}" for rank, (_, error) in enumerate(rows) if error is not None]
        if failed:
            raise CheckpointError(failed[0])
        return [result for result, _ in rows]


def _room_of_site(sites: StorageTopology, rooms: list[Any], *, quota: bool) -> str:
    """The space that the checkpoint needs on this rank's disk, including neighbours' copies, and the free space."""
    own = sites.own
    parts = [rank for rank, site in enumerate(sites.of_rank) if own in (site, sites.of_rank[sites.neighbour_of(rank)])]
    return room(sum(rooms[rank][0] for rank in parts), rooms[own][1], quota=quota)
