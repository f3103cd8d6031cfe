"""The task's optimizer and schedule, checked, and fused where the task leaves that open."""

from __future__ import annotations

import functools
import inspect
from types import MethodType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from rung.errors import TaskError
from rung.parallel.materialize import is_absent
from rung.task import Task

_FUSED = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad)
_FUSED_ON_SHARDS = (torch.optim.AdamW, torch.optim.Adam)  # DTensor knows no other fused kernel


def make_optimizer(task: Task, model: nn.Module, *, fused: bool) -> Optimizer:
    """The task's optimizer over the parameters that this rank keeps. The task sees the whole model."""
    absent = {id(p): p for p in model.parameters() if is_absent(p)}
    for parameter in absent.values():
        parameter.requires_grad_(parameter.is_trained_elsewhere)  # type: ignore[attr-defined]
    optimizer = task.optimizer(model)
    for parameter in absent.values():
        parameter.requires_grad_(False)
    if not isinstance(optimizer, Optimizer):
        raise TaskError(
            f"{task.name}: optimizer(model) must return a torch Optimizer, but it returned {type(optimizer).__name__}."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TaskError(
            f"{task.name}: LBFGS evaluates the loss several times a step, which a step over many ranks does not offer."
        )
    if isinstance(optimizer, torch.optim.Adafactor) and any(
        isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"]
    ):
        raise TaskError(
            f"{task.name}: torch's Adafactor cannot update parameters that are cut. Use AdamW, or a strategy that "
            "leaves parameters whole: ddp, or pp."
        )
    own = {id(parameter) for parameter in model.parameters()}
    foreign = sum(id(p) not in own for group in optimizer.param_groups for p in group["params"])
    if foreign:
        raise TaskError(
            f"{task.name}: the optimizer was given {foreign} tensors that are not parameters of the model (any more): "
            "lists kept by the constructor do not follow when the model is spread. Take them from model.parameters()."
        )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    members = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) not in absent]
    optimizer = _fused(optimizer) if fused else optimizer
    optimizer.rung_members = members  # type: ignore[attr-defined]
    _step_kind_by_kind(optimizer)
    return optimizer


def make_schedule(task: Task, optimizer: Optimizer, total_steps: int | None) -> LRScheduler | None:
    if task.schedule is None:
        return None
    if total_steps is None:
        raise TaskError(
            f"{task.name}: schedule() needs the number of steps, which is not known here. "
            "Give --steps, or total_steps to open_session."
        )
    schedule = task.schedule(optimizer, total_steps)
    if isinstance(schedule, ReduceLROnPlateau):
        raise TaskError(f"{task.name}: ReduceLROnPlateau follows a metric, not the step. Return another LRScheduler.")
    if not isinstance(schedule, LRScheduler):
        raise TaskError(
            f"{task.name}: schedule() must return an LRScheduler, but it returned {type(schedule).__name__}."
        )
    return schedule


class LocalScaler(torch.amp.GradScaler):
    """torch's scaler on each rank's own parts of gradients, which may be cut over several meshes."""

    def _unscale_grads_(self, optimizer: Any, *args: Any) -> dict[torch.device, Tensor]:
        views = []
        for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            view = local_part(parameter.detach())
            view.grad = local_part(parameter.grad)
            views.append(view)
        shim: Any = SimpleNamespace(param_groups=[{"params": views}])
        return super()._unscale_grads_(shim, *args)

    def agree(self, optimizer: Optimizer, device: torch.device) -> Tensor:
        """After unscaling, where ranks have seen different gradients: 1 on all ranks if any of them overflowed, else 0.

        The largest flag and not their sum: torch's fused kernels skip a step at exactly 1, and at 2 they take it.
        """
        found: dict[Any, Tensor] = self._found_inf_per_device(optimizer)
        flag = torch.zeros(1, device=device)
        for value in found.values():
            flag = torch.maximum(flag, value.to(device).reshape(1))
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        for own in found.values():
            own.copy_(flag.reshape_as(own))
        if not found:  # no gradient of this rank's was looked at; its scale must follow the others' all the same
            found[device] = flag
        return flag

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """torch's fused SGD creates momentum in uninitialised memory, and a skipped first step leaves it so: 0 there
        gives the next step the momentum of a first one."""
        groups = [group for group in optimizer.param_groups if group.get("fused") and group.get("momentum")]
        new = [p for group in groups for p in group["params"] if p.grad is not None and not optimizer.state.get(p)]
        result = super().step(optimizer, *args, **kwargs)
        (skipped, *_) = self._found_inf_per_device(optimizer).values()
        for parameter in new:
            momentum = local_part(optimizer.state[parameter]["momentum_buffer"])
            momentum.masked_fill_(skipped.to(momentum.device).reshape(()) > 0, 0.0)
        return result


