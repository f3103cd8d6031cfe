"""Top-k: sends the largest values of the whole gradient and adds the rest to later gradients.

As in Deep Gradient Compression (arXiv 1712.01887): momentum is applied before the exchange, so that a delayed value has
its full effect (momentum correction); the momentum of a sent value restarts at 0 (factor masking); each rank clips its
own gradient; and the ratio that is sent shrinks to its final value over the first steps. Two things differ. The values
are chosen among all parameters together, not per tensor: at equal bytes this is closer to uncompressed training,
because layers differ in how much of their gradient is in few values. And a gradient is scaled by the learning rate of
its own step, not by that of the step that sends it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from rung.distributed.world import World
from rung.parallel.compression.base import Slots
from rung.parallel.compression.feedback import ErrorFeedback
from rung.parallel.compression.packing import Positions, num_bit_bytes, pack_bits, unpack_bits

_STAGE = 4  # factor by which the ratio shrinks at a time: 1/4, 1/16, 1/64, ...
_SAMPLED = 67  # every 67th value estimates the threshold; a prime, so that the stride does not align with rows


@dataclass(frozen=True)
class SparseFormat:
    """The message format of the chosen values: positions, then values."""

    size: int
    count: int
    values: str  # sign, half or full
    num_tensors: int
    dtype: torch.dtype

    @property
    def positions(self) -> Positions:
        return Positions(self.size, self.count)

    def pack(self, index: Tensor, values: Tensor, owners: Tensor) -> tuple[Tensor, Tensor]:
        """The message, and the values as a receiver decodes them. `owners` are the tensors that the values are in."""
        if self.values == "sign":
            scales = _means_by(owners, values.abs(), self.num_tensors)
            signs = values >= 0
            packed = torch.cat([pack_bits(signs), _as_bytes(scales)])
            decoded = self._signed(signs, scales, owners, values.dtype)
        else:
            narrow = values.to(torch.bfloat16 if self.values == "half" else self.dtype)
            packed, decoded = _as_bytes(narrow), narrow.to(values.dtype)
        return torch.cat([self.positions.pack(index), packed]), decoded

    def unpack(self, message: Tensor, owner_of: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        split = self.positions.num_bytes
        index, rest = self.positions.unpack(message[:split]), message[split:]
        if self.values == "sign":
            signs = unpack_bits(rest[: num_bit_bytes(self.count)], self.count)
            scales = _from_bytes(rest[num_bit_bytes(self.count) :], torch.float32)
            return index, self._signed(signs, scales, owner_of(index), self.dtype)
        kind = torch.bfloat16 if self.values == "half" else self.dtype
        return index, _from_bytes(rest, kind).to(self.dtype)

    def _signed(self, signs: Tensor, scales: Tensor, owners: Tensor, dtype: torch.dtype) -> Tensor:
        size = scales.to(dtype)[owners]
        return torch.where(signs, size, -size)


class TopK(ErrorFeedback):
    """Sends `ratio` of all values; during the first `warm_up` steps the ratio shrinks from 1/4."""

    def __init__(
        self,
        slots: Slots,
        world: World,
        optimizer: Optimizer,
        *,
        ratio: float,
        values: str,
        warm_up: int,
        **common: Any,
    ) -> None:
        super().__init__(slots, world, optimizer, **common)
        self._ratio, self._values, self._warm_up = ratio, values, warm_up
        self._ends = torch.tensor(slots.sizes, device=slots.device).cumsum(0)

    def ratio_now(self) -> float:
        return warm_ratio(self.num_steps, self._ratio, self._warm_up)

    def _exchange(self, gradient: Tensor, used: list[bool] | None) -> Tensor:
        residual, velocity = self._accumulated(gradient, used)
        candidates = residual
        if used is not None and not all(used):
            candidates = residual.clone()
            for view, flag in zip(self.slots.views(candidates), used, strict=True):
                view.mul_(float(flag))
        ratio = self.ratio_now()
        form = self._form(max(1, math.ceil(ratio * self.slots.total)))
        index = largest(candidates, form.count)
        message, decoded = form.pack(index, candidates[index], self._owner_of(index))
        common = self.slots.zeros()
        for row in self.wire.gather(message).unbind():
            places, values = form.unpack(row, self._owner_of)
            common[places] += values
        residual[index] -= decoded
        if velocity is not None and form.count < self.slots.total:  # if all values are sent, no momentum is stale
            velocity[index] = torch.where(decoded == 0, velocity[index], 0.0)
        self._next = (residual, velocity)
        return common.div_(self.wire.num_ranks)

    def _owner_of(self, index: Tensor) -> Tensor:
        """The index of the tensor that contains each position."""
        return torch.bucketize(index, self._ends, right=True)

    def _form(self, count: int) -> SparseFormat:
        values = self._values
        if values == "auto":  # a message with all values should be exact
            values = "full" if count == self.slots.total else "half"
        return SparseFormat(self.slots.total, count, values, len(self.slots.sizes), self.slots.dtype)


def warm_ratio(step: int, ratio: float, warm_up: int) -> float:
    """The ratio to send in a step, counted from 0: 1/4, 1/16, ... in stages of equal length, then `ratio`."""
    if step >= warm_up or ratio >= 1 / _STAGE:
        return ratio
    num_stages = math.ceil(round(math.log(1 / ratio, _STAGE), 9)) - 1
    stage = step * num_stages // warm_up
    return max(ratio, float(_STAGE) ** -(stage + 1))


def largest(values: Tensor, count: int) -> Tensor:
    """The positions of the `count` values of largest magnitude, in increasing order.

    On the CPU a sample gives a threshold, and only values above it are compared. On a GPU this would need a host
    synchronisation, and topk is fast without it.
    """
    if count == values.numel():
        return torch.arange(count, device=values.device)
    sizes = values.abs()
    if values.device.type == "cpu" and type(values) is Tensor and values.numel() >= 64 * _SAMPLED:
        sample = sizes[::_SAMPLED]
        expected = sample.numel() * count / values.numel()
        rank = math.ceil(expected + 3 * math.sqrt(expected) + 2)
        if rank < sample.numel():
            threshold = torch.topk(sample, rank, sorted=True).values[-1]
            places = (sizes > threshold).nonzero().view(-1)
            if places.numel() >= count:
                chosen = torch.topk(sizes[places], count, sorted=False).indices
                return places[chosen].sort().values
    return torch.topk(sizes, count, sorted=False).indices.sort().values


def _means_by(owners: Tensor, values: Tensor, num_owners: int) -> Tensor:
    """The mean of each owner's values, as float32; 0 where it has none."""
    sums = values.new_zeros(num_owners).index_add_(0, owners, values)
    counts = values.new_zeros(num_owners).index_add_(0, owners, torch.ones_like(values))
    return (sums / counts.clamp_(min=1)).to(torch.float32)


def _as_bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


def _from_bytes(packed: Tensor, dtype: torch.dtype) -> Tensor:
    return packed.clone().view(dtype)  # a slice of bytes may not be aligned for the dtype
