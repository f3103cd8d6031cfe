"""The task's hooks: `on_start`, `on_step`, `on_evaluation`, `on_checkpoint` and `on_end`, called with a `HookState`.

Every rank calls every hook at the same moment. After each call the ranks exchange three numbers (of which one is that a
rank wants to stop), so that all leave after the same step, whichever rank asked.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rung.checkpoint import Position
from rung.distributed.collectives import broadcast_from
from rung.distributed.status_board import StatusWriter
from rung.errors import TaskError, nearest
from rung.runtime.base import LocalStep, LoggedValue, Runtime, figure_of
from rung.spec.logged import check_figure
from rung.spec.task import Task
from rung.train.figures import fetch_sums, reduced
from rung.train.metrics import Observer

log = logging.getLogger("rung")


class HookState:
    """The state of a run, for the task's hooks. Hooks read it; training goes on as if they had not been called."""

    step: int
    """The steps done so far."""
    epoch: int
    """The epoch of the last step; the first is 0."""
    total_steps: int | None
    """The steps of the whole run, where they are known."""
    learning_rate: float
    """The learning rate of the last step, in the first parameter group."""
    metrics: Mapping[str, float]
    """The figures of the last evaluation; empty before the first."""
    model: nn.Module
    """The module as this rank has it: parameters may be shards, or on other ranks. See `parameter`."""
    resumed: bool
    """Whether the run goes on from a checkpoint."""
    stopped: bool
    """In `on_end`: whether the run was asked to stop (a signal, say) and can be resumed."""
    is_main: bool
    """Whether this is rank 0, for work that one rank does, such as printing."""

    def __init__(self, rank: _HookRank) -> None:
        self._rank = rank
        self.step, self.epoch, self.total_steps = 0, 0, None
        self.learning_rate, self.metrics, self.model = 0.0, {}, rank.runtime.model
        self.resumed = self.stopped = False
        self.is_main = rank.world.is_main

    @property
    def loss(self) -> float | None:
        """The loss of the last step, that of the global batch; None before the first. Waits for the device."""
        return self._rank.loss()

    def parameter(self, name: str) -> Tensor:
        """A copy of a whole parameter in host memory, by its name in the model. All ranks must call it together."""
        return self._rank.parameter(name)

    def stop(self, reason: str = "") -> None:
        """End the run after the present step, on all ranks, as if it were the last: evaluated and saved."""
        self._rank.reason = str(reason) or "no reason given"

    def log(self, name: str, value: Any, reduce: str = "mean") -> None:
        """Log a figure. Each rank gives a value; `reduce` says what becomes of them: mean, sum or max."""
        self._rank.log(name, value, reduce)


