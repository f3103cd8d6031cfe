"""Pack bits, trits and sorted positions into bytes. Shapes depend on counts only, never on values.

So the messages of all ranks have equal length and need one collective without an exchange of lengths, a GPU needs no
host synchronisation, and the code runs on fake tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

TRITS_PER_BYTE = 5  # 3**5 = 243


def num_bit_bytes(count: int) -> int:
    return -(-count // 8)


def pack_bits(bits: Tensor) -> Tensor:
    """Pack booleans, eight to a byte."""
    padded = bits.new_zeros(8 * num_bit_bytes(bits.numel()), dtype=torch.uint8)
    padded[: bits.numel()] = bits
    return _combine(padded.view(-1, 8), 2)


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits = (packed.unsqueeze(1) >> shifts).bitwise_and_(1)
    return bits.view(-1)[:count].to(torch.bool)


def num_trit_bytes(count: int) -> int:
    return -(-count // TRITS_PER_BYTE)


def pack_trits(trits: Tensor) -> Tensor:
    """Pack values of -1, 0 and 1, five to a byte: 1.6 bits each; the minimum is 1.585."""
    padded = trits.new_ones(TRITS_PER_BYTE * num_trit_bytes(trits.numel()), dtype=torch.uint8)
    padded[: trits.numel()] = trits + 1
    return _combine(padded.view(-1, TRITS_PER_BYTE), 3)


def unpack_trits(packed: Tensor, count: int) -> Tensor:
    """The trits as int8."""
    places = torch.tensor([3**place for place in range(TRITS_PER_BYTE)], dtype=torch.uint8, device=packed.device)
    trits = (packed.unsqueeze(1) // places).remainder_(3)
    return trits.view(-1)[:count].to(torch.int8) - 1


def _combine(digits: Tensor, base: int) -> Tensor:
    """Combine each row of digits, lowest first, into one byte."""
    packed = digits[:, 0].clone()
    for place in range(1, digits.shape[1]):
        packed += digits[:, place] * base**place
    return packed


@dataclass(frozen=True)
class Positions:
    """The packed format of `count` increasing numbers below `size`.

    Elias-Fano: the lower bits of each number verbatim, and the upper parts as one bit vector, in which the i-th 1 is at
    the i-th upper part plus i. That takes 2 + log2(size / count) bits a number, half a bit more than the entropy of a
    random choice. If more than about one in four are chosen, one bit for every number below `size` is shorter, and if
    all are, nothing is sent.
    """

    size: int
    count: int

    @property
    def is_everything(self) -> bool:
        return self.count == self.size

    @property
    def num_lower(self) -> int | None:
        """Lower bits of each number; None for one bit a number below `size`."""
        best = math.floor(math.log2(max(1.0, self.size / self.count)))
        return best if self._elias_fano_bytes(best) < num_bit_bytes(self.size) else None

    @property
    def num_bytes(self) -> int:
        if self.is_everything:
            return 0
        lower = self.num_lower
        return num_bit_bytes(self.size) if lower is None else self._elias_fano_bytes(lower)

    def _elias_fano_bytes(self, lower: int) -> int:
        return num_bit_bytes(self.count * lower) + num_bit_bytes(self._num_upper_bits(lower))

    def _num_upper_bits(self, lower: int) -> int:
        return self.count + ((self.size - 1) >> lower)

    def pack(self, numbers: Tensor) -> Tensor:
        """Pack increasing numbers (int64)."""
        if self.is_everything:
            return torch.empty(0, dtype=torch.uint8, device=numbers.device)
        lower = self.num_lower
        if lower is None:
            marks = torch.zeros(self.size, dtype=torch.bool, device=numbers.device)
            marks[numbers] = True
            return pack_bits(marks)
        shifts = torch.arange(lower, device=numbers.device)
        below = (numbers.unsqueeze(1) >> shifts) & 1
        marks = torch.zeros(self._num_upper_bits(lower), dtype=torch.bool, device=numbers.device)
        marks[(numbers >> lower) + torch.arange(self.count, device=numbers.device)] = True
        return torch.cat([pack_bits(below.view(-1)), pack_bits(marks)])

    def unpack(self, packed: Tensor) -> Tensor:
        if self.is_everything:
            return torch.arange(self.size, device=packed.device)
        lower = self.num_lower
        if lower is None:
            return _places(unpack_bits(packed, self.size), self.count)
        below_bytes = num_bit_bytes(self.count * lower)
        below = unpack_bits(packed[:below_bytes], self.count * lower).view(self.count, lower).to(torch.int64)
        shifts = torch.arange(lower, device=packed.device)
        marks = unpack_bits(packed[below_bytes:], self._num_upper_bits(lower))
        upper = _places(marks, self.count) - torch.arange(self.count, device=packed.device)
        return (upper << lower) + (below << shifts).sum(dim=1)


def _places(marks: Tensor, count: int) -> Tensor:
    """The positions of the `count` marks."""
    return torch.nonzero_static(marks, size=count).view(-1)
