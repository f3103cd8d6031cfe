"""ps: in each step trainers push gradients to the servers, which update, and pull the parameters back.

Gradients are weighted, so that the sum over trainers is the gradient of the global loss. A server adds them in the
order of the trainers' ranks, not of arrival: the sums do not depend on timing.
"""

from __future__ import annotations

import threading
from functools import partial

import torch
from torch import Tensor, nn
from torch.futures import Future

from rung.distributed.rpc import async_execution, served
from rung.distributed.world import World
from rung.errors import TaskError
from rung.parallel.gradients import GradientFigures
from rung.parallel.materialize import Weights
from rung.runtime.base import Runtime, Traffic
from rung.runtime.context import RuntimeContext
from rung.runtime.mesh import whole_model_parts
from rung.runtime.parameter_server.base import ServerRuntime, num_bytes, on_host, place_by_size, trainer_weights
from rung.runtime.step import StepParts, StepRuntime
from rung.runtime.update import norm_over_ranks
from rung.spec.task import Task

Gradients = list[Tensor | None]


def place_parameters(model: nn.Module, num_servers: int, *, frozen: bool = False) -> dict[str, int]:
    """The server of each parameter that is trained, or with `frozen` of all. Trainers have the others, and buffers."""
    kept = [(name, p) for name, p in model.named_parameters() if p.requires_grad or frozen]
    return place_by_size({name: p.numel() * p.element_size() for name, p in kept}, num_servers)


def build(context: RuntimeContext) -> Runtime:
    return sync_server(context) if context.world.role.is_server else StepRuntime(context, sync_trainer_parts(context))


def place(weights: Weights, world: World, task: Task) -> tuple[dict[str, int], dict[str, int]]:
    """Keep storage on a server for its own parameters only."""
    assert weights.model is not None
    places = place_parameters(weights.model, world.layout.servers)
    if world.role.is_server:
        weights.keep_only(lambda name: places.get(name) == world.rank)
    return places, {}


class SyncEndpoint:
    """Handles the trainers' calls to a server."""

    def __init__(self, num_trainers: int) -> None:
        self._num_trainers = num_trainers
        self._pushed: dict[int, Gradients] = {}
        self._futures: list[Future[list[Tensor]]] = []
        self._changed = threading.Condition()

    def push(self, trainer: int, gradients: Gradients) -> Future[list[Tensor]]:
        """Take a trainer's gradients. The future resolves to the parameters after the update."""
        future: Future[list[Tensor]] = Future()
        with self._changed:
            assert trainer not in self._pushed, "a trainer waits for the answer before it pushes again"
            self._pushed[trainer] = gradients
            self._futures.append(future)
            self._changed.notify()
        return future

    def collect(self, parameters: list[nn.Parameter]) -> None:
        """Wait for all trainers, and sum their gradients in rank order."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._pushed) == self._num_trainers)
            pushed, self._pushed = self._pushed, {}
        for trainer in range(self._num_trainers):
            for parameter, gradient in zip(parameters, pushed[trainer], strict=True):
                if gradient is not None:
                    here = gradient.to(parameter.device)
                    parameter.grad = here if parameter.grad is None else parameter.grad + here

    def answer(self, parameters: list[nn.Parameter]) -> None:
        # No copy: the next update waits for every trainer's next push, which waits for this answer.
        values = [on_host(parameter) for parameter in parameters]
        with self._changed:
            futures, self._futures = self._futures, []
        for future in futures:
            future.set_result(values)

    def share(self, parameters: list[nn.Parameter]) -> None:
        self.collect(parameters)  # no gradients: the trainers only pull
        self.answer(parameters)


@async_execution  # type: ignore[untyped-decorator]
def push(trainer: int, gradients: Gradients) -> Future[list[Tensor]]:
    endpoint: SyncEndpoint = served("ps")
    return endpoint.push(trainer, gradients)


def sync_server(context: RuntimeContext) -> ServerRuntime:
    """Holds a part of the parameters and their optimizer state."""
    endpoint = SyncEndpoint(context.world.layout.num_data_ranks)
    context.world.calls.serve("ps", endpoint)
    return ServerRuntime(context, endpoint)


def sync_trainer_parts(context: RuntimeContext) -> StepParts:
    """Computes gradients on its share of each batch. Has no optimizer state."""
    parts = whole_model_parts(context)
    push_and_pull = PushAndPull(context)
    parts.update = push_and_pull
    parts.gradient_figures, parts.share_weights = push_and_pull.push_for_probe, push_and_pull.pull
    parts.averaging = 1.0  # servers sum the gradients, without a mean
    parts.named_weights = partial(trainer_weights, context)
    parts.traffic = lambda: push_and_pull.traffic
    context.world.barrier()  # until the servers' endpoints are registered
    return parts


class PushAndPull:
    """The update on a trainer: push gradients, pull the updated parameters."""

    def __init__(self, context: RuntimeContext) -> None:
        self._context = context
        for group in context.optimizer.param_groups:
            group["params"] = []  # the servers hold the optimizer state and step the parameters
        by_server: dict[int, list[nn.Parameter]] = {}
        for name, parameter in context.trainable:
            if name not in context.parallel.places:
                raise TaskError(
                    f"{context.task.name}: {name} is frozen in model() and trained after optimizer(), and what is "
                    "frozen has no server. Unfreeze it in model()."
                )
            by_server.setdefault(context.parallel.places[name], []).append(parameter)
        # Within a server in the model's order, which is also the order of the server's own list.
        self._by_server = dict(sorted(by_server.items()))
        self.traffic = {"push": Traffic(), "pull": Traffic()}

    def __call__(self, want_norm: bool) -> Tensor | None:
        context, world = self._context, self._context.world
        futures = self._push()
        norm = None
        if context.config.clip is not None or want_norm:
            # Zero from trainers: the servers have the summed gradients.
            norm = norm_over_ranks(torch.zeros((), device=world.device), world)
        with context.clock.waiting():
            answers = [future.wait() for future in futures]
        context.updates.begin()
        self._take(answers)
        context.updates.end()
        return norm

    def pull(self) -> None:
        """Take the parameters as the servers have them now, without an update. There are no gradients to push."""
        self._take([future.wait() for future in self._push()])

    @torch.no_grad()
    def _take(self, answers: list[list[Tensor]]) -> None:
        for parameters, values in zip(self._by_server.values(), answers, strict=False):
            self.traffic["pull"].add(num_bytes(values))
            for parameter, value in zip(parameters, values, strict=True):
                parameter.copy_(value)
                parameter.grad = None

    def push_for_probe(self) -> GradientFigures:
        """Let the servers sum the gradients; they tell the figures, and update nothing."""
        for future in self._push():
            future.wait()
        return GradientFigures()

    def _push(self) -> list[Future[list[Tensor]]]:
        world, futures = self._context.world, []
        for server, parameters in self._by_server.items():
            gradients = [None if p.grad is None else on_host(p.grad) for p in parameters]
            self.traffic["push"].add(num_bytes(gradients))
            futures.append(world.calls.start(server, push, world.role.data_rank, gradients))
        idle = set(range(world.layout.servers)) - set(self._by_server)  # these wait for a push in every step, too
        return futures + [world.calls.start(server, push, world.role.data_rank, []) for server in idle]
