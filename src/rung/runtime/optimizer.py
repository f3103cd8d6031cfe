"""Builds and checks the task's optimizers and schedules. An optimizer is fused unless the task chose otherwise."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from types import MethodType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from rung.distributed.torch_private import has_step_hooks
from rung.errors import TaskError
from rung.parallel.combined_optimizer import (
    CombinedOptimizer,
    CombinedSchedule,
    explain_failed_step,
    members_of,
    parameters_of,
    step_whole_parameters,
    wants_whole_parameters,
)
from rung.parallel.gather import local_part
from rung.parallel.materialize import gradient_hooks, is_absent
from rung.spec.task import Task, takes_name

Schedule = LRScheduler | CombinedSchedule

_FUSED = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad)
_FUSED_ON_SHARDS = (torch.optim.AdamW, torch.optim.Adam)  # DTensor supports no other fused kernel


def make_optimizer(
    task: Task,
    model: nn.Module,
    *,
    fused: bool,
    device: torch.device,
    num_ranks: int = 1,
    allow_unused: bool = False,
) -> tuple[Optimizer, list[list[str]]]:
    """The task's optimizer over the parameters that this rank holds, several as one, and the names of all in each of
    its groups. The task is given the whole model.

    `allow_unused`: some parameters may get no gradient in a step.
    """
    absent = {id(p): p for p in model.parameters() if is_absent(p)}
    for parameter in absent.values():  # while optimizer() runs, as in the whole model
        parameter.requires_grad_(parameter.is_trained_elsewhere)  # type: ignore[attr-defined]
    hooks = gradient_hooks(model)
    made = _by_name(task, task.optimizer(model))
    if num_ranks > 1 and (hooked := gradient_hooks(model) - hooks):
        raise TaskError(
            f"{task.name}: optimizer() registers a hook on the gradient of {next(iter(hooked))}. With several ranks it "
            "would get the gradient of one rank's samples, before the ranks sum theirs, or none at all. Change "
            "gradients in a hook of the optimizer (register_step_pre_hook)."
        )
    members = _names_of_groups(task, model, made)
    for parameter in absent.values():
        parameter.requires_grad_(False)
    is_gathered = False
    for name, optimizer in made.items():
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in absent]
        made[name] = optimizer = _fused(optimizer, allow_unused) if fused else optimizer
        if not any(isinstance(p, DTensor) for p in parameters_of(optimizer)):
            continue
        if wants_whole_parameters(optimizer):
            step_whole_parameters(optimizer, device)
            is_gathered = True
        elif type(optimizer).__module__.startswith("torch.optim"):
            _step_mesh_by_mesh(optimizer)
        else:
            explain_failed_step(optimizer)
    # Rung's own hooks are around a step of all parameters, and go to the optimizer that is returned.
    combined = CombinedOptimizer(made) if len(made) > 1 or is_gathered else next(iter(made.values()))
    return combined, [names for groups in members for names in groups]


def _by_name(task: Task, made: Any) -> dict[str, Optimizer]:
    """What optimizer() returned, by the keys of a dict or the positions in a list."""
    if isinstance(made, Mapping):
        found = dict(made)
    else:
        found = {str(n): one for n, one in enumerate(made if isinstance(made, list | tuple) else [made])}
    wrong = [value for value in found.values() if not isinstance(value, Optimizer)]
    if wrong or not found:
        is_one = not found or wrong[0] is made
        raise TaskError(
            f"{task.name}: optimizer(model) must return a torch Optimizer, or a list or dict of them, but "
            + (f"it returned {type(made).__name__}." if is_one else f"one is {wrong[0]!r:.60}.")
        )
    if unnamed := [key for key in found if not isinstance(key, str) or not key]:
        raise TaskError(f"{task.name}: the optimizers in a dict have names, but one has the key {unnamed[0]!r}.")
    if len(found) > 1 and (evaluating := [one for one in found.values() if takes_closure(one)]):
        raise TaskError(
            f"{task.name}: {type(evaluating[0]).__name__} evaluates the loss by itself, several times a step, and so "
            "cannot be one of several optimizers."
        )
    return found


def _names_of_groups(task: Task, model: nn.Module, made: Mapping[str, Optimizer]) -> list[list[list[str]]]:
    """The names of the parameters in each group of each optimizer; several share none and leave none out."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    foreign = sum(id(p) not in names for optimizer in made.values() for p in parameters_of(optimizer))
    if foreign:
        raise TaskError(
            f"{task.name}: the optimizer was given {foreign} tensors that are not parameters of the model (any more): "
            "parallelizing replaces parameters, but not in lists made before. Take them from model.parameters()."
        )
    owners: dict[str, list[str]] = {}
    for owner, optimizer in made.items():
        for parameter in parameters_of(optimizer):
            if owner not in (those := owners.setdefault(names[id(parameter)], [])):
                those.append(owner)
    if shared := [name for name, those in owners.items() if len(those) > 1]:
        raise TaskError(
            f"{task.name}: the optimizers {' and '.join(map(repr, owners[shared[0]]))} both update "
            f"{_listed(shared)}. Give each parameter to one of them."
        )
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if len(made) > 1 and (missing := [name for name in trained if name not in owners]):
        raise TaskError(
            f"{task.name}: none of the optimizers {', '.join(map(repr, made))} updates {_listed(missing)}. Give each "
            "trainable parameter to one of them, or freeze it (requires_grad_(False))."
        )
    return [[[names[id(p)] for p in group["params"]] for group in one.param_groups] for one in made.values()]


