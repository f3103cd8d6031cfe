"""Known values to send, and a count of wrong elements among the received ones.

A pattern is a block of small random integers, repeated over a tensor. Its length is prime, so that data shifted by a
part, a page or a cache line does not match. The integers are so small that a sum over the ranks is exact in the type,
in any order of summation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_LENGTH = 65521
_CHUNK = 1 << 24  # elements compared at a time, to bound the memory of the comparison
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MAX_VALUE = 127


class Patterns:
    """The patterns of one type and number of ranks."""

    def __init__(self, dtype: torch.dtype, device: torch.device, ranks: int, reduction: str, count: int) -> None:
        self._dtype, self._device, self._reduction = dtype, device, reduction
        self._length = max(1, min(_LENGTH, count))  # of a block: at most the elements of the tensor
        largest = _exact_integers(dtype)
        self._max_value = 1 if dtype == torch.bool else min(_MAX_VALUE, largest // ranks)
        # If not even a one from every rank adds up exactly, only a few ranks have a one at any place.
        self._share_of_ones = largest / (16 * ranks)
        # Only the mean is inexact: a backend may divide before it adds.
        self._divides = reduction == "avg" and (dtype.is_floating_point or dtype.is_complex)
        self._tolerance = 4 * torch.finfo(dtype).eps if self._divides else 0.0

    def values(self, *key: int) -> torch.Tensor:
        """The block of a key, the same on every rank, as integers on the host."""
        seed = 0
        for number in key:
            seed = seed * 1_000_003 + number + 1
        generator = torch.Generator().manual_seed(seed % 2**63)
        if self._max_value:
            return torch.randint(0, self._max_value + 1, (self._length,), generator=generator)
        return (torch.rand(self._length, generator=generator) < self._share_of_ones).long()

    def reduce(self, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        """The expected result of reducing the blocks of all ranks."""
        stacked = torch.stack(list(blocks))
        if self._reduction == "min":
            return stacked.amin(0)
        if self._reduction == "max":
            return stacked.amax(0)
        total = stacked.sum(0)
        if self._dtype == torch.bool:
            return total.clamp(max=1)  # the sum of booleans is their "or"
        if self._reduction == "avg":
            return total / len(blocks) if self._divides else total // len(blocks)
        return total

    def fill(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Fill a flat tensor with repetitions of a block."""
        block = self._typed(values)
        whole = tensor.numel() // self._length * self._length
        tensor[:whole].view(-1, self._length).copy_(block.expand(whole // self._length, -1))
        tensor[whole:].copy_(block[: tensor.numel() - whole])

    def num_wrong(self, tensor: torch.Tensor, values: torch.Tensor) -> int:
        """The number of elements of a flat tensor that differ from the repeated block; every element is compared."""
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
        if self._dtype != torch.bool:  # compare bits: some types have no comparison
            bits = _BITS[self._dtype.itemsize]
            found, expected = found.view(bits), expected.view(bits)
        return int(found.ne(expected).sum())


def poison(tensor: torch.Tensor) -> None:
    """Fill with values that no pattern has, so that elements never written count as wrong."""
    tensor.view(torch.uint8).fill_(255)


def _exact_integers(dtype: torch.dtype) -> int:
    """The largest integer up to which a type represents every integer."""
    if dtype == torch.bool:
        return 1
    if dtype.is_complex:
        return _exact_integers(dtype.to_real())
    if not dtype.is_floating_point:
        return torch.iinfo(dtype).max
    return int(2 / torch.finfo(dtype).eps)
