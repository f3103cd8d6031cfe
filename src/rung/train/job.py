"""What a rank is started with. The launcher knows this and nothing of what ranks compute with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rung.spec.config import RunConfig
from rung.spec.task import HOOKS, Task, load_task
from rung.spec.turns import turns_of

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


@dataclass(frozen=True)
class RankJob:
    """The parameters of a run. The launcher sends it unchanged to each rank's process."""

    task_path: str
    strategy: str
    config: RunConfig
    arguments: Mapping[str, Any] = field(default_factory=dict)
    run_dir: str | None = None
    store: str | None = None  # the address of the run, if it is kept in a store; then `run_dir` is its local part
    resume: bool = False  # from the newest checkpoint of the run directory, if there is one
    restarted: bool = False  # by the launcher, which has logged that
    plain_sgd: bool = False  # `verify` replaces the task's optimizer
    calls_hooks: bool = True  # `verify` compares numbers, and its runs are not the user's

    def load(self) -> Task:
        task = load_task(self.task_path).bind(self.arguments)
        if not self.calls_hooks:
            without: dict[str, Any] = dict.fromkeys(HOOKS)
            task = replace(task, **without)
        if not self.plain_sgd:
            return task
        # With losses that take turns, the task's optimizers say which parameters each of them trains.
        sgd = _sgd if turns_of(task.loss) is None else partial(_sgd_for_each, task.optimizer)
        return replace(task, optimizer=sgd, schedule=None)


def _sgd(model: nn.Module) -> Optimizer:
    return _sgd_of([p for p in model.parameters() if p.requires_grad])


def _sgd_for_each(make: Callable[[nn.Module], dict[str, Optimizer]], model: nn.Module) -> dict[str, Optimizer]:
    return {
        name: _sgd_of([parameter for group in optimizer.param_groups for parameter in group["params"]])
        for name, optimizer in make(model).items()
    }


def _sgd_of(parameters: list[nn.Parameter]) -> Optimizer:
    from torch.optim import SGD  # the commands import this module before torch

    return SGD(parameters, lr=0.01)
