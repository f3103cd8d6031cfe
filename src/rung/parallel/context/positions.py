"""Which positions of a sequence each rank has."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    # Made at once rather than when they are wanted: compiled code cannot wait for a lock, as cached properties have.
    chunk: int = field(init=False, compare=False)  # its size
    own: Tensor = field(init=False, repr=False, compare=False)  # this rank's positions
    everyone: Tensor = field(init=False, repr=False, compare=False)  # those of all ranks, one after the other
    order: Tensor = field(init=False, repr=False, compare=False)  # where each position lies in the parts of all ranks

    def __post_init__(self) -> None:
        size = -(-self.length // (2 * self.num_ranks))
        # A part must not be as long as the whole, so that a size tells which of the two a tensor has.
        object.__setattr__(self, "chunk", size + 1 if 2 * size == self.length else size)
        object.__setattr__(self, "own", self.of_rank(self.rank))
        object.__setattr__(self, "everyone", torch.cat([self.of_rank(rank) for rank in range(self.num_ranks)]))
        places: dict[int, int] = {}
        for place, position in enumerate(p for rank in range(self.num_ranks) for p in self._index(rank)):
            places.setdefault(position, place)
        order = torch.tensor([places[position] for position in range(self.length)], device=self.device)
        object.__setattr__(self, "order", order)

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

    def of_rank(self, rank: int) -> Tensor:
        return torch.tensor(self._index(rank), device=self.device)
