"""Weights that ranks change each for itself and average from time to time; with an outer step, if that is asked for.

Local SGD averages the weights. DiLoCo (arXiv 2311.08105) takes the way from the weights of the last meeting to the
average for a gradient, and lets SGD with Nesterov momentum take a step along it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from rung.parallel.compression import Slots, Wire, ring_bytes
from rung.world import World


@dataclass(frozen=True)
class OuterStep:
    """SGD with Nesterov momentum on what all ranks together did."""

    lr: float
    momentum: float


class Averaging:
    """All ranks meet after every `every` steps. Between that each has weights of its own."""

    def __init__(self, slots: Slots, world: World, every: int, outer: OuterStep | None) -> None:
        self.slots, self.wire, self.every, self.outer = slots, Wire(world), every, outer
        self.num_steps = 0  # since the last meeting
        self.anchor: Tensor | None = None  # the weights then
        self.momentum = slots.zeros() if outer is not None else None

    def begin(self) -> None:
        """Before a step: the weights that all ranks have are those to measure from."""
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
        """The mean of all ranks' weights in the place of this rank's, for whoever reads them. All ranks enter it."""
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
        """Over the ranks, as a new tensor. Counters stay as they are."""
        if not tensor.is_floating_point() or tensor.dim() == 0:
            return tensor
        return self._mean(tensor.to(device=self.slots.device, copy=True)).to(tensor.device)

    def _weights(self) -> Tensor:
        vector = self.slots.zeros()
        torch._foreach_copy_(self.slots.views(vector), [p.detach() for p in self.slots.parameters])
        return vector

    def _set(self, weights: Tensor) -> None:
        torch._foreach_copy_([p.detach() for p in self.slots.parameters], self.slots.views(weights))

    def _mean(self, vector: Tensor) -> Tensor:
        self.wire.all_reduce(vector)
        return vector.div_(self.wire.num_ranks)
