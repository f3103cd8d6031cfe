"""Follows the memory of one rank: which allocation a tensor lies in, when it was taken and when it was freed."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from rung.distributed.fake_world import StreamWatch
from rung.distributed.torch_private import storage_id
from rung.planner.trace import Alloc, Allocation, Free, Trace


class MemoryLog:
    """Writes the allocations of one rank into a trace. A storage is one allocation, freed with its last tensor."""

    def __init__(self, streams: StreamWatch) -> None:
        self.trace = Trace()
        self.phase = ""
        self._streams = streams
        self._by_storage: dict[int, Allocation] = {}
        self._ignored: set[int] = set()
        self.places_on_host = False  # whether new memory lies on the host
        self.uses_host = False  # whether any does

    def classify(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Give the memory of these tensors its kind. Parameters and buffers keep theirs."""
        for tensor in tensors:
            allocation = self.trace.allocations[self.number_of(tensor)]
            if allocation.kind not in ("parameters", "buffers"):
                allocation.kind = kind

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Exclude placeholder tensors, such as those for parameters that other ranks keep."""
        for tensor in tensors:
            key = _key(tensor)
            if key not in self._ignored and key not in self._by_storage:
                self._ignored.add(key)
                weakref.finalize(tensor.untyped_storage(), self._ignored.discard, key)

    def is_ignored(self, tensor: Tensor) -> bool:
        return _key(tensor) in self._ignored

    def number_of(self, tensor: Tensor) -> int:
        """The number of the allocation that a tensor, or its part on this rank, lies in; a new one if it is unknown."""
        storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
        key = storage_id(storage)
        known = self._by_storage.get(key)
        if known is None:
            known = self._take(key, storage.nbytes())
            weakref.finalize(storage, self._end, key, known)
        return known.number

    def adopt(self, tensor: Tensor, allocation: Allocation) -> None:
        """Let the lifetime of a tensor that was made unrecorded decide that of an allocation."""
        storage = tensor.untyped_storage()
        self._by_storage[storage_id(storage)] = allocation
        weakref.finalize(storage, self._end, storage_id(storage), allocation)

    def free(self, allocation: Allocation) -> None:
        if allocation.died is None:
            allocation.died = len(self.trace.events)
            self.trace.events.append(Free(allocation))

    def resize(self, storage: Any, size: int) -> None:
        """FSDP empties the storage of gathered parameters and fills it again without calling an operation."""
        key = storage_id(storage)
        known = self._by_storage.get(key)
        if known is None or known.num_bytes == size:
            return
        if known.num_bytes:
            known.kind = "gathered"
        self.free(known)
        self._take(key, size, "gathered")

    def move_to_host(self, tensor: Tensor) -> None:
        """The memory of a tensor leaves the device."""
        storage = tensor.untyped_storage()
        self.number_of(tensor)  # which makes it known
        self.free(self._by_storage[storage_id(storage)])
        self.places_on_host = True
        self._take(storage_id(storage), storage.nbytes())
        self.places_on_host = False

    def add_workspace(self, num_bytes: int) -> None:
        """Memory that a kernel allocates for itself while it runs."""
        allocation = self._take(-len(self.trace.allocations) - 1, num_bytes, "temporary")
        del self._by_storage[-allocation.number - 1]
        self.free(allocation)

    def _take(self, key: int, num_bytes: int, kind: str = "") -> Allocation:
        trace = self.trace
        allocation = Allocation(len(trace.allocations), num_bytes, self.phase, kind, len(trace.events))
        allocation.stream, allocation.on_host = self._streams.current, self.places_on_host
        self.uses_host |= allocation.on_host
        trace.allocations.append(allocation)
        trace.events.append(Alloc(allocation))
        self._by_storage[key] = allocation
        return allocation

    def _end(self, key: int, first: Allocation) -> None:
        # After a resize, the storage has a younger allocation than the one it began with.
        self.free(self._by_storage.pop(key, first))


def _key(tensor: Tensor) -> int:
    return storage_id(tensor.untyped_storage())
