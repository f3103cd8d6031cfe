"""Iterable data sets that come in shards: which shard each sample of a batch is from, and a reader of some of them.

A batch of B samples has B slots, which read from L lanes: slot s from lane s * L // B. Lane l reads the shards at the
places l, l + L, l + 2L ... of the epoch's order, one after the other, and when they are read, its slots stay empty. So
the samples of a batch depend on nothing but the batch size, and a rank opens only the shards in the lanes of its own
slots.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from rung.data.batch_shard import BadSample
from rung.data.permutation import Permutation, mix
from rung.data.rng import keeping_generators, seed_generators
from rung.data.sample_reader import CountedSamples
from rung.errors import DataError

STATE_EVERY = 16  # batches between two states of a shard; a run that resumes reads at most as many again
_PROOFS = 2  # samples that a state must give again, as they came, before states are used
_END = object()


@dataclass(frozen=True)
class LanePlace:
    """How far a lane was read: its shard, counted within the lane, and the samples taken from that one. `state` is
    the shard's own, after `state_index` samples."""

    shard: int
    index: int
    state: Any = None
    state_index: int = 0


@dataclass(frozen=True)
class ReadSamples:
    """What a reader took for one batch: samples by slot, and the places of its lanes after them."""

    samples: dict[int, Any]
    places: dict[int, LanePlace] = field(default_factory=dict)


