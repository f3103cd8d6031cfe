"""A model's forward run once on tensors without data: what is called in which order, and what depends on what.

The rehearsal follows the model's own code, so it needs no tracing and no promise about how forward is written. Tensor
and pipeline parallelism read from it which modules run, on which shapes, from whose results, with whose parameters.
"""

from __future__ import annotations

import contextlib
import copy
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.flop_counter import flop_registry

from rung import fakes
from rung.errors import ModelError
from rung.parallel.blocks import describe
from rung.parallel.materialize import put_tensor

# Where a tensor comes from: the call whose result it is and which of its tensors; or, by name, a parameter that was
# used outside of any call; or random numbers that were drawn there.
Source = tuple[int, int] | str
_RANDOM = "random numbers "


@dataclass
class Call:
    """One call of a watched module. Tensors are fake: they have a shape, a type and a device."""

    index: int
    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None
    needs: set[Source] = field(default_factory=set)
    parameters: set[str] = field(default_factory=set)
    changes: set[Source] = field(default_factory=set)  # results of other calls that it changes in place
    flops: int = 0

    def output_tensors(self) -> list[Tensor]:
        return tensors_of(self.output)


@dataclass
class Rehearsal:
    calls: list[Call]
    output: Any = None
    needs: set[Source] = field(default_factory=set)  # of the output
    unused: list[str] = field(default_factory=list)  # parameters that no operation touched
    changed: set[Source] = field(default_factory=set)  # results that code between the calls changes in place
    # Calls of which something is used elsewhere that they did not return, and the line that uses it.
    leaks: dict[int, str] = field(default_factory=dict)
    # Buffers that forward changes: the calls that do, with -1 for code between calls.
    buffers: dict[str, set[int]] = field(default_factory=dict)


def rehearse(
    model: nn.Module,
    run: Callable[[], Any],
    is_watched: Callable[[str, nn.Module], bool],
    *,
    device: torch.device,
    mode: Any = None,
    parameter_dtype: torch.dtype | None = None,
    repeats: bool = False,
) -> Rehearsal:
    """Call `run` (which calls the model on a batch) while every parameter and buffer holds no data.

    A watched module inside another watched one is part of that one. `parameter_dtype` stands for the type in which
    sharded parameters are gathered. With `repeats`, of calls that are alike only the first is run.
    """
    mode = mode or fakes.new_fake_mode()
    watch = _Watch({})
    with fakes.imagined(mode), _without_data(model, device, parameter_dtype) as (names, buffers), torch.no_grad():
        watch.names, watch.buffer_names = names, buffers
        known: dict[Any, tuple[Call, bool]] | None = {} if repeats else None
        watched = [(name, module) for name, module in model.named_modules() if is_watched(name, module)]
        undo = [_observe(module, name, watch, known) for name, module in watched]
        try:
            with watch:
                output = run()
            watch.look_for_leaks(tensors_of(output), None)
            for module_name, module in model.named_modules():  # a buffer that was replaced by another tensor
                for key, tensor in module._buffers.items():
                    if tensor is not None and id(tensor) not in buffers:
                        watch.note_buffer(f"{module_name}.{key}".lstrip("."), None)
        except Exception as error:
            raise explain_failure(error) from error
        finally:
            for restore in reversed(undo):
                restore()
    used = set().union(*(call.parameters for call in watch.calls), watch.loose)
    result = Rehearsal(watch.calls, output, watch.sources_of(output))
    result.unused = sorted(set(names.values()) - used)
    result.changed, result.leaks, result.buffers = watch.changed, watch.leaks, watch.buffers
    return result


class Rehearser:
    """Rehearses batches of a task as they come, each form once.

    It works on a copy of the model, without data and as the task made it: what spreads a model puts communication into
    it, which a rehearsal must not start.
    """

    def __init__(
        self, model: nn.Module, run: Callable[[nn.Module, Any], Any], device: torch.device, mode: Any = None
    ) -> None:
        self.twin = copy_without_data(model)
        self.device = device
        self.mode = mode or fakes.new_fake_mode()
        self.parameter_dtype: torch.dtype | None = None
        self.repeats = False  # for a quick look: of parts that are alike one is run
        self.is_part: Callable[[str, nn.Module], bool] = lambda name, module: False
        self._run = run
        self._known: dict[Any, Rehearsal] = {}

    def fake(self, batch: Any) -> Any:
        """The batch without data."""
        return tree_map_only(Tensor, self._fake, batch)

    def run(self, batch: Any) -> Callable[[], Any]:
        faked = self.fake(batch)
        return lambda: self._run(self.twin, faked)

    def __call__(self, batch: Any, *, training: bool = True) -> Rehearsal:
        leaves, form = tree_flatten(batch)
        key = (training, str(form), *(_form(leaf) for leaf in leaves))
        if key not in self._known:
            self.twin.train(training)
            self._known[key] = rehearse(
                self.twin,
                self.run(batch),
                self.is_part,
                device=self.device,
                mode=self.mode,
                parameter_dtype=self.parameter_dtype,
                repeats=self.repeats,
            )
        return self._known[key]

    def _fake(self, tensor: Tensor) -> Tensor:
        with fakes.imagined(self.mode):
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)


