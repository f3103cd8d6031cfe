"""What the contenders have in common: the loss inside the module, the clock, and when the loss is read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.cases import Case
from rung.distributed.world import World
from rung.spec.task import Task

LOG_EVERY = 10  # steps between two reads of the loss; each is a synchronisation with the device


class Stopwatch:
    """The time of day at the steps in which the loss was read, when the device has nothing left to do."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.times: dict[int, float] = {}

    def mark(self, step: int, *, wait: bool = True) -> None:
        """Note the time of a step's end. Without `wait` the caller knows that the step has just ended."""
        if wait and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.times[step] = time.perf_counter()

    def seconds_per_step(self, first: int, last: int) -> float:
        return (self.times[last] - self.times[first]) / (last - first)


class Contender(Protocol):
    """A job that was built once and goes on with each call."""

    def run(self, num_steps: int, stopwatch: Stopwatch) -> float:
        """Take steps, marking at least the LOG_EVERY-th (counted from 1 in each call) and the last; the mean of every
        LOG_EVERY-th loss."""
        ...


class ModelWithLoss(nn.Module):
    """The model and its loss as one module.

    So the loss is compiled and autocast with the model, and no wrapper has the logits to convert. That is the fastest
    form for every contender that leaves the choice to its user.
    """

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__()
        self.model = model
        self._loss: Callable[[Tensor, Tensor], Tensor] = task.loss
        self._forward: Callable[[nn.Module, Any], Tensor] | None = task.forward

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        if self._forward is not None:
            return self._loss(self._forward(self.model, (inputs, targets)), targets)
        return self._loss(self.model(inputs), targets)


def seeded_module(case: Case, task: Task) -> ModelWithLoss:
    torch.manual_seed(case.seed)
    return ModelWithLoss(task.model(), task)


def shuffled_loader(case: Case, task: Task, world: World) -> DataLoader[Any]:
    """A loader as a script has it before a library takes it over. `batch_size` is each rank's."""
    return DataLoader(
        task.train_data(),
        batch_size=case.rank_batch_size,
        shuffle=True,
        drop_last=True,
        pin_memory=world.device.type == "cuda",
        num_workers=case.workers,
        persistent_workers=case.workers > 0,
        multiprocessing_context="fork" if case.workers else None,  # as Rung starts its own
    )


def endless(epochs: Iterable[Any]) -> Iterator[Any]:
    """The batches of one epoch after the other."""
    while True:
        yield from epochs
