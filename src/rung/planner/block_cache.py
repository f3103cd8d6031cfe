"""Record the trace of one block and replay it for identical blocks, to save time in dry runs.

A wrapped block is one autograd node. On the first call the block runs beside the trace and its events become a
template; every call, also the first, then appends the template's events to the trace with new allocations and runs no
operation. All code around blocks still runs: hooks that gather and reduce, buckets, schedules, updates. The only
difference in a trace is that the gradients of a block's parameters all arrive at its end instead of one by one
(`tests/planner/test_block_cache.py` compares traces with and without the cache).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rung.distributed import fake_world
from rung.distributed.torch_private import TreeSpec, tree_flatten, tree_unflatten
from rung.parallel.blocks import describe
from rung.planner.trace import Alloc, Allocation, Event, Free, Sent, Work
from rung.planner.tracer import Tracer

# Template allocation -> trace allocation. In a template a block's inputs, parameters and buffers come first; arriving
# gradients have negative numbers.
_Numbers = dict[int, int]
_TENSOR = object()  # in the place of a tensor; None is a value that blocks return
# The original function: `when_autocast_ends` patches torch's, and its release must not run while recording a template.
_clear_autocast_cache = torch.clear_autocast_cache


@dataclass(frozen=True)
class _Shape:
    """The metadata needed to make an equal fake tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    number: int  # of its allocation in the template
    placements: Any = None  # of a DTensor
    whole: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # global shape and stride of a DTensor

    def make(self, mesh: Any) -> tuple[Tensor, Tensor]:
        """The tensor, and its local tensor, which holds the memory."""
        local = torch.empty_strided(self.size, self.stride, dtype=self.dtype)
        if self.placements is None:
            return local, local
        assert self.whole is not None
        size, stride = torch.Size(self.whole[0]), self.whole[1]
        tensor = DTensor.from_local(local, mesh, self.placements, run_check=False, shape=size, stride=stride)
        return tensor, local


@dataclass
class _TracePart:
    """The events and results of a block's forward or backward."""

    events: list[Event]
    results: list[_Shape | None]


@dataclass
class _Template:
    """The recorded forward and backward of a block."""

    forward: _TracePart
    backward: _TracePart
    form: TreeSpec  # of its output
    others: list[Any]  # leaves of the output, with _TENSOR for each tensor
    lingers: list[int]  # allocations that the autocast cache holds until autocast ends
    keeps: list[bool]  # for each input, whether backward needs it
    keeps_outputs: list[bool]  # for each output, the same
    num_arrivals: int  # outputs that a gradient may arrive at


@dataclass
class BlockTraceCache:
    """Templates of one task's blocks."""

    tracer: Tracer | None = None
    setting: tuple[Any, ...] = ()  # settings that change a block's trace, part of each key
    templates: dict[Any, _Template] = field(default_factory=dict)
    _lingering: list[Allocation] = field(default_factory=list)

    @contextlib.contextmanager
    def recording(self, tracer: Tracer) -> Iterator[None]:
        """Record the calls of wrapped blocks with `tracer` for the duration."""

        def release() -> None:
            for allocation in self._lingering:
                tracer.memory.free(allocation)
            self._lingering.clear()

        self.tracer = tracer
        try:
            with fake_world.when_autocast_ends(release):
                yield
        finally:
            self.tracer = None
            self._lingering.clear()

    def wrap(self, block: nn.Module) -> None:
        """Replace a block's forward by one that records or replays a template; without a tracer it runs as before."""
        inner = block.forward
        form: list[Any] = []

        @functools.wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            tracer = self.tracer
            if tracer is None or not torch.is_grad_enabled() or not tracer.is_active:
                return inner(*args, **kwargs)
            if not form:
                form.append(None if _is_nested(block) else (describe(block), repr(block)))
            if form[0] is None:
                return inner(*args, **kwargs)
            leaves, spec = tree_flatten((args, kwargs))
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            plain = tuple(leaf for leaf in leaves if not isinstance(leaf, Tensor))
            if any(isinstance(tensor, DTensor) for tensor in tensors) or not all(map(_is_simple, plain)):
                return inner(*args, **kwargs)
            parameters = list(dict.fromkeys(block.parameters()))
            key = (
                self.setting,
                form[0],
                block.training,
                torch.is_autocast_enabled("cpu"),
                spec,
                plain,
                *(_signature(tensor) for tensor in (*tensors, *parameters)),
            )
            tracer.see_phase()
            numbers = [tracer.memory.number_of(tensor) for tensor in (*tensors, *parameters, *block.buffers())]
            given = list(dict.fromkeys(numbers))
            places = [given.index(number) for number in numbers]
            key = key, tuple(places)
            trainable = [parameter for parameter in parameters if parameter.requires_grad]
            if key not in self.templates:
                recorded = _record(tracer, inner, leaves, spec, given, places[: len(tensors)], trainable)
                self.templates[key] = recorded[0]
                self._lingering += recorded[1]
            if self.templates[key].num_arrivals > 1:  # perhaps none arrives at some, and backward is another then
                return inner(*args, **kwargs)
            call = _Call(self.templates[key], tracer, given, trainable)
            found = _Block.apply(call, *tensors, *trainable)  # type: ignore[no-untyped-call]
            self._lingering += call.lingering
            return call.output(found if isinstance(found, tuple) else (found,))

        block.forward = forward