def copy_without_data(model: nn.Module) -> nn.Module:
    """The same modules, with tensors on the meta device."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and id(tensor) not in memo:
                bare = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                is_parameter = isinstance(tensor, nn.Parameter)
                memo[id(tensor)] = nn.Parameter(bare, requires_grad=tensor.requires_grad) if is_parameter else bare
    return copy.deepcopy(model, memo)


def _form(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf)


def tensors_of(data: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(data)[0] if isinstance(leaf, Tensor)]


def explain_failure(error: Exception) -> ModelError:
    """The line of the model at which a forward without data could not go on."""
    line = user_line(traceback.extract_tb(error.__traceback__))
    place = f"{line}\n" if line else ""
    kind = type(error).__name__
    if kind in ("DataDependentOutputException", "GuardOnDataDependentSymNode", "DynamicOutputShapeException"):
        reason = (
            "forward decides by the values of tensors here, which are not known before it runs. A model can be cut "
            "into stages or tensors only if the same operations run for every batch. Use a data-parallel strategy, or "
            "rewrite the line without a decision (torch.where)."
        )
    else:
        first = str(error).strip().splitlines()
        reason = f"forward could not be followed on tensors without data: {kind}: {first[0] if first else ''}"
    return ModelError(f"{place}{reason}")


def user_line(stack: traceback.StackSummary) -> str:
    """The innermost line that is neither torch's nor Rung's."""
    libraries = (Path(__file__).parent.parent, Path(torch.__file__).parent)
    own = [f for f in stack if not any(Path(f.filename).is_relative_to(library) for library in libraries)]
    return f"{own[-1].filename}:{own[-1].lineno}: {own[-1].line}" if own else ""


def is_random(source: Source) -> bool:
    return isinstance(source, str) and source.startswith(_RANDOM)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows every operation: which call it is part of, which results and parameters it depends on."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = names
        self.calls: list[Call] = []
        self.loose: set[str] = set()
        self._open: list[Call] = []
        self.buffer_names: dict[int, str] = {}
        self.buffers: dict[str, set[int]] = {}
        self.leaks: dict[int, str] = {}
        self._made: dict[int, int] = {}  # what depends on weights and was made inside a call
        self._between: set[int] = set()  # memory of what code between the calls made
        self._disturbed: dict[int, int] = {}  # such memory that a call changed
        self._num_random = 0
        self.changed: set[Source] = set()
        self._sources: dict[int, set[Source]] = {}
        # By memory, which several tensors may share: what was written into it, and whose result it is.
        self._written: dict[int, set[Source]] = {}
        self._results: dict[int, set[Source]] = {}
        self._alive: list[Tensor] = []  # so that an identity stays one tensor's

    @property
    def is_inside(self) -> bool:
        return bool(self._open)

    def sources_of(self, data: Any) -> set[Source]:
        found: set[Source] = set()
        for tensor in tensors_of(data):
            found |= self._sources.get(id(tensor), set())
            found |= self._written.get(_memory(tensor), set())
            if id(tensor) in self.names:
                found.add(self.names[id(tensor)])
        return found

    def begin(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        call = Call(len(self.calls), name, module, args, kwargs, needs=self.sources_of((args, kwargs)))
        self.calls.append(call)
        self._open.append(call)
        return call

    def end(self, call: Call, output: Any) -> None:
        call.output = output
        self._open.pop()
        for leaf, tensor in enumerate(tensors_of(output)):
            self._remember(tensor, {(call.index, leaf)})
            self._results.setdefault(_memory(tensor), set()).add((call.index, leaf))

    def look_for_leaks(self, used: list[Tensor], by: Call | None) -> None:
        """Something that a call made and did not return, used by other code: nobody could hand it on."""
        for tensor in used:
            maker = self._made.get(id(tensor)) if id(tensor) not in self._sources else None
            maker = self._disturbed.get(_memory(tensor), maker)
            if maker is not None and (by is None or by.index != maker):
                self.leaks.setdefault(maker, user_line(traceback.extract_stack()))

    def note_buffer(self, name: str | None, call: Call | None) -> None:
        if name is not None:
            self.buffers.setdefault(name, set()).add(-1 if call is None else call.index)

    def _remember(self, tensor: Tensor, sources: set[Source]) -> None:
        self._sources[id(tensor)] = sources
        self._alive.append(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tensors_of((args, kwargs))
        output = func(*args, **kwargs)
        if func is torch.ops.aten.rand.default and not args[0]:
            # One number, drawn to skip a layer now and then. A cut model can have that only if it never happens.
            output = torch.tensor(1 - 2**-24, dtype=output.dtype, device=output.device)
        parameters = {self.names[id(tensor)] for tensor in given if id(tensor) in self.names}
        if self._open:
            call = self._open[-1]
            call.parameters |= parameters
            for tensor in given:  # also what came another way than as an argument
                call.needs |= self._sources.get(id(tensor), set())
            self.look_for_leaks(given, call)
            for tensor in _changed_by(func, args, kwargs):
                self.note_buffer(self.buffer_names.get(id(tensor)), call)
                call.changes |= self._results.get(_memory(tensor), set())
                if _memory(tensor) in self._between:
                    self._disturbed[_memory(tensor)] = call.index
            if parameters or any(self._sources.get(id(t)) or id(t) in self._made for t in given):
                for tensor in tensors_of(output):
                    self._made.setdefault(id(tensor), call.index)
                    self._alive.append(tensor)
            count = flop_registry.get(func._overloadpacket)
            if count is not None:
                with contextlib.suppress(Exception):
                    call.flops += int(count(*args, **kwargs, out_val=output))
            return output
        self.loose |= parameters
        self.look_for_leaks(given, None)
        sources = self.sources_of(given)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._num_random += 1
            sources = {*sources, f"{_RANDOM}{self._num_random}"}
        for tensor in _changed_by(func, args, kwargs):
            self.note_buffer(self.buffer_names.get(id(tensor)), None)
            self._written.setdefault(_memory(tensor), set()).update(sources)
            self.changed |= self._results.get(_memory(tensor), set())
        for tensor in tensors_of(output):
            self._remember(tensor, sources)
            if _memory(tensor) not in self._results:
                self._between.add(_memory(tensor))
        return output


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _changed_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that an operation writes to."""
    written = [a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments]
    by_name = {a.name for a, is_written in zip(func._schema.arguments, written, strict=True) if is_written}
    places = [arg for arg, is_written in zip(args, written, strict=False) if is_written]
    return tensors_of((places, [value for key, value in kwargs.items() if key in by_name]))


