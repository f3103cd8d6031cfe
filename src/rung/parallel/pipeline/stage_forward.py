"""Run one pipeline stage with the model's own forward.

Every rank has all modules, but real tensors only for its own stages (see `materialize`). On a stage, a call of an
earlier stage returns the received tensors, or fake ones if no later code needs the values; a call of a later stage ends
the run. So forward may be written in any way, take any arguments and change its shapes from step to step.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from rung.distributed import fake_world
from rung.distributed.torch_private import (
    run_hooks_last,
    saved_tensor_hooks,
    tree_flatten,
    tree_unflatten,
    without_hooks,
)
from rung.errors import ModelError
from rung.parallel.forward_trace import Call, ForwardTrace, tensors_of
from rung.parallel.pipeline.partition import Result, Stages

_Place = tuple[nn.Module, str]


class _StageEnd(BaseException):
    """Raised when forward calls the first part of the next stage. A BaseException, as a model may catch Exception."""


class _NonLeaf(torch.autograd.Function):
    """A non-leaf alias of a received tensor: autograd forbids in-place changes of a leaf that requires a gradient."""

    @staticmethod
    def forward(ctx: Any, received: Tensor) -> Tensor:
        return received.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class StageExecutor:
    """Runs single stages of a model. It wraps the forward of every part, which acts unchanged outside of `run`.

    `hooks` are the numbers of the hooks that the model itself registered on its parts. They are code between the parts,
    which every stage repeats; hooks of FSDP and tensor parallelism run on the stage of their part alone.
    """

    def __init__(
        self, model: nn.Module, stages: Stages, *, expects_data: bool, hooks: Mapping[str, set[int]] | None = None
    ) -> None:
        self.model, self.stages = model, stages
        self._expects_data = expects_data
        self._hooks = hooks or {}
        self._is_running = self._is_inside = False
        self._next = self._start = self._stop = 0
        self._regions: list[Any] = [None]
        self._trace: ForwardTrace | None = None
        self._results: dict[Result, Tensor] = {}
        self._finished: tuple[nn.Module, int] | None = None
        self._others: dict[int, dict[nn.Module, set[int]]] = {}
        for name in dict.fromkeys(stages.calls):
            module = model.get_submodule(name)
            module.forward = self._wrap(name, module, module.forward)
            module.register_forward_hook(self._take_result)  # after tensor-parallel hooks, which change the output
            run_hooks_last(module, self._hooks.get(name, ()))

    def run(
        self, stage: int, forward_trace: ForwardTrace, received: dict[Result, Tensor], body: Callable[[], Any]
    ) -> tuple[dict[Result, Tensor], Any]:
        """Run `body`, which calls the model, on one stage. Returns the results, and those of `body` if it ended."""
        self._start, self._stop = self.stages.bounds[stage], self.stages.bounds[stage + 1]
        self._next, self._trace = 0, forward_trace
        self._results = {}
        for key, tensor in received.items():
            # Cloned if code between parts changes it in place: the received value is sent on unchanged.
            non_leaf = _NonLeaf.apply(tensor) if tensor.requires_grad else tensor  # type: ignore[no-untyped-call]
            self._results[key] = tensor.clone() if key in forward_trace.changed else non_leaf
        self._is_running = True
        self._regions = [_checkpointed_region()]
        outcome: Any = None
        try:
            # FSDP's hooks would gather the parts of other stages for nothing.
            with without_hooks(self._parts_of_other_stages(stage)), _without_reentrant_checkpoints():
                outcome = body()
        except _StageEnd:
            pass
        finally:
            self._is_running = self._is_inside = False
            self._finished = None
            self._regions = [None]
            results, self._results, self._trace = self._results, {}, None
        if self._next < self._stop:
            raise ModelError(
                f"forward ended without calling {self.stages.calls[self._next]}, which it called for the first batch. "
                "A pipeline needs the same calls in every step."
            )
        if self._expects_data and any(fake_world.is_fake(tensor) for tensor in tensors_of(outcome)):
            raise ModelError(
                "the loss depends on a tensor that an earlier stage computed and the model does not return. Return it "
                "from the model, or use a strategy without stages."
            )
        # Received tensors go on to later stages unchanged.
        return {**results, **received}, outcome

    def _parts_of_other_stages(self, stage: int) -> dict[nn.Module, set[int]]:
        """These parts, with the numbers of the model's own hooks."""
        if stage not in self._others:
            own = set(self.stages.modules_of(stage))
            names = [name for name in dict.fromkeys(self.stages.calls) if name not in own]
            self._others[stage] = {self.model.get_submodule(name): self._hooks.get(name, set()) for name in names}
        return self._others[stage]

    def _take_result(self, module: nn.Module, args: Any, output: Any) -> None:
        """Store the result of a call after the module's hooks."""
        if self._finished is not None and self._finished[0] is module:
            assert self._trace is not None
            call = self._trace.calls[self._finished[1]]
            if call.reads_values and self._stop < len(self.stages.calls):
                self._check_decided(call, output)
            for leaf, tensor in enumerate(tensors_of(output)):
                key = self._finished[1], leaf
                # Every stage repeats the code between parts, so send the result before that code changes it in place.
                self._results[key] = tensor.clone() if key in self._trace.changed else tensor
            self._finished = None

    def _check_decided(self, call: Call, output: Any) -> None:
        """Raise if values changed more of a part's result than its tensors' values: later stages assume its trace."""
        found, expected = tree_flatten(output)[0], tree_flatten(call.output)[0]
        for ours, traced in itertools.zip_longest(found, expected):
            if self._expects_data and isinstance(ours, Tensor) and fake_world.is_fake(ours):
                raise ModelError(
                    f"{call.reads_values}\n{call.name} branches on tensor values here, and this branch depends on a "
                    "tensor that another stage computed. Give it to the part as an argument."
                )
            if _form(ours) != _form(traced):
                raise ModelError(
                    f"{call.reads_values}\n{call.name} branches on tensor values here, and returned {_describe(ours)} "
                    f"where its trace has {_describe(traced)}, which later stages expect. Return tensors whose shape "
                    "does not depend on values (padded, say) and no numbers, or use a strategy without stages."
                )

    def _wrap(self, name: str, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
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
            if self._expects_data and any(fake_world.is_fake(t) for t in tensors_of((args, kwargs))):
                raise ModelError(
                    f"{name} depends on a value that an earlier stage computed outside of the model's parts. "
                    "Give that computation a module of its own, or cut elsewhere with --split."
                )
            self._is_inside = True
            try:
                output = forward(*args, **kwargs)
            finally:
                self._is_inside = False
            self._finished = module, index
            self._take_result(module, args, output)  # the model may call `forward` directly, which runs no hooks
            self._finished = module, index
            return output

        return wrapped

    def _refuse_cut_region(self, index: int) -> None:
        """Raise if the model checkpoints a region across stages: torch recomputes such a region as a whole."""
        region = _checkpointed_region()
        if index in (self._start, self._stop) and region is not self._regions[0] and region is self._regions[-1]:
            before, after = self.stages.calls[index - 1], self.stages.calls[index]
            raise ModelError(
                f"the model checkpoints a region that contains {before} and {after}, which are in different stages. "
                "Cut elsewhere with --split, or let Rung checkpoint (--activation-checkpointing) instead of the model."
            )
        self._regions.append(region)

    def _stand_in(self, index: int) -> Any:
        """The output of a call in the trace, with the received tensors filled in."""
        assert self._trace is not None
        leaves, form = tree_flatten(self._trace.calls[index].output)
        number, filled = 0, []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                filled.append(self._results.get((index, number), leaf))
                number += 1
            else:
                filled.append(leaf)
        return tree_unflatten(filled, form)


class _Checkpoint:
    """In place of torch's `CheckpointFunction`, which checkpoints in the reentrant way: the same without reentry.

    A part of an earlier stage would return its received tensor into that function, which replaces the tensor's place in
    the graph; its gradient would not reach the earlier stage.
    """

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        return checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)


