"""Known values to send, and how many of those that came are not the ones expected.

A pattern is a block of small random integers, repeated over a tensor. Its length is a prime, so that no shift by a part
of a collective, by a page or by a cache line falls on the same values again; and the integers are so small that any
sum over the ranks is exact in the type, in whatever order it is taken.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_LENGTH = 65521
_CHUNK = 1 << 24  # elements compared at a time: the comparison needs memory, too
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LARGEST = 127


class Patterns:
    """The values of one type and number of ranks."""

    def __init__(self, dtype: torch.dtype, device: torch.device, ranks: int, reduction: str, count: int) -> None:
        self._dtype, self._device, self._reduction = dtype, device, reduction
        self._length = max(1, min(_LENGTH, count))  # of a block: not more than the largest tensor has elements
        largest = _exact_integers(dtype)
        self._most = 1 if dtype == torch.bool else min(_LARGEST, largest // ranks)
        # Of so many ranks that not even one each can be added up, few have a one at any place.
        self._part = largest / (16 * ranks)
        # The mean alone is not exact: a backend may divide before it adds.
        self._divides = reduction == "avg" and (dtype.is_floating_point or dtype.is_complex)
        self._tolerance = 4 * torch.finfo(dtype).eps if self._divides else 0.0

    def values(self, *key: int) -> torch.Tensor:
        """The block that a key stands for, the same on every rank, as integers on the host."""
        seed = 0
        for number in key:
            seed = seed * 1_000_003 + number + 1
        generator = torch.Generator().manual_seed(seed % 2**63)
        if self._most:
            return torch.randint(0, self._most + 1, (self._length,), generator=generator)
        return (torch.rand(self._length, generator=generator) < self._part).long()

    def reduced(self, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        """What a reduction makes of the blocks of all ranks."""
        stacked = torch.stack(list(blocks))
        if self._reduction == "min":
            return stacked.amin(0)
        if self._reduction == "max":
            return stacked.amax(0)
        total = stacked.sum(0)
        if self._dtype == torch.bool:
            return total.clamp(max=1)  # a sum of truths is their "or"
        if self._reduction == "avg":
            return total / len(blocks) if self._divides else total // len(blocks)
        return total

    def put(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Fill a flat tensor with a block, again and again."""
        block = self._typed(values)
        whole = tensor.numel() // self._length * self._length
        tensor[:whole].view(-1, self._length).copy_(block.expand(whole // self._length, -1))
        tensor[whole:].copy_(block[: tensor.numel() - whole])

    def num_wrong(self, tensor: torch.Tensor, values: torch.Tensor) -> int:
        """How many elements of a flat tensor are not those of the block. Every one is looked at."""
        block = self._typed(values)
        rows, found = max(1, _CHUNK // self._length), 0
        for start in range(0, tensor.numel(), rows * self._length):
            part = tensor[start : start + rows * self._length]
            whole = part.numel() // self._length * self._length
            found += self._count(part[:whole].view(-1, self._length), block)
            found += self._count(part[whole:], block[: part.numel() - whole])
        return found

    def _typed(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(torch.float64).to(self._dtype).to(self._device)

    def _count(self, found: torch.Tensor, expected: torch.Tensor) -> int:
        if self._tolerance:
            if self._dtype.is_complex:
                found, expected = torch.view_as_real(found), torch.view_as_real(expected)
            wanted = expected.double()
            differs = (found.double() - wanted).abs() > self._tolerance * wanted.abs().clamp(min=1)
            return int((differs | found.isnan()).sum())
        if self._dtype != torch.bool:  # not every type can be compared, but their bits can
            bits = _BITS[self._dtype.itemsize]
            found, expected = found.view(bits), expected.view(bits)
        return int(found.ne(expected).sum())


def poison(tensor: torch.Tensor) -> None:
    """Values that no pattern has, so that what was not written is seen."""
    tensor.view(torch.uint8).fill_(255)


def _exact_integers(dtype: torch.dtype) -> int:
    """The largest integer up to which a type knows them all."""
    if dtype == torch.bool:
        return 1
    if dtype.is_complex:
        return _exact_integers(dtype.to_real())
    if not dtype.is_floating_point:
        return torch.iinfo(dtype).max
    return int(2 / torch.finfo(dtype).eps)
