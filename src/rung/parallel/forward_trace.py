"""Trace a model's forward on fake tensors: the order of module calls and the data flow between them.

The tracer runs the model's own Python code, so forward may be written in any way; there is no fx or export graph.
Tensor and pipeline parallelism read from the trace which modules run, their shapes, inputs and parameters.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from rung.distributed import fake_world
from rung.distributed.torch_private import (
    TorchDispatchMode,
    schema,
    storage_id,
    tree_flatten,
    tree_map_only,
)
from rung.parallel.assumed_values import AssumedValues
from rung.parallel.blocks import describe
from rung.parallel.constants import Constants
from rung.parallel.conversions import conversions_in_forward
from rung.parallel.materialize import put_tensor
from rung.parallel.trace_errors import explain_assumption, explain_failure, user_line

# Origin of a tensor: (call, index of the tensor in its output); or, as a string, the name of a parameter that code
# outside any watched call uses, or random numbers drawn there.
Source = tuple[int, int] | str
_RANDOM = "random numbers "


@dataclass
class Call:
    """One call of a watched module, with fake tensors as arguments and output."""

    index: int
    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None
    needs: set[Source] = field(default_factory=set)
    parameters: set[str] = field(default_factory=set)
    changes: set[Source] = field(default_factory=set)  # results of other calls that it modifies in place
    flops: int = 0
    reads_values: str = ""  # the first line in it whose result, or its shape, depends on the values of tensors

    def output_tensors(self) -> list[Tensor]:
        return tensors_of(self.output)


@dataclass
class ForwardTrace:
    calls: list[Call]
    output: Any = None
    needs: set[Source] = field(default_factory=set)  # sources of the output
    unused: list[str] = field(default_factory=list)  # parameters that no operation reads
    changed: set[Source] = field(default_factory=set)  # results that code between the calls modifies in place
    # Calls that made a tensor which other code uses although they did not return it -> the line that uses it.
    leaks: dict[int, str] = field(default_factory=dict)
    read_between: set[tuple[int, int]] = field(default_factory=set)  # results that code between the calls reads
    # Buffers that forward modifies -> the calls that do it; -1 stands for code between calls.
    buffers: dict[str, set[int]] = field(default_factory=dict)


def trace_forward(
    model: nn.Module,
    run: Callable[[], Any],
    is_watched: Callable[[str, nn.Module], bool],
    *,
    device: torch.device,
    mode: Any = None,
    parameter_dtype: torch.dtype | None = None,
    repeats: bool = False,
    may_decide: Callable[[str, nn.Module], bool] | None = None,
) -> ForwardTrace:
    """Call `run` (which calls the model on a batch) with fake parameters and buffers, and record the watched calls.

    Calls of a watched module inside another watched module belong to the outer one. `parameter_dtype` is the dtype
    in which sharded parameters are gathered. With `repeats`, identical calls run once and are replayed after that.
    Inside the modules that `may_decide` names, the watched ones by default, forward may read values of tensors.
    """
    may_decide = may_decide or is_watched
    mode = mode or fake_world.new_fake_mode()
    flow = _DataFlow()
    with fake_world.imagined(mode), _fake_tensors(model, device, parameter_dtype) as (names, buffers), torch.no_grad():
        flow.names, flow.buffer_names = names, buffers
        known: dict[Any, tuple[Call, bool]] | None = {} if repeats else None
        # Innermost first: a module that is both is observed around its runs with other assumed values.
        undo = [_assume_values(module, flow) for name, module in model.named_modules() if may_decide(name, module)]
        watched = [(name, module) for name, module in model.named_modules() if is_watched(name, module)]
        undo += [_observe(module, name, flow, known) for name, module in watched]
        try:
            with flow, conversions_in_forward(), fake_world.numbers_in_words():
                output = run()
            flow.find_leaks(tensors_of(output), None)
            flow.note_replaced("", model, None)
        except Exception as error:
            raise explain_failure(error) from error
        finally:
            for restore in reversed(undo):
                restore()
    used = set().union(*(call.parameters for call in flow.calls), flow.used_outside)
    result = ForwardTrace(flow.calls, output, flow.sources_of(output))
    result.unused = sorted(set(names.values()) - used)
    result.changed, result.leaks, result.buffers = flow.changed, flow.leaks, flow.buffers
    result.read_between = flow.read_between
    return result


def signature(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf)


def tensors_of(data: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(data)[0] if isinstance(leaf, Tensor)]


def is_random(source: Source) -> bool:
    return isinstance(source, str) and source.startswith(_RANDOM)


class _DataFlow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records for every operation the call it belongs to and the results and parameters it depends on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: dict[int, str] = {}
        self.calls: list[Call] = []
        self.used_outside: set[str] = set()
        self._open: list[Call] = []
        self.buffer_names: dict[int, str] = {}
        self.buffers: dict[str, set[int]] = {}
        self.leaks: dict[int, str] = {}
        self.read_between: set[tuple[int, int]] = set()
        self._outputs: dict[int, tuple[int, int]] = {}  # tensors that calls returned -> the call and its place
        self._made: dict[int, int] = {}  # tensors that depend on weights -> the call that made them
        self._between: set[int] = set()  # storages allocated by code between the calls
        self._overwritten: dict[int, int] = {}  # those of them that a call wrote to -> the call
        self._num_random = 0
        self._constants = Constants()
        self.assumed: AssumedValues | None = None  # set inside modules that may decide by values
        self.changed: set[Source] = set()
        self._sources: dict[int, set[Source]] = {}
        # By storage, since views share it: sources written into it, and the results that live in it.
        self._written: dict[int, set[Source]] = {}
        self._results: dict[int, set[Source]] = {}
        self._alive: list[Tensor] = []  # keeps tensors alive, so that Python cannot reuse an id()

    @property
    def is_inside(self) -> bool:
        return bool(self._open)

    def sources_of(self, data: Any) -> set[Source]:
        found: set[Source] = set()
        for tensor in tensors_of(data):
            found |= self._sources.get(id(tensor), set())
            found |= self._written.get(_storage(tensor), set())
            if id(tensor) in self.names:
                found.add(self.names[id(tensor)])
        return found

    def begin(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        call = Call(len(self.calls), name, module, args, kwargs, needs=self.sources_of((args, kwargs)))
        self.calls.append(call)
        self._open.append(call)
        return call

    def end(self, call: Call, output: Any) -> None:
        # The containers of the output anew: code after the call may change them (transformers' CLIP does).
        call.output = tree_map_only(Tensor, lambda tensor: tensor, output)
        self._open.pop()
        for leaf, tensor in enumerate(tensors_of(output)):
            self._remember(tensor, {(call.index, leaf)})
            self._outputs[id(tensor)] = call.index, leaf
            self._results.setdefault(_storage(tensor), set()).add((call.index, leaf))

    def find_leaks(self, used: list[Tensor], by: Call | None) -> None:
        """Note tensors that a call made but did not return, if `by` uses them: a pipeline could not send them."""
        for tensor in used:
            maker = self._made.get(id(tensor)) if id(tensor) not in self._sources else None
            maker = self._overwritten.get(_storage(tensor), maker)
            if maker is not None and (by is None or by.index != maker):
                self.leaks.setdefault(maker, user_line(traceback.extract_stack()))

    def mark(self) -> tuple[int, int]:
        return len(self.calls), len(self._open)

    def rewind(self, mark: tuple[int, int]) -> None:
        """Forget the calls that began after the mark: their module runs again."""
        del self.calls[mark[0] :], self._open[mark[1] :]
        for call in self._open:
            call.flops = 0

    def _note_decision(self) -> None:
        for call in self._open:
            call.reads_values = call.reads_values or user_line(traceback.extract_stack())
            # Other values may lead through other branches, so it may use any of its parameters.
            call.parameters |= {self.names[id(parameter)] for parameter in call.module.parameters()}

    def note_buffer(self, name: str | None, call: Call | None) -> None:
        if name is not None:
            self.buffers.setdefault(name, set()).add(-1 if call is None else call.index)

    def note_replaced(self, path: str, module: nn.Module, call: Call | None) -> None:
        """Note buffers in `module` to which forward assigned a new tensor."""
        for name, buffer in module.named_buffers(path, remove_duplicate=False):
            if id(buffer) not in self.buffer_names:
                self.note_buffer(name, call)
                self.buffer_names[id(buffer)] = name
                self._alive.append(buffer)

    def _remember(self, tensor: Tensor, sources: set[Source]) -> None:
        self._sources[id(tensor)] = sources
        self._alive.append(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tensors_of((args, kwargs))
        if self.assumed is not None:
            args = self.assumed.fitted(func, args)
        try:
            output = func(*args, **kwargs)
        except fake_world.NEEDS_VALUES:
            output = self._constants.result(func, args, kwargs)
            if output is NotImplemented and self.assumed is not None:
                self._note_decision()
                output = self.assumed.result(func, args, kwargs)
            if output is NotImplemented:
                raise
        written = _changed_by(func, args, kwargs)
        self._constants.forget(written)
        self._constants.note(func, args, kwargs, given, output)
        if func is torch.ops.aten.rand.default and not args[0]:
            # A scalar draw decides whether to skip a layer (LayerDrop). A pipeline needs every layer to run, so return
            # the largest float32 below 1, with which none is skipped.
            output = torch.tensor(1 - 2**-24, dtype=output.dtype, device=output.device)
        parameters = {self.names[id(tensor)] for tensor in given if id(tensor) in self.names}
        if self._open:
            call = self._open[-1]
            call.parameters |= parameters
            for tensor in given:  # includes tensors that forward reads from attributes or closures
                call.needs |= self._sources.get(id(tensor), set())
            self.find_leaks(given, call)
            for tensor in written:
                self.note_buffer(self.buffer_names.get(id(tensor)), call)
                call.changes |= self._results.get(_storage(tensor), set())
                if _storage(tensor) in self._between:
                    self._overwritten[_storage(tensor)] = call.index
            if parameters or any(self._sources.get(id(t)) or id(t) in self._made for t in given):
                for tensor in tensors_of(output):
                    self._made.setdefault(id(tensor), call.index)
                    self._alive.append(tensor)
            count = flop_registry.get(func.overloadpacket)
            if count is not None:
                with contextlib.suppress(
                    Exception
                ):  # FLOPs only balance stages: a formula that fails must not end the trace
                    call.flops += int(count(*args, **kwargs, out_val=output))
            return output
        self.used_outside |= parameters
        self.read_between |= {self._outputs[id(tensor)] for tensor in given if id(tensor) in self._outputs}
        self.find_leaks(given, None)
        sources = self.sources_of(given)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._num_random += 1
            sources = {*sources, f"{_RANDOM}{self._num_random}"}
        for tensor in written:
            self.note_buffer(self.buffer_names.get(id(tensor)), None)
            self._written.setdefault(_storage(tensor), set()).update(sources)
            self.changed |= self._results.get(_storage(tensor), set())
        for tensor in tensors_of(output):
            self._remember(tensor, sources)
            if _storage(tensor) not in self._results:
                self._between.add(_storage(tensor))
        return output


def _storage(tensor: Tensor) -> int:
    return storage_id(tensor.untyped_storage())


def _changed_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that an operation writes to."""
    written = [a.alias_info is not None and a.alias_info.is_write for a in schema(func).arguments]
    by_name = {a.name for a, is_written in zip(schema(func).arguments, written, strict=True) if is_written}
    places = [arg for arg, is_written in zip(args, written, strict=False) if is_written]
    return tensors_of((places, [value for key, value in kwargs.items() if key in by_name]))


