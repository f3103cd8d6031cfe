"""Shared by strategies with servers: placement on servers, a server's step, the norm over all ranks.

Servers and trainers go through the same loop, window by window. A trainer computes gradients; a server waits for them,
updates the parameters that it holds, and answers. Calls arrive on RPC threads; the update runs on the loop's thread, so
that one thread makes all calls of the task's optimizer, as in any other process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rung.data.batch_shard import LocalBatch
from rung.distributed.torch_private import sparse_parts
from rung.parallel.gradients import clip, global_norm, gradient_figures
from rung.parallel.materialize import is_absent
from rung.runtime.base import LocalStep, Names, Probe
from rung.runtime.context import ContextRuntime, RuntimeContext
from rung.runtime.measure import figures_of_set
from rung.runtime.optimizer import learning_rate, learning_rates
from rung.runtime.update import end_update, norm_over_ranks
from rung.runtime.weights import share_buffers


def place_by_size(sizes: Mapping[str, int], num_servers: int) -> dict[str, int]:
    """A server for each name: the largest first, each to the least loaded server."""
    loads = [0] * num_servers
    found = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        server = min(range(num_servers), key=lambda s: (loads[s], s))
        found[name] = server
        loads[server] += sizes[name]
    return found


def num_bytes(tensors: Iterable[Tensor | None]) -> int:
    """The size of the tensors as messages."""
    total = 0
    for tensor in tensors:
        if tensor is not None:
            dense = sparse_parts(tensor) if tensor.is_sparse else [tensor]
            total += sum(t.numel() * t.element_size() for t in dense)
    return total


def on_host(tensor: Tensor) -> Tensor:
    """RPC carries host memory; between devices it would need a map of them."""
    return tensor.detach().cpu()


class ServerEndpoint(Protocol):
    """The calls of trainers to a server, where the strategies differ."""

    def collect(self, parameters: list[nn.Parameter]) -> None:
        """Wait for all trainers; set each parameter's `grad` to the gradient of the global loss."""
        ...

    def answer(self, parameters: list[nn.Parameter]) -> None:
        """Release the trainers, after the update."""
        ...

    def share(self, parameters: list[nn.Parameter]) -> None:
        """Let the trainers compute with the parameters as they are now. All ranks take part."""
        ...


class ServerRuntime(ContextRuntime):
    """A rank that holds parameters and computes no loss. A step waits for all trainers."""

    def __init__(self, context: RuntimeContext, endpoint: ServerEndpoint) -> None:
        super().__init__(context)
        self._endpoint = endpoint
        self.notes.append(self.world.calls.describe())
        self.world.barrier()  # trainers call only after it, when the endpoint is registered

    def place(self, windows: Iterable[LocalBatch]) -> Iterator[LocalBatch]:
        return iter(windows)

    def step(self, window: LocalBatch, *, want_norm: bool = False) -> LocalStep:
        own, max_norm = self.context.parameters, self.context.config.clip
        with self.clock.begin(0.0), self.context.default_type():  # the norm of no parameters, too, is in fp64
            self.context.enter("update")
            with self.clock.waiting():
                self._endpoint.collect(own)
            # Before the schedule's step changes them.
            rate, rates, norm = learning_rate(self.optimizer), learning_rates(self.optimizer), None
            if max_norm is not None or want_norm:
                norm = norm_over_ranks(global_norm(own), self.world)
            if max_norm is not None:
                assert norm is not None
                clip(own, max_norm, norm)
            self.updates.begin()
            self.optimizer.step()
            end_update(self.context)
            self._endpoint.answer(own)
        return LocalStep(torch.zeros((), device=self.world.device), norm, rate, rates)

    def probe(self, window: LocalBatch) -> Probe:
        own = [(name, p) for name, p in self.context.trainable if not is_absent(p)]
        with self.clock.begin(0.0), self.context.default_type():
            self._endpoint.collect(self.context.parameters)
            figures = gradient_figures(self.context.trainable, self.world.device)
            for _, parameter in own:
                parameter.grad = None
            self._endpoint.answer(self.context.parameters)
        return Probe(torch.zeros((), device=self.world.device), figures)

    @torch.no_grad()
    def evaluate(self, windows: Iterable[LocalBatch]) -> dict[str, float]:
        with self.evaluated_weights():
            for _ in windows:  # the loop checks between windows whether to stop, in step on all ranks
                self.context.status.touch()
            return figures_of_set(self.world, {}, {})

    def share_weights(self) -> None:
        self._endpoint.share(self.context.parameters)

    def named_weights(self, names: Names = None) -> Iterator[tuple[str, Tensor]]:
        return collect_weights(self.context, names)


def trainer_weights(context: RuntimeContext, names: Names = None) -> Iterator[tuple[str, Tensor]]:
    """`collect_weights` on a trainer, with the buffers of the first trainer."""
    if names is None:
        share_buffers(context)
    return collect_weights(context, names)


def collect_weights(context: RuntimeContext, names: Names = None) -> Iterator[tuple[str, Tensor]]:
    """The module's state dict on the main rank, each tensor from its server, or else from the first trainer. All ranks
    must iterate together."""
    model, world, places = context.model, context.world, context.parallel.places
    canonical = {id(t): name for name, t in [*model.named_parameters(), *model.named_buffers()]}
    for key, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor) or (names is not None and key not in names):
            continue
        home = places.get(canonical.get(id(value), key), world.layout.servers)
        whole = torch.empty(0)
        if world.is_main:
            whole = on_host(value) if home == 0 else torch.empty(value.shape, dtype=value.dtype)
            if home != 0:
                dist.recv(whole.reshape(-1).view(torch.uint8), src=home)
        elif world.rank == home:
            dist.send(on_host(value).contiguous().reshape(-1).view(torch.uint8), dst=0)
        yield key, whole
