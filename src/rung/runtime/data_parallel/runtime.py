"""dp: one process with a replica of the model on each of its devices, as torch's `DataParallel`.

A step is that of one process, except that `Replicas` compute the model's output in parts. Device 0 gathers it, computes
the loss, and holds gradients and optimizer state. The cost: the other devices wait for device 0, which needs more
memory than they do. Both are reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rung.data.batch_shard import LocalBatch, MicroBatch
from rung.data.pytree import map_tensors
from rung.parallel.batchnorm import batch_norms
from rung.runtime.context import RuntimeContext
from rung.runtime.data_parallel.replicas import GpuReplicas, Replicas, ReplicaSettings, ThreadReplicas, TransferCounts
from rung.runtime.data_parallel.scatter import num_bytes
from rung.runtime.forward import LossModule, NoDropout, compute_output, split_for_model
from rung.runtime.measure import Measured, measure
from rung.runtime.passes import MicroBatchLoop
from rung.runtime.step import StepParts, StepRuntime
from rung.runtime.update import OptimizerUpdate
from rung.runtime.weights import gathered_weights
from rung.spec.task import Task


def build(context: RuntimeContext) -> StepRuntime:
    return StepRuntime(context, data_parallel_parts(context))


def data_parallel_parts(context: RuntimeContext) -> StepParts:
    """The step of one process on device 0, with outputs computed by replicas."""
    exchanges = TransferCounts()
    replicas = _make_replicas(context, exchanges)
    loss = _GatheredLoss(context.model, context.task, replicas)
    passes = ReplicaPasses(context, replicas, loss)
    context.notes += _notes(context)

    def device_0_bytes() -> dict[str, int]:
        if len(context.world.devices) == 1:
            return {}
        state = [v for values in context.optimizer.state.values() for v in values.values() if isinstance(v, Tensor)]
        return {
            "outputs": exchanges.output_bytes,
            "output gradients": exchanges.output_gradient_bytes,
            "loss": loss.saved_bytes or 0,
            "gradients": num_bytes(context.parameters),
            "optimizer": num_bytes(state),
        }

    return StepParts(
        passes,
        OptimizerUpdate(context),
        1.0,
        partial(gathered_weights, context),
        [passes.drop_unreached],
        replica_threads=replicas if isinstance(replicas, ThreadReplicas) else None,
        traffic=lambda: dict(exchanges.traffic),
        further_bytes=lambda: {"replicas": replicas.copied_bytes()},
        device_0_bytes=device_0_bytes,
    )


def _make_replicas(context: RuntimeContext, exchanges: TransferCounts) -> Replicas:
    world, config = context.world, context.config
    recomputing = None if config.dropout else NoDropout
    settings = ReplicaSettings(world.layout.name, config.activation_checkpointing, recomputing=recomputing)

    def compute(model: nn.Module, given: Any) -> Any:
        """The output of one replica. Runs in its thread, which has none of the main thread's modes."""
        with context.autocast(), context.without_dropout():
            return compute_output(context.task, model, given)

    if world.device.type == "cuda":
        return GpuReplicas(context.model, compute, world.devices, exchanges, settings)
    return ThreadReplicas(context.model, compute, len(world.devices), exchanges, settings)


class ReplicaPasses:
    """A loop over micro-batches whose forward and backward run on replicas."""

    def __init__(self, context: RuntimeContext, replicas: Replicas, loss: _GatheredLoss) -> None:
        self._context, self._replicas, self._loss = context, replicas, loss
        self._loop = MicroBatchLoop(context, loss, self._micro_batch)
        self._num_notes = 0  # of the replicas, already in the context's

    def run(
        self, micro_batches: list[MicroBatch], shares: list[float | Tensor], averaging: float
    ) -> tuple[Tensor, set[str]]:
        context = self._context
        buffers = context.own_buffers.versions() if context.is_first_step else {}
        found = self._loop.run(micro_batches, shares, averaging)
        if context.is_first_step and len(context.world.devices) > 1:
            context.notes += context.own_buffers.change_notes(buffers, holder="replica")
        new = self._replicas.notes[self._num_notes :]
        context.notes += new
        self._num_notes += len(new)
        return found

    @contextmanager
    def _micro_batch(self, micro: MicroBatch, is_last: bool) -> Iterator[None]:
        self._loss.num_rows = max(1, micro.num_samples)  # a stand-in has one
        yield
        self._replicas.backward()

    def drop_unreached(self) -> None:
        """Drop gradients of parameters that no replica used."""
        reached = self._replicas.reached()
        if reached is not None:
            for parameter in self._context.parameters:
                if id(parameter) not in reached:
                    parameter.grad = None

    def measure(self, window: LocalBatch) -> Iterator[Measured]:
        context = self._context
        for micro in window.micro_batches:
            self._loss.num_rows = micro.num_samples
            with context.autocast():
                output, target = self._loss.call(micro.data)
                yield measure(context.task, output, target, micro, context.world)


class _GatheredLoss(LossModule):
    """The loss on device 0, of an output that replicas computed in parts."""

    def __init__(self, model: nn.Module, task: Task, replicas: Replicas) -> None:
        super().__init__(model, task)
        self._replicas = replicas
        self.num_rows = 0
        self.saved_bytes: int | None = None  # saved by the loss for its backward, measured in the first step

    def call(self, batch: Any) -> tuple[Any, Any]:
        given, target = split_for_model(self._task, batch)
        return self._replicas.outputs(given, self.num_rows), target

    def take_loss(self, output: Any, target: Any) -> Tensor:
        if self.saved_bytes is not None:
            return super().take_loss(output, target)
        saved: dict[int, int] = {}
        known: list[int] = []  # storages of output and target, which are counted elsewhere

        def record(tensor: Tensor) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
            loss = super().take_loss(output, target)
        map_tensors((output, target), lambda tensor: known.append(tensor.untyped_storage().data_ptr()))
        self.saved_bytes = sum(size for place, size in saved.items() if place not in known)
        return loss


def _notes(context: RuntimeContext) -> list[str]:
    """Notes for the user on differences from one process."""
    world, devices = context.world, context.world.devices
    found = []
    if world.device.type == "cpu":
        found.append(f"dp: {len(devices)} replicas on the CPU, a thread each")
    else:
        shared = len(set(devices)) < len(devices)
        found.append(
            f"dp: {len(devices)} replicas on {', '.join(map(str, dict.fromkeys(devices)))}"
            + "; those that share a GPU share its random numbers, which then do not repeat from run to run" * shared
        )
    if batch_norms(context.model) and len(devices) > 1:
        found.append(
            "batch norm: each replica normalises by its own part of the batch, as torch's DataParallel does; the "
            "running statistics are those of the first"
        )
    return found