def _assume_values(module: nn.Module, flow: _DataFlow) -> Callable[[], None]:
    """Let forward read values, and run it again with others if the assumed ones lead into an error."""

    def replaced(forward: Callable[..., Any]) -> Callable[..., Any]:
        def deciding(*args: Any, **kwargs: Any) -> Any:
            if flow.assumed is not None:
                return forward(*args, **kwargs)
            flow.assumed = assumed = AssumedValues()
            mark, failure = flow.mark(), None
            try:
                while True:
                    try:
                        return forward(*args, **kwargs)
                    except Exception as error:
                        failure = failure or error
                        if not assumed.line:
                            raise
                        if not assumed.change_answer():
                            raise explain_assumption(failure, assumed.line) from failure
                        flow.rewind(mark)
            finally:
                flow.assumed = None

        return deciding

    return _replace_forward(module, replaced)


def _observe(
    module: nn.Module, name: str, flow: _DataFlow, known: dict[Any, tuple[Call, bool]] | None
) -> Callable[[], None]:
    def replaced(forward: Callable[..., Any]) -> Callable[..., Any]:
        def observed(*args: Any, **kwargs: Any) -> Any:
            if flow.is_inside:
                return forward(*args, **kwargs)
            call = flow.begin(name, module, args, kwargs)
            key = None if known is None else _replay_key(module, args, kwargs)
            if known is not None and key in known and known[key][1]:
                output = _replay(known[key][0], call)
            else:
                before = len(flow.buffers), set(call.needs)
                output = forward(*args, **kwargs)
                flow.note_replaced(name, module, call)
                same = before == (len(flow.buffers), call.needs) and not call.changes
                if known is not None and key is not None:
                    known[key] = call, same and _is_new(output, args, kwargs)
            flow.end(call, output)
            return output

        return observed

    return _replace_forward(module, replaced)


