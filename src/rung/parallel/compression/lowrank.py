"""PowerSGD: approximates each gradient matrix by the product of two narrow ones, with torch's hook.

DDP would call the hook for each bucket. On gloo, which pairs collectives by issue order, the hook's second collective
can then pair with another bucket's; and buckets, by which the hook keeps errors, change after the first step. So it
gets all gradients as one bucket after backward, in the order of `named_parameters`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from rung.distributed.ddp import collective_futures
from rung.distributed.world import World
from rung.parallel.compression.base import GradientExchange, Slots


class _Bucket:
    """The methods of a GradBucket that torch's hook calls."""

    def __init__(self, slots: Slots, vector: Tensor) -> None:
        self._slots, self._vector = slots, vector

    def buffer(self) -> Tensor:
        return self._vector

    def gradients(self) -> list[Tensor]:
        # The hook reads the first dimension as rows, which a scalar does not have.
        return [view.view(1) if view.dim() == 0 else view for view in self._slots.views(self._vector) if view.numel()]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


class LowRank(GradientExchange):
    """PowerSGD with torch's error feedback and warm start. Vectors and matrices that would not shrink to half are sent
    uncompressed, and so is everything in the first `warm_up` steps."""

    def __init__(self, slots: Slots, world: World, *, rank: int, seed: int, warm_up: int, **common: Any) -> None:
        super().__init__(slots, world, **common)
        self._warm_up = warm_up
        # torch requires at least 2, the steps until DDP has rebuilt its buckets. `_exchange` sets the step count.
        self._state: Any = PowerSGDState(
            self.wire.group,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=2,
            orthogonalization_epsilon=1e-8,  # a zero gradient cannot be normalised
            random_seed=seed % 2**32,
        )
        self._residual = slots.zeros()
        self._directions: Tensor | None = None  # the right matrices of the last step, for the warm start
        self._sizes = _sizes(slots, rank)
        self._next: tuple[Tensor, Tensor | None] = (self._residual, None)

    @property
    def clips(self) -> bool:
        return False

    def _exchange(self, gradient: Tensor, used: list[bool] | None) -> Tensor:
        state = self._state
        if self.num_steps < self._warm_up:
            self._next = (self._residual, self._directions)
            self.wire.all_reduce(gradient)
            return gradient.div_(self.wire.num_ranks)
        state.iter = state.start_powerSGD_iter  # before this step the hook would not compress
        state.error_dict[0] = self._residual
        if self._directions is not None:
            state.q_memory_dict[0] = self._directions.clone()
            state.p_memory_dict[0] = gradient.new_empty(self._sizes[1])  # without it the hook would draw a new q
        with collective_futures(self.world):
            common: Tensor = powerSGD_hook(state, _Bucket(self.slots, gradient)).wait()
        for size in self._sizes:
            self.wire.count_reduce(size * gradient.element_size())
        left = state.error_dict[0]
        if used is not None:
            for flag, waiting, given in zip(used, self.slots.views(left), self.slots.views(common), strict=True):
                if not flag:  # this gradient will not be applied: keep it in the residual
                    waiting.add_(given)
        directions = state.q_memory_dict[0]
        # A zero gradient leaves zero directions, which would stay zero for ever: replace them by ones.
        self._next = (left, torch.where(directions == 0, 1.0, directions))
        return common

    def commit(self) -> None:
        super().commit()
        self._residual, self._directions = self._next

    def vectors(self) -> dict[str, Tensor]:
        return {"gradient": self._residual}

    def extras(self) -> dict[str, Tensor]:
        found = super().extras()
        if self._directions is not None:
            found["directions"] = self._directions
        return found

    def restore(self, extras: Mapping[str, Tensor]) -> None:
        super().restore(extras)
        if "directions" in extras:
            self._directions = extras["directions"].to(self._residual)


def _sizes(slots: Slots, rank: int) -> tuple[int, int, int]:
    """The numbers of elements that torch's hook reduces: uncompressed values, left matrices, right matrices."""
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
