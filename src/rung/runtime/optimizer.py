"""The task's optimizer and schedule, checked, and fused where the task leaves that open."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from rung.errors import TaskError
from rung.task import Task

_FUSED = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad)
_FUSED_ON_SHARDS = (torch.optim.AdamW, torch.optim.Adam)  # DTensor knows no other fused kernel


def make_optimizer(task: Task, model: nn.Module, *, fused: bool) -> Optimizer:
    optimizer = task.optimizer(model)
    if not isinstance(optimizer, Optimizer):
        raise TaskError(
            f"{task.name}: optimizer(model) must return a torch Optimizer, but it returned {type(optimizer).__name__}."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TaskError(
            f"{task.name}: LBFGS evaluates the loss several times a step, which a step over many ranks does not offer."
        )
    own = {id(parameter) for parameter in model.parameters()}
    foreign = sum(id(p) not in own for group in optimizer.param_groups for p in group["params"])
    if foreign:
        raise TaskError(
            f"{task.name}: the optimizer was given {foreign} tensors that are not parameters of the model (any more): "
            "lists kept by the constructor do not follow when the model is spread. Take them from model.parameters()."
        )
    return _fused(optimizer) if fused else optimizer


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