class Shards:
    """The shards of a data set, in the order of each epoch.

    A data set has shards if it has `num_shards` and `shard(num_shards, index)`, as those of Hugging Face have; one with
    `state_dict` and `load_state_dict` is a single shard.
    """

    def __init__(self, dataset: Any, batch_size: int, seed: int, *, shuffle: bool, num_skipped: int = 0) -> None:
        """`num_skipped`: samples that may raise, each left out of its batch."""
        self.dataset, self.num_skipped = dataset, num_skipped
        self._is_divided = _is_divided(dataset)
        self.num_shards = int(dataset.num_shards) if self._is_divided else 1
        if self.num_shards < 1:
            raise DataError(f"the data set {type(dataset).__name__} has num_shards = {dataset.num_shards}.")
        self.num_lanes = choose_num_lanes(self.num_shards, batch_size)
        self._batch_size, self._seed = batch_size, seed
        self._order = Permutation(self.num_shards, mix(seed, 2), shuffle=shuffle and self.num_shards > 1)

    @staticmethod
    def are_in(dataset: Any) -> bool:
        has_state = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
        return _is_divided(dataset) or has_state

    def lane_of(self, slot: int) -> int:
        return slot * self.num_lanes // self._batch_size

    def slots_of(self, lane: int) -> range:
        first, after = (-(-number * self._batch_size // self.num_lanes) for number in (lane, lane + 1))
        return range(first, after)

    def of_lane(self, epoch: int, lane: int) -> list[int]:
        return self._order.samples(epoch, 0, self.num_shards)[lane :: self.num_lanes]

    def open(self, epoch: int, shard: int) -> Any:
        """The data set of one shard."""
        _set_epoch(self.dataset, epoch)
        if not self._is_divided:
            return self.dataset
        one = self.dataset.shard(num_shards=self.num_shards, index=shard)
        _set_epoch(one, epoch)
        return one

    def open_again(self, epoch: int, shard: int) -> Any:
        """The same beside the open one, which it must not disturb."""
        return self.open(epoch, shard) if self._is_divided else copy.deepcopy(self.dataset)

    def first_sample(self, epoch: int) -> Any:
        """For a rank that has none of its own."""
        with keeping_generators():
            lanes = (_Lane(self, epoch, lane, None, 0) for lane in range(self.num_lanes))
            for lane in lanes:
                sample = lane.next()
                while isinstance(sample, BadSample):
                    sample = lane.next()
                if sample is not _END:
                    return sample
        raise DataError(f"the data set {type(self.dataset).__name__} gives no sample that can be read.")

    def seed_for(self, epoch: int, shard: int, index: int) -> None:
        """So that what a shard draws at random depends on the sample alone."""
        seed_generators(mix(self._seed, epoch, shard, index))


def choose_num_lanes(num_shards: int, batch_size: int) -> int:
    """The most lanes with which an epoch of equal shards has at most a quarter more batches than it must: lanes with
    more shards for each slot than others are read when those are not."""
    fits = (
        lanes
        for lanes in range(min(num_shards, batch_size), 0, -1)
        if 5 * num_shards * (batch_size // lanes) >= 4 * batch_size * -(-num_shards // lanes)
    )
    return next(fits)


def _is_divided(dataset: Any) -> bool:
    return callable(getattr(dataset, "shard", None)) and hasattr(dataset, "num_shards")


def _set_epoch(dataset: Any, epoch: int) -> None:
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)


class _Lane:
    """One lane of an epoch, read from a place on. Without a place it first skips `num_read` samples."""

    def __init__(self, shards: Shards, epoch: int, lane: int, place: LanePlace | None, num_read: int) -> None:
        self._shards, self._epoch = shards, epoch
        self._order = shards.of_lane(epoch, lane)
        start = place or LanePlace(0, 0)
        self._shard, self._index = start.shard, 0
        self._data: Any = None
        self._samples: CountedSamples | None = None
        self._state: Any = None
        self._state_index = 0
        self._proof: list[Any] = []  # samples that followed a state, to be given by it again
        self._candidate: Any = None
        self.is_proven: bool | None = None  # whether a state gives the samples that follow it
        if place is not None and place.state is not None:
            self._open(place.state, place.state_index)
            self._index = place.state_index
        for _ in range(start.index - self._index if place is not None else num_read):
            self.next()

    def next(self) -> Any:
        while self._shard < len(self._order):
            shard = self._order[self._shard]
            try:
                if self._samples is None:
                    self._open()
                assert self._samples is not None
                self._shards.seed_for(self._epoch, shard, self._index)
                for sample in self._samples:
                    if isinstance(sample, BadSample):
                        # Which comes first in a batch does not matter: all ranks sort by it.
                        sample = replace(sample, position=(shard << 32) + self._index)
                    self._index += 1
                    if self._candidate is not None and self.is_proven is None:
                        self._prove(sample)
                    return sample
            except Exception as error:
                if not getattr(error, "__notes__", None):
                    error.add_note(f"It is raised by shard {shard} of the data set, after {self._index} samples of it.")
                raise
            self._samples, self._shard, self._index = None, self._shard + 1, 0
            self._state, self._candidate, self._proof = None, None, []
        return _END

    def place(self, *, takes_state: bool) -> LanePlace:
        """The place; with `takes_state`, and a shard that has one which is proven, with its state."""
        if takes_state and self._samples is not None and hasattr(self._data, "state_dict"):
            if self.is_proven:
                self._state, self._state_index = copy.deepcopy(self._data.state_dict()), self._index
            elif self.is_proven is None and not self._proof:
                self._candidate, self._state_index = copy.deepcopy(self._data.state_dict()), self._index
        return LanePlace(self._shard, self._index, self._state, self._state_index if self._state is not None else 0)

    def _open(self, state: Any = None, index: int = 0) -> None:
        self._data = self._shards.open(self._epoch, self._order[self._shard])
        if state is not None:
            self._data.load_state_dict(copy.deepcopy(state))
        where = f"of shard {self._order[self._shard]} in epoch {self._epoch}"
        self._samples = CountedSamples(iter(self._data), self._shards.num_skipped, where)
        self._samples.index = index

    def _prove(self, sample: Any) -> None:
        """Data sets that shuffle in a buffer have states, too, but go on with other samples."""
        self._proof.append(sample)
        if len(self._proof) < _PROOFS:
            return
        shard = self._order[self._shard]
        found = []
        try:
            again = self._shards.open_again(self._epoch, shard)
            again.load_state_dict(self._candidate)
            samples = iter(again)
            for index in range(self._state_index, self._state_index + _PROOFS):
                self._shards.seed_for(self._epoch, shard, index)
                found.append(next(samples, None))
            self.is_proven = _are_same(found, self._proof)
        except Exception:  # states are not needed: they save reading
            self.is_proven = False
        self._proof, self._candidate = [], None


def _are_same(one: Any, other: Any) -> bool:
    """Whether two samples are the same, as far as that can be seen."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_are_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_are_same, one, other))
    return bool(np.array_equal(one, other))


class ShardReader(IterableDataset[ReadSamples]):
    """The samples of some slots of an epoch's batches, from a batch on, without end: after the last sample they are
    empty. Loader processes share out the lanes."""

    def __init__(
        self, shards: Shards, slots: list[int], epoch: int, start: int, places: Mapping[int, LanePlace]
    ) -> None:
        """`start` is the number of batches read before, `places` the lanes' places then, as far as they are known."""
        self._shards, self._epoch, self._start, self._places = shards, epoch, start, places
        self._lanes: dict[int, list[int]] = {}
        for slot in slots:
            self._lanes.setdefault(shards.lane_of(slot), []).append(slot)

    @property
    def num_lanes(self) -> int:
        return len(self._lanes)

    def __iter__(self) -> Iterator[ReadSamples]:
        worker = torch.utils.data.get_worker_info()
        number, count = (worker.id, worker.num_workers) if worker else (0, 1)
        if worker is not None:
            # A data set that divides its samples among loader processes would divide those of a shard again.
            object.__setattr__(worker, "id", 0)  # torch guards it against setting
            object.__setattr__(worker, "num_workers", 1)
        own = list(self._lanes.items())[number::count]
        lanes: dict[int, _Lane] = {}
        with keeping_generators():
            for lane, _ in own:
                num_read = self._start * len(self._shards.slots_of(lane))
                lanes[lane] = _Lane(self._shards, self._epoch, lane, self._places.get(lane), num_read)
        batch = self._start
        while True:
            batch += 1
            with keeping_generators():
                samples: dict[int, Any] = {}
                for lane, slots in own:
                    # All of the lane's slots, also those of another rank, which reads the lane as well.
                    samples |= self._read(lanes[lane], lane, set(slots))
                if any(lane.is_proven is False for lane in lanes.values()):
                    for one in lanes.values():
                        one.is_proven = False
                takes_state = batch % STATE_EVERY == 0
                places = {lane: lanes[lane].place(takes_state=takes_state) for lane, _ in own}
            yield ReadSamples(samples, places)

    def _read(self, reader: _Lane, lane: int, wanted: set[int]) -> dict[int, Any]:
        found = {}
        for slot in self._shards.slots_of(lane):
            sample = reader.next()
            if sample is _END:
                break
            if slot in wanted:
                found[slot] = sample
        return found
