"""One stage of a cut model: the model's own forward, run on each rank up to and from what the rank computes.

Every rank has the whole model in form, and the data of its own stages only (see `materialize`). On a stage, a call of
an earlier stage returns what was received, or a tensor without data where nobody needs the values; a call of a later
stage ends the run. So forward may be written in any way, take any arguments and change its shapes from step to step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from rung.errors import ModelError
from rung.parallel.rehearsal import Rehearsal, tensors_of
from rung.parallel.stages import Result, Stages

_Place = tuple[nn.Module, str]


class _StageEnd(BaseException):
    """What the next stage begins with was called. Not an Exception: a model may catch those."""


class _Fresh(torch.autograd.Function):
    """The same values as a tensor that may be changed in place, which a leaf that requires a gradient may not be."""

    @staticmethod
    def forward(ctx: Any, received: Tensor) -> Tensor:
        return received.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Conductor:
    """Runs single stages of a model. The forward of every part is wrapped once; outside of `run` it is unchanged."""

    def __init__(self, model: nn.Module, stages: Stages, *, expects_data: bool) -> None:
        self.model, self.stages = model, stages
        self._expects_data = expects_data
        self._is_running = self._is_inside = False
        self._next = self._start = self._stop = 0
        self._regions: list[Any] = [None]
        self._rehearsal: Rehearsal | None = None
        self._results: dict[Result, Tensor] = {}
        self._finished: tuple[nn.Module, int] | None = None
        self._others: dict[int, list[nn.Module]] = {}
        for name in dict.fromkeys(stages.calls):
            module = model.get_submodule(name)
            module.forward = self._conducted(name, module, module.forward)
            module.register_forward_hook(self._take_result)  # after the hooks that cut tensors have had their say

    def run(
        self, stage: int, rehearsal: Rehearsal, received: dict[Result, Tensor], body: Callable[[], Any]
    ) -> tuple[dict[Result, Tensor], Any]:
        """Run `body`, which calls the model, on one stage: the results it has, and what `body` returned if it ended."""
        self._start, self._stop = self.stages.bounds[stage], self.stages.bounds[stage + 1]
        self._next, self._rehearsal = 0, rehearsal
        self._results = {}
        for key, tensor in received.items():
            fresh = _Fresh.apply(tensor) if tensor.requires_grad else tensor  # type: ignore[no-untyped-call]
            self._results[key] = tensor.clone() if key in rehearsal.changed else fresh
        self._is_running = True
        self._regions = [_checkpointed_region()]
        outcome: Any = None
        others = self._parts_of_other_stages(stage)
        for module in others:
            module._compiled_call_impl = module.forward  # past its hooks: sharding would gather it for nothing
        try:
            outcome = body()
        except _StageEnd:
            pass
        finally:
            for module in others:
                module._compiled_call_impl = None
            self._is_running = self._is_inside = False
            self._finished = None
            results, self._results, self._rehearsal = self._results, {}, None
        if self._next < self._stop:
            raise ModelError(
                f"forward ended before {self.stages.calls[self._next]} was called, as it was for the first batch. "
                "A pipeline needs the same calls in every step."
            )
        # What only passes through is handed on as it came.
        return {**results, **received}, outcome

    def _parts_of_other_stages(self, stage: int) -> list[nn.Module]:
        if stage not in self._others:
            own = set(self.stages.modules_of(stage))
            names = [name for name in dict.fromkeys(self.stages.calls) if name not in own]
            self._others[stage] = [self.model.get_submodule(name) for name in names]
        return self._others[stage]

    def _take_result(self, module: nn.Module, args: Any, output: Any) -> None:
        """What a call gives to the model: its forward's result, as hooks of the module left it."""
        if self._finished is not None and self._finished[0] is module:
            assert self._rehearsal is not None
            for leaf, tensor in enumerate(tensors_of(output)):
                key = self._finished[1], leaf
                # Every stage repeats what forward does between its parts, so what is sent must be as the part left it.
                self._results[key] = tensor.clone() if key in self._rehearsal.changed else tensor
            self._finished = None

    def _conducted(self, name: str, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def conducted(*args: Any, **kwargs: Any) -> Any:
            if not self._is_running or self._is_inside:
                return forward(*args, **kwargs)
            index = self._next
            if index >= len(self.stages.calls) or self.stages.calls[index] != name:
                expected = self.stages.calls[index] if index < len(self.stages.calls) else "the end"
                raise ModelError(
                    f"forward called {name} where it called {expected} for the first batch. "
                    "A pipeline needs the same calls in every step."
                )
            self._refuse_cut_region(index)
            if index >= self._stop:
                raise _StageEnd
            self._next += 1
            if index < self._start:
                return self._stand_in(index)
            if self._expects_data and any(isinstance(t, FakeTensor) for t in tensors_of((args, kwargs))):
                raise ModelError(
                    f"{name} depends on something that an earlier stage computed outside of the model's parts. "
                    "Give that computation a module of its own, or cut elsewhere with --split."
                )
            self._is_inside = True
            try:
                output = forward(*args, **kwargs)
            finally:
                self._is_inside = False
            self._finished = module, index
            self._take_result(module, args, output)  # in case that forward was called by itself, without hooks
            self._finished = module, index
            return output

        return conducted

    def _refuse_cut_region(self, index: int) -> None:
        """A region that the model itself checkpoints is computed again as a whole, so it must lie within one stage."""
        region = _checkpointed_region()
        if index in (self._start, self._stop) and region != self._regions[0] and region == self._regions[-1]:
            before, after = self.stages.calls[index - 1], self.stages.calls[index]
            raise ModelError(
                f"the model checkpoints a region that holds both {before} and {after}, which are in different stages. "
                "Cut elsewhere with --split, or let Rung checkpoint (--activation-checkpointing) instead of the model."
            )
        self._regions.append(region)

    def _stand_in(self, index: int) -> Any:
        """What the call gave in the rehearsal, with the values that were received put in."""
        assert self._rehearsal is not None
        leaves, form = tree_flatten(self._rehearsal.calls[index].output)
        number, filled = 0, []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                filled.append(self._results.get((index, number), leaf))
                number += 1
            else:
                filled.append(leaf)
        return tree_unflatten(filled, form)


def _checkpointed_region() -> Any:
    """What tells one open `torch.utils.checkpoint` from another: the hooks that save tensors now."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    hooks = top(True) if top is not None else None
    return None if hooks is None else id(hooks[0])


class StagePart(nn.Module):
    """What one stage holds: the parts of the model that it calls, and the parameters it uses beside them.

    The model's own tree stays as it is; this is a second view of it, which is sharded as one unit. It must not contain
    the model, because a rank may hold two stages, and each is sharded by itself.
    """

    def __init__(self, conductor: Conductor, stage: int) -> None:
        super().__init__()
        model, stages = conductor.model, conductor.stages
        self.stage = stage
        self._conductor = conductor
        self.parts = nn.ModuleList(model.get_submodule(name) for name in stages.modules_of(stage))
        self.loose = nn.Module()
        inside = {id(module) for part in self.parts for module in part.modules()}
        # Places in the model's tree that must show a parameter which this view has elsewhere, and where it has it.
        self._shown: list[tuple[_Place, _Place]] = []
        for name, places in places_of(model).items():
            if stage not in stages.holders[name]:
                continue
            own = [place for place in places if id(place[0]) in inside]
            if not own:
                own = [(self.loose, f"p{len(self.loose._parameters)}")]
                self.loose.register_parameter(own[0][1], places[0][0]._parameters[places[0][1]])
            self._shown += [(place, own[0]) for place in places if id(place[0]) not in inside]

    def forward(
        self,
        job: Callable[[], Any],
        rehearsal: Rehearsal,
        receives: list[Result],
        sends: list[Result],
        received: list[Tensor],
    ) -> tuple[list[Tensor], Any]:
        """What this stage sends on, and what the job returned if it ended here."""
        self.show_parameters()
        given = dict(zip(receives, received, strict=True))
        results, outcome = self._conductor.run(self.stage, rehearsal, given, job)
        return [results[key] for key in sends], outcome

    def module_named(self, name: str) -> nn.Module | None:
        stages = self._conductor.stages
        return self._conductor.model.get_submodule(name) if name in stages.modules_of(self.stage) else None

    def show_parameters(self) -> None:
        """Let the model's tree see parameters as they are now: gathered in forward, sharded otherwise."""
        for (owner, key), (holder, name) in self._shown:
            owner._parameters[key] = holder._parameters[name]


def places_of(model: nn.Module) -> dict[str, list[_Place]]:
    """For each parameter by its name, every module and attribute under which it is found."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, list[_Place]] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(names[id(parameter)], []).append((module, key))
    return found
