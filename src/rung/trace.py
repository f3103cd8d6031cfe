"""Everything a rank does in a step, in order: memory taken and given back, operations, messages.

A tracer is a recorder that also looks at what every operation reads and leaves. Like the recorder it sees the calls
themselves, so a real step and a pretended one are read alike. It keeps events and no sums: what the peak is, what an
allocator would make of it, how long it takes on some hardware are questions to the finished trace.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from rung import fakes, like_cuda
from rung.record import Message, Recorder, group_of
from rung.status import StatusWriter
from rung.world import World

KINDS = ("parameters", "gradients", "optimizer", "buffers", "batch", "gathered", "messages", "activations", "temporary")
_IGNORED = ("prim", "profiler")
# Attention on the CPU, which torch's own table has not.
_FLOPS: dict[str, Callable[..., int]] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": flop_registry[
        torch.ops.aten._scaled_dot_product_flash_attention
    ],
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": flop_registry[
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ],
}
_READS_ROWS = ("aten::embedding", "aten::index_select", "aten::gather", "aten::index.Tensor")


@dataclass(slots=True)
class Allocation:
    """A piece of memory, from the event that took it to the one that gave it back."""

    number: int
    num_bytes: int
    phase: str
    kind: str = ""
    born: int = 0
    died: int | None = None
    stream: int = 0  # of the device; allocators keep the memory of each apart


@dataclass(slots=True, frozen=True)
class Taken:
    allocation: Allocation


@dataclass(slots=True, frozen=True)
class Returned:
    allocation: Allocation


@dataclass(slots=True, frozen=True)
class Work:
    """One operation on the device. `reads` and `writes` are numbers of allocations."""

    name: str
    phase: str
    flops: int
    num_bytes: int  # that pass between memory and processor if nothing is cached
    dtype: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    stream: int = 0


@dataclass(slots=True, frozen=True)
class Sent:
    """A collective, or a message to or from another rank."""

    message: Message
    peer: int | None  # of a send or receive
    touches: tuple[int, ...]


@dataclass(slots=True, frozen=True)
class Mark:
    """A place in the trace: a step begins, a phase begins, a stage acts."""

    what: str


Event = Taken | Returned | Work | Sent | Mark


@dataclass
class Trace:
    """What one rank did."""

    events: list[Event] = field(default_factory=list)
    allocations: list[Allocation] = field(default_factory=list)

    def settle(self) -> None:
        """Give a kind to what has none: it served until backward, or within its phase."""
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

    def messages(self) -> list[Message]:
        return [event.message for event in self.events if isinstance(event, Sent)]


class Tracer(Recorder):
    """Traces one rank while active. Enter it inside `world.tensors()`.

    `gradients` tells the gradients that there are now; asked when an update begins.
    """

    gradients: Callable[[], Iterable[Tensor]] | None = None

    def __init__(self, world: World, status: StatusWriter) -> None:
        super().__init__(world, status)
        self.trace = Trace()
        self._by_storage: dict[int, Allocation] = {}
        self._phase = ""
        self._resize: Any = None
        self._imaginary: set[int] = set()
        self._streams = fakes.Streams()
        self._shims = contextlib.ExitStack()
        self._is_paused = False
        self.is_active = False

    # -- what is there before, and what things are ---------------------------------------------------------------

    def know(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Memory that exists already, or has come to be known as something."""
        for tensor in tensors:
            allocation = self.trace.allocations[self._number(_plain(tensor))]
            if allocation.kind not in ("parameters", "buffers"):
                allocation.kind = kind

    def imagine(self, tensors: Iterable[Tensor]) -> None:
        """Tensors that no memory is meant by, such as those that stand for what other ranks keep."""
        for tensor in tensors:
            key = _key(tensor)
            if key not in self._imaginary and key not in self._by_storage:
                self._imaginary.add(key)
                weakref.finalize(tensor.untyped_storage(), self._imaginary.discard, key)

    def mark(self, what: str) -> None:
        self.trace.events.append(Mark(what))

    # -- watching ------------------------------------------------------------------------------------------------

    def __enter__(self) -> Any:
        self._resize = torch.UntypedStorage.resize_
        tracer, resize = self, self._resize

        def resized(storage: Any, size: int) -> Any:
            found = resize(storage, size)
            tracer._follow(storage, size)
            return found

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        self._shims = contextlib.ExitStack()
        self._shims.enter_context(fakes.around_shape_inference(self.paused))
        self._shims.enter_context(fakes.watch_streams(self._streams))
        self.is_active = True
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> Any:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        self._shims.close()
        self.is_active = False
        return super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does with its parts comes by here
        if self._is_paused or func.namespace in _IGNORED or self._is_elsewhere():
            return func(*args, **(kwargs or {}))
        inputs = tensors_of((args, kwargs))
        if fakes.is_imagining() or any(_key(tensor) in self._imaginary for tensor in inputs):
            output = func(*args, **(kwargs or {}))
            self.imagine(tensors_of(output))
            return output
        self.see_phase()
        if func is torch.ops.aten.add.Tensor and fakes.adds_gradients(args):
            func = torch.ops.aten.add_.Tensor  # as autograd does where nobody looks on
        output = super().__torch_dispatch__(func, types, args, kwargs)
        outputs = tensors_of(output)
        reads = [self._number(tensor) for tensor in inputs]
        known = len(self.trace.allocations)
        writes = [self._number(tensor) for tensor in outputs]
        if self._world.device_type == "cuda" and not self._world.has_storage:
            for num_bytes in like_cuda.workspaces_of(func._schema.name, inputs, outputs):
                self._note_workspace(num_bytes)
        if func.namespace in ("c10d", "_c10d_functional"):
            return output
        if self._computes(func, reads, writes, known):
            self._note_work(func, args, kwargs or {}, inputs, output, tuple(reads), tuple(writes))
        return output

    def _note(self, operation: str, args: tuple[Any, ...], *, is_functional: bool) -> None:
        before = len(self.messages)
        super()._note(operation, args, is_functional=is_functional)
        tensors = tensors_of(args)
        touched = tuple(dict.fromkeys(self._number(tensor) for tensor in tensors))
        for number in touched:
            if not self.trace.allocations[number].kind:
                self.trace.allocations[number].kind = "messages"
        if len(self.messages) > before:
            peer = None
            if operation in ("send", "receive"):
                peer = dist.get_global_rank(group_of(args), next(arg for arg in args if type(arg) is int))
            self.trace.events.append(Sent(self.messages[-1], peer, touched))

    def _is_elsewhere(self) -> bool:
        """Whether a pretended rank computes with real numbers for once, which are not its device's."""
        return self._world.fake_mode is not None and not fakes.is_faking()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """While inside, operations are not looked at."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    @contextlib.contextmanager
    def aside(self) -> Iterator[Trace]:
        """While inside, what happens goes to another trace, which knows the allocations of this one."""
        kept, self.trace = self.trace, Trace(allocations=list(self.trace.allocations))
        try:
            yield self.trace
        finally:
            for allocation in self.trace.allocations[len(kept.allocations) :]:
                allocation.died = allocation.died or 0  # it may outlive this, and is nothing to the trace that goes on
            self.trace = kept

    @property
    def phase(self) -> str:
        return self._phase

    def see_phase(self) -> None:
        phase = self._status.current().phase
        if phase != self._phase:
            self._phase = phase
            self.mark(phase)
            if phase == "update" and self.gradients is not None:
                self.know(self.gradients(), "gradients")

    # -- memory --------------------------------------------------------------------------------------------------

    def _number(self, tensor: Tensor) -> int:
        """The allocation that a tensor lies in; a new one if nobody has seen it."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._by_storage.get(key)
        if known is None:
            known = self._take(key, storage.nbytes())
            weakref.finalize(storage, self._gone, key, known)
        return known.number

    def number_of(self, tensor: Tensor) -> int:
        """The number of the allocation that a tensor, or its part on this rank, lies in."""
        return self._number(_plain(tensor))

    def adopt(self, tensor: Tensor, allocation: Allocation) -> None:
        """Let a tensor that was made unseen stand for an allocation, which lives as long as it."""
        storage = tensor.untyped_storage()
        self._by_storage[storage._cdata] = allocation
        weakref.finalize(storage, self._gone, storage._cdata, allocation)

    def give_back(self, allocation: Allocation) -> None:
        """An allocation is no longer needed; of one that a tensor stands for, the tensor says so."""
        self._return(allocation)

    def _take(self, key: int, num_bytes: int, kind: str = "") -> Allocation:
        trace = self.trace
        allocation = Allocation(len(trace.allocations), num_bytes, self._phase, kind, len(trace.events))
        allocation.stream = self._streams.current
        trace.allocations.append(allocation)
        trace.events.append(Taken(allocation))
        self._by_storage[key] = allocation
        return allocation

    def _gone(self, key: int, first: Allocation) -> None:
        # By now the place may have been resized, in which case there is a younger one.
        allocation = self._by_storage.pop(key, first)
        self._return(allocation)

    def _return(self, allocation: Allocation) -> None:
        if allocation.died is None:
            allocation.died = len(self.trace.events)
            self.trace.events.append(Returned(allocation))

    def _follow(self, storage: Any, size: int) -> None:
        """FSDP empties what it gathers and fills it again without calling an operation."""
        key = storage._cdata
        known = self._by_storage.get(key)
        if known is None or known.num_bytes == size:
            return
        if known.num_bytes:
            known.kind = "gathered"
        self._return(known)
        self._take(key, size, "gathered")

    def _note_workspace(self, num_bytes: int) -> None:
        """What an operation takes for itself while it runs."""
        allocation = self._take(-len(self.trace.allocations) - 1, num_bytes, "temporary")
        del self._by_storage[-allocation.number - 1]
        self._return(allocation)

    # -- operations ----------------------------------------------------------------------------------------------

    def _computes(self, func: Any, reads: list[int], writes: list[int], known: int) -> bool:
        if any(number >= known for number in writes):
            return not func._schema.name.startswith(("aten::empty", "aten::new_empty"))
        return any(
            argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments
        )

    def _note_work(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        inputs: list[Tensor],
        output: Any,
        reads: tuple[int, ...],
        writes: tuple[int, ...],
    ) -> None:
        name = func._schema.name
        outputs = tensors_of(output)
        count = _FLOPS.get(name) or flop_registry.get(func._overloadpacket)
        flops = int(count(*args, **kwargs, out_val=output)) if count else 0
        written = [
            leaf
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for leaf in tensors_of(value)
        ]
        seen = outputs if name in _READS_ROWS else inputs
        num_bytes = sum(_num_bytes(t) for t in (*seen, *(written or outputs)))
        main = next((t for t in (*outputs, *inputs) if t.is_floating_point()), None)
        self.trace.events.append(
            Work(
                name.removeprefix("aten::"),
                self._phase,
                flops,
                num_bytes,
                str(main.dtype).removeprefix("torch.") if main is not None else "int64",
                reads,
                tuple(dict.fromkeys((*writes, *(self._number(t) for t in written)))),
                self._streams.current,
            )
        )


def tensors_of(values: Any) -> list[Tensor]:
    """All tensors with a storage of their own; a DTensor's is that of its part."""
    found = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor)]
    return [tensor for tensor in found if tensor.layout is torch.strided and tensor.device.type != "meta"]


def _key(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _plain(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