class _Call:
    """One replayed call of a block."""

    def __init__(self, template: _Template, tracer: Tracer, given: list[int], trainable: Sequence[Tensor]) -> None:
        self._template, self._tracer, self._trainable = template, tracer, trainable
        self.lingering: list[Allocation] = []
        self._numbers: _Numbers = dict(enumerate(given))

    def forward(self) -> tuple[Tensor, ...]:
        self._tracer.see_phase()
        outputs = _replay(self._tracer, self._template.forward, self._numbers, [])
        allocations = self._tracer.trace.allocations
        self.lingering = [allocations[self._numbers[place]] for place in self._template.lingers]
        return tuple(tensor for tensor in outputs if tensor is not None)

    def needed(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The inputs that backward needs, which must stay alive until then."""
        return [tensor for tensor, keeps in zip(tensors, self._template.keeps, strict=False) if keeps]

    def needed_outputs(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Other tensors with the storage of outputs that backward needs: the outputs would refer to themselves."""
        with self._tracer.paused():
            keeps = self._template.keeps_outputs
            return [tensor.detach() for tensor, kept in zip(outputs, keeps, strict=True) if kept]

    def output(self, found: tuple[Tensor, ...]) -> Any:
        """The block's output, rebuilt around the tensors `found`."""
        fresh = iter(found)
        return tree_unflatten([next(fresh) if x is _TENSOR else x for x in self._template.others], self._template.form)

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        tracer, part = self._tracer, self._template.backward
        tracer.see_phase()
        numbers = self._numbers
        for place, gradient in enumerate(gradients):
            if gradient is not None:
                numbers[-1 - place] = tracer.memory.number_of(gradient)
        owners: list[Any] = [None] * (len(part.results) - len(self._trainable))
        owners += [p.device_mesh if isinstance(p, DTensor) else None for p in self._trainable]
        results = _replay(tracer, part, numbers, owners)
        # A result with a negative number is an arriving gradient that backward accumulated into in place.
        return [
            gradients[-1 - shape.number] if shape is not None and shape.number < 0 else result
            for result, shape in zip(results, part.results, strict=True)
        ]


def _record(
    tracer: Tracer,
    inner: Callable[..., Any],
    leaves: list[Any],
    spec: TreeSpec,
    given: list[int],
    places: list[int],
    trainable: Sequence[Tensor],
) -> tuple[_Template, list[Allocation]]:
    """Run a block's forward and backward beside the main trace and make a template of the events.

    `given` are the allocations of inputs, parameters and buffers; `places` are the indices of the inputs in it. Also
    returns the casts of weights before this block that the autocast cache held, and in training holds until its end.
    """
    numbers: _Numbers = dict(enumerate(given))
    with tracer.aside() as trace, torch.enable_grad():
        inputs = [_unshared_copy(leaf, tracer) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        input_tensors = [leaf for leaf in inputs if isinstance(leaf, Tensor)]
        for place, tensor in zip(places, input_tensors, strict=True):
            numbers[place] = tracer.memory.number_of(tensor)
        entries = [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in input_tensors]
        start = len(trace.events)
        args, kwargs = tree_unflatten(inputs, spec)
        output = inner(*args, **kwargs)
        found, form = tree_flatten(output)
        outputs = [leaf for leaf in found if isinstance(leaf, Tensor)]
        forward = _as_part(trace.events[start:], numbers, len(given), [_shape(tensor, tracer) for tensor in outputs])
        arrivals = [(place, tensor) for place, tensor in enumerate(outputs) if tensor.requires_grad]
        with tracer.paused():
            ends = [_Arrival.apply(tracer, numbers, -1 - place, t) for place, t in arrivals]  # type: ignore[no-untyped-call]
            arriving = [torch.empty_like(end) for end in ends]
        edges = [get_gradient_edge(end) for end in ends]
        own_numbers = [tracer.memory.number_of(tensor) for tensor in outputs]
        num_arrivals = len(arrivals)
        others = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in found]
        # Training holds no references either, so these tensors must be freed now.
        del output, found, outputs, args, kwargs, arrivals, ends, inputs, input_tensors, tensor
        start = len(trace.events)
        _clear_autocast_cache()
        own = {number: place for place, number in numbers.items()}
        gone = [event.allocation for event in trace.events[start:] if isinstance(event, Free)]
        lingers = [own[a.number] for a in gone if own.get(a.number, -1) >= len(given)]
        earlier = [allocation for allocation in gone if allocation.number not in own]
        for allocation in earlier:
            allocation.died = None  # it ended in the trace beside the main one alone
        keeps = [trace.allocations[numbers[place]].died is None for place in places]
        keeps_outputs = [trace.allocations[number].died is None for number in own_numbers]
        targets: list[Any] = [*(edge for edge in entries if edge is not None), *trainable]
        start = len(trace.events)
        with torch.autocast("cpu", enabled=False):  # training runs backward outside autocast
            computed = torch.autograd.grad(edges, targets, arriving, allow_unused=True) if edges and targets else ()
        gradients = iter(computed)
        results = [next(gradients, None) if entry is not None else None for entry in (*entries, *trainable)]
        shapes = [None if tensor is None else _shape(tensor, tracer) for tensor in results]
        backward = _as_part(trace.events[start:], numbers, len(given), shapes)
        _end_at_last_use(backward)
        del results, gradients, computed, edges, arriving, targets, entries
    return _Template(forward, backward, form, others, lingers, keeps, keeps_outputs, num_arrivals), earlier


class _Arrival(torch.autograd.Function):
    """Starts a block's backward with a gradient that only autograd references, as in training."""

    @staticmethod
    def forward(ctx: Any, tracer: Tracer, numbers: _Numbers, place: int, output: Tensor) -> Tensor:
        ctx.tracer, ctx.numbers, ctx.place = tracer, numbers, place
        return torch.empty_like(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with ctx.tracer.paused():
            fresh = torch.empty_like(gradient)
        ctx.numbers[ctx.place] = ctx.tracer.memory.number_of(fresh)
        return None, None, None, fresh


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> Any:
        ctx.call = call
        ctx.kept = call.needed(tensors)
        ctx.set_materialize_grads(False)  # zeros in the place of None would be traced as allocations
        outputs = call.forward()
        ctx.kept += call.needed_outputs(outputs)
        ctx.mark_non_differentiable(*(tensor for tensor in outputs if not tensor.is_floating_point()))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        found = ctx.call.backward(gradients)
        ctx.call = ctx.kept = None
        return None, *found


def _replay(tracer: Tracer, part: _TracePart, numbers: _Numbers, meshes: list[Any]) -> list[Tensor | None]:
    """Append the template's events to the trace in its current phase, and make the result tensors."""
    trace, phase = tracer.trace, tracer.phase
    events, allocations = trace.events, trace.allocations
    for event in part.events:
        if isinstance(event, Work):
            reads = tuple(numbers[n] for n in event.reads if n in numbers)
            writes = tuple(numbers[n] for n in event.writes if n in numbers)
            events.append(_same_work(event, phase, reads, writes))
        elif isinstance(event, Alloc):
            old = event.allocation
            fresh = Allocation(len(allocations), old.num_bytes, phase, old.kind, len(events), None, old.stream)
            numbers[old.number] = fresh.number
            allocations.append(fresh)
            events.append(Alloc(fresh))
        elif isinstance(event, Free):
            tracer.memory.free(allocations[numbers[event.allocation.number]])
        elif isinstance(event, Sent):
            touches = tuple(numbers[n] for n in event.touches if n in numbers)
            events.append(replace(event, message=replace(event.message, phase=phase), touches=touches))
    results: list[Tensor | None] = []
    with tracer.paused():
        for index, shape in enumerate(part.results):
            if shape is None or shape.number < 0:
                results.append(None)
                continue
            tensor, local = shape.make(meshes[index] if meshes else None)
            tracer.memory.adopt(local, allocations[numbers[shape.number]])
            results.append(tensor)
    return results


def _same_work(work: Work, phase: str, reads: tuple[int, ...], writes: tuple[int, ...]) -> Work:
    """A copy with other allocations; `dataclasses.replace` is too slow for this many events."""
    own = work.stream, work.calls, work.is_inner, work.pieces
    return Work(work.name, phase, work.flops, work.num_bytes, work.dtype, reads, writes, *own)


def _as_part(events: list[Event], numbers: _Numbers, given: int, shapes: list[_Shape | None]) -> _TracePart:
    """Renumber events from trace to template allocations. Adds the new allocations to `numbers`."""
    own = {number: place for place, number in numbers.items()}
    found: list[Event] = []
    for event in events:
        if isinstance(event, Alloc):
            old = event.allocation
            place = own[old.number] = max(len(numbers), max(own.values(), default=-1) + 1)
            numbers[place] = old.number
            found.append(Alloc(Allocation(place, old.num_bytes, "", old.kind, 0, None, old.stream)))
        elif isinstance(event, Free):
            place = own.get(event.allocation.number, -1)
            if place >= given:  # the caller owns the block's inputs, parameters and buffers
                found.append(Free(Allocation(place, 0, "")))
        elif isinstance(event, Work):
            reads = tuple(own[n] for n in event.reads if n in own)
            writes = tuple(own[n] for n in event.writes if n in own)
            found.append(_same_work(event, "", reads, writes))
        elif isinstance(event, Sent):
            found.append(replace(event, touches=tuple(own[n] for n in event.touches if n in own)))
    return _TracePart(found, [None if shape is None else replace(shape, number=own[shape.number]) for shape in shapes])


def _end_at_last_use(part: _TracePart) -> None:
    """Free allocations that only autocast held at the end of the recording, after the last operation that uses each."""
    born = {event.allocation.number for event in part.events if isinstance(event, Alloc)}
    born -= {event.allocation.number for event in part.events if isinstance(event, Free)}
    born -= {shape.number for shape in part.results if shape is not None}
    last: dict[int, int] = {}
    for position, event in enumerate(part.events):
        if isinstance(event, Work):
            last.update(dict.fromkeys((n for n in (*event.reads, *event.writes) if n in born), position))
    for number, position in sorted(last.items(), key=lambda pair: -pair[1]):
        part.events.insert(position + 1, Free(Allocation(number, 0, "")))


def _shape(tensor: Tensor, tracer: Tracer) -> _Shape:
    number = tracer.memory.number_of(tensor)
    if not isinstance(tensor, DTensor):
        return _Shape(tuple(tensor.shape), tensor.stride(), tensor.dtype, number)
    local = tensor.to_local()
    whole = tuple(tensor.shape), tuple(tensor.stride())
    return _Shape(tuple(local.shape), local.stride(), local.dtype, number, tensor.placements, whole)


class _Duplicate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise AssertionError("the recorded backward ends at this node")


def _unshared_copy(tensor: Tensor, tracer: Tracer) -> Tensor:
    """A copy of an input that only the block references, so that its lifetime shows whether backward needs it."""
    with tracer.paused():
        if not tensor.requires_grad:
            return torch.empty_like(tensor)
        return _Duplicate.apply(torch.empty_like(tensor).requires_grad_())  # type: ignore[no-any-return, no-untyped-call]


def _signature(tensor: Tensor) -> tuple[Any, ...]:
    """The metadata of a tensor on which an operation may depend."""
    placed = (tensor.placements, tuple(tensor.to_local().shape)) if isinstance(tensor, DTensor) else ()
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad, *placed


def _is_simple(value: Any) -> bool:
    return value is None or type(value) in (int, float, bool, str)


def _is_nested(block: nn.Module) -> bool:
    """Whether a module inside the block is an FSDP unit, whose hooks must run."""
    return any(isinstance(module, FSDPModule) for module in block.modules() if module is not block)
