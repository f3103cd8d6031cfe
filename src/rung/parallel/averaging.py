"""Local SGD and DiLoCo: ranks train on their own and average their weights every few steps.

Local SGD takes the average. DiLoCo (arXiv 2311.08105) treats the difference between the last common weights and the
average as a gradient, and applies an outer step of SGD with Nesterov momentum.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from rung.distributed.torch_private import foreach_copy_
from rung.distributed.world import World
from rung.parallel.compression import Slots, Wire, ring_bytes


@dataclass(frozen=True)
class OuterStep:
    """SGD with Nesterov momentum on the averaged change of the weights."""

    lr: float
    momentum: float


class Averaging:
    """Averages the weights of all ranks after every `every` steps; in between each rank has its own."""

    def __init__(self, slots: Slots, world: World, every: int, outer: OuterStep | None) -> None:
        self.slots, self.wire, self.every, self.outer = slots, Wire(world), every, outer
        self.num_steps = 0  # since the last average
        self.anchor: Tensor | None = None  # the common weights since the last average
        self.momentum = slots.zeros() if outer is not None else None

    def begin(self) -> None:
        """Call before a step. Saves the common weights, from which the outer gradient is measured."""
        if self.outer is not None and self.num_steps == 0:
            self.anchor = self._weights()

    @torch.no_grad()
    def after_step(self) -> None:
        self.wire.plain_bytes += ring_bytes(self.slots.plain_bytes, self.wire.num_ranks)
        self.num_steps += 1
        if self.num_steps < self.every:
            return
        weights = self._mean(self._weights())
        if self.outer is not None:
            assert self.anchor is not None
            assert self.momentum is not None
            gradient = self.anchor - weights
            self.momentum.mul_(self.outer.momentum).add_(gradient)
            weights = self.anchor.sub_(gradient.add_(self.momentum, alpha=self.outer.momentum), alpha=self.outer.lr)
        self._set(weights)
        self.num_steps, self.anchor = 0, None

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the mean of all ranks' weights into the model for the duration, to evaluate or save. A collective."""
        if self.num_steps == 0:
            yield
            return
        with torch.no_grad():
            own = self._weights()
            self._set(self._mean(own.clone()))
        try:
            yield
        finally:
            with torch.no_grad():
                self._set(own)

    def mean_of(self, tensor: Tensor) -> Tensor:
        """The mean over ranks as a new tensor; integers and scalars, such as counters, are returned as they are."""
        if not tensor.is_floating_point() or tensor.dim() == 0:
            return tensor
        return self._mean(tensor.to(device=self.slots.device, copy=True)).to(tensor.device)

    def _weights(self) -> Tensor:
        vector = self.slots.zeros()
        foreach_copy_(self.slots.views(vector), [p.detach() for p in self.slots.parameters])
        return vector

    def _set(self, weights: Tensor) -> None:
        foreach_copy_([p.detach() for p in self.slots.parameters], self.slots.views(weights))

    def _mean(self, vector: Tensor) -> Tensor:
        self.wire.all_reduce(vector)
        return vector.div_(self.wire.num_ranks)