@contextlib.contextmanager
def _without_reentrant_checkpoints() -> Iterator[None]:
    kept = checkpoint.CheckpointFunction
    checkpoint.CheckpointFunction = _Checkpoint  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        checkpoint.CheckpointFunction = kept  # type: ignore[misc]


def _form(leaf: Any) -> Any:
    """What the trace of a result tells later stages about one leaf of it."""
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype
    return leaf if isinstance(leaf, int | float | str) else type(leaf)


def _describe(leaf: Any) -> str:
    return f"{tuple(leaf.shape)} {leaf.dtype}" if isinstance(leaf, Tensor) else repr(leaf)


def _checkpointed_region() -> Any:
    """The innermost open `torch.utils.checkpoint`: its hook for saved tensors. Not the hook's `id`, which the next
    region may get once this one has ended."""
    hooks = saved_tensor_hooks()
    return None if hooks is None else hooks[0]


class StagePart(nn.Module):
    """The modules and parameters of one stage, sharded as one FSDP unit.

    The model's module tree stays as it is; this is a second view of its parts. It must not contain the model, because a
    rank may hold two stages, and each is sharded separately.
    """

    def __init__(self, executor: StageExecutor, stage: int) -> None:
        super().__init__()
        model, stages = executor.model, executor.stages
        self.stage = stage
        self._executor = executor
        self.parts = nn.ModuleList(model.get_submodule(name) for name in stages.modules_of(stage))
        self.loose = nn.Module()
        inside = {id(module) for part in self.parts for module in part.modules()}
        # (attribute in the model's tree, attribute in this view) of parameters that both trees refer to.
        self._shown: list[tuple[_Place, _Place]] = []
        for name, places in places_of(model).items():
            if stage not in stages.holders[name]:
                continue
            own = [place for place in places if id(place[0]) in inside]
            if not own:
                own = [(self.loose, f"p{len(list(self.loose.parameters()))}")]
                self.loose.register_parameter(own[0][1], places[0][0].get_parameter(places[0][1]))
            self._shown += [(place, own[0]) for place in places if id(place[0]) not in inside]

    def forward(
        self,
        body: Callable[[], Any],
        forward_trace: ForwardTrace,
        receives: list[Result],
        sends: list[Result],
        received: list[Tensor],
    ) -> tuple[list[Tensor], Any]:
        """The tensors that this stage sends, and what `body` returned if it ended here."""
        self.show_parameters()
        given = dict(zip(receives, received, strict=True))
        results, outcome = self._executor.run(self.stage, forward_trace, given, body)
        return [results[key] for key in sends], outcome

    def module_named(self, name: str) -> nn.Module | None:
        """The part `name` of the model if this stage calls it, else None."""
        stages = self._executor.stages
        return self._executor.model.get_submodule(name) if name in stages.modules_of(self.stage) else None

    def show_parameters(self) -> None:
        """Point the model's tree to the current parameters: FSDP replaces them when it gathers and shards."""
        for (owner, key), (holder, name) in self._shown:
            setattr(owner, key, holder.get_parameter(name))


def places_of(model: nn.Module) -> dict[str, list[_Place]]:
    """For each parameter name, every (module, attribute) that refers to it."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, list[_Place]] = {}
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            found.setdefault(names[id(parameter)], []).append((module, key))
    return found