class _HookRank:
    """What one rank's hooks have asked for, and what they read by exchanging it with other ranks."""

    def __init__(self, task_name: str, runtime: Runtime) -> None:
        self.runtime, self.world = runtime, runtime.world
        self.hook = ""  # the one that runs
        self.reason: str | None = None  # of this rank, to stop
        self._logged: list[LoggedValue] = []
        self._task_name = task_name
        self._loss: Tensor | None = None
        self._sum: Any = None

    def begin_loss(self, share: Tensor) -> None:
        """Start to add the ranks' shares: a reduction on demand would hang if one rank alone reads the loss."""
        self._loss = share.detach().to(torch.float64, copy=True)
        self._sum = dist.all_reduce(self._loss, async_op=True) if self.world.has_peers else None

    def loss(self) -> float | None:
        if self._sum is not None:
            self._sum.wait()
            self._sum = None
        return None if self._loss is None else float(self._loss)

    def parameter(self, name: str) -> Tensor:
        names = self._names()
        if name not in names:
            raise TaskError(f"{self._where()}: the model has no parameter {name!r}.{nearest(name, names)}")
        self.meet(reads=1 + names.index(name))
        ((_, whole),) = self.runtime.named_weights({name})
        if not self.world.has_peers:
            return whole.clone()
        like = self.runtime.model.get_parameter(name)
        found = whole.clone().contiguous() if self.world.is_main else torch.empty(like.shape, dtype=like.dtype)
        if found.numel() > 0:
            broadcast_from(0, found)
        return found

    def log(self, name: str, value: Any, reduce: str) -> None:
        check_figure(name, reduce, self._where())
        self._logged.append(LoggedValue(name, reduce, figure_of(value, name, self._where()), function=self.hook))

    def meet(self, reads: int = 0) -> list[list[float]]:
        """Exchange what this rank does next: which parameter it reads, or 0 at the end of the hook; whether it wants to
        stop; whether it has logged."""
        own = [float(reads), float(self.reason is not None), float(bool(self._logged))]
        rows = self.world.gather(own) if self.world.has_peers else [own]
        other = next((rank for rank, row in enumerate(rows) if row[0] != rows[0][0]), None)
        if other is not None:
            what = [f"reads {self._names()[int(row[0]) - 1]!r}" if row[0] else "does not" for row in rows]
            raise TaskError(
                f"{self._where()}: all ranks must call state.parameter() together, and rank 0 {what[0]} while rank "
                f"{other} {what[other]}. Call it before a condition that differs between ranks, such as state.is_main."
            )
        return rows

    def take_logged(self) -> list[LoggedValue]:
        found, self._logged = self._logged, []
        return found

    def _names(self) -> list[str]:
        return [name for name, _ in self.runtime.model.named_parameters(remove_duplicate=False)]

    def _where(self) -> str:
        return f"{self._task_name}: {self.hook}()"


class Hooks:
    """Calls the task's hooks, if there are any. All ranks make the same calls in the same order."""

    def __init__(
        self, task: Task | None, runtime: Runtime, status: StatusWriter, start: Position, total_steps: int | None
    ) -> None:
        names = task.hooks() if task is not None else []
        self._hooks: dict[str, Callable[..., Any]] = {name: getattr(task, name) for name in names}
        self._status, self._world = status, runtime.world
        self._rank = _HookRank(task.name if task is not None else "", runtime)
        self._share: Tensor | None = None  # of the last step's loss, until the ranks add it
        self.state = HookState(self._rank)
        self.state.step, self.state.epoch, self.state.resumed = start.step, start.epoch, start.step > 0
        self.state.total_steps = total_steps
        self.state.learning_rate = float(runtime.optimizer.param_groups[0].get("lr", math.nan))
        self.is_stopped = False  # by a hook; the same on all ranks

    def after_step(self, step: int, epoch: int, result: LocalStep) -> list[LoggedValue]:
        """Call `on_step`. Returns what it logs on this rank."""
        if not self._hooks:
            return []
        self.state.step, self.state.epoch, self.state.learning_rate = step, epoch, result.learning_rate
        self._share = result.loss_share
        if "on_step" in self._hooks:
            self._call("on_step")
        return self._rank.take_logged()

    def call(self, name: str, observers: Iterable[Observer]) -> None:
        """Call another hook, and give the observers what the ranks log in it."""
        has_logged = name in self._hooks and any(row[2] for row in self._call(name))
        if has_logged:
            (own,) = fetch_sums(self._world, [self._rank.take_logged()])()
            rows = self._world.gather_objects([[*key, *pair] for key, pair in own.items()])
            figures = reduced({(key, reduce): (a, b)} for row in rows for key, reduce, a, b in row)
            for observer in observers:
                observer.on_logged(figures, self.state.step)

    def _call(self, name: str) -> list[list[float]]:
        if self._share is not None:
            self._rank.begin_loss(self._share)
            self._share = None
        self._status.phase(name)
        self._rank.hook = name
        self._hooks[name](self.state)
        rows = self._rank.meet()
        self._status.phase("logging")
        if any(row[1] for row in rows) and not self.is_stopped and name != "on_end":
            reasons = [reason for reason in self._world.gather_objects(self._rank.reason) if reason is not None]
            self.is_stopped = True
            if self._world.is_main:
                log.info("  ends after step %d: %s (state.stop in %s)", self.state.step, reasons[0], name)
        return rows
