"""Which samples the global batch of a step holds, and which of them a rank reads.

The global batch is cut twice: first into micro-batches, then each micro-batch into one contiguous piece for each
rank. So a micro-batch holds the same samples for any number of ranks. Pieces may be ragged or empty; a rank with an
empty piece gets a stand-in sample that counts for nothing, because it must still take part in the collectives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from rung.nested import map_tensors


@dataclass(frozen=True)
class MicroBatch:
    """This rank's piece of one micro-batch."""

    data: Any
    num_samples: int  # of this rank; 0 means that `data` is a stand-in
    num_global_samples: int

    def pin_memory(self) -> MicroBatch:
        """Called by torch's loader, which looks for tensors in lists and dicts but not in a dataclass."""
        return replace(self, data=map_tensors(self.data, _pinned))


@dataclass(frozen=True)
class Window:
    """This rank's share of one global batch."""

    step: int
    epoch: int
    micro_batches: list[MicroBatch]
    ends_epoch: bool
    wait_seconds: float = 0.0

    @property
    def num_global_samples(self) -> int:
        return sum(micro.num_global_samples for micro in self.micro_batches)

    @property
    def num_samples(self) -> int:
        """Of this rank."""
        return sum(micro.num_samples for micro in self.micro_batches)


@dataclass(frozen=True)
class Cut:
    """How a global batch is cut: by micro-batch, then by rank."""

    batch_size: int
    num_ranks: int
    rank: int
    micro_batch: int | None = None

    @property
    def global_micro_batch(self) -> int:
        if self.micro_batch is None:
            return self.batch_size
        return min(self.batch_size, self.micro_batch * self.num_ranks)

    @property
    def num_micro_batches(self) -> int:
        return -(-self.batch_size // self.global_micro_batch)

    def piece(self, num_samples: int) -> tuple[int, int]:
        """This rank's part of a micro-batch of `num_samples`: start and stop within it."""
        return num_samples * self.rank // self.num_ranks, num_samples * (self.rank + 1) // self.num_ranks

    def micro_sizes(self, num_samples: int) -> list[int]:
        """The sizes of the micro-batches of a window of `num_samples` (the last window of an epoch is short)."""
        size = self.global_micro_batch
        return [min(size, num_samples - start) for start in range(0, num_samples, size)]


@dataclass(frozen=True)
class Piece:
    """What a loader process is asked for: positions of one epoch. `real` is 0 for a stand-in."""

    epoch: int
    start: int
    stop: int
    real: int
    num_global: int


def pieces_of(step: int, cut: Cut, per_epoch: int, num_samples: int) -> Iterator[Piece]:
    """The pieces of one step, counted from 0."""
    epoch, within = divmod(step, per_epoch)
    base = within * cut.batch_size
    for size in cut.micro_sizes(min(cut.batch_size, num_samples - base)):
        start, stop = cut.piece(size)
        if start < stop:
            yield Piece(epoch, base + start, base + stop, stop - start, size)
        else:
            yield Piece(epoch, base, base + 1, 0, size)
        base += size


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """A data set may have its samples on the GPU already, or sparse ones, which have no memory that could be pinned."""
    can_be = tensor.device.type == "cpu" and tensor.layout == torch.strided
    return tensor.pin_memory() if can_be else tensor
