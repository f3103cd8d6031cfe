"""One bit or one trit for every value of a gradient, and a scale for every tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rung.order import mix
from rung.parallel.compression.base import Exchange, Slots
from rung.parallel.compression.feedback import ErrorFeedback
from rung.parallel.compression.packing import num_bit_bytes, pack_bits, pack_trits, unpack_bits, unpack_trits
from rung.world import World

_FEW_DEVIATIONS = 2.5  # beyond which TernGrad clips


class OneBit(ErrorFeedback):
    """The sign of each value, times the mean magnitude of its tensor; the difference goes into the next step.

    1-bit SGD with error feedback, in the form of EF-signSGD (arXiv 1901.09847), with momentum before it as in
    dist-EF-SGDM (arXiv 1905.10936).
    """

    def _exchange(self, gradient: Tensor, used: list[bool] | None) -> Tensor:
        left, velocity = self._accumulated(gradient, used)
        scales = torch.stack([view.abs().mean() for view in self._filled(left)]).to(torch.float32)
        if used is not None:
            scales *= torch.tensor([float(flag) for flag in used], device=scales.device)
        signs = left >= 0
        message = torch.cat([pack_bits(signs), scales.view(torch.uint8)])
        common = self.slots.zeros()
        for row in self.wire.gather(message).unbind():
            cut = num_bit_bytes(self.slots.total)
            _add(self.slots, common, unpack_bits(row[:cut], self.slots.total), row[cut:].clone().view(torch.float32))
        own = self.slots.zeros()
        _add(self.slots, own, signs, scales)
        self._next = (left.sub_(own), velocity)
        return common.div_(self.wire.num_ranks)

    def _filled(self, vector: Tensor) -> list[Tensor]:
        """The tensors' parts; one that has no elements stands as a zero."""
        return [view if view.numel() else vector.new_zeros(1) for view in self.slots.views(vector)]


def _add(slots: Slots, total: Tensor, signs: Tensor, scales: Tensor) -> None:
    values = signs.to(slots.dtype).mul_(2).sub_(1)
    torch._foreach_mul_(slots.views(values), list(scales.to(slots.dtype).unbind()))
    total.add_(values)


class Ternary(Exchange):
    """-1, 0 or 1 for each value, drawn so that the mean is right, times the largest magnitude of its tensor.

    TernGrad (arXiv 1705.07878): values beyond 2.5 standard deviations of their tensor are clipped first. It keeps no
    error, because what it sends is right in the mean; added up, draws as coarse as these would not settle.
    """

    def __init__(self, slots: Slots, world: World, *, seed: int, **common: Any) -> None:
        super().__init__(slots, world, **common)
        self._seed = seed

    def _exchange(self, gradient: Tensor, used: list[bool] | None) -> Tensor:
        parts = self.slots.views(gradient)
        scales = []
        for part in parts:
            if part.numel() > 1:
                bound = _FEW_DEVIATIONS * part.std()
                part.clamp_(min=-bound, max=bound)
            scales.append(part.abs().max() if part.numel() else part.new_zeros(()))
        sizes = torch.stack(scales).to(torch.float32)
        chances = gradient.abs()
        torch._foreach_div_(self.slots.views(chances), [size.clamp(min=1e-38) for size in scales])
        trits = (self._draws() < chances).to(torch.int8) * gradient.sign().to(torch.int8)
        message = torch.cat([pack_trits(trits), sizes.view(torch.uint8)])
        common = self.slots.zeros()
        for row in self.wire.gather(message).unbind():
            cut = row.numel() - 4 * sizes.numel()
            values = unpack_trits(row[:cut], self.slots.total).to(self.slots.dtype)
            told = row[cut:].clone().view(torch.float32).to(self.slots.dtype)
            torch._foreach_mul_(self.slots.views(values), list(told.unbind()))
            common.add_(values)
        return common.div_(self.wire.num_ranks)

    def _draws(self) -> Tensor:
        """Of this rank and step alone: a run that goes on draws as one that was not interrupted."""
        if self.world.pretend:
            return torch.rand(self.slots.total, device=self.slots.device, dtype=self.slots.dtype)
        generator = torch.Generator(self.slots.device)
        generator.manual_seed(mix(self._seed, self.world.data_rank, 2, self.num_steps))
        return torch.rand(self.slots.total, generator=generator, device=self.slots.device, dtype=self.slots.dtype)