def _replace_forward(
    module: nn.Module, replaced: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[], None]:
    """Set `forward` to what `replaced` makes of it; returns a function that restores it."""
    forward = module.forward
    was_own = "forward" in vars(module)
    module.forward = replaced(forward)

    def restore() -> None:
        if was_own:
            module.forward = forward
        else:
            del module.forward

    return restore


def _replay_key(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The key under which a call's record can be replayed for another call; None if an argument has no key."""
    leaves, structure = tree_flatten((args, kwargs))
    simple = (int, float, bool, str, type(None))
    if not all(isinstance(leaf, (Tensor, *simple)) for leaf in leaves):
        return None
    return describe(module), str(structure), *(signature(leaf) for leaf in leaves), module.training


def _is_new(output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call returns new tensors, no two over one storage and none a view of an argument."""
    given = {_storage(tensor) for tensor in tensors_of((args, kwargs))}
    found = [_storage(tensor) for tensor in tensors_of(output)]
    return len(set(found)) == len(found) and not given & set(found)


def _replay(known: Call, call: Call) -> Any:
    """Fill in `call` from an identical one, and return fake outputs without running the module."""
    call.parameters = {f"{call.name}.{name.removeprefix(f'{known.name}.')}" for name in known.parameters}
    call.flops, call.reads_values = known.flops, known.reads_values
    # `empty_like` would be recorded as an operation on the known call's output, and add a dependency on it.
    return tree_map_only(
        Tensor, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device), known.output
    )


@contextlib.contextmanager
def _fake_tensors(
    model: nn.Module, device: torch.device, parameter_dtype: torch.dtype | None
) -> Iterator[tuple[dict[int, str], dict[int, str]]]:
    """Replace the model's tensors by fake ones for the duration. Yields the names of parameters and buffers by id."""
    names: dict[int, str] = {}
    buffers: dict[int, str] = {}
    fakes: dict[int, Tensor] = {}
    kept: list[tuple[nn.Module, str, Tensor]] = []
    known = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    for owner in model.modules():
        for is_parameter, named in ((True, owner.named_parameters), (False, owner.named_buffers)):
            for key, tensor in list(named(recurse=False, remove_duplicate=False)):
                if id(tensor) not in fakes:
                    dtype = tensor.dtype
                    if is_parameter and parameter_dtype is not None and tensor.is_floating_point():
                        dtype = parameter_dtype
                    fake = torch.empty(tensor.shape, dtype=dtype, device=device)
                    fakes[id(tensor)] = nn.Parameter(fake, requires_grad=False) if is_parameter else fake
                    (names if is_parameter else buffers)[id(fakes[id(tensor)])] = known[id(tensor)]
                kept.append((owner, key, tensor))
                put_tensor(owner, key, fakes[id(tensor)])
    try:
        yield names, buffers
    finally:
        for owner, key, tensor in kept:
            put_tensor(owner, key, tensor)
