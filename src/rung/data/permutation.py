"""The order of samples: a function of (seed, epoch, position), computed where it is needed.

A keyed permutation of [0, n) that stores nothing: every rank and loader process can compute any position at any time,
with the same result. It is a Feistel network over the next power of two, iterated until the value is below n.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_BLOCK = 4096  # positions computed at a time, to amortize the overhead of numpy calls

UInts = NDArray[np.uint64]


def mix(*words: int) -> int:
    """A 63-bit hash of integers, good enough to seed a generator (splitmix64's finaliser, chained)."""
    state = 0x9E3779B97F4A7C15
    for word in words:
        state = _finalise((state ^ (word & _MASK)) + 0x9E3779B97F4A7C15 & _MASK)
    return state >> 1


_MASK = (1 << 64) - 1


def _finalise(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _finalise_array(x: UInts) -> UInts:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniform(key: int, start: int, stop: int) -> NDArray[np.float64]:
    """A number in [0, 1) for each of the positions start..stop."""
    positions = np.arange(start, stop, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    return (_finalise_array(positions) >> np.uint64(11)).astype(np.float64) * 2.0**-53


class Permutation:
    """The sample at each position of each epoch."""

    def __init__(self, num_samples: int, seed: int, *, shuffle: bool) -> None:
        self.num_samples = num_samples
        self.seed = seed
        self.shuffle = shuffle
        self._block_key: tuple[int, int] | None = None
        self._block: list[int] = []

    def samples(self, epoch: int, start: int, stop: int) -> list[int]:
        """The samples at positions start..stop of an epoch."""
        if not self.shuffle:
            return list(range(start, stop))
        found: list[int] = []
        while start < stop:
            block, offset = divmod(start, _BLOCK)
            if self._block_key != (epoch, block):
                positions = np.arange(block * _BLOCK, min((block + 1) * _BLOCK, self.num_samples), dtype=np.uint64)
                self._block = self._permute(positions, epoch).tolist()
                self._block_key = (epoch, block)
            taken = self._block[offset : offset + stop - start]
            found += taken
            start += len(taken)
        return found

    def _permute(self, positions: UInts, epoch: int) -> UInts:
        bits = max(2, (self.num_samples - 1).bit_length())
        # A half of two or three bits mixes little in a round: small sets need more rounds for all orders to be equally
        # likely.
        rounds = 16 if bits < 16 else 8
        low_bits = np.uint64(bits // 2)
        low_mask = np.uint64((1 << (bits // 2)) - 1)
        high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
        keys = [np.uint64(mix(self.seed, epoch, number)) for number in range(rounds)]
        values = positions
        outside = np.ones(len(values), dtype=bool)
        while outside.any():
            high, low = values[outside] >> low_bits, values[outside] & low_mask
            for number, key in enumerate(keys):
                if number % 2 == 0:
                    high = high ^ (_finalise_array(low ^ key) & high_mask)
                else:
                    low = low ^ (_finalise_array(high ^ key) & low_mask)
            values = values.copy()
            values[outside] = (high << low_bits) | low
            outside = values >= np.uint64(self.num_samples)
        return values
