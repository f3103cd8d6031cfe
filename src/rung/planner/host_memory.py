"""What a traced rank keeps in the memory of the host, where `--offload cpu` has its state."""

from __future__ import annotations

from torch import Tensor

from rung.planner.memory_log import MemoryLog


class HostMemory:
    """Tells memory of the host from that of the device, which are both the CPU's in a dry run."""

    def __init__(self, memory: MemoryLog) -> None:
        self._memory = memory
        self._copies_to: str | None = None

    def has_results(self, reads: tuple[int, ...]) -> bool:
        """Whether the results of an operation lie on the host: they do if all that it reads does."""
        if self._copies_to is not None:
            return self._copies_to == "host"
        return self._memory.uses_host and bool(reads) and all(self._holds(number) for number in reads)

    def place_of(self, inputs: list[Tensor], reads: tuple[int, ...], changes: tuple[int, ...]) -> str:
        """Where an operation runs. Single numbers may come from the other side."""
        if not self._memory.uses_host:
            return "device"
        large = [number for number, tensor in zip(reads, inputs, strict=True) if tensor.dim()]
        sides = {self._holds(number) for number in (*large, *changes)}
        return "link" if len(sides) == 2 else "host" if True in sides else "device"

    def copy(self, tensor: Tensor, to: str) -> Tensor:
        """A copy on the other side of the link, the "host" or the "device"."""
        self._copies_to = to
        try:
            copied = tensor.clone()
        finally:
            self._copies_to = None
        if to == "host":
            self._pin(copied)
        return copied

    def move(self, tensor: Tensor) -> None:
        """The memory of a tensor leaves the device."""
        self._memory.move_to_host(tensor)
        self._pin(tensor)

    def _holds(self, number: int) -> bool:
        return self._memory.trace.allocations[number].on_host

    def _pin(self, tensor: Tensor) -> None:
        """torch's allocator of pinned memory takes powers of two."""
        allocation = self._memory.trace.allocations[self._memory.number_of(tensor)]
        allocation.num_bytes = 1 << (allocation.num_bytes - 1).bit_length() if allocation.num_bytes else 0
