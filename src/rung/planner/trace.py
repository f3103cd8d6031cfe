"""The record of what one rank does in a step: memory taken and freed, operations, messages, in order.

It keeps events and no sums: the peak, the allocator's reserve and the time on some hardware are computed from a
finished trace, by memory.py and cost.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rung.planner.recorder import Message


@dataclass(slots=True)
class Allocation:
    """A block of memory, from the event that allocated it to the one that freed it."""

    number: int
    num_bytes: int
    phase: str
    kind: str = ""
    born: int = 0
    died: int | None = None
    stream: int = 0  # of the device; an allocator reuses memory within a stream
    on_host: bool = False  # not on the device, where `--offload` keeps the state


@dataclass(slots=True, frozen=True)
class Alloc:
    allocation: Allocation


@dataclass(slots=True, frozen=True)
class Free:
    allocation: Allocation


@dataclass(slots=True, frozen=True)
class Work:
    """One operation on the device. `reads` and `writes` are numbers of allocations."""

    name: str
    phase: str
    flops: int
    num_bytes: int  # that pass between memory and processor without a cache
    dtype: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    stream: int = 0
    calls: int = 0  # of modules, since the operation before: the host's time
    is_inner: bool = False  # a library issues it within another operation
    pieces: int = 0  # that a GPU computes one by one: rows of a norm, elements of operands that lie differently
    place: str = "device"  # or "host", or "link" if it copies between them

    @property
    def is_large(self) -> bool:
        """Whether it calls a library: a product, a convolution, attention or a norm of activations."""
        return self.flops > 0 or ("norm" in self.name and self.name.startswith(("native_", "cudnn_")))


@dataclass(slots=True, frozen=True)
class Sent:
    """A collective, or a message to or from another rank."""

    message: Message
    peer: int | None  # of a send or receive
    touches: tuple[int, ...]


@dataclass(slots=True, frozen=True)
class Mark:
    """The beginning of a step, of a phase or of a stage's action."""

    what: str


Event = Alloc | Free | Work | Sent | Mark


@dataclass
class Trace:
    """The events of one rank."""

    events: list[Event] = field(default_factory=list)
    allocations: list[Allocation] = field(default_factory=list)

    def settle(self) -> None:
        """Give a kind to allocations without one: activations if they live until backward, else temporary."""
        ends: list[tuple[int, str]] = [(i, e.what) for i, e in enumerate(self.events) if isinstance(e, Mark)]
        for allocation in self.allocations:
            if allocation.kind:
                continue
            allocation.kind = "temporary"
            if allocation.phase == "forward":
                end = next((i for i, what in ends if i > allocation.born and what != "forward"), len(self.events))
                if allocation.died is None or allocation.died > end:
                    allocation.kind = "activations"

    def works(self) -> list[Work]:
        return [event for event in self.events if isinstance(event, Work)]

    def messages(self, start: int = 0) -> list[Message]:
        """Those from the event number `start` on."""
        return [event.message for event in self.events[start:] if isinstance(event, Sent)]
