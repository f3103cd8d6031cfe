"""Several optimizers of a task as one, and optimizers that compute on whole matrices.

The rest of Rung knows one optimizer: its groups, its state by parameter, its step. `CombinedOptimizer` is that for
several, each of which steps its own parameters.

On sharded parameters an optimizer computes with DTensors, whose operations give what they give on whole tensors, but
for rounding. That is not enough for two kinds: torch's Muon rounds to bf16 inside, where sums of shards come out
otherwise, and Adafactor and others use operations that DTensor does not have. These get the whole matrices, one at a
time.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rung.distributed.torch_private import has_step_hooks
from rung.errors import TaskError
from rung.parallel.gather import local_part, own_shard, whole_tensor


class CombinedOptimizer(Optimizer):
    """Steps its members one after the other. Its groups and its state are theirs, in their order."""

    def __init__(self, members: Mapping[str, Optimizer]) -> None:
        super().__init__([{"params": []}], {})
        self.members = dict(members)
        self.turn: str | None = None  # the only member to step, where a task's losses take turns
        self._take_over()

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "an optimizer that evaluates the loss is not combined with others"
        for name, member in self.stepped().items():
            member.step()
            if len(self.members) > 1 and any(not isinstance(key, Tensor) for key in self.state):
                raise TaskError(
                    f"the optimizer {name!r} ({type(member).__name__}) keeps state that belongs to no parameter. Rung "
                    "has one state for all optimizers, by parameter: use this one alone, or keep its state with them."
                )

    def stepped(self) -> dict[str, Optimizer]:
        """The members that a step is for."""
        return self.members if self.turn is None else {self.turn: self.members[self.turn]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state, groups = state_dict["state"], iter(state_dict["param_groups"])
        for member in self.members.values():
            own = [next(groups) for _ in member.param_groups]
            numbers = {old: new for new, old in enumerate(n for group in own for n in group["params"])}
            others = {key: value for key, value in state.items() if not isinstance(key, int)}
            member.load_state_dict(
                {
                    "state": {**others, **{new: state[old] for old, new in numbers.items() if old in state}},
                    "param_groups": [{**group, "params": [numbers[n] for n in group["params"]]} for group in own],
                }
            )
        self._take_over()

    def _take_over(self) -> None:
        """Share groups and state with the members: whoever changes them changes them for both."""
        self.param_groups = [group for member in self.members.values() for group in member.param_groups]
        self.state: defaultdict[Any, Any] = defaultdict(dict)
        for member in self.members.values():
            self.state.update(member.state)
        for member in self.members.values():
            member.state = self.state


class CombinedSchedule:
    """The schedules of several optimizers, stepped together."""

    def __init__(self, members: Mapping[str, LRScheduler]) -> None:
        self.members = dict(members)

    def step(self) -> None:
        for schedule in self.members.values():
            schedule.step()

    def state_dict(self) -> dict[str, Any]:
        return {"_schedulers": [schedule.state_dict() for schedule in self.members.values()]}  # as in SequentialLR

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for schedule, state in zip(self.members.values(), state_dict["_schedulers"], strict=True):
            schedule.load_state_dict(state)


def members_of(optimizer: Optimizer) -> dict[str, Optimizer]:
    """The task's own optimizers, by name."""
    return optimizer.members if isinstance(optimizer, CombinedOptimizer) else {"0": optimizer}


def stepped_parameters(optimizer: Optimizer) -> list[Any]:
    """The parameters that a step is for."""
    members = optimizer.stepped().values() if isinstance(optimizer, CombinedOptimizer) else [optimizer]
    return [parameter for member in members for parameter in parameters_of(member)]


def kind_of(one: Optimizer | LRScheduler | CombinedSchedule) -> str:
    """The class of an optimizer or schedule, or the classes of several, for messages and checkpoints."""
    members: Any = one.members.values() if isinstance(one, CombinedOptimizer | CombinedSchedule) else [one]
    return " and ".join(type(member).__name__ for member in members)


