"""Traces what a rank does in a step, in order: memory taken and freed, operations, messages.

A tracer is a recorder that also records what every operation reads and writes. Like the recorder it intercepts the
calls in torch's dispatcher, so a real step and a dry run are traced alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.flop_counter import flop_registry

from rung.distributed import cuda_emulation, fake_world
from rung.distributed.known_indices import argument_tensors
from rung.distributed.status_board import StatusWriter
from rung.distributed.torch_private import schema
from rung.distributed.world import World
from rung.parallel.float8 import GatheredWeight
from rung.planner.host_memory import HostMemory
from rung.planner.memory_log import MemoryLog
from rung.planner.recorder import Recorder, group_of
from rung.planner.trace import Mark, Sent, Trace, Work

_IGNORED = ("prim", "profiler")


def _with_all_heads(count: Callable[..., int], query: int) -> Callable[..., int]:
    """torch's count of an attention's operations, also where groups of queries share a key; `query` is its place."""

    def counted(*args: Any, **kwargs: Any) -> int:
        shapes = list(args)
        for place in (query + 1, query + 2):
            batch, _, *others = args[place].shape
            shapes[place] = torch.Size((batch, args[query].shape[1], *others))
        return count(*shapes, **kwargs)

    return counted


def _grouped_product(left: Tensor, right: Tensor, *args: Any, **kwargs: Any) -> int:
    """The operations of a product by groups of rows, or of the inner dimension; transformers' experts are such."""
    groups = left.shape[0] if left.dim() == 3 and right.dim() == 2 else 1  # each has a part of the right's columns
    return 2 * left.numel() // groups * right.shape[-1]


def _added_product(total: Tensor, left: Tensor, right: Tensor, *args: Any, **kwargs: Any) -> int:
    """torch's table does not know of a type for the result."""
    return 2 * left.numel() * right.shape[-1]


_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention
_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward
# What torch's table lacks: attention on the CPU, grouped queries, grouped products.
_FLOPS: dict[str, Callable[..., int]] = {
    f"aten::_scaled_dot_product_{kernel}{suffix}": _with_all_heads(flop_registry[packet], query)
    for kernel in ("flash_attention", "flash_attention_for_cpu", "cudnn_attention")
    for suffix, packet, query in (("", _ATTENTION, 0), ("_backward", _ATTENTION_BACKWARD, 1))
} | {"aten::_grouped_mm": _grouped_product, "aten::addmm": _added_product}
_CONVOLUTIONS = ("aten::convolution", "aten::convolution_backward")
_READS_ROWS = ("aten::embedding", "aten::index_select", "aten::gather", "aten::index.Tensor", "aten::nll_loss_forward")