def _observe(
    module: nn.Module, name: str, watch: _Watch, known: dict[Any, tuple[Call, bool]] | None
) -> Callable[[], None]:
    forward = module.forward

    def observed(*args: Any, **kwargs: Any) -> Any:
        if watch.is_inside:
            return forward(*args, **kwargs)
        call = watch.begin(name, module, args, kwargs)
        key = None if known is None else _alike(module, args, kwargs)
        if known is not None and key in known and known[key][1]:
            output = _same_again(known[key][0], call)
        else:
            before = len(watch.buffers), set(call.needs)
            output = forward(*args, **kwargs)
            is_plain = before == (len(watch.buffers), call.needs) and not call.changes and _is_new(output, args, kwargs)
            if known is not None and key is not None:
                known[key] = call, is_plain
        watch.end(call, output)
        return output

    was_own = "forward" in vars(module)
    module.forward = observed

    def restore() -> None:
        if was_own:
            module.forward = forward
        else:
            del module.forward

    return restore


def _alike(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What two calls share if one tells of the other."""
    leaves, form = tree_flatten((args, kwargs))
    simple = (int, float, bool, str, type(None))
    if not all(isinstance(leaf, (Tensor, *simple)) for leaf in leaves):
        return None
    return describe(module), str(form), *(_form(leaf) for leaf in leaves), module.training


def _is_new(output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call returns tensors of its own, and no views of what it was given."""
    given = {_memory(tensor) for tensor in tensors_of((args, kwargs))}
    found = [_memory(tensor) for tensor in tensors_of(output)]
    return len(set(found)) == len(found) and not given & set(found)


def _same_again(known: Call, call: Call) -> Any:
    """What a call like a known one gives, without running it."""
    call.parameters = {f"{call.name}.{name.removeprefix(f'{known.name}.')}" for name in known.parameters}
    call.flops = known.flops
    # Not `empty_like`, which would make this call depend on the known one's result.
    return tree_map_only(
        Tensor, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device), known.output
    )


@contextlib.contextmanager
def _without_data(
    model: nn.Module, device: torch.device, parameter_dtype: torch.dtype | None
) -> Iterator[tuple[dict[int, str], dict[int, str]]]:
    """While inside, the model's tensors are fake ones of the same shapes. Gives parameters' and buffers' names by
    identity."""
    names: dict[int, str] = {}
    buffers: dict[int, str] = {}
    stand_ins: dict[int, Tensor] = {}
    kept: list[tuple[nn.Module, str, Tensor]] = []
    known = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    for owner in model.modules():
        for is_parameter, registry in ((True, owner._parameters), (False, owner._buffers)):
            for key, tensor in list(registry.items()):
                if tensor is None:
                    continue
                if id(tensor) not in stand_ins:
                    dtype = tensor.dtype
                    if is_parameter and parameter_dtype is not None and tensor.is_floating_point():
                        dtype = parameter_dtype
                    fake = torch.empty(tensor.shape, dtype=dtype, device=device)
                    stand_ins[id(tensor)] = nn.Parameter(fake, requires_grad=False) if is_parameter else fake
                    (names if is_parameter else buffers)[id(stand_ins[id(tensor)])] = known[id(tensor)]
                kept.append((owner, key, tensor))
                put_tensor(owner, key, stand_ins[id(tensor)])
    try:
        yield names, buffers
    finally:
        for owner, key, tensor in kept:
            put_tensor(owner, key, tensor)
