"""Which rank writes and reads which chunks: the planners of torch.distributed.checkpoint, with our own file format.

torch's planner divides a rank's tensors (whole, or DTensors with any sharding) into chunks, and finds the chunks that
each rank needs for its current shards. torch's storage pickles the metadata; here it is JSON in the manifest.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from rung.checkpoint.files import DTYPES, Entry, TensorFile, dtype_name
from rung.checkpoint.manifest import Checkpoint
from rung.distributed.world import World
from rung.errors import CheckpointError


@dataclass(frozen=True)
class Part:
    """A chunk of a tensor, and its key in this rank's file."""

    item: WriteItem
    entry: Entry

    @property
    def name(self) -> str:
        return self.item.index.fqn


class SharePlan:
    """The chunks that this rank writes. Collective; remade only when the list of tensors changes."""

    def __init__(self, tensors: Mapping[str, Tensor], world: World, *, alone: bool = False) -> None:
        """`alone`: no communication; this rank writes all it holds, even if other ranks hold it too."""
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(tensors), is_coordinator=True)
        own = planner.create_local_plan()
        plans = [own] if alone else [_plan_from_json(items) for items in world.gather_objects(_plan_to_json(own))]
        shared, _ = planner.create_global_plan(plans) if not alone else ([own], None)
        mine: SavePlan = shared[0 if alone else world.rank]
        found = [Part(item, _entry_of(item)) for item in mine.items if _volume(item)]
        # Wide types first: every tensor then starts at a multiple of its item size.
        self.parts = sorted(found, key=lambda part: (-part.entry.dtype.itemsize, part.entry.key))
        self._empty = [item for item in mine.items if item.tensor_data and not math.prod(item.tensor_data.size)]
        self._planner = planner
        self._names = _signature(tensors)

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        return self._names == _signature(tensors)

    def values(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """The current values of the parts, on their device."""
        self._planner.state_dict = dict(tensors)
        return [self._planner.lookup_object(part.item.index) for part in self.parts]

    def describe(self, file: str) -> dict[str, Any]:
        """For the manifest: this rank's chunks by tensor."""
        described: dict[str, Any] = {}
        for part in self.parts:
            data = part.item.tensor_data
            assert data is not None
            offsets, sizes = list(data.chunk.offsets), list(data.chunk.sizes)
            known = described.setdefault(
                part.name, {"dtype": dtype_name(part.entry.dtype), "shape": list(data.size), "chunks": []}
            )
            known["chunks"].append({"file": file, "key": part.entry.key, "offsets": offsets, "shape": sizes})
        for item in self._empty:  # no bytes to write, but the model has them
            data = item.tensor_data
            assert data is not None
            described[item.index.fqn] = {
                "dtype": dtype_name(data.properties.dtype),
                "shape": list(data.size),
                "chunks": [],
            }
        return described


def _plan_to_json(plan: SavePlan) -> list[Any]:
    """A rank's plan as JSON. It has only tensors: other values are in the manifest."""
    found = []
    for item in plan.items:
        assert item.tensor_data is not None
        data = item.tensor_data
        place = list(item.index.offset) if item.index.offset is not None else None
        chunk = [list(data.chunk.offsets), list(data.chunk.sizes)]
        kind = [item.type.name, dtype_name(data.properties.dtype)]
        found.append([item.index.fqn, place, item.index.index, *kind, *chunk, list(data.size)])
    return found


def _plan_from_json(found: list[Any]) -> SavePlan:
    items = []
    for name, place, number, kind, dtype, offsets, sizes, size in found:
        index = MetadataIndex(name, torch.Size(place) if place is not None else None, number)
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        data = TensorWriteData(chunk, TensorProperties(DTYPES[dtype]), torch.Size(size))
        items.append(WriteItem(index, WriteItemType[kind], tensor_data=data))
    return SavePlan(items)


def read_into(targets: Mapping[str, Tensor], checkpoint: Checkpoint) -> None:
    """Read this rank's tensors, sharded or whole, from a checkpoint. No communication.

    torch's planner maps slices of chunks to slices of tensors. `dcp.load` is not used: it wraps errors in
    CheckpointException, which is not an Exception.
    """
    wanted = {name: tensor.detach() for name, tensor in targets.items() if tensor.numel() > 0}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(wanted, Metadata({name: _described(checkpoint, name) for name in wanted}), True)
    tensors, files = checkpoint.manifest["tensors"], OpenFiles(checkpoint)
    chunks = {(name, tuple(chunk["offsets"])): chunk for name in wanted for chunk in tensors[name]["chunks"]}
    for item in planner.create_local_plan().items:
        index: MetadataIndex = item.storage_index
        chunk = chunks[index.fqn, tuple(index.offset or ())]
        with files.open(chunk, dtype_of(checkpoint, index.fqn)) as source:
            for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                source = source.narrow(dim, offset, length)
            target = planner.resolve_tensor(item).detach()
            for dim, stride in enumerate(target.stride()):
                if stride == 0:  # made by expand(): one element along this dimension
                    target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
            target.copy_(source)


def _described(checkpoint: Checkpoint, name: str) -> TensorStorageMetadata:
    saved = checkpoint.manifest["tensors"][name]
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype_of(checkpoint, name)),
        size=torch.Size(saved["shape"]),
        chunks=[
            ChunkStorageMetadata(offsets=torch.Size(chunk["offsets"]), sizes=torch.Size(chunk["shape"]))
            for chunk in saved["chunks"]
        ],
    )


