"""Which positions of a sequence each rank has."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RankPositions:
    """The positions of one rank.

    A sequence is cut into two chunks for each rank, which has one from the front and its mirror image from the back:
    under a causal mask all ranks then have equal work. Every rank has `each` positions. Where the length does not
    divide, some have the last position again, which is dropped when the parts are put together.
    """

    length: int
    num_ranks: int
    rank: int
    device: torch.device

    @functools.cached_property
    def chunk(self) -> int:
        """The size of a chunk."""
        size = -(-self.length // (2 * self.num_ranks))
        # A part must not be as long as the whole, so that a size tells which of the two a tensor has.
        return size + 1 if 2 * size == self.length else size

    @property
    def each(self) -> int:
        return 2 * self.chunk

    @property
    def is_even(self) -> bool:
        """Whether no rank has a position again."""
        return self.num_ranks * self.each == self.length

    def spans(self, rank: int) -> list[tuple[int, int]]:
        """The first position and the one after the last of a rank's two chunks, before the sequence ends."""
        starts = [number * self.chunk for number in (rank, 2 * self.num_ranks - 1 - rank)]
        return [(min(start, self.length), min(start + self.chunk, self.length)) for start in starts]

    def _index(self, rank: int) -> list[int]:
        padded = [range(start, start + self.chunk) for start in (rank * self.chunk, self._mirror(rank) * self.chunk)]
        return [min(position, self.length - 1) for chunk in padded for position in chunk]

    def _mirror(self, rank: int) -> int:
        return 2 * self.num_ranks - 1 - rank

    @functools.cached_property
    def own(self) -> Tensor:
        """This rank's positions."""
        return self.of_rank(self.rank)

    @functools.cached_property
    def everyone(self) -> Tensor:
        """The positions of all ranks, one after the other."""
        return torch.cat([self.of_rank(rank) for rank in range(self.num_ranks)])

    @functools.cached_property
    def order(self) -> Tensor:
        """Where each position lies in the parts of all ranks, one after the other."""
        places: dict[int, int] = {}
        for place, position in enumerate(p for rank in range(self.num_ranks) for p in self._index(rank)):
            places.setdefault(position, place)
        return torch.tensor([places[position] for position in range(self.length)], device=self.device)

    def of_rank(self, rank: int) -> Tensor:
        return torch.tensor(self._index(rank), device=self.device)
