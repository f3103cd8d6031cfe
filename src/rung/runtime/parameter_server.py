"""ps: trainers push their gradients to the servers, which update, and pull the parameters back, all in step.

Gradients come weighted, so that the sum over trainers is the gradient of the global loss. A server adds them in the
order of the trainers, not of their arrival: the numbers do not depend on who was first.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future

from rung.parallel.materialize import Weights
from rung.rpc import answers_later
from rung.runtime.base import Traffic
from rung.runtime.mesh import MeshRuntime
from rung.runtime.servers import ServerRuntime, add_squares, collect_weights, num_bytes, on_host, place_by_size
from rung.windows import Window
from rung.world import World

Gradients = list[Tensor | None]


def place_parameters(model: nn.Module, num_servers: int) -> dict[str, int]:
    """Which server keeps each parameter, frozen ones too. Buffers stay with trainers, whose forward changes them."""
    sizes = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
    return place_by_size(sizes, num_servers)


def keep_own_parameters(weights: Weights, world: World) -> dict[str, int]:
    """Let a server have storage for its own parameters only. Returns where each parameter lives."""
    assert weights.model is not None
    places = place_parameters(weights.model, world.layout.servers)
    if world.is_server:
        weights.keep_only(lambda name: places.get(name) == world.rank)
    return places


class Desk:
    """Where the calls of trainers arrive at a server."""

    def __init__(self, num_trainers: int) -> None:
        self._num_trainers = num_trainers
        self._pushed: dict[int, Gradients] = {}
        self._futures: list[Future[list[Tensor]]] = []
        self._changed = threading.Condition()

    def push(self, trainer: int, gradients: Gradients) -> Future[list[Tensor]]:
        """Gradients of a trainer. The future is the parameters after the update."""
        future: Future[list[Tensor]] = Future()
        with self._changed:
            assert trainer not in self._pushed, "a trainer waits for the answer before it pushes again"
            self._pushed[trainer] = gradients
            self._futures.append(future)
            self._changed.notify()
        return future

    def collect(self) -> list[Gradients]:
        """The gradients of all trainers, in their order, once all are here."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._pushed) == self._num_trainers)
            pushed, self._pushed = self._pushed, {}
        return [pushed[trainer] for trainer in range(self._num_trainers)]

    def answer(self, parameters: list[Tensor]) -> None:
        with self._changed:
            futures, self._futures = self._futures, []
        for future in futures:
            future.set_result(parameters)


_desk: Desk | None = None  # of this process; calls find it here


@answers_later  # type: ignore[untyped-decorator]
def push(trainer: int, gradients: Gradients) -> Future[list[Tensor]]:
    assert _desk is not None, "servers are built before trainers push"
    return _desk.push(trainer, gradients)


class ParameterServer(ServerRuntime):
    """Keeps a part of the parameters and their optimizer state."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        global _desk
        self._desk = _desk = Desk(self.world.layout.num_data_ranks)
        self.notes.append(self.world.calls.describe())
        self.world.barrier()  # no trainer may push before

    def _collect(self) -> None:
        for gradients in self._desk.collect():
            for parameter, gradient in zip(self._own, gradients, strict=True):
                if gradient is not None:
                    here = gradient.to(parameter.device)
                    parameter.grad = here if parameter.grad is None else parameter.grad + here

    def _answer(self) -> None:
        # Not copied: the next update waits for the next push of every trainer, which waits for this answer.
        self._desk.answer([on_host(parameter) for parameter in self._own])


class Trainer(MeshRuntime):
    """Computes gradients on its share of each batch. It has no optimizer state."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        for group in self.optimizer.param_groups:
            group["params"] = []
        by_server: dict[int, list[nn.Parameter]] = {}
        for name, parameter in self._trainable:
            by_server.setdefault(self.spread.places[name], []).append(parameter)
        # In the order in which the server has them: that of the model.
        self._by_server = dict(sorted(by_server.items()))
        self._traffic = {"push": Traffic(), "pull": Traffic()}
        self.world.barrier()  # the servers are ready

    def _shares(self, window: Window) -> tuple[list[float | Tensor], float]:
        return super()._shares(window)[0], 1.0  # servers add, nobody averages

    def _update(self, want_norm: bool) -> Tensor | None:
        calls, futures = self.world.calls, []
        for server, parameters in self._by_server.items():
            gradients = [None if p.grad is None else on_host(p.grad) for p in parameters]
            self._traffic["push"].add(num_bytes(gradients))
            futures.append(calls.start(server, push, self.world.data_rank, gradients))
        idle = set(range(self.world.layout.servers)) - set(self._by_server)  # they keep step, too
        futures += [calls.start(server, push, self.world.data_rank, []) for server in idle]
        norm = None
        if self.config.clip is not None or want_norm:
            norm = add_squares(torch.zeros((), device=self.world.device), self.world)
        with self._clock.waiting():
            answers = [future.wait() for future in futures]
        self.is_updating = True
        with torch.no_grad():
            for parameters, values in zip(self._by_server.values(), answers, strict=False):
                self._traffic["pull"].add(num_bytes(values))
                for parameter, value in zip(parameters, values, strict=True):
                    parameter.copy_(value)
                    parameter.grad = None
        self.is_updating, self.num_updates = False, self.num_updates + 1
        return norm

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        self._share_buffers()
        return collect_weights(self.model, self.world, self.spread.places)

    def traffic(self) -> dict[str, Traffic]:
        return self._traffic