def read_whole(checkpoint: Checkpoint, name: str, files: OpenFiles | None = None) -> Tensor:
    """Read one whole tensor to the host. Pass `files` when reading many."""
    files = files or OpenFiles(checkpoint)
    saved = checkpoint.manifest["tensors"][name]
    dtype = dtype_of(checkpoint, name)
    try:
        value = torch.empty(saved["shape"], dtype=dtype)
    except (RuntimeError, MemoryError) as error:
        raise CheckpointError(f"{checkpoint.path}: not enough memory for {name}, {saved['shape']} {dtype}.") from error
    for chunk in saved["chunks"]:
        place = tuple(slice(o, o + n) for o, n in zip(chunk["offsets"], chunk["shape"], strict=True))
        with files.open(chunk, value.dtype) as part:
            value[place].copy_(part)
    return value


def dtype_of(checkpoint: Checkpoint, name: str) -> torch.dtype:
    dtype = checkpoint.manifest["tensors"][name]["dtype"]
    if dtype not in DTYPES:
        raise CheckpointError(f"{checkpoint.path}: {name} is of type {dtype}, which this version of Rung cannot read.")
    return DTYPES[dtype]


class OpenFiles:
    """A cache of a checkpoint's files, so that headers are read once."""

    _MAX_OPEN = 64

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._folder = checkpoint.path
        self._files: OrderedDict[str, TensorFile] = OrderedDict()

    @contextmanager
    def open(self, chunk: Mapping[str, Any], dtype: torch.dtype) -> Iterator[Tensor]:
        """Map a chunk of the manifest into memory."""
        name = chunk["file"]
        if name not in self._files:
            self._files[name] = TensorFile(self._folder / name)
            while len(self._files) > self._MAX_OPEN:
                self._files.popitem(last=False)
        with self._files[name].open(chunk["key"], dtype) as part:
            if list(part.shape) != chunk["shape"]:
                raise CheckpointError(
                    f"{self._folder / name} is damaged: {chunk['key']} is {list(part.shape)}, not {chunk['shape']}."
                )
            yield part


def _entry_of(item: WriteItem) -> Entry:
    data = item.tensor_data
    assert data is not None
    whole = data.chunk.sizes == data.size
    place = "" if whole else "@" + ",".join(map(str, data.chunk.offsets))
    return Entry(f"{item.index.fqn}{place}", data.properties.dtype, tuple(data.chunk.sizes))


def _volume(item: WriteItem) -> int:
    return math.prod(item.tensor_data.chunk.sizes) if item.tensor_data is not None else 0


def _signature(tensors: Mapping[str, Tensor]) -> tuple[Any, ...]:
    return tuple((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items())