class Tracer(Recorder):
    """Traces one rank while active. Enter it inside `world.tensors.mode()`.

    `gradients` returns the gradients that exist now; the tracer calls it when an update begins.
    """

    gradients: Callable[[], Iterable[Tensor]] | None = None

    def __init__(self, world: World, status: StatusWriter) -> None:
        super().__init__(world, status)
        self._is_fake_gpu = world.device_type == "cuda" and not world.tensors.has_storage
        self._streams = fake_world.StreamWatch()
        self.memory = MemoryLog(self._streams)
        self.host = HostMemory(self.memory)
        self._resize: Any = None
        self._shims = contextlib.ExitStack()
        self._is_paused = False
        self._num_calls = 0
        self.is_active = False

    @property
    def trace(self) -> Trace:
        return self.memory.trace

    def mark(self, what: str) -> None:
        self.trace.events.append(Mark(what))

    def __enter__(self) -> Any:
        self._resize = torch.UntypedStorage.resize_
        memory, resize = self.memory, self._resize

        def resized(storage: Any, size: int) -> Any:
            found = resize(storage, size)
            memory.resize(storage, size)
            return found

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        self._shims = contextlib.ExitStack()
        self._shims.enter_context(fake_world.around_shape_inference(self.paused))
        self._shims.enter_context(fake_world.watch_streams(self._streams))
        self._shims.callback(register_module_forward_pre_hook(self._see_call).remove)
        self.is_active = True
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> Any:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        self._shims.close()
        self.is_active = False
        return super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return fake_world.device_of(args[0])
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the operations on its local tensors are dispatched again
        if self._is_paused or func.namespace in _IGNORED or self._is_outside_fakes():
            return func(*args, **(kwargs or {}))
        if self._is_fake_gpu and (steps := cuda_emulation.steps_of(func)) is not None:
            with self._inside():
                return steps(*args, **(kwargs or {}))
        memory, inputs = self.memory, tensors_of((args, kwargs))
        if fake_world.is_imagining() or any(memory.is_ignored(tensor) for tensor in inputs):
            output = func(*args, **(kwargs or {}))
            memory.ignore(tensors_of(output))
            return output
        self.see_phase()
        if func is torch.ops.aten.add.Tensor and fake_world.adds_gradients(args):
            func = torch.ops.aten.add_.Tensor  # as autograd does without a dispatch mode
        output = super().__torch_dispatch__(func, types, args, kwargs)
        outputs = tensors_of(output)
        reads = tuple(memory.number_of(tensor) for tensor in inputs)
        num_known = len(self.trace.allocations)
        memory.places_on_host = self.host.has_results(reads)
        writes = tuple(memory.number_of(tensor) for tensor in outputs)
        memory.places_on_host = False
        if self._is_fake_gpu:
            for num_bytes in cuda_emulation.workspaces_of(schema(func).name, inputs, outputs):
                memory.add_workspace(num_bytes)
        if func.namespace in ("c10d", "_c10d_functional"):
            return output
        if _computes(func, any(number >= num_known for number in writes)):
            self.trace.events.append(self._work(func, args, kwargs or {}, inputs, output, reads, writes))
        return output

    def _work(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        inputs: list[Tensor],
        output: Any,
        reads: tuple[int, ...],
        writes: tuple[int, ...],
    ) -> Work:
        name = schema(func).name
        outputs = tensors_of(output)
        count = _FLOPS.get(name) or flop_registry.get(func.overloadpacket)
        flops = int(count(*args, **kwargs, out_val=output)) if count else 0
        written = [
            leaf
            for argument, value in zip(schema(func).arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for leaf in tensors_of(value)
        ]
        seen = outputs if name in _READS_ROWS else inputs
        num_bytes = sum(_num_bytes(t) for t in (*seen, *(written or outputs)))
        changes = tuple(dict.fromkeys((*writes, *(self.memory.number_of(t) for t in written))))
        place = self.host.place_of(inputs, reads, changes)
        if place == "link":
            num_bytes = sum(_num_bytes(t) for t in (written or outputs))
        num_calls, self._num_calls = self._num_calls, 0
        main = next((t for t in (*outputs, *inputs) if t.is_floating_point()), None)
        if flops:  # a product takes the time of its factors' type, also if it is added in a wider one
            main = min((t for t in inputs if t.is_floating_point()), key=lambda t: t.itemsize, default=main)
        if name in _CONVOLUTIONS and _argument(func, args, kwargs, "groups") > 1:
            name += "_grouped"  # a kernel of its own
        if _argument(func, args, kwargs, "dropout_p"):
            name += "_dropout"
        return Work(
            name.removeprefix("aten::"),
            self.phase,
            flops,
            num_bytes,
            str(main.dtype).removeprefix("torch.") if main is not None else "int64",
            reads,
            changes,
            self._streams.current,
            num_calls,
            cuda_emulation.is_inside_library(),
            cuda_emulation.pieces_of(func, inputs, outputs) if self._world.device_type == "cuda" else 0,
            place,
        )

    def _see_call(self, module: nn.Module, inputs: Any) -> None:
        self._num_calls += not self._is_paused

    def _note(self, operation: str, args: tuple[Any, ...], *, is_functional: bool) -> None:
        before = len(self.messages)
        super()._note(operation, args, is_functional=is_functional)
        touched = tuple(dict.fromkeys(self.memory.number_of(tensor) for tensor in tensors_of(args)))
        for number in touched:
            if not self.trace.allocations[number].kind:
                self.trace.allocations[number].kind = "messages"
        if len(self.messages) > before:
            peer = None
            if operation in ("send", "receive"):
                peer = dist.get_global_rank(group_of(args), next(arg for arg in args if type(arg) is int))
            self.trace.events.append(Sent(self.messages[-1], peer, touched))

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """Operations inside are traced, although another one is at work."""
        super().__enter__()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _is_outside_fakes(self) -> bool:
        """Whether a dry run computes with real tensors for the moment, which do not belong to the device."""
        return self._world.tensors.fake_mode is not None and not fake_world.is_faking()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Operations inside are not recorded."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    @contextlib.contextmanager
    def aside(self) -> Iterator[Trace]:
        """Events inside go to another trace, which knows the allocations of this one."""
        kept = self.trace
        self.memory.trace = Trace(allocations=list(kept.allocations))
        try:
            yield self.trace
        finally:
            for allocation in self.trace.allocations[len(kept.allocations) :]:
                allocation.died = allocation.died or 0  # its end, if it is later, is no event of the other trace
            self.memory.trace = kept

    @property
    def phase(self) -> str:
        return self.memory.phase

    def see_phase(self) -> None:
        phase = self._status.current().phase
        if phase != self.memory.phase:
            self.memory.phase = phase
            self.mark(phase)
            if phase == "update" and self.gradients is not None:
                self.memory.classify(self.gradients(), "gradients")


def _computes(func: Any, makes_memory: bool) -> bool:
    """Whether an operation runs a kernel: it fills new memory, or writes into one of its arguments."""
    if makes_memory:
        return not schema(func).name.startswith(("aten::empty", "aten::new_empty"))
    return any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema(func).arguments)


def _argument(func: Any, args: Any, kwargs: Any, name: str) -> Any:
    """An argument of an operation by its name, if it has such a one and it was given."""
    given = zip(schema(func).arguments, args, strict=False)
    return kwargs.get(name) or next((value for argument, value in given if argument.name == name), None)


def tensors_of(values: Any) -> list[Tensor]:
    """All tensors with a storage of their own; a DTensor's is that of its part, for one."""
    found = [tensor for tensor in argument_tensors(values) if not isinstance(tensor, DTensor | GatheredWeight)]
    return [
        tensor for tensor in found if tensor.layout is torch.strided and fake_world.device_of(tensor).type != "meta"
    ]


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
