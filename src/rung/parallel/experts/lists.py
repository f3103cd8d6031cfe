"""Find lists of alike experts that a module calls one by one, and prove on random numbers that they can be shared out.

A list of layers is no list of experts: those are called on rows that do not depend on one another's results.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rung.distributed import fake_world
from rung.distributed.torch_private import forward_hooks_of, tree_map_only
from rung.parallel.adapters import LoraLinear
from rung.parallel.blocks import describe
from rung.parallel.dropout import NoDropout
from rung.parallel.experts.two_passes import Key, ListCall, Recorded, TwoPasses
from rung.parallel.experts.validate import part_of
from rung.parallel.forward_trace import Call, ForwardTrace, tensors_of
from rung.parallel.forward_tracer import ForwardTracer
from rung.parallel.linear_layers import is_linear, num_outputs
from rung.parallel.random_proof import equal, isolated, random_inputs, random_state

_NUM_ROWS = 7
_LENGTH = 8


def find_lists(tracer: ForwardTracer, num_ranks: int, example: Any) -> dict[str, ListCall | str]:
    """The lists of experts by name, and how their modules are called, or why ranks cannot share them."""
    model = tracer.meta_model
    callers = callers_of_lists(model)
    if not callers:
        return {}
    lists = {name: model.get_submodule(name) for name in callers}
    experts = {f"{name}.{key}": name for name, module in lists.items() for key, _ in module.named_children()}

    def trace(is_watched: Callable[[str], bool]) -> ForwardTrace:
        return tracer.watch(
            example,
            lambda name, _: is_watched(name),
            lambda name, module: name in callers.values() or tracer.is_part(name, module),
        )

    of_experts = trace(lambda name: name in experts)
    of_callers = {call.name: call for call in reversed(trace(lambda name: name in callers.values()).calls)}
    found: dict[str, ListCall | str] = {}
    with fake_world.outside_fakes():
        for name, module in lists.items():
            calls = [call for call in of_experts.calls if experts[call.name] == name]
            indices = {call.index for call in of_experts.calls if callers[experts[call.name]] == callers[name]}
            if any(isinstance(source, tuple) and source[0] in indices for call in calls for source in call.needs):
                if "expert" in name.rpartition(".")[2]:
                    found[name] = "the rows of one of them depend on the results of another"
                continue
            found[name] = _prove(model, name, module, calls, of_callers.get(callers[name]), num_ranks)
        for caller in dict.fromkeys(callers.values()):
            own = {name: call for name, call in found.items() if callers[name] == caller}
            proven = {lists[name]: call for name, call in own.items() if isinstance(call, ListCall)}
            problem = _why_wrong(proven, of_callers[caller]) if proven else ""
            # A list that stays whole would be computed twice, with the rows of zeros that others give at first.
            left = next((name for name, why in own.items() if isinstance(why, str)), "")
            problem = f"{caller or 'the model'} also calls the modules of {left}, which stay whole" if left else problem
            found |= dict.fromkeys((name for name in own if problem and isinstance(own[name], ListCall)), problem)
    return found


def callers_of_lists(model: nn.Module) -> dict[str, str]:
    """The lists that may hold experts, and the modules that may call these."""
    named = model.named_modules()
    return {name: _caller_of(model, name) for name, module in named if _may_hold_experts(model, name, module)}


def _may_hold_experts(model: nn.Module, name: str, module: nn.Module) -> bool:
    """A list of several modules that is called so, or has a router with an output for each of them beside it."""
    if type(module) is not nn.ModuleList or len(module) < 2 or not any(True for _ in module.parameters()):
        return False
    parent, _, key = name.rpartition(".")
    beside = [one for one in model.get_submodule(parent).children() if one is not module]
    linear = [one for child in beside for one in (child, *child.children()) if is_linear(one)]
    return "expert" in key or any(num_outputs(one) == len(module) for one in linear)


def _caller_of(model: nn.Module, name: str) -> str:
    """The innermost module around a list that has a forward."""
    while name:
        name = name.rpartition(".")[0]
        if not isinstance(model.get_submodule(name), nn.ModuleList | nn.ModuleDict):
            break
    return name


def _prove(
    model: nn.Module,
    name: str,
    module: nn.Module,
    calls: list[Call],
    caller: Call | None,
    num_ranks: int,
) -> ListCall | str:
    first, *rest = experts = list(module.children())
    if any(describe(one) != describe(first) for one in rest):
        return "its modules are not alike"
    if any(True for _ in module.buffers()):
        return "its modules have buffers, which each rank would change by itself"
    own = (one for one in module.modules() if not isinstance(one, LoraLinear))
    if any(hooks for one in own for hooks in forward_hooks_of(one)):
        return "its modules have hooks, which other ranks would not run"
    inside = sum(1 for one in experts for _ in one.parameters())
    held = {id(parameter) for parameter in module.parameters()}
    uses = [p for owner in model.modules() for p in owner.parameters(recurse=False) if id(p) in held]
    if inside != len(held) or len(uses) != len(held):
        return "its modules share parameters with each other or with the rest of the model"
    if len(part_of(len(experts), num_ranks, num_ranks - 1)) == 0:
        each = len(part_of(len(experts), num_ranks, 0))
        return f"its {len(experts)} experts, {each} on a rank, leave none for the last of {num_ranks} ranks"
    if not calls or caller is None:
        return "the model does not call its modules within the module that holds the list"
    found = _arguments_of(calls, name, caller.name, len(experts))
    if isinstance(found, str):
        return found
    return _why_rows_are_mixed(first, calls[0], found) or found


def _arguments_of(calls: list[Call], name: str, caller: str, num_experts: int) -> ListCall | str:
    found: set[Any] = set()
    for call in calls:
        given: dict[Key, Any] = dict([*enumerate(call.args), *call.kwargs.items()])
        tensors = [key for key, value in given.items() if isinstance(value, Tensor)]
        if len(tensors) != 1 or len(tensors_of((call.args, call.kwargs))) != 1:
            return "its modules are not called with one tensor of rows alone"
        rows, output = given.pop(tensors[0]), call.output
        if not isinstance(output, Tensor) or output.shape[:-1] != rows.shape[:-1] or not rows.is_floating_point():
            return "the result of its modules is not a tensor with a row for each row of hidden values"
        if not all(isinstance(value, int | float | str | None) for value in given.values()):
            return "its modules are called with other arguments than rows, numbers and words"
        widths, dtypes = (rows.shape[-1], output.shape[-1]), (rows.dtype, output.dtype)
        found.add(ListCall(name, caller, num_experts, tensors[0], tuple(given.items()), widths, dtypes))
    return found.pop() if len(found) == 1 else "its modules are called with different arguments, types or widths"


def _why_rows_are_mixed(expert: nn.Module, traced: Call, call: ListCall) -> str:
    """Why rows cannot be computed beside those of other ranks; empty if they can."""
    with isolated(), NoDropout():
        state = random_state(expert)
        shape = [*[3] * (tensors_of((traced.args, traced.kwargs))[0].dim() - 1), call.widths[0]]
        rows = torch.randn(shape, generator=torch.Generator().manual_seed(1))

        def run(rows: Tensor) -> Tensor:
            return call.compute(lambda *args, **kwargs: functional_call(expert, state, args, kwargs), rows)

        was = expert.training
        try:
            for training in (True, False):
                expert.train(training)
                flat = rows.flatten(0, -2)
                parts = torch.cat([run(flat[:1]), run(flat[1:])])
                if not equal(parts, run(rows).flatten(0, -2)):
                    return "the result of a row depends on the other rows with which an expert is called"
        except Exception as error:
            return f"one of its modules fails on random numbers ({_text(error)})"
        finally:
            expert.train(was)
    return ""


def _why_wrong(lists: Mapping[nn.Module, ListCall], caller: Call) -> str:
    """Why the two passes of the calling module do not compute what it does by itself; empty if they do. Simple
    functions of rows are the experts here."""
    owner, start = caller.module, f"{caller.name}." if caller.name else ""
    inside = [call.name.removeprefix(start) for call in lists.values()]
    kept = {one: vars(one).get("forward") for one in (owner, *(e for module in lists for e in module.children()))}
    training = {one: one.training for one in owner.modules()}
    problem = ""
    with isolated():
        state = random_state(owner, besides=inside)
        for length, flag in ((_LENGTH, True), (_LENGTH, False), (0, True), (0, False)):
            args, kwargs = random_inputs(caller, length, 1, flag)
            try:
                # Results of both signs: a condition on them holds in one case or the other.
                for is_training, sign in itertools.product((True, False), (1.0, -1.0)):
                    owner.train(is_training)
                    found = []
                    for in_two_passes in (False, True):
                        _replace_experts(lists, owner, sign, in_two_passes)
                        found.append(_results(owner, state, args, kwargs))
                        _put_back(kept)
                    if not _are_equal(*found):
                        return (
                            "with the rows of all experts known before the results of any, its module computes "
                            "something else"
                        )
                return ""
            except Exception as error:
                problem = f"its module fails on random numbers ({_text(error)})"
            finally:
                _put_back(kept)
                for one, was in training.items():
                    one.training = was
    return problem


def _replace_experts(lists: Mapping[nn.Module, ListCall], owner: nn.Module, sign: float, in_two_passes: bool) -> None:
    passes = TwoPasses(owner)
    for place, (module, call) in enumerate(lists.items()):
        functions = [_function_of(call, number, sign, place) for number in range(call.num_experts)]
        for expert, function in zip(module.children(), functions, strict=True):
            expert.forward = function
        real = replace(call, dtypes=(torch.float32, torch.float32))
        passes.add(module, real, partial(_computed, real, functions))
    if in_two_passes:
        passes.install()


def _function_of(call: ListCall, number: int, sign: float, place: int) -> Callable[..., Tensor]:
    """Stands for an expert: another function for each, also of other lists."""

    def run(*args: Any, **kwargs: Any) -> Tensor:
        rows: Tensor = dict([*enumerate(args), *kwargs.items()])[call.rows]
        found = sign * torch.sin(rows * (1 + number / call.num_experts + place) + number)
        if call.widths[0] != call.widths[1]:
            found = found.mean(-1, keepdim=True) * torch.linspace(0.5, 1.0, call.widths[1])
        return found

    return run


def _computed(
    call: ListCall, functions: Sequence[Callable[..., Tensor]], recorded: list[Recorded]
) -> tuple[list[Tensor], None]:
    if not recorded:
        raise ValueError("it calls none of the experts")
    return [call.compute(functions[one.number], one.rows) for one in recorded], None


def _put_back(kept: Mapping[nn.Module, Any]) -> None:
    for module, forward in kept.items():
        vars(module).pop("forward", None)
        if forward is not None:
            module.forward = forward


def _results(owner: nn.Module, state: Mapping[str, Tensor], args: Any, kwargs: Any) -> list[Tensor]:
    """What a module returns for random numbers, and all gradients."""
    sources = [tensor for tensor in (*state.values(), *tensors_of((args, kwargs))) if tensor.requires_grad]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        args, kwargs = tree_map_only(
            Tensor, Tensor.clone, (args, kwargs)
        )  # no leaves, which nothing may change in place
        output = tensors_of(functional_call(owner, dict(state), args, kwargs))
    generator = torch.Generator().manual_seed(2)
    graded = [tensor for tensor in output if tensor.requires_grad]
    directions = [torch.randn(tensor.shape, generator=generator) for tensor in graded]
    gradients = torch.autograd.grad(graded, sources, directions, allow_unused=True) if graded and sources else ()
    zeros = [torch.zeros_like(one) if grad is None else grad for one, grad in zip(sources, gradients, strict=False)]
    return [*output, *zeros]


def _are_equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and equal(one, other)


def _text(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:120]
