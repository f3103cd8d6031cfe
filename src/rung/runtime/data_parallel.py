"""The runtime of dp: one process, a replica of the model on each of its devices, torch's `DataParallel`.

A step is that of one process. Only the output of the model is computed in parts, by `Replicas`; the loss is taken on
device 0 of the output as a whole, where the gradients, the optimizer and its state are, too. That is what makes it
simple, and what it costs: the other devices wait for device 0, which holds more than they do. Both are counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from rung.nested import map_tensors
from rung.parallel.batchnorm import batch_norms
from rung.runtime.base import Traffic
from rung.runtime.buffers import note_of_changes
from rung.runtime.forward import LossModule, NoDropout, autocast, compute_output, split_for_model
from rung.runtime.measure import measure
from rung.runtime.mesh import MeshRuntime
from rung.runtime.pieces import num_bytes
from rung.runtime.replicas import Exchanges, GpuReplicas, Replicas, Settings, ThreadReplicas
from rung.task import Task
from rung.windows import MicroBatch, Window


class DataParallelRuntime(MeshRuntime):
    """Takes steps in one process with many devices. `model`, the optimizer and all that is kept are on the first."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        world, config = self.world, self.config
        settings = Settings(
            world.layout.name, config.activation_checkpointing, recomputing=None if config.dropout else NoDropout
        )
        self._exchanges = Exchanges()
        self._replicas: Replicas
        if world.device.type == "cuda":
            self._replicas = GpuReplicas(self.model, self._compute, world.devices, self._exchanges, settings)
        else:
            self._replicas = ThreadReplicas(self.model, self._compute, len(world.devices), self._exchanges, settings)
        self._gathered = _GatheredLoss(self.model, self.task, self._replicas)
        self._loss_module = self._gathered
        self._told_of = 0  # notes of the replicas
        self.notes += _notes(self)

    def _compute(self, model: nn.Module, given: Any) -> Any:
        """The output of one replica. In its thread, where no mode of the main one is on."""
        with autocast(self.config, self.world.device), nullcontext() if self.config.dropout else NoDropout():
            return compute_output(self.task, model, given)

    @property
    def replicas(self) -> Replicas:
        return self._replicas

    # -- training -----------------------------------------------------------------------------------------------

    def _accumulate(
        self, micro_batches: list[MicroBatch], shares: list[float | Tensor], averaging: float
    ) -> tuple[Tensor, set[str]]:
        versions = [buffer._version for _, buffer in self._own_buffers] if self._first_step else []
        found = super()._accumulate(micro_batches, shares, averaging)
        if self._first_step and len(self.world.devices) > 1:
            self.notes += note_of_changes(self.model, self._own_buffers, versions, who="replica")
        new = self._replicas.notes[self._told_of :]
        self.notes += new
        self._told_of += len(new)
        return found

    def _forward(self, micro: MicroBatch, share: float | Tensor) -> Tensor:
        self._gathered.num_rows = micro.num_samples
        return super()._forward(micro, share)

    def _backward(self, part: Tensor, averaging: float) -> None:
        super()._backward(part, averaging)
        self._replicas.backward()

    def _settle(self) -> None:
        super()._settle()
        reached = self._replicas.reached()
        if reached is not None:
            for _, parameter in self._trainable:
                if id(parameter) not in reached:
                    parameter.grad = None

    # -- evaluation ---------------------------------------------------------------------------------------------

    def _measure_window(self, window: Window) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
        for micro in window.micro_batches:
            self._gathered.num_rows = micro.num_samples
            with self._autocast():
                output, target = self._gathered.call(micro.data)
                yield measure(self.task, output, target, micro, self.world.device)

    # -- what is kept -------------------------------------------------------------------------------------------

    def state_bytes(self) -> dict[str, int]:
        return {**super().state_bytes(), "replicas": self._replicas.copied_bytes()}

    def traffic(self) -> dict[str, Traffic]:
        return dict(self._exchanges.traffic)

    def device_0_bytes(self) -> dict[str, int]:
        if len(self.world.devices) == 1:
            return {}
        return {
            "outputs": self._exchanges.output_bytes,
            "output gradients": self._exchanges.output_gradient_bytes,
            "loss": self._gathered.saved_bytes or 0,
            "gradients": num_bytes(parameter for _, parameter in self._trainable),
            "optimizer": self.state_bytes()["optimizer"],
        }


class _GatheredLoss(LossModule):
    """From a batch to its loss on device 0, of outputs that replicas computed in parts."""

    def __init__(self, model: nn.Module, task: Task, replicas: Replicas) -> None:
        super().__init__(model, task)
        self._replicas = replicas
        self.num_rows = 0
        self.saved_bytes: int | None = None  # by the loss for its backward, in the first step

    def call(self, batch: Any) -> tuple[Any, Any]:
        given, target = split_for_model(self._task, batch)
        return self._replicas.outputs(given, self.num_rows), target

    def take_loss(self, output: Any, target: Any) -> Tensor:
        if self.saved_bytes is not None:
            return super().take_loss(output, target)
        saved: dict[int, int] = {}
        known: list[int] = []

        def note(tensor: Tensor) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = super().take_loss(output, target)
        map_tensors((output, target), lambda tensor: known.append(tensor.untyped_storage().data_ptr()))
        self.saved_bytes = sum(size for place, size in saved.items() if place not in known)
        return loss


def _notes(runtime: DataParallelRuntime) -> list[str]:
    """What differs from one process, or from what the user might think."""
    world, devices = runtime.world, runtime.world.devices
    found = []
    if world.device.type == "cpu":
        found.append(f"dp: {len(devices)} replicas on the CPU, a thread each")
    else:
        shared = len(set(devices)) < len(devices)
        found.append(
            f"dp: {len(devices)} replicas on {', '.join(map(str, dict.fromkeys(devices)))}"
            + "; those that share a GPU share its random numbers, which then do not repeat from run to run" * shared
        )
    if batch_norms(runtime.model) and len(devices) > 1:
        found.append(
            "batch norm: each replica normalises by its own part of the batch, as torch's DataParallel does; the "
            "running statistics are those of the first"
        )
    return found
