"""Blocks that are alike are dry-run once: what a block did is noted, and told again for each one like it.

A block's forward and backward become one node of autograd each way. The first time, the block itself runs inside of it
and the tracer's events are kept; after that they are put into the trace with other allocations in their place, and no
operation is called. Everything around a block is as ever: hooks that gather and reduce, buckets, schedules, updates.
Gradients of a block's parameters come all at its end rather than one by one, which is the one difference that a trace
shows (`tests/fake/test_repeat.py` holds the two against each other).
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
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from rung import fakes
from rung.parallel.blocks import describe
from rung.trace import Allocation, Event, Returned, Sent, Taken, Tracer, Work

# In a template allocations have numbers of their own: those that a block is given come first.
_Numbers = dict[int, int]
_drop_casts = torch.clear_autocast_cache


@dataclass(frozen=True)
class _Shape:
    """Enough of a tensor to make one like it."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    number: int  # of its allocation in the template
    placements: Any = None  # if it is a part of a whole
    whole: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def make(self, mesh: Any) -> tuple[Tensor, Tensor]:
        """The tensor, and the one that holds its memory."""
        local = torch.empty_strided(self.size, self.stride, dtype=self.dtype)
        if self.placements is None:
            return local, local
        assert self.whole is not None
        size, stride = torch.Size(self.whole[0]), self.whole[1]
        tensor = DTensor.from_local(local, mesh, self.placements, run_check=False, shape=size, stride=stride)
        return tensor, local


@dataclass
class _Part:
    """One way through a block, as a row of events."""

    events: list[Event]
    results: list[_Shape | None]


@dataclass
class _Template:
    """What a block did. It was given its inputs, parameters and buffers."""

    forward: _Part
    backward: _Part
    form: TreeSpec  # of its output
    others: list[Any]  # leaves of the output that are no tensors, None where there is a tensor
    lingers: list[int]  # what autocast keeps until it ends
    keeps: list[bool]  # which of the inputs are needed in backward


@dataclass
class Repeats:
    """Templates of one task's blocks."""

    tracer: Tracer | None = None
    setting: tuple[Any, ...] = ()  # what else a block's work depends on
    templates: dict[Any, _Template] = field(default_factory=dict)
    _lingering: list[Allocation] = field(default_factory=list)

    @contextlib.contextmanager
    def told_to(self, tracer: Tracer) -> Iterator[None]:
        """While inside, what blocks do is told to this tracer."""

        def release() -> None:
            for allocation in self._lingering:
                tracer.give_back(allocation)
            self._lingering.clear()

        self.tracer = tracer
        try:
            with fakes.when_autocast_ends(release):
                yield
        finally:
            self.tracer = None
            self._lingering.clear()

    def wrap(self, block: nn.Module) -> None:
        """Let a block run through its template, if there is one when it is called."""
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
                *(_look(tensor) for tensor in (*tensors, *parameters)),
            )
            tracer.see_phase()
            numbers = [tracer.number_of(tensor) for tensor in (*tensors, *parameters, *block.buffers())]
            given = list(dict.fromkeys(numbers))
            places = [given.index(number) for number in numbers]
            key = key, tuple(places)
            trainable = [parameter for parameter in parameters if parameter.requires_grad]
            if key not in self.templates:
                self.templates[key] = _experiment(tracer, inner, leaves, spec, given, places[: len(tensors)], trainable)
            call = _Call(self.templates[key], tracer, given, trainable)
            found = _Block.apply(call, *tensors, *trainable)  # type: ignore[no-untyped-call]
            self._lingering += call.lingering
            return call.output(found if isinstance(found, tuple) else (found,))

        block.forward = forward


