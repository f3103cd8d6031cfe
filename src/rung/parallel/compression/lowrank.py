"""PowerSGD: each matrix of a gradient as the product of two narrow ones. torch's hook, on all gradients at once.

torch calls its hook for each of DDP's buckets and keeps errors by bucket; on gloo the second of two collectives may
then meet another bucket's, and buckets change after the first step. Here it gets one bucket in the order of the
parameters' names, when backward is over.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from rung import fakes
from rung.parallel.compression.base import Exchange, Slots
from rung.world import World


class _Bucket:
    """What torch's hook asks of a bucket."""

    def __init__(self, slots: Slots, vector: Tensor) -> None:
        self._slots, self._vector = slots, vector

    def buffer(self) -> Tensor:
        return self._vector

    def gradients(self) -> list[Tensor]:
        # The hook takes a tensor's first dimension for the rows.
        return [view.view(1) if view.dim() == 0 else view for view in self._slots.views(self._vector) if view.numel()]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


class LowRank(Exchange):
    """Error feedback and warm start as torch does them. Vectors, and matrices that would not shrink to half, travel as
    they are; so does everything in the first `warm_up` steps."""

    def __init__(self, slots: Slots, world: World, *, rank: int, seed: int, warm_up: int, **common: Any) -> None:
        super().__init__(slots, world, **common)
        self._warm_up = warm_up
        # torch waits two steps for DDP to settle its buckets. Here there is one, and `_exchange` sets the count.
        self._state: Any = PowerSGDState(
            self.wire.group,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=2,
            orthogonalization_epsilon=1e-8,  # a gradient of zeros has no direction
            random_seed=seed % 2**32,
        )
        self._left = slots.zeros()
        self._directions: Tensor | None = None  # the right matrices of the last step, which the next begins with
        self._sizes = _sizes(slots, rank)
        self._next: tuple[Tensor, Tensor | None] = (self._left, None)

    @property
    def clips(self) -> bool:
        return False

    def _exchange(self, gradient: Tensor, used: list[bool] | None) -> Tensor:
        state = self._state
        if self.num_steps < self._warm_up:
            self._next = (self._left, self._directions)
            self.wire.all_reduce(gradient)
            return gradient.div_(self.wire.num_ranks)
        state.iter = state.start_powerSGD_iter
        state.error_dict[0] = self._left
        if self._directions is not None:
            state.q_memory_dict[0] = self._directions.clone()
            state.p_memory_dict[0] = gradient.new_empty(self._sizes[1])
        with fakes.results_of_all_reduces() if self.world.pretend else nullcontext():
            common: Tensor = powerSGD_hook(state, _Bucket(self.slots, gradient)).wait()
        for size in self._sizes:
            self.wire.count_reduce(size * gradient.element_size())
        left = state.error_dict[0]
        if used is not None:
            for flag, waiting, given in zip(used, self.slots.views(left), self.slots.views(common), strict=True):
                if not flag:  # nobody will apply it
                    waiting.add_(given)
        directions = state.q_memory_dict[0]
        # One of zeros, left by a gradient of zeros, would stay so for ever. Any other will do.
        self._next = (left, torch.where(directions == 0, 1.0, directions))
        return common

    def commit(self) -> None:
        super().commit()
        self._left, self._directions = self._next

    def vectors(self) -> dict[str, Tensor]:
        return {"gradient": self._left}

    def extras(self) -> dict[str, Tensor]:
        found = super().extras()
        if self._directions is not None:
            found["directions"] = self._directions
        return found

    def restore(self, extras: Mapping[str, Tensor]) -> None:
        super().restore(extras)
        if "directions" in extras:
            self._directions = extras["directions"].to(self._left)


def _sizes(slots: Slots, rank: int) -> tuple[int, int, int]:
    """Elements of the three things that torch's hook reduces: what is not compressed, the left and right matrices."""
    plain = left = right = 0
    for parameter in slots.parameters:
        if parameter.numel() == 0:
            continue
        rows = parameter.shape[0] if parameter.dim() else 1
        columns = parameter.numel() // rows
        width = min(rows, columns, rank)
        if (rows + columns) * width * 2 < rows * columns:
            left, right = left + rows * width, right + columns * width
        else:
            plain += parameter.numel()
    return plain, left, right