def _listed(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def takes_closure(optimizer: Optimizer) -> bool:
    """Whether a step must be given a function that computes the loss and its gradients again, as LBFGS's."""
    kinds = [type(member) for member in members_of(optimizer).values()]
    closures = [inspect.signature(kind.step).parameters.get("closure") for kind in kinds]
    return any(closure is not None and closure.default is closure.empty for closure in closures)


def make_schedule(task: Task, optimizer: Optimizer, total_steps: int | None) -> Schedule | None:
    """The task's schedule, or those of several optimizers, of which some may have none."""
    if task.schedule is None:
        return None
    if total_steps is None:
        raise TaskError(
            f"{task.name}: schedule() needs the number of steps, which is not set. Give --steps, or total_steps to "
            "open_session."
        )
    members = members_of(optimizer)
    found = {}
    for name, member in members.items():
        named = {"name": name} if takes_name(task.schedule) else {}
        schedule = task.schedule(member, total_steps, **named)
        if isinstance(schedule, ReduceLROnPlateau):
            raise TaskError(
                f"{task.name}: ReduceLROnPlateau follows a metric, not the step. Return another LRScheduler."
            )
        if schedule is None and len(members) > 1:
            continue  # its rate stays as it is
        if not isinstance(schedule, LRScheduler):
            raise TaskError(
                f"{task.name}: schedule() must return an LRScheduler, but it returned {type(schedule).__name__}."
            )
        found[name] = schedule
    if len(members) == 1:
        return next(iter(found.values()))
    return CombinedSchedule(found) if found else None


class LocalScaler(torch.amp.GradScaler):
    """GradScaler on each rank's local parts of gradients, which may be sharded over several meshes.

    `unscale_` and `step` take gradients from the optimizer and divide them in a private method: there is no public way
    to pass the local parts.
    """

    def _unscale_grads_(self, optimizer: Any, *args: Any) -> dict[torch.device, Tensor]:
        views = []
        for parameter, grad in ((p, p.grad) for p in parameters_of(optimizer)):
            if grad is None:
                continue
            view = local_part(parameter.detach())
            view.grad = local_part(grad)
            views.append(view)
        shim: Any = SimpleNamespace(param_groups=[{"params": views}])
        return super()._unscale_grads_(shim, *args)

    def sync_overflow(self, optimizer: Optimizer, device: torch.device) -> Tensor:
        """After unscaling different gradients on each rank: 1 on all ranks if any of them overflowed, else 0.

        The maximum of the flags and not their sum: torch's fused kernels skip a step at exactly 1, but not at 2.
        """
        # Private: in public, a scaler shows only after a step whether it was skipped.
        found: dict[Any, Tensor] = self._found_inf_per_device(optimizer)
        flag = torch.zeros(1, device=device)
        for value in found.values():
            flag = torch.maximum(flag, value.to(device).reshape(1))
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        for own in found.values():
            own.copy_(flag.reshape_as(own))
        if not found:  # this rank had no gradient, but its scale must follow the others'
            found[device] = flag
        return flag

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Zero the momentum after a skipped first step: torch's fused SGD allocates it uninitialised, and with zeros
        the next step computes the momentum of a first one."""
        groups = [group for group in optimizer.param_groups if group.get("fused") and group.get("momentum")]
        new = [p for group in groups for p in group["params"] if p.grad is not None and not optimizer.state.get(p)]
        result = super().step(optimizer, *args, **kwargs)
        (skipped, *_) = self._found_inf_per_device(optimizer).values()
        # Without state, torch did not call the step at all: it lets fused kernels alone skip an update by themselves.
        for parameter in (p for p in new if optimizer.state.get(p)):
            momentum = local_part(optimizer.state[parameter]["momentum_buffer"])
            momentum.masked_fill_(skipped.to(momentum.device).reshape(()) > 0, 0.0)
        return result


def local_bytes(tensor: Tensor) -> int:
    local = local_part(tensor)
    return local.numel() * local.element_size()


def learning_rate(optimizer: Optimizer) -> float:
    """The learning rate of the first group, for display."""
    return float(optimizer.param_groups[0]["lr"]) if "lr" in optimizer.param_groups[0] else float("nan")


def learning_rates(optimizer: Optimizer) -> dict[str, float]:
    """That of each of several optimizers, by name."""
    members = members_of(optimizer)
    return {name: learning_rate(member) for name, member in members.items()} if len(members) > 1 else {}


def _step_mesh_by_mesh(optimizer: Optimizer) -> None:
    """Let foreach and fused kernels get only parameters of one mesh at a time.

    The groups stay as the task made them, for its schedule; they are split by mesh only during a step.
    """
    if len({_mesh_of(parameter) for parameter in parameters_of(optimizer)}) < 2:
        return
    step = optimizer.step

    @functools.wraps(step)
    def divided(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        groups = optimizer.param_groups
        optimizer.param_groups = []
        for group in groups:
            kinds: dict[Any, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                kinds.setdefault(_mesh_of(parameter), []).append(parameter)
            optimizer.param_groups += [{**group, "params": some} for some in kinds.values()]
        try:
            return step(*args, **kwargs)
        finally:
            optimizer.param_groups = groups

    # A bound method, as schedulers expect.
    optimizer.step = MethodType(divided, optimizer)  # type: ignore[method-assign]


def _mesh_of(parameter: Tensor) -> Any:
    return parameter.device_mesh if isinstance(parameter, DTensor) else None


def _fused(optimizer: Optimizer, allow_unused: bool) -> Optimizer:
    """The same optimizer with torch's fused kernel, unless the task chose an implementation itself."""
    kind = type(optimizer)
    if kind not in _FUSED:
        return optimizer
    defaults = optimizer.defaults
    if kind is torch.optim.SGD and allow_unused and any(group["momentum"] for group in optimizer.param_groups):
        return optimizer  # torch's fused SGD needs momentum for all parameters or none (TypeError in 2.11 to 2.13)
    chosen = [defaults.get(key) for key in ("fused", "foreach", "capturable", "differentiable")]
    if any(chosen) or defaults.get("fused") is False or defaults.get("foreach") is False:
        return optimizer
    if any(group.get("fused") is not None or group.get("foreach") is not None for group in optimizer.param_groups):
        return optimizer
    if defaults.get("dampening"):
        return optimizer  # zeroed momentum would not make the next step a first one: see `LocalScaler.step`
    if has_step_hooks(optimizer):
        return optimizer  # the rebuilt optimizer would lose the task's hooks
    parameters = parameters_of(optimizer)
    if not parameters or any(not p.is_floating_point() for p in parameters):
        return optimizer
    if any(isinstance(p, DTensor) for p in parameters) and kind not in _FUSED_ON_SHARDS:
        return optimizer
    accepted = inspect.signature(kind.__init__).parameters
    options: dict[str, Any] = {key: value for key, value in defaults.items() if key in accepted}
    groups = [{**group, "fused": True} for group in optimizer.param_groups]
    rebuilt: Optimizer = kind(groups, **{**options, "fused": True})
    if kind in (torch.optim.SGD, torch.optim.Adagrad):
        _step_unfused_if_needed(rebuilt)
    return rebuilt


def _step_unfused_if_needed(optimizer: Optimizer) -> None:
    """Give up torch's fused kernel for the groups that it refuses in a step and the plain one takes.

    It refuses sparse gradients, and SGD's momentum for some parameters only, as when one gets its first gradient later
    than others (torch 2.11 to 2.13). It does so before it changes anything of the group, but after it has updated the
    groups before it.
    """
    step = optimizer.step

    @functools.wraps(step)
    def with_retry(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        try:
            return step(*args, **kwargs)
        except (RuntimeError, TypeError) as error:
            groups = optimizer.param_groups
            refused = [place for place, group in enumerate(groups) if _is_refused_by_fused(optimizer, group)]
            if not refused:
                raise
            if getattr(optimizer, "grad_scale", None) is not None:  # in fp16, which the plain kernel ignores
                error.add_note("--set fused=false steps without torch's fused kernels.")
                raise
        for place in refused:
            groups[place]["fused"] = False
        optimizer.param_groups = groups[refused[0] :]
        try:
            return step(*args, **kwargs)
        finally:
            optimizer.param_groups = groups

    optimizer.step = MethodType(with_retry, optimizer)  # type: ignore[method-assign]


def _is_refused_by_fused(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    given = [parameter for parameter in group["params"] if parameter.grad is not None]
    if any(parameter.grad.is_sparse for parameter in given):
        return bool(group["fused"])
    begun = {optimizer.state.get(parameter, {}).get("momentum_buffer") is not None for parameter in given}
    return bool(group["fused"] and group.get("momentum") and len(begun) == 2)
