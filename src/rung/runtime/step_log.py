"""What a task's `loss` and `forward` log in a step: `log(name, value, reduce="mean")`.

Values stay on the device until the figures of several steps are read together. A mean is weighted as the loss is: by
each micro-batch's share. Of ranks that compute the same (those of a tensor group, or all with a loss of the whole
micro-batch) one counts, and of the stages of a pipeline, which all run the task's `forward`, the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rung.data.batch_shard import MicroBatch
from rung.distributed import fake_world
from rung.distributed.world import World
from rung.errors import ModelError
from rung.parallel.experts.loads import ExpertLoads
from rung.parallel.experts.rows import CountedRows, RowCounter
from rung.runtime.base import LoggedValue, figure_of
from rung.spec.logged import check_figure
from rung.spec.task import Task


class StepLog:
    """Collects what is logged in the forward passes of a step. Ignores calls at any other time: evaluations, a probe,
    recomputed activations."""

    def __init__(
        self,
        task: Task,
        world: World,
        *,
        is_compiled: bool,
        loads: ExpertLoads | None = None,
        rows: RowCounter | None = None,
    ) -> None:
        self._world, self._rows = world, rows
        self._loads = loads
        self._experts = [one for one in (loads, rows) if one is not None]
        self._gathers_batch = task.loss_scope == "batch" and world.layout.num_data_ranks > 1
        self._is_used = (bool(task.logging_functions()) or bool(self._experts)) and world.tensors.has_values
        self._open: list[LoggedValue] | None = None  # of the micro-batch whose forward runs
        self._found: list[LoggedValue] = []
        logs: dict[str, Callable[..., None]] = {name: partial(self._log, name) for name in task.logging_functions()}
        if is_compiled:  # compiled code calls it between two graphs
            logs = {name: torch.compiler.disable(log) for name, log in logs.items()}  # type: ignore[no-untyped-call]
        self.task = task.with_log(logs)
        self._name = task.name

    def micro_batch(self, micro: MicroBatch, share: float | Tensor) -> AbstractContextManager[None]:
        """Around the forward of a micro-batch that counts; `share` is its part of the global mean."""
        return self._forward(micro, share) if self._is_used else nullcontext()

    def take(self) -> list[LoggedValue]:
        """What this rank adds to the figures of the step: what the task logged, and how evenly rows chose experts."""
        found, self._found = self._found, []
        loads = self._loads.take() if self._loads is not None else {}
        return found + [LoggedValue(n, "max", figure_of(v, n, "experts"), function="experts") for n, v in loads.items()]

    def want_rows(self, wanted: bool) -> None:
        """Whether the rows of each expert are counted in the next step, whose figures are read."""
        if self._rows is not None:
            self._rows.is_wanted = wanted

    def take_rows(self) -> CountedRows | None:
        return self._rows.take() if self._rows is not None else None

    @contextmanager
    def _forward(self, micro: MicroBatch, share: float | Tensor) -> Iterator[None]:
        self._open = []
        for one in self._experts:
            one.is_open = True
        try:
            yield  # a stage but the last leaves by an exception
            self._found += [replace(log, weight=self._weight(log, micro, share)) for log in self._counted(micro)]
        finally:
            self._open = None
            for one in self._experts:
                one.is_open = False

    def _counted(self, micro: MicroBatch) -> Iterator[LoggedValue]:
        role = self._world.role
        for one in self._open or ():
            if isinstance(one.value, Tensor) and fake_world.is_fake(one.value):
                raise ModelError(
                    f"{self._name}: log({one.name!r}) in {one.function}() depends on a tensor that an earlier stage "
                    "computed and the model does not return. Return it from the model and log it in loss(), or use a "
                    "strategy without stages."
                )
            is_again = self._gathers_batch and one.function == "loss" and role.data_rank > 0
            if role.counts_loss and micro.num_samples > 0 and not is_again:
                yield one

    def _weight(self, one: LoggedValue, micro: MicroBatch, share: float | Tensor) -> float | Tensor:
        """Each rank has the loss of the whole micro-batch where it is gathered, but the forward of its own samples."""
        return float(micro.num_samples) if self._gathers_batch and one.function == "forward" else share

    def _log(self, function: str, name: str, value: Any, reduce: str = "mean") -> None:
        if self._open is not None:
            where = f"{self._name}: {function}()"
            check_figure(name, reduce, where)
            self._open.append(LoggedValue(name, reduce, figure_of(value, name, where), function=function))