def parameters_of(optimizer: Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def wants_whole_parameters(optimizer: Optimizer) -> bool:
    """Whether an optimizer gets sharded parameters whole. One of the task's own says so by an attribute."""
    declared: bool | None = getattr(optimizer, "whole_parameters", None)
    return isinstance(optimizer, torch.optim.Muon | torch.optim.Adafactor) if declared is None else bool(declared)


def explain_failed_step(optimizer: Optimizer) -> None:
    """Let an optimizer of the task's own that fails on sharded parameters name the way out."""
    step = optimizer.step

    @functools.wraps(step)
    def explained(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        try:
            return step(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            if not any(word in str(error) for word in ("DTensor", "sharding", "placement")):
                raise
            kind, line = type(optimizer).__name__, str(error).partition("\n")[0]
            raise TaskError(
                f"{kind} cannot compute on sharded parameters: {line} With `whole_parameters = True` in the class "
                f"{kind}, its step gets whole parameters, one at a time."
            ) from error

    optimizer.step = MethodType(explained, optimizer)  # type: ignore[method-assign]


def is_stepped_whole(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Whether the optimizer of a sharded parameter gets it whole, so that its state may have any shape."""
    owners = (one for one in members_of(optimizer).values() if any(p is parameter for p in parameters_of(one)))
    return any(wants_whole_parameters(owner) for owner in owners)


def steps_one_at_a_time(optimizer: Optimizer) -> bool:
    """Whether sharded parameters are gathered for their update, each by itself."""
    whole = [one for one in members_of(optimizer).values() if wants_whole_parameters(one)]
    return any(isinstance(parameter, DTensor) for one in whole for parameter in parameters_of(one))


def step_whole_parameters(optimizer: Optimizer, device: torch.device) -> None:
    """Let an optimizer step whole parameters where they are sharded, each by itself.

    All ranks that share a parameter gather it with its gradient and state, compute the same update, and keep their
    shards of the result. It costs memory for one parameter at a time.
    """
    kind = type(optimizer).__name__
    if has_step_hooks(optimizer):
        raise TaskError(
            f"{kind} steps sharded parameters one at a time, and so hooks of its step would run once for each of them. "
            "Leave the hooks out, or use a strategy that leaves parameters whole, such as ddp."
        )
    step = optimizer.step

    @functools.wraps(step)
    def one_at_a_time(optimizer: Optimizer) -> None:
        groups = optimizer.param_groups
        try:
            for group in groups:
                used = [p for p in group["params"] if p.grad is not None]
                for parameter in (p for p in used if isinstance(p, DTensor)):
                    with _gathered(optimizer, parameter, device) as whole:
                        _step_some(optimizer, step, group, [whole])
                _step_some(optimizer, step, group, [p for p in used if not isinstance(p, DTensor)])
        finally:
            optimizer.param_groups = groups

    optimizer.step = MethodType(one_at_a_time, optimizer)  # type: ignore[method-assign]


def _step_some(optimizer: Optimizer, step: Callable[[], Any], group: dict[str, Any], parameters: list[Any]) -> None:
    given = {**group, "params": parameters}
    optimizer.param_groups = [given]
    if parameters:
        step()
    if changed := [key for key in group if key != "params" and given[key] is not group[key]]:
        raise TaskError(
            f"{type(optimizer).__name__} changes {changed[0]!r} of its groups in a step, and sharded parameters are "
            "stepped one at a time. Use a strategy that leaves parameters whole, such as ddp."
        )


@contextlib.contextmanager
def _gathered(optimizer: Optimizer, parameter: DTensor, device: torch.device) -> Iterator[Tensor]:
    """While open, a whole copy of a sharded parameter, with gradient and state; then the shards take its values."""

    def gathered(value: Any) -> Any:
        if isinstance(value, DTensor):
            return whole_tensor(value, device)
        # Numbers, such as Adafactor's step, stay on the host; other tensors are there after a resume with --offload.
        return value.to(device) if isinstance(value, Tensor) and value.dim() else value

    whole: Tensor = gathered(parameter.detach())
    whole.grad = gathered(parameter.grad)
    state = optimizer.state
    if parameter in state:
        state[whole] = {key: gathered(value) for key, value in state[parameter].items()}
    try:
        yield whole
        local_part(parameter.detach()).copy_(own_shard(whole, parameter))
        for key, value in state.get(whole, {}).items():
            state[parameter][key] = _sharded(value, parameter, state[parameter].get(key))
    finally:
        state.pop(whole, None)


def _sharded(value: Any, parameter: DTensor, before: Any) -> Any:
    """A value of a parameter's state: of the parameter's shape and so sharded as that is, or whole on every rank."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape or not value.dim():
        return value
    if isinstance(before, DTensor) and before.dtype == value.dtype:
        local_part(before).copy_(own_shard(value, parameter))
        return before
    local = torch.empty_like(local_part(parameter.detach()), dtype=value.dtype).copy_(own_shard(value, parameter))
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
