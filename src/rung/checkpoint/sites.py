"""Which ranks share a disk, and how files travel between those that do not.

A site is a set of ranks that see the same run directory: all of them on one machine or over a network file system, one
for each machine otherwise. Nothing is configured; each rank leaves a token in its directory and looks who else did.
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

from rung.world import World, gather_json

_BLOCK = 16 * 2**20


class Sites:
    """All sites of a job, as every rank knows them."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world = world
        token = world.gather_objects(uuid.uuid4().hex)[0]
        place = folder / f".sites-{token}"
        if world.size > 1:
            place.mkdir(parents=True, exist_ok=True)
            (place / str(world.rank)).touch()
            world.barrier()
        seen = sorted(int(path.name) for path in place.iterdir()) if world.size > 1 else [world.rank]
        self.of_rank: list[int] = world.gather_objects(seen[0])  # a site is called by its first rank
        if world.size > 1 and self.is_leader:
            shutil.rmtree(place, ignore_errors=True)

    @property
    def own(self) -> int:
        return self.of_rank[self.world.rank]

    @property
    def is_leader(self) -> bool:
        """Whether this rank does for its site what one rank must do."""
        return self.own == self.world.rank

    @property
    def leaders(self) -> list[int]:
        return sorted(set(self.of_rank))

    @property
    def members(self) -> list[int]:
        return [rank for rank, site in enumerate(self.of_rank) if site == self.own]

    @property
    def is_shared(self) -> bool:
        """Whether all ranks see one disk."""
        return len(self.leaders) == 1

    def neighbour_of(self, rank: int) -> int:
        """The rank at the next site that keeps a copy of what `rank` wrote."""
        leaders = self.leaders
        following = leaders[(leaders.index(self.of_rank[rank]) + 1) % len(leaders)]
        own = [r for r, site in enumerate(self.of_rank) if site == self.of_rank[rank]]
        theirs = [r for r, site in enumerate(self.of_rank) if site == following]
        return theirs[own.index(rank) % len(theirs)]


def host_group(world: World) -> dist.ProcessGroup | None:
    """A group on the host for a thread beside training: collectives of two threads must not meet in one."""
    if world.size == 1 or world.pretend:
        return None
    group: dist.ProcessGroup = dist.new_group(backend=world.host_backend, timeout=datetime.timedelta(minutes=60))
    return group


def gather_in(group: dist.ProcessGroup | None, value: Any) -> list[Any]:
    if group is None:
        return [value]
    return gather_json(value, group)


def mirror(sites: Sites, group: dist.ProcessGroup | None, folder: Path, names: Iterable[str]) -> None:
    """This rank's files to its neighbour at the next site, and others' files from them. All ranks call it.

    A rank whose disk fails still takes part to the end, and raises then: the others would wait for it.
    """
    if sites.is_shared or group is None:
        return
    problem: OSError | None = None
    own: list[tuple[str, int]] = []
    try:
        own = [(name, (folder / name).stat().st_size) for name in names]
    except OSError as error:
        problem = error
    told = gather_in(group, own)
    for source, files in enumerate(told):
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


def pass_on(sites: Sites, path: Path, num_bytes: int, source: int, receivers: set[int]) -> None:
    """A file from the rank `source` to other ranks. All ranks call it; it is for the time before training."""
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
    """All blocks of a file, also where it cannot be read to its end: of as many bytes as were announced."""
    with _Blocks(path, "rb") as file:
        for start in range(0, num_bytes, _BLOCK):
            block = torch.zeros(min(_BLOCK, num_bytes - start), dtype=torch.uint8)
            file.read_into(block)
            dist.send(block, group=group, group_dst=target)


def _receive(path: Path, num_bytes: int, source: int, group: dist.ProcessGroup) -> None:
    """All blocks of a file, also where they cannot be written."""
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
    """A file whose first error is raised at the end of the block: until then, what is asked of it does nothing."""

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
