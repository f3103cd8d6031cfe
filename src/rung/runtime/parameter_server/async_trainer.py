"""ps-async, trainer side: request a work item, pull, compute, push, until the first server ends the run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from rung.data.batch_shard import LocalBatch
from rung.data.batches import Batches
from rung.distributed.world import World
from rung.parallel.gradients import clip, global_norm
from rung.parallel.materialize import Weights
from rung.runtime.base import Runtime
from rung.runtime.context import RuntimeContext
from rung.runtime.measure import Measured, add_measured
from rung.runtime.mesh import whole_model_parts
from rung.runtime.parameter_server import async_server as remote
from rung.runtime.parameter_server.base import on_host
from rung.runtime.parameter_server.scheduler import TRAIN, WorkItem
from rung.runtime.parameter_server.sync import Gradients
from rung.runtime.step import StepRuntime
from rung.spec.task import Task


class HoldGradients:
    """Keeps gradients for the push instead of updating. Clips them, since this rank has the whole gradient."""

    def __init__(self, context: RuntimeContext) -> None:
        self._context = context
        for group in context.optimizer.param_groups:
            group["params"] = []  # the servers hold the optimizer state and step the parameters
        places, servers = context.parallel.places, range(context.world.layout.servers)
        self.parameters: list[list[nn.Parameter]] = [
            [p for name, p in context.trainable if places[name] == server] for server in servers
        ]
        self.buffers = [buffer for _, buffer in context.model.named_buffers()]
        self.gradients: list[Gradients] = []  # of the last step, by server

    def __call__(self, want_norm: bool) -> Tensor | None:
        parameters, max_norm = self._context.parameters, self._context.config.clip
        norm = global_norm(parameters)
        if max_norm is not None:
            clip(parameters, max_norm, norm)
        self.gradients = [[None if p.grad is None else on_host(p.grad) for p in own] for own in self.parameters]
        for parameter in parameters:
            parameter.grad = None
        self._context.updates.end()
        return norm


def build(context: RuntimeContext) -> Runtime:
    return remote.AsyncServer(context) if context.world.role.is_server else async_trainer(context)


def place(weights: Weights, world: World, task: Task) -> tuple[dict[str, int], dict[str, int]]:
    return remote.keep_server_state(weights, world), {}


def async_trainer(context: RuntimeContext) -> StepRuntime:
    """Computes whole steps on parameters pulled from the servers. Has no optimizer state and joins no collective."""
    parts = whole_model_parts(context)
    held = HoldGradients(context)
    parts.update = held
    runtime = StepRuntime(context, parts)
    runtime.work = AsyncTrainer(runtime, held).work
    return runtime


class AsyncTrainer:
    """Runs the work items that the first server dispatches."""

    def __init__(self, runtime: StepRuntime, held: HoldGradients) -> None:
        self._runtime, self._world, self._held = runtime, runtime.world, held

    def work(self, batches: Batches, make_evaluation: Callable[[], Batches] | None) -> str:
        """Process items until the first server answers with an exit reason, finished or stopped, and return that."""
        calls, rank, status = self._world.calls, self._world.rank, self._runtime.context.status
        evaluation: Batches | None = None
        for server in range(self._world.layout.servers):
            calls.call(server, remote.wait_until_ready)
        while True:
            status.phase("reading data")
            item: WorkItem | str = calls.call(0, remote.ask, rank)
            if isinstance(item, str):
                with contextlib.suppress(RuntimeError):  # the server may be gone before its answer is here
                    calls.call(0, remote.acknowledge_exit, rank)
                return item
            self._pull(item.version)
            if item.kind == TRAIN:
                status.step(item.number)
                (window,) = self._runtime.place([batches.window(item.number)])
                self._compute(item, window)
            else:
                assert make_evaluation is not None
                status.phase("evaluating")
                evaluation = evaluation or make_evaluation()
                calls.call(0, remote.deliver, item.ticket, self._measure(evaluation.window(item.number)))

    def _compute(self, item: WorkItem, window: LocalBatch) -> None:
        calls = self._world.calls
        result = self._runtime.step(window, want_norm=True)
        self._runtime.context.status.phase("update")
        # The other servers first: the delivery to server 0 makes the gradient count.
        pushes = [
            calls.start(server, remote.push, item.ticket, gradients)
            for server, gradients in enumerate(self._held.gradients)
            if server > 0
        ]
        for answer in pushes:
            answer.wait()
        assert result.grad_norm is not None
        content = {
            "gradients": self._held.gradients[0],
            "buffers": [on_host(buffer) for buffer in self._held.buffers],
            "loss": on_host(result.loss_share),
            "norm": on_host(result.grad_norm),
        }
        calls.call(0, remote.deliver, item.ticket, content)  # false, and ignored, if the item was reassigned

    @torch.no_grad()
    def _pull(self, version: int) -> None:
        calls = self._world.calls
        answers = [calls.start(server, remote.pull, version) for server in range(self._world.layout.servers)]
        for server, (own, answer) in enumerate(zip(self._held.parameters, answers, strict=True)):
            values = answer.wait()
            targets = [*own, *self._held.buffers] if server == 0 else own
            for target, value in zip(targets, values, strict=True):
                target.copy_(value)

    @torch.no_grad()
    def _measure(self, window: LocalBatch) -> Measured:
        self._runtime.model.eval()
        (placed,) = self._runtime.place([window])
        sums: Measured = {}
        with self._runtime.context.default_type():
            for measured in self._runtime.parts.passes.measure(placed):
                add_measured(sums, measured)
        pairs = {name: value for name, value in sums.items() if isinstance(value, tuple)}
        return {**sums, **{name: (total.item(), count.item()) for name, (total, count) in pairs.items()}}
