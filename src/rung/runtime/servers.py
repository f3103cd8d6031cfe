"""What strategies with servers share: which server keeps what, what a server does in a step, and the norm over all.

Servers and trainers go through the same loop, window by window. A trainer computes gradients; a server waits for them,
updates the parameters that it keeps, and answers. Calls arrive on threads of the RPC's, and the update happens on the
thread of the loop, so whatever the task's optimizer does is done by one thread, as in any other process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rung.parallel.gradients import clip, global_norm
from rung.runtime.base import LocalStep
from rung.runtime.mesh import MeshRuntime
from rung.runtime.optimizer import learning_rate
from rung.windows import Window
from rung.world import World


def place_by_size(sizes: Mapping[str, int], num_servers: int) -> dict[str, int]:
    """A server for each name: the largest first, each to the server that has least."""
    loads = [0] * num_servers
    found = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        server = min(range(num_servers), key=lambda s: (loads[s], s))
        found[name] = server
        loads[server] += sizes[name]
    return found


def num_bytes(tensors: Iterable[Tensor | None]) -> int:
    """What it takes to send them."""
    total = 0
    for tensor in tensors:
        if tensor is not None:
            dense = [tensor._indices(), tensor._values()] if tensor.is_sparse else [tensor]
            total += sum(t.numel() * t.element_size() for t in dense)
    return total


def on_host(tensor: Tensor) -> Tensor:
    """RPC carries host memory; between devices it would need a map of them."""
    return tensor.detach().cpu()


def add_squares(own: Tensor, world: World) -> Tensor:
    """The norm over all ranks, from the norm of what each one answers for. All ranks call it."""
    squared = own.to(device=world.device, dtype=torch.promote_types(own.dtype, torch.float32)).square()
    dist.all_reduce(squared)
    return squared.sqrt()


class ServerRuntime(MeshRuntime):
    """A rank that keeps parameters. `_collect` and `_answer` are what strategies differ in."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self._own = [p for _, p in self._trainable]

    def step(self, window: Window, *, want_norm: bool = False) -> LocalStep:
        with self._clock.begin(0.0):
            self._enter("update")
            with self._clock.waiting():
                self._collect()
            rate, norm = learning_rate(self.optimizer), None
            if self.config.clip is not None or want_norm:
                norm = add_squares(global_norm(self._own), self.world)
            if self.config.clip is not None:
                assert norm is not None
                clip(self._own, self.config.clip, norm)
            self.is_updating = True
            self.optimizer.step()
            for parameter in self._own:
                parameter.grad = None
            if self.schedule is not None:
                self.schedule.step()
            self.is_updating, self.num_updates = False, self.num_updates + 1
            self._answer()
        return LocalStep(torch.zeros((), device=self.world.device), norm, rate)

    def _collect(self) -> None:
        """Wait for all trainers; leave in each parameter the gradient of the global loss."""
        raise NotImplementedError

    def _answer(self) -> None:
        """Let the trainers go on."""
        raise NotImplementedError

    def place(self, windows: Iterable[Window]) -> Iterator[Window]:
        return iter(windows)

    @torch.no_grad()
    def evaluate(self, windows: Iterable[Window]) -> dict[str, float]:
        for _ in windows:  # the loop looks between them whether to stop, on all ranks alike
            self._status.touch()
        return self._add_up({})

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return collect_weights(self.model, self.world, self.spread.places)


def collect_weights(model: nn.Module, world: World, places: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
    """The module's state dict on the main rank, each tensor from its server, or else from the first trainer. All ranks
    walk through it together."""
    names = {id(t): name for name, t in [*model.named_parameters(), *model.named_buffers()]}
    for key, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            continue
        home = places.get(names.get(id(value), key), world.layout.servers)
        whole = torch.empty(0)
        if world.is_main:
            whole = on_host(value) if home == 0 else torch.empty(value.shape, dtype=value.dtype)
            if home != 0:
                dist.recv(whole.reshape(-1).view(torch.uint8), src=home)
        elif world.rank == home:
            dist.send(on_host(value).contiguous().reshape(-1).view(torch.uint8), dst=0)
        yield key, whole
