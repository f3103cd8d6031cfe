"""The windows of an iterable data set that comes in shards, of which each rank reads only its part.

Where a shard ends is known to the ranks that read it alone. So ranks tell each other how many samples they have for
each micro-batch; at the end of an epoch, when some lanes are read and others are not, batches are smaller.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rung.data.bad_samples import bad, good
from rung.data.batch_shard import BatchPartition, MicroBatch
from rung.data.sample_reader import Collator
from rung.data.shards import LanePlace, ReadSamples, ShardReader, Shards
from rung.errors import DataError

# Takes this rank's counts, and returns those of every data rank.
Exchange = Callable[[list[int]], list[list[int]]]


@dataclass(frozen=True)
class StreamPlace:
    """Where reading goes on after a batch: what a checkpoint keeps. `lanes` are those that this rank reads."""

    epoch: int = 0
    batch: int = 0  # batches of the epoch that are read
    lanes: Mapping[int, LanePlace] = field(default_factory=dict)


class ShardWindows:
    """Reads this rank's part of each window. Without an `exchange` a rank reads all shards, and keeps its part."""

    def __init__(
        self,
        shards: Shards,
        cut: BatchPartition,
        collate: Callable[[list[Any]], Any],
        seed: int,
        load: Callable[[ShardReader], Iterator[ReadSamples]],
        exchange: Exchange | None,
        *,
        pin_memory: bool,
    ) -> None:
        """`load` iterates over a reader, in this process or in others."""
        self._shards, self._cut, self._seed = shards, cut, seed
        self._collate, self._load, self._exchange = Collator(collate), load, exchange
        self._pin_memory = pin_memory
        self._pieces = [list(_pieces(cut, rank)) for rank in range(cut.num_ranks)]  # slots, by rank and micro-batch
        self._own = [slot for piece in self._pieces[cut.rank] for slot in piece]
        self._slots = list(range(cut.batch_size)) if exchange is None else self._own
        self._spare: list[Any] = []  # a sample for micro-batches in which this rank has none
        self.lanes_read = {shards.lane_of(slot) for slot in self._slots}

    def epoch(self, start: StreamPlace) -> Iterator[tuple[list[MicroBatch], StreamPlace, float]]:
        """The windows of one epoch, from a place on: micro-batches, the place after them, seconds waited."""
        number = start.batch
        reader = ShardReader(self._shards, self._slots, start.epoch, number, start.lanes)
        loaded = self._load(reader)
        places = {lane: place for lane, place in start.lanes.items() if lane in self.lanes_read}
        while True:
            started = time.perf_counter()
            taken = next(loaded)
            for lane, place in taken.places.items():
                before = places.get(lane)
                if place.state is None and before is not None and before.shard == place.shard:
                    place = LanePlace(place.shard, place.index, before.state, before.state_index)
                places[lane] = place
            micro_batches = self._micro_batches(taken.samples, start.epoch, number)
            if not micro_batches:
                if number == 0:
                    name = type(self._shards.dataset).__name__
                    raise DataError(f"the data set {name} gave no sample in epoch {start.epoch}.")
                return
            number += 1
            yield micro_batches, StreamPlace(start.epoch, number, dict(places)), time.perf_counter() - started

    def _micro_batches(self, samples: Mapping[int, Any], epoch: int, number: int) -> list[MicroBatch]:
        counts = [[sum(slot in samples for slot in piece) for piece in pieces] for pieces in self._pieces]
        if self._exchange is not None:
            rows = self._exchange([self._shards.num_shards, *counts[self._cut.rank]])
            if any(row[0] != self._shards.num_shards for row in rows):
                raise DataError(
                    f"ranks have {', '.join(str(row[0]) for row in rows)} shards of the data set. Rung divides shards "
                    "among ranks: let the data set have all of them on every rank."
                )
            counts = [row[1:] for row in rows]
        found = []
        for place, piece in enumerate(self._pieces[self._cut.rank]):
            total = sum(row[place] for row in counts)
            if total == 0:
                continue
            taken = [samples[slot] for slot in piece if slot in samples]
            own = good(taken)
            self._spare = self._spare or own[:1] or good(samples.values())[:1] or [self._shards.first_sample(epoch)]
            data = self._collate(own or self._spare, self._seed, epoch, number, -1 - (piece.start if own else 0))
            micro = MicroBatch(data, len(own), total, self._collate.draws, bad(taken))
            found.append(micro.pin_memory() if self._pin_memory else micro)
        return found


def _pieces(cut: BatchPartition, rank: int) -> Iterator[range]:
    base = 0
    for size in cut.micro_sizes(cut.batch_size):
        start, stop = BatchPartition(cut.batch_size, cut.num_ranks, rank, cut.micro_batch).piece(size)
        yield range(base + start, base + stop)
        base += size