def members_of(optimizer: Optimizer) -> list[list[str]]:
    """The names of the parameters in each group as the task made them, whatever this rank keeps of them."""
    members: list[list[str]] = optimizer.rung_members  # type: ignore[attr-defined]
    return members


def local_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_bytes(tensor: Tensor) -> int:
    local = local_part(tensor)
    return local.numel() * local.element_size()


def learning_rate(optimizer: Optimizer) -> float:
    """Of the first group, which is what is shown."""
    return float(optimizer.param_groups[0]["lr"]) if "lr" in optimizer.param_groups[0] else float("nan")


def _step_kind_by_kind(optimizer: Optimizer) -> None:
    """Let a kernel that updates many parameters at once get only such that are cut over the same mesh.

    The groups stay as the task made them, for its schedule; they are divided while a step runs.
    """
    every = [p for group in optimizer.param_groups for p in group["params"]]
    if len({_kind(p) for p in every}) < 2 or not type(optimizer).__module__.startswith("torch.optim"):
        return
    step = optimizer.step

    @functools.wraps(step)
    def divided(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        groups = optimizer.param_groups
        optimizer.param_groups = []
        for group in groups:
            kinds: dict[Any, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                kinds.setdefault(_kind(parameter), []).append(parameter)
            optimizer.param_groups += [{**group, "params": some} for some in kinds.values()]
        try:
            return step(*args, **kwargs)
        finally:
            optimizer.param_groups = groups

    # A method, as schedulers expect.
    optimizer.step = MethodType(divided, optimizer)  # type: ignore[method-assign]


def _kind(parameter: Tensor) -> Any:
    return parameter.device_mesh if isinstance(parameter, DTensor) else None


def _fused(optimizer: Optimizer) -> Optimizer:
    """The same optimizer with torch's fused kernel, unless the task chose an implementation itself."""
    kind = type(optimizer)
    if kind not in _FUSED:
        return optimizer
    defaults = optimizer.defaults
    chosen = [defaults.get(key) for key in ("fused", "foreach", "capturable", "differentiable")]
    if any(chosen) or defaults.get("fused") is False or defaults.get("foreach") is False:
        return optimizer
    if any(group.get("fused") is not None or group.get("foreach") is not None for group in optimizer.param_groups):
        return optimizer
    if defaults.get("dampening"):
        return optimizer  # its momentum after a skipped first step would not be that of a first step (`LocalScaler`)
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return optimizer  # what the task hung on it would be lost
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not parameters or any(not p.is_floating_point() for p in parameters):
        return optimizer
    if any(isinstance(p, DTensor) for p in parameters) and kind not in _FUSED_ON_SHARDS:
        return optimizer
    accepted = inspect.signature(kind.__init__).parameters
    options: dict[str, Any] = {key: value for key, value in defaults.items() if key in accepted}
    groups = [{**group, "fused": True} for group in optimizer.param_groups]
    rebuilt: Optimizer = kind(groups, **{**options, "fused": True})
    return rebuilt
