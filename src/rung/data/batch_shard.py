"""The partition of a step's global batch into micro-batches and ranks.

The global batch is split first into micro-batches, then each micro-batch into one contiguous range for each rank. So a
micro-batch holds the same samples for any number of ranks. Ranges may be ragged or empty; a rank with an empty range
gets a stand-in sample of weight 0, because it must still take part in the collectives.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rung.data.pytree import map_tensors, tensors_in


@dataclass(frozen=True)
class BadSample:
    """A sample that raised when it was read."""

    position: int  # within the epoch
    name: str  # in words; the same name is the same sample
    error: str

    @classmethod
    def of(cls, position: int, name: str, error: Exception) -> BadSample:
        frames = traceback.extract_tb(error.__traceback__)
        where = f" ({frames[-1].filename.rpartition('/')[2]}, line {frames[-1].lineno})" if frames else ""
        text = " ".join(str(error).split())
        return cls(position, name, f"{type(error).__name__}{': ' if text else ''}{text[:500]}{where}")


@dataclass(frozen=True)
class MicroBatch:
    """This rank's range of one micro-batch."""

    data: Any
    num_samples: int  # of this rank; 0 means that `data` is a stand-in
    num_global_samples: int
    collate_draws: bool = False  # random numbers, which then depend on how the batch is divided among ranks
    bad: tuple[BadSample, ...] = ()  # of this rank's range, which `num_global_samples` still counts

    def pin_memory(self) -> MicroBatch:
        """Called by torch's loader, which by itself pins tensors in lists and dicts but not in dataclasses."""
        return replace(self, data=map_tensors(self.data, _pinned))


def joined(pieces: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Ranks' pieces of a micro-batch as one, or as they are if they cannot be: padded to other lengths, say."""
    tensors = [tensors_in(piece.data) for piece in pieces]
    shapes = [[(t.dtype, t.shape[1:], len(t) if t.dim() else -1) for t in own] for own in tensors]
    fits = all(
        _has_only_tensors(piece.data)
        and [row[:2] for row in own] == [row[:2] for row in shapes[0]]
        and all(length == piece.num_samples for *_, length in own)
        for piece, own in zip(pieces, shapes, strict=True)
    )
    if not pieces or not fits:
        return [replace(piece, num_global_samples=piece.num_samples) for piece in pieces]
    whole = iter([torch.cat(column) for column in zip(*tensors, strict=True)])
    count = sum(piece.num_samples for piece in pieces)
    bad = tuple(sample for piece in pieces for sample in piece.bad)
    data = map_tensors(pieces[0].data, lambda _: next(whole))
    return [replace(pieces[0], data=data, num_samples=count, num_global_samples=count, bad=bad)]


def _has_only_tensors(data: Any) -> bool:
    if isinstance(data, Mapping):
        return all(_has_only_tensors(value) for value in data.values())
    if isinstance(data, tuple | list):
        return all(_has_only_tensors(value) for value in data)
    return isinstance(data, Tensor)


@dataclass(frozen=True)
class LocalBatch:
    """This rank's share of one global batch."""

    step: int
    epoch: int
    micro_batches: list[MicroBatch]
    ends_epoch: bool
    wait_seconds: float = 0.0
    place: Any = None  # after this batch, where a data set in shards is read on
    skipped: tuple[str, ...] = ()  # samples that the run has left out by now, by name

    @property
    def num_global_samples(self) -> int:
        return sum(micro.num_global_samples for micro in self.micro_batches)

    @property
    def num_samples(self) -> int:
        """Samples of this rank."""
        return sum(micro.num_samples for micro in self.micro_batches)


@dataclass(frozen=True)
class BatchPartition:
    """The partition of a global batch: by micro-batch, then by rank."""

    batch_size: int
    num_ranks: int
    rank: int
    micro_batch: int | None = None
    num_parts: int | None = None  # micro-batches of each batch, whatever its size, in place of `micro_batch`

    @property
    def global_micro_batch(self) -> int:
        """The most samples of a micro-batch, over all ranks."""
        return self._micro_size(self.batch_size)

    @property
    def num_micro_batches(self) -> int:
        """Of a whole batch."""
        return -(-self.batch_size // self.global_micro_batch)

    def piece(self, num_samples: int) -> tuple[int, int]:
        """Start and stop of this rank's range within a micro-batch of `num_samples`."""
        return num_samples * self.rank // self.num_ranks, num_samples * (self.rank + 1) // self.num_ranks

    def micro_sizes(self, num_samples: int) -> list[int]:
        """The sizes of the micro-batches of a window of `num_samples` (the last window of an epoch is short)."""
        size = self._micro_size(num_samples)
        return [min(size, num_samples - start) for start in range(0, num_samples, size)]

    def _micro_size(self, num_samples: int) -> int:
        if self.num_parts is not None:
            each = -(-num_samples // (self.num_ranks * self.num_parts))
        elif self.micro_batch is not None:
            each = self.micro_batch
        else:
            return self.batch_size
        return min(self.batch_size, each * self.num_ranks)


@dataclass(frozen=True)
class SampleRange:
    """A request to a loader process: positions of one epoch. `real` is 0 for a stand-in."""

    epoch: int
    start: int
    stop: int
    real: int
    num_global: int


def ranges_of(cut: BatchPartition, epoch: int, start: int, stop: int) -> Iterator[SampleRange]:
    """This rank's ranges of the batch at the positions start..stop of an epoch."""
    base = start
    for size in cut.micro_sizes(stop - start):
        first, after = cut.piece(size)
        if first < after:
            yield SampleRange(epoch, base + first, base + after, after - first, size)
        else:
            yield SampleRange(epoch, base, base + 1, 0, size)
        base += size


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Pin a tensor, unless it is on a GPU already, or sparse, which cannot be pinned."""
    can_be = tensor.device.type == "cpu" and tensor.layout == torch.strided
    return tensor.pin_memory() if can_be else tensor
