"""Calls the task's functions: from a batch, in any nesting of tensors, to an output and a loss."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rung.data.pytree import map_tensors
from rung.errors import TaskError
from rung.parallel.chunked_loss import HeadGradient
from rung.parallel.dropout import NoDropout
from rung.parallel.sharding import HALF_TYPES
from rung.parallel.tensor.apply import loss_context, whole_output
from rung.parallel.tensor.plan import TensorPlan
from rung.runtime.batch_loss import BatchGather
from rung.spec.config import RunConfig
from rung.spec.task import Task, has_target, split_batch

__all__ = ["LossModule", "NoDropout", "autocast", "call_model", "default_type", "laid_out"]


class LossModule(nn.Module):
    """Model and loss as one module, for DDP and compile: outputs need not outlive the forward."""

    def __init__(
        self, model: nn.Module, task: Task, plan: TensorPlan | None = None, batch_gather: BatchGather | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self._task = task
        self._plan, self._batch_gather = plan, batch_gather

    def forward(self, batch: Any, counted: Tensor | None = None, num_global_samples: int = 0) -> Tensor:
        """`counted` is a flag on the device: whether this batch has any weight. If not, its gradient is zeroed."""
        output, target = self.call(batch)
        if self._batch_gather is not None:
            output, target = self._batch_gather((whole_output(output), target), num_global_samples)
        if counted is not None:
            map_tensors(output, lambda t: _zero_gradient_unless(counted, t))
        if self._plan is None:
            return self.take_loss(output, target)
        with loss_context(self._plan):
            loss = self._task.loss(output, target)
            return loss.full_tensor() if isinstance(loss, DTensor) else loss

    def call(self, batch: Any) -> tuple[Any, Any]:
        return call_model(self._task, self.model, batch)

    def take_loss(self, output: Any, target: Any) -> Tensor:
        return self._task.loss(output, target)  # type: ignore[no-any-return]


def call_model(task: Task, model: nn.Module, batch: Any) -> tuple[Any, Any]:
    """(output, target) of a batch, by the task's `forward` or the conventions of `rung.spec.task`."""
    given, target = split_for_model(task, batch)
    return compute_output(task, model, given), target


def split_for_model(task: Task, batch: Any) -> tuple[Any, Any]:
    """Split a batch into the input of `compute_output` and the target of the loss."""
    inputs, target = split_batch(batch)
    if task.forward is not None:
        return batch, target
    if not has_target(batch):
        raise TaskError(
            f"{task.name}: a batch must be a pair (input, target) or a dict with a 'target'; this one is "
            f"{_describe(batch)}. Define forward(model, batch) to use it as it is."
        )
    return inputs, target


def compute_output(task: Task, model: nn.Module, given: Any) -> Any:
    if task.forward is not None:
        return task.forward(model, given)
    return model(**given) if isinstance(given, Mapping) else model(given)


def _zero_gradient_unless(counted: Tensor, output: Tensor) -> None:
    if output.requires_grad:
        output.register_hook(lambda grad: _where(counted, grad))  # type: ignore[no-untyped-call]


def _where(counted: Tensor, gradient: Tensor) -> Tensor:
    if isinstance(gradient, HeadGradient):
        return gradient.where(counted)
    return torch.where(counted, gradient, torch.zeros_like(gradient))  # not a product: 0 * nan is nan


def autocast(config: RunConfig, device: torch.device) -> AbstractContextManager[Any]:
    half = HALF_TYPES.get(config.precision)
    return torch.autocast(device.type, dtype=half) if half is not None else contextlib.nullcontext()


class _DefaultType:
    """torch's default dtype is global to the process: the first thread to enter sets it, the last restores it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = torch.float32

    @contextlib.contextmanager
    def __call__(self, dtype: torch.dtype) -> Iterator[None]:
        with self._lock:
            if self._inside == 0:
                self._before = torch.get_default_dtype()
                torch.set_default_dtype(dtype)
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0:
                    torch.set_default_dtype(self._before)


default_type = _DefaultType()


def laid_out(config: RunConfig, tensor: Tensor) -> Tensor:
    """A tensor of a batch in the memory format of the run, with the same shape and values."""
    if config.memory_format != "channels_last" or tensor.dim() != 4:
        return tensor
    return tensor.contiguous(memory_format=torch.channels_last)


def _describe(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return f"a dict with the keys {', '.join(map(repr, batch))}"
    if isinstance(batch, tuple | list):
        return f"a {type(batch).__name__} of {len(batch)}"
    return f"a {type(batch).__name__}"