class _Call:
    """One call of a block."""

    def __init__(self, template: _Template, tracer: Tracer, given: list[int], trainable: Sequence[Tensor]) -> None:
        self._template, self._tracer, self._trainable = template, tracer, trainable
        self.lingering: list[Allocation] = []
        self._numbers: _Numbers = dict(enumerate(given))

    def forward(self) -> tuple[Tensor, ...]:
        self._tracer.see_phase()
        outputs = _play(self._tracer, self._template.forward, self._numbers, [])
        allocations = self._tracer.trace.allocations
        self.lingering = [allocations[self._numbers[place]] for place in self._template.lingers]
        return tuple(tensor for tensor in outputs if tensor is not None)

    def needed(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The inputs that live until backward."""
        return [tensor for tensor, keeps in zip(tensors, self._template.keeps, strict=False) if keeps]

    def output(self, found: tuple[Tensor, ...]) -> Any:
        """The block's output, with its tensors in their places."""
        fresh = iter(found)
        return tree_unflatten([next(fresh) if x is None else x for x in self._template.others], self._template.form)

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        tracer, part = self._tracer, self._template.backward
        tracer.see_phase()
        numbers = self._numbers
        for place, gradient in enumerate(gradients):
            if gradient is not None:
                numbers[-1 - place] = tracer.number_of(gradient)
        owners: list[Any] = [None] * (len(part.results) - len(self._trainable))
        owners += [p.device_mesh if isinstance(p, DTensor) else None for p in self._trainable]
        results = _play(tracer, part, numbers, owners)
        # What was added to a gradient that came, in its place, is that gradient.
        return [
            gradients[-1 - shape.number] if shape is not None and shape.number < 0 else result
            for result, shape in zip(results, part.results, strict=True)
        ]


def _experiment(
    tracer: Tracer,
    inner: Callable[..., Any],
    leaves: list[Any],
    spec: TreeSpec,
    given: list[int],
    places: list[int],
    trainable: Sequence[Tensor],
) -> _Template:
    """Run a block forward and backward, beside the trace, and keep what it did.

    `given` are the allocations of inputs, parameters and buffers, and `places` says which of these the inputs are.
    """
    numbers: _Numbers = dict(enumerate(given))
    with tracer.aside() as trace, torch.enable_grad():
        inputs = [_stand_in(leaf, tracer) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        asked = [leaf for leaf in inputs if isinstance(leaf, Tensor)]
        for place, tensor in zip(places, asked, strict=True):
            numbers[place] = tracer.number_of(tensor)
        entries = [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in asked]
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
        others = [None if isinstance(leaf, Tensor) else leaf for leaf in found]
        # In training they would not be held either.
        del output, found, outputs, args, kwargs, arrivals, ends, inputs, asked, tensor
        start = len(trace.events)
        _drop_casts()
        own = {number: place for place, number in numbers.items()}
        gone = [own[e.allocation.number] for e in trace.events[start:] if isinstance(e, Returned)]
        lingers = [place for place in gone if place >= len(given)]
        keeps = [trace.allocations[numbers[place]].died is None for place in places]
        wanted: list[Any] = [*(edge for edge in entries if edge is not None), *trainable]
        start = len(trace.events)
        with torch.autocast("cpu", enabled=False):  # as around a backward in training
            computed = torch.autograd.grad(edges, wanted, arriving, allow_unused=True) if edges and wanted else ()
        gradients = iter(computed)
        results = [next(gradients, None) if entry is not None else None for entry in (*entries, *trainable)]
        shapes = [None if tensor is None else _shape(tensor, tracer) for tensor in results]
        backward = _as_part(trace.events[start:], numbers, len(given), shapes)
        _end_at_last_use(backward)
        del results, gradients, computed, edges, arriving, wanted, entries
    return _Template(forward, backward, form, others, lingers, keeps)


class _Arrival(torch.autograd.Function):
    """Where a block's backward begins: with a gradient that nobody holds but autograd, as it is in training."""

    @staticmethod
    def forward(ctx: Any, tracer: Tracer, numbers: _Numbers, place: int, output: Tensor) -> Tensor:
        ctx.tracer, ctx.numbers, ctx.place = tracer, numbers, place
        return torch.empty_like(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with ctx.tracer.paused():
            fresh = torch.empty_like(gradient)
        ctx.numbers[ctx.place] = ctx.tracer.number_of(fresh)
        return None, None, None, fresh


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> Any:
        ctx.call = call
        ctx.kept = call.needed(tensors)
        ctx.set_materialize_grads(False)
        outputs = call.forward()
        ctx.mark_non_differentiable(*(tensor for tensor in outputs if not tensor.is_floating_point()))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        found = ctx.call.backward(gradients)
        ctx.call = ctx.kept = None
        return None, *found


def _play(tracer: Tracer, part: _Part, numbers: _Numbers, meshes: list[Any]) -> list[Tensor | None]:
    """Put the events into the trace, as of the phase that it is in, and make what came out."""
    trace, phase = tracer.trace, tracer.phase
    events, allocations = trace.events, trace.allocations
    for event in part.events:
        if isinstance(event, Work):
            reads = tuple(numbers[n] for n in event.reads if n in numbers)
            writes = tuple(numbers[n] for n in event.writes if n in numbers)
            events.append(_same_work(event, phase, reads, writes))
        elif isinstance(event, Taken):
            old = event.allocation
            fresh = Allocation(len(allocations), old.num_bytes, phase, old.kind, len(events), None, old.stream)
            numbers[old.number] = fresh.number
            allocations.append(fresh)
            events.append(Taken(fresh))
        elif isinstance(event, Returned):
            tracer.give_back(allocations[numbers[event.allocation.number]])
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
            tracer.adopt(local, allocations[numbers[shape.number]])
            results.append(tensor)
    return results


def _same_work(work: Work, phase: str, reads: tuple[int, ...], writes: tuple[int, ...]) -> Work:
    """As `dataclasses.replace`, which is slow where there are many."""
    return Work(work.name, phase, work.flops, work.num_bytes, work.dtype, reads, writes, work.stream)


def _as_part(events: list[Event], numbers: _Numbers, given: int, shapes: list[_Shape | None]) -> _Part:
    """Events with the template's own numbers in the place of the trace's. `numbers` gets those of what was born."""
    own = {number: place for place, number in numbers.items()}
    found: list[Event] = []
    for event in events:
        if isinstance(event, Taken):
            old = event.allocation
            place = own[old.number] = max(len(numbers), max(own.values(), default=-1) + 1)
            numbers[place] = old.number
            found.append(Taken(Allocation(place, old.num_bytes, "", old.kind, 0, None, old.stream)))
        elif isinstance(event, Returned):
            place = own.get(event.allocation.number, -1)
            if place >= given:  # what a block is given belongs to others
                found.append(Returned(Allocation(place, 0, "")))
        elif isinstance(event, Work):
            reads = tuple(own[n] for n in event.reads if n in own)
            writes = tuple(own[n] for n in event.writes if n in own)
            found.append(_same_work(event, "", reads, writes))
        elif isinstance(event, Sent):
            found.append(replace(event, touches=tuple(own[n] for n in event.touches if n in own)))
    return _Part(found, [None if shape is None else replace(shape, number=own[shape.number]) for shape in shapes])


def _end_at_last_use(part: _Part) -> None:
    """What was still held when the experiment ended, by autocast alone, goes after the last operation that reads it."""
    born = {event.allocation.number for event in part.events if isinstance(event, Taken)}
    born -= {event.allocation.number for event in part.events if isinstance(event, Returned)}
    born -= {shape.number for shape in part.results if shape is not None}
    last: dict[int, int] = {}
    for position, event in enumerate(part.events):
        if isinstance(event, Work):
            last.update(dict.fromkeys((n for n in (*event.reads, *event.writes) if n in born), position))
    for number, position in sorted(last.items(), key=lambda pair: -pair[1]):
        part.events.insert(position + 1, Returned(Allocation(number, 0, "")))


def _shape(tensor: Tensor, tracer: Tracer) -> _Shape:
    number = tracer.number_of(tensor)
    if not isinstance(tensor, DTensor):
        return _Shape(tuple(tensor.shape), tensor.stride(), tensor.dtype, number)
    local = tensor.to_local()
    whole = tuple(tensor.shape), tuple(tensor.stride())
    return _Shape(tuple(local.shape), local.stride(), local.dtype, number, tensor.placements, whole)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise AssertionError("gradients are asked for here")


def _stand_in(tensor: Tensor, tracer: Tracer) -> Tensor:
    """A tensor like an input, held by nobody else, so that its end shows whether backward needs it."""
    with tracer.paused():
        if not tensor.requires_grad:
            return torch.empty_like(tensor)
        return _Copy.apply(torch.empty_like(tensor).requires_grad_())  # type: ignore[no-any-return, no-untyped-call]


def _look(tensor: Tensor) -> tuple[Any, ...]:
    """What an operation can see of a tensor without its values."""
    placed = (tensor.placements, tuple(tensor.to_local().shape)) if isinstance(tensor, DTensor) else ()
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad, *placed


def _is_simple(value: Any) -> bool:
    return value is None or type(value) in (int, float, bool, str)


def _is_nested(block: nn.Module) -> bool:
    """Whether something inside is sharded by itself: its hooks must run."""
    return any(isinstance(module, FSDPModule) for module in block.modules() if module is not block)
