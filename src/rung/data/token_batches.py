"""Batches by number of tokens instead of samples: of short samples many, of long ones few."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rung.data.orders import numbers
from rung.data.permutation import Permutation, mix
from rung.errors import DataError

Ints = NDArray[np.int64]


class TokenBatches:
    """Every sample once an epoch, in batches of at most `most` tokens, padding included: as many times the longest.

    The samples are sorted by length and cut into batches, which come in random order; so batches have samples of
    similar length. Samples of the same length change places in every epoch. How many batches there are, and how many
    samples each has, follows from the lengths alone, and so do the steps of an epoch. Without `shuffle` batches are cut
    from the data set's own order.
    """

    def __init__(
        self, lengths: Any, num_samples: int, most: int, seed: int, *, shuffle: bool, takes_longer: bool = False
    ) -> None:
        """A sample of more than `most` tokens is refused, or with `takes_longer` a batch of its own."""
        given = numbers(lengths, num_samples, "sample_lengths")
        if (given < 0).any():
            raise DataError(f"sample_lengths() gives {given.min():g} tokens for sample {int(np.argmin(given))}.")
        self.lengths = np.maximum(given, 1)  # an empty sample takes a place, too
        self.num_samples, self._shuffle = num_samples, shuffle
        longest = int(np.argmax(self.lengths))
        if self.lengths[longest] > most and not takes_longer:
            raise DataError(
                f"sample {longest} has {self.lengths[longest]:,.10g} tokens, and a batch takes at most {most:,} "
                "(batch_tokens). Take more, or cut or leave out what is longer in the data set."
            )
        self._samples = Permutation(num_samples, mix(seed, 7), shuffle=shuffle)
        ordered = np.sort(self.lengths) if shuffle else self.lengths
        self._starts = _cut(ordered, most)
        self.num_batches = len(self._starts) - 1  # of an epoch
        self._batches = Permutation(self.num_batches, mix(seed, 8), shuffle=shuffle)
        self._epoch: tuple[int, Ints] = (-1, self._starts)

    @property
    def sizes(self) -> Ints:
        """The number of samples of each batch, by length."""
        return np.diff(self._starts)

    @functools.lru_cache(maxsize=2)  # noqa: B019 (loader processes read an epoch ahead of the steps)
    def starts(self, epoch: int) -> Ints:
        """The position of each batch's first sample in the epoch, and at last the number of all."""
        return np.concatenate([[0], np.cumsum(self.sizes[self._batches.samples(epoch, 0, self.num_batches)])])

    def samples(self, epoch: int, start: int, stop: int) -> list[int]:
        if not self._shuffle:
            return list(range(start, stop))
        if self._epoch[0] != epoch:
            self._epoch = (epoch, self._in_order(epoch))
        found: list[int] = self._epoch[1][start:stop].tolist()
        return found

    def fullest(self) -> list[int]:
        """The samples of a batch with the most tokens."""
        starts = self.starts(0)
        lengths = self.lengths[self.samples(0, 0, self.num_samples)]
        batch = int(np.argmax(np.maximum.reduceat(lengths, starts[:-1]) * np.diff(starts)))
        return self.samples(0, int(starts[batch]), int(starts[batch + 1]))

    def _in_order(self, epoch: int) -> Ints:
        found = np.array(self._samples.samples(epoch, 0, self.num_samples), dtype=np.int64)
        parts = np.split(found[np.argsort(self.lengths[found], kind="stable")], self._starts[1:-1])
        return np.concatenate([parts[batch] for batch in self._batches.samples(epoch, 0, self.num_batches)])


def _cut(lengths: NDArray[np.float64], most: int) -> Ints:
    """Where batches start, and the end: each takes as many samples as fit."""
    starts, longest = [0], 0.0
    for position, length in enumerate(lengths.tolist()):
        longest = max(longest, length)
        if position > starts[-1] and longest * (position + 1 - starts[-1]) > most:
            starts.append(position)
            longest = length
    return np.array([*starts, len(lengths)], dtype=np.int64)
