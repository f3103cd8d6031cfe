"""Quantise each gradient value to one bit or one trit, with one scale per tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rung.data.permutation import mix
from rung.distributed.torch_private import foreach_div_, foreach_mul_
from rung.distributed.world import World
from rung.parallel.compression.base import GradientExchange, Slots
from rung.parallel.compression.feedback import ErrorFeedback
from rung.parallel.compression.packing import num_bit_bytes, pack_bits, pack_trits, unpack_bits, unpack_trits

_CLIP_DEVIATIONS = 2.5  # TernGrad clips values beyond this many standard deviations


class OneBit(ErrorFeedback):
    """Sends the sign of each value and the mean magnitude of each tensor; the error goes into the next step.

    1-bit SGD with error feedback, in the form of EF-signSGD (arXiv 1901.09847), with momentum before it as in
    dist-EF-SGDM (arXiv 1905.10936).
    """

    def _exchange(self, gradient: Tensor, used: list[bool] | None) -> Tensor:
        residual, velocity = self._accumulated(gradient, used)
        scales = torch.stack([view.abs().mean() for view in self._filled(residual)]).to(torch.float32)
        if used is not None:
            scales *= torch.tensor([float(flag) for flag in used], device=scales.device)
        signs = residual >= 0
        message = torch.cat([pack_bits(signs), scales.view(torch.uint8)])
        common = self.slots.zeros()
        split = num_bit_bytes(self.slots.total)
        for row in self.wire.gather(message).unbind():
            received = row[split:].clone().view(torch.float32)
            _add_signed(self.slots, common, unpack_bits(row[:split], self.slots.total), received)
        own = self.slots.zeros()
        _add_signed(self.slots, own, signs, scales)
        self._next = (residual.sub_(own), velocity)
        return common.div_(self.wire.num_ranks)

    def _filled(self, vector: Tensor) -> list[Tensor]:
        """Views of the tensors, with a single 0 for an empty one, so that its mean is not nan."""
        return [view if view.numel() else vector.new_zeros(1) for view in self.slots.views(vector)]


def _add_signed(slots: Slots, total: Tensor, signs: Tensor, scales: Tensor) -> None:
    values = signs.to(slots.dtype).mul_(2).sub_(1)
    foreach_mul_(slots.views(values), list(scales.to(slots.dtype).unbind()))
    total.add_(values)


class Ternary(GradientExchange):
    """Sends -1, 0 or 1 for each value, drawn without bias, and the largest magnitude of each tensor.

    TernGrad (arXiv 1705.07878): values beyond 2.5 standard deviations of their tensor are clipped first. There is no
    error feedback: the draws are unbiased, and accumulated errors of draws this coarse would not converge.
    """

    def __init__(self, slots: Slots, world: World, *, seed: int, **common: Any) -> None:
        super().__init__(slots, world, **common)
        self._seed = seed

    def _exchange(self, gradient: Tensor, used: list[bool] | None) -> Tensor:
        parts = self.slots.views(gradient)
        scales = []
        for part in parts:
            if part.numel() > 1:
                bound = _CLIP_DEVIATIONS * part.std()
                part.clamp_(min=-bound, max=bound)
            scales.append(part.abs().max() if part.numel() else part.new_zeros(()))
        sizes = torch.stack(scales).to(torch.float32)
        probabilities = gradient.abs()
        foreach_div_(self.slots.views(probabilities), [size.clamp(min=1e-38) for size in scales])
        trits = (self._draws() < probabilities).to(torch.int8) * gradient.sign().to(torch.int8)
        message = torch.cat([pack_trits(trits), sizes.view(torch.uint8)])
        common = self.slots.zeros()
        for row in self.wire.gather(message).unbind():
            split = row.numel() - 4 * sizes.numel()
            values = unpack_trits(row[:split], self.slots.total).to(self.slots.dtype)
            received = row[split:].clone().view(torch.float32).to(self.slots.dtype)
            foreach_mul_(self.slots.views(values), list(received.unbind()))
            common.add_(values)
        return common.div_(self.wire.num_ranks)

    def _draws(self) -> Tensor:
        """Random numbers seeded by rank and step, so that a resumed run draws the same as an uninterrupted one."""
        seed = mix(self._seed, self.world.role.data_rank, 2, self.num_steps)
        generator = self.world.tensors.generator(self.slots.device, seed)
        return torch.rand(self.slots.total, generator=generator, device=self.slots.device, dtype=self.slots.dtype)
