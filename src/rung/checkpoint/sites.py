"""Storage sites: which ranks share a disk, and the transfer of files between those that do not.

A site is a set of ranks that see the same run directory: all ranks on one machine or on a network file system, else
those of each machine. Nothing is configured: each rank creates a file in its directory and lists the others' files.
"""

from __future__ import annotations

import contextlib
import datetime
import shutil
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rung.distributed.collectives import gather_json
from rung.distributed.world import World

_BLOCK = 16 * 2**20  # bytes of a message


class StorageTopology:
    """The sites of a job; equal on every rank."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world = world
        token = world.gather_objects(uuid.uuid4().hex)[0]
        probe = folder / f".sites-{token}"
        if world.size > 1:
            probe.mkdir(parents=True, exist_ok=True)
            (probe / str(world.rank)).touch()
            world.barrier()
        seen = sorted(int(path.name) for path in probe.iterdir()) if world.size > 1 else [world.rank]
        self.of_rank: list[int] = world.gather_objects(seen[0])  # a site is named by its first rank
        if world.size > 1 and self.is_leader:  # after the gather: every rank has listed the folder
            shutil.rmtree(probe, ignore_errors=True)

    @property
    def own(self) -> int:
        return self.of_rank[self.world.rank]

    @property
    def is_leader(self) -> bool:
        """Whether this rank does the work that one rank per site must do."""
        return self.own == self.world.rank

    @property
    def leaders(self) -> list[int]:
        return sorted(set(self.of_rank))

    @property
    def members(self) -> list[int]:
        return [rank for rank, site in enumerate(self.of_rank) if site == self.own]

    @property
    def is_shared(self) -> bool:
        """Whether all ranks share one disk."""
        return len(self.leaders) == 1

    def neighbour_of(self, rank: int) -> int:
        """The rank at the next site that keeps a copy of what `rank` wrote."""
        leaders = self.leaders
        following = leaders[(leaders.index(self.of_rank[rank]) + 1) % len(leaders)]
        own = [r for r, site in enumerate(self.of_rank) if site == self.of_rank[rank]]
        theirs = [r for r, site in enumerate(self.of_rank) if site == following]
        return theirs[own.index(rank) % len(theirs)]


def host_group(world: World) -> dist.ProcessGroup | None:
    """A host group for a thread beside training: collectives of two threads must not mix in one group."""
    if not world.has_peers:
        return None
    group: dist.ProcessGroup = world.host_group(datetime.timedelta(minutes=60))
    return group


def gather_in(group: dist.ProcessGroup | None, value: Any) -> list[Any]:
    if group is None:
        return [value]
    return gather_json(value, group)


def mirror(sites: StorageTopology, group: dist.ProcessGroup | None, folder: Path, names: Iterable[str]) -> None:
    """Send this rank's files to its neighbour at the next site, and receive others'. Collective.

    A rank whose disk fails takes part to the end before it raises, because the others wait for its messages.
    """
    if sites.is_shared or group is None:
        return
    problem: OSError | None = None
    own: list[tuple[str, int]] = []
    try:
        own = [(name, (folder / name).stat().st_size) for name in names]
    except OSError as error:
        problem = error
    for source, files in enumerate(gather_in(group, own)):
        target = sites.neighbour_of(source)
        for name, count in files:
            try:
                if sites.world.rank == source:
                    _send(folder / name, count, target, group)
                elif sites.world.rank == target:
                    _receive(folder / name, count, source, group)
            except OSError as error:
                problem = problem or error
    if problem is not None:
        raise problem


def pass_on(sites: StorageTopology, path: Path, num_bytes: int, source: int, receivers: set[int]) -> None:
    """Broadcast a file from `source`; `receivers` write it. Collective on the default group: only before training."""
    here = sites.world.rank
    partial = path.with_name(f".{path.name}.partial")
    with contextlib.ExitStack() as stack:
        file: Any = None
        if here == source:
            file = stack.enter_context(path.open("rb"))
        elif here in receivers:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(partial.open("wb"))
        for start in range(0, num_bytes, _BLOCK):
            count = min(_BLOCK, num_bytes - start)
            block = torch.empty(count, dtype=torch.uint8)
            if here == source and file is not None:
                block = torch.frombuffer(bytearray(file.read(count)), dtype=torch.uint8)
            dist.broadcast(block, src=source)
            if here in receivers and file is not None:
                file.write(block.numpy().data)
    if here in receivers:
        partial.rename(path)


def _send(path: Path, num_bytes: int, target: int, group: dist.ProcessGroup) -> None:
    """Send the announced number of bytes, even if the file cannot be read to its end: the receiver expects them."""
    with _Blocks(path, "rb") as file:
        for start in range(0, num_bytes, _BLOCK):
            block = torch.zeros(min(_BLOCK, num_bytes - start), dtype=torch.uint8)
            file.read_into(block)
            dist.send(block, group=group, group_dst=target)


def _receive(path: Path, num_bytes: int, source: int, group: dist.ProcessGroup) -> None:
    """Receive all blocks of a file, even if they cannot be written."""
    partial = path.with_name(f".{path.name}.partial")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    with _Blocks(partial, "wb") as file:
        for start in range(0, num_bytes, _BLOCK):
            block = torch.empty(min(_BLOCK, num_bytes - start), dtype=torch.uint8)
            dist.recv(block, group=group, group_src=source)
            file.write(block)
    partial.rename(path)


class _Blocks:
    """A file whose first error is raised at the end of the `with` block; later calls do nothing."""

    def __init__(self, path: Path, mode: str) -> None:
        self._path, self._mode = path, mode
        self._file: Any = None
        self._problem: OSError | None = None

    def __enter__(self) -> _Blocks:
        self._try(self._open)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._file is not None:
            self._try(self._file.close)
        if error is None and self._problem is not None:
            raise self._problem

    def read_into(self, block: Tensor) -> None:
        self._try(lambda: self._file.readinto(block.numpy().data))

    def write(self, block: Tensor) -> None:
        self._try(lambda: self._file.write(block.numpy().data))

    def _open(self) -> None:
        self._file = self._path.open(self._mode)

    def _try(self, action: Callable[[], object]) -> None:
        if self._problem is None:
            try:
                action()
            except OSError as error:
                self._problem = error
