"""Orders of a map-style data set besides a plain permutation, each a function of (seed, epoch, position)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset

from rung.data.permutation import Permutation, mix, uniform
from rung.errors import DataError

_POOL = 50  # batches of which the samples are sorted by length together
_BLOCK = 2**16  # positions in which the parts of a mixture have exactly their shares


class Order(Protocol):
    num_samples: int  # of an epoch

    def samples(self, epoch: int, start: int, stop: int) -> list[int]:
        """The samples at positions start..stop of an epoch."""


class WeightedDraws:
    """As many draws an epoch as there are samples, with replacement, by weight."""

    def __init__(self, weights: Any, num_samples: int, seed: int) -> None:
        values = numbers(weights, num_samples, "sample_weights")
        if (values < 0).any() or not values.sum() > 0:
            raise DataError("sample_weights() gives weights that are negative, or all 0; no draw can follow them.")
        self.num_samples, self._seed = num_samples, seed
        sums = np.cumsum(values)
        self._sums = sums / sums[-1]
        self._last = int(np.flatnonzero(values)[-1])  # rounding must not lead to one of weight 0

    def samples(self, epoch: int, start: int, stop: int) -> list[int]:
        places = np.searchsorted(self._sums, uniform(mix(self._seed, epoch, 3), start, stop), side="right")
        return [min(place, self._last) for place in places.tolist()]


class ByLength:
    """Every sample once an epoch, in batches of samples of similar length; batches in random order."""

    def __init__(self, lengths: Any, num_samples: int, batch_size: int, seed: int) -> None:
        self._lengths = numbers(lengths, num_samples, "sample_lengths")
        self.num_samples, self._batch_size, self._seed = num_samples, batch_size, seed
        self._shuffled = Permutation(num_samples, seed, shuffle=True)
        self._epoch: tuple[int, list[int]] = (-1, [])

    def samples(self, epoch: int, start: int, stop: int) -> list[int]:
        if self._epoch[0] != epoch:
            self._epoch = (epoch, self._order(epoch))
        return self._epoch[1][start:stop]

    def _order(self, epoch: int) -> list[int]:
        size, found = self._batch_size, np.array(self._shuffled.samples(epoch, 0, self.num_samples))
        for start in range(0, self.num_samples, _POOL * size):
            pool = found[start : start + _POOL * size]
            found[start : start + _POOL * size] = pool[np.argsort(self._lengths[pool], kind="stable")]
        count = self.num_samples // size  # the short batch stays the last one
        if count > 1:
            batches = Permutation(count, mix(self._seed, 6), shuffle=True).samples(epoch, 0, count)
            found[: count * size] = found[: count * size].reshape(count, size)[batches].reshape(-1)
        return [int(sample) for sample in found]


class Mixture:
    """The parts of a ConcatDataset by their shares. Each part is gone through in an order of its own, again and again,
    over the epochs; an epoch has as many samples as all parts together."""

    def __init__(self, dataset: Any, shares: Sequence[Any], seed: int, *, shuffle: bool) -> None:
        if not isinstance(dataset, ConcatDataset):
            raise DataError(
                f"mixture has the shares of the parts of a ConcatDataset, and train_data() gives a "
                f"{type(dataset).__name__}. Return torch.utils.data.ConcatDataset([...])."
            )
        parts: list[Any] = dataset.datasets
        lengths = [len(part) for part in parts]
        values = numbers(shares, len(lengths), "mixture", what="parts of the data set")
        if not (values > 0).all():
            raise DataError(f"mixture = {list(shares)!r}: a share must be above 0. Leave a part without one out.")
        if 0 in lengths:
            raise DataError(f"part {lengths.index(0)} of the mixture is empty.")
        self.num_samples = sum(lengths)
        self._counts = _share_out(values)
        self._bounds = np.cumsum(self._counts)
        self._starts = [0, *np.cumsum(lengths).tolist()]
        self._places = Permutation(_BLOCK, mix(seed, 4), shuffle=True)
        self._parts = [Permutation(n, mix(seed, 5, part), shuffle=shuffle) for part, n in enumerate(lengths)]
        self._block: tuple[int, list[int], list[int]] = (-1, [], [])

    def samples(self, epoch: int, start: int, stop: int) -> list[int]:
        return [self._sample(epoch * self.num_samples + position) for position in range(start, stop)]

    def _sample(self, position: int) -> int:
        """The sample at a position of the whole run."""
        block, offset = divmod(position, _BLOCK)
        if self._block[0] != block:
            sources = np.searchsorted(self._bounds, self._places.samples(block, 0, _BLOCK), side="right")
            numbers = np.zeros(_BLOCK, dtype=np.int64)  # how many of the same part come before in the block
            for part in range(len(self._parts)):
                own = sources == part
                numbers[own] = np.arange(own.sum())
            self._block = (block, sources.tolist(), numbers.tolist())
        part = self._block[1][offset]
        number = block * int(self._counts[part]) + self._block[2][offset]
        turn, place = divmod(number, self._parts[part].num_samples)
        return int(self._starts[part]) + self._parts[part].samples(turn, place, place + 1)[0]


def _share_out(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Positions of a block for each part: at least one, and all together."""
    exact = values / values.sum() * _BLOCK
    counts: NDArray[np.int64] = np.maximum(1, np.floor(exact)).astype(np.int64)
    for part in np.argsort(np.floor(exact) - exact, kind="stable")[: max(0, _BLOCK - int(counts.sum()))]:
        counts[part] += 1
    counts[np.argmax(counts)] += _BLOCK - counts.sum()
    return counts


def numbers(values: Any, count: int, name: str, what: str = "samples") -> NDArray[np.float64]:
    """What a task gives for each sample, or for each of its parts."""
    found = np.asarray(values, dtype=np.float64)
    if found.shape != (count,) or not np.isfinite(found).all():
        raise DataError(
            f"{name} must be {count:,} finite numbers, one for each of the {what}, and has the shape "
            f"{list(found.shape)}."
        )
    return found
