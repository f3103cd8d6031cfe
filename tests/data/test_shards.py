"""Data sets that come in shards: each rank reads its part, and together they read the same for any number of ranks."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from rung.data.batch_shard import BatchPartition
from rung.data.batches import Batches
from rung.data.shards import STATE_EVERY, choose_num_lanes
from rung.errors import DataError
from tests.marks import slow


class Shards(IterableDataset[Any]):
    """Shards of the given lengths. A sample is (shard, its number, three random numbers); what is read is counted."""

    def __init__(self, lengths: list[int], which: list[int] | None = None, reads: Counter[int] | None = None) -> None:
        self.lengths, self.which = lengths, list(range(len(lengths))) if which is None else which
        self.reads: Counter[int] = Counter() if reads is None else reads

    @property
    def num_shards(self) -> int:
        return len(self.which)

    def shard(self, num_shards: int, index: int) -> Any:
        return type(self)(self.lengths, self.which[index::num_shards], self.reads)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()  # what divides itself among processes gives all of a shard
        for shard in self.which:
            for number in range(0, self.lengths[shard], worker.num_workers if worker is not None else 1):
                self.reads[shard] += 1
                draws = [random.random(), float(np.random.rand()), torch.rand(()).item()]
                yield torch.tensor([shard, number, *draws], dtype=torch.float64)


def windows(data: Any, batch: int, ranks: int = 1, rank: int = 0, micro: int | None = None, **options: Any) -> Any:
    options.setdefault("num_epochs", 1)
    return list(Batches(data, BatchPartition(batch, ranks, rank, micro), **options))


def rows(window: Any) -> list[tuple[float, ...]]:
    return [tuple(row) for micro in window.micro_batches if micro.num_samples for row in micro.data.tolist()]


LENGTHS = [5, 0, 13, 7, 1, 9, 9, 3, 11, 2]
SIZES = [(8, 4, None), (25, 4, 2), (3, 4, None), (6, 2, 1), slow(64, 3, 5), slow(1, 2, None), slow(11, 5, 1)]


@pytest.mark.parametrize(("batch", "ranks", "micro"), SIZES)
def test_each_sample_once_an_epoch_for_any_number_of_ranks(batch: int, ranks: int, micro: int | None) -> None:
    single = windows(Shards(LENGTHS), batch, num_epochs=2)
    found = [windows(Shards(LENGTHS), batch, ranks, rank, micro, num_epochs=2) for rank in range(ranks)]
    everyone = [(shard, number) for shard, length in enumerate(LENGTHS) for number in range(length)]
    for epoch in (0, 1):
        seen = [row[:2] for window in single if window.epoch == epoch for row in rows(window)]
        assert sorted(seen) == everyone
    for number, window in enumerate(single):
        together = [row for rank in range(ranks) for row in rows(found[rank][number])]
        assert sorted(together) == sorted(rows(window)), "also what is drawn at random"
        assert {one[number].num_global_samples for one in found} == {len(together)}
        assert len({one[number].ends_epoch for one in found}) == 1
    assert [len(one) for one in found] == [len(single)] * ranks


@pytest.mark.parametrize("workers", [2, slow(1), slow(5)])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_loader_processes_change_nothing(workers: int) -> None:
    expected = [rows(window) for window in windows(Shards(LENGTHS), 12, 2, 1)]
    assert [rows(window) for window in windows(Shards(LENGTHS), 12, 2, 1, num_workers=workers)] == expected


def test_shards_come_in_another_order_each_epoch_and_in_their_own_without_shuffle() -> None:
    first = [rows(w)[0][0] for w in windows(Shards([4] * 20), 20, num_epochs=9) if w.step % 4 == 1]
    assert len(set(first)) > 3
    plain = windows(Shards([2] * 6), 3, shuffle=False)
    assert [[row[:2] for row in rows(w)] for w in plain[:3]] == [
        [(0, 0), (1, 0), (2, 0)],
        [(0, 1), (1, 1), (2, 1)],
        [(3, 0), (4, 0), (5, 0)],
    ]


@pytest.mark.parametrize(
    ("shards", "batch", "lanes"), [(8, 8, 8), (1, 9, 1), (64, 8, 8), (40, 32, 16), (8, 12, 4), (3, 64, 3), (7, 6, 2)]
)
def test_lanes_end_at_about_the_same_time(shards: int, batch: int, lanes: int) -> None:
    assert choose_num_lanes(shards, batch) == lanes
    steps = len(windows(Shards([20] * shards), batch))
    assert steps <= 1.25 * -(-20 * shards // batch) + 1


def in_step(data: list[Shards], batch: int) -> list[list[Any]]:
    """The windows of all ranks. They tell each other their counts, here taken from a reading of everything."""
    ranks = len(data)
    whole = [windows(Shards(data[0].lengths), batch, ranks, rank) for rank in range(ranks)]
    counts = [[len(data[0].lengths), *(window.num_samples for window in row)] for row in zip(*whole, strict=True)]
    found = []
    for rank, one in enumerate(data):
        calls = iter([*counts, [counts[0][0], *[0] * ranks]])

        def exchange(own: list[int], rank: int = rank, calls: Any = calls) -> list[list[int]]:
            num_shards, *sizes = next(calls)
            assert own == [num_shards, sizes[rank]]
            return [[num_shards, size] for size in sizes]

        found.append(list(Batches(one, BatchPartition(batch, ranks, rank), num_epochs=1, exchange=exchange)))
    return found


def test_a_rank_reads_only_its_own_shards() -> None:
    lengths = [5, 6, 4, 5, 7, 5, 3, 5]
    data = [Shards(lengths) for _ in range(4)]
    found = in_step(data, 8)
    expected = windows(Shards(lengths), 8)
    for number, window in enumerate(expected):
        assert sorted(row for one in found for row in rows(one[number])) == sorted(rows(window))
    assert [len(one.reads) for one in data] == [2, 2, 2, 2]
    assert sum((one.reads for one in data), Counter()) == Counter(dict(enumerate(lengths)))
    assert Batches(Shards(lengths), BatchPartition(8, 4, 1), exchange=lambda own: [own]).num_shards == (8, 2)


def test_ranks_share_a_shard_where_there_are_fewer_shards_than_ranks() -> None:
    data = [Shards([9, 4]) for _ in range(4)]
    found = in_step(data, 8)
    assert sorted(row[:2] for one in found for w in one for row in rows(w)) == sorted(
        (shard, number) for shard, length in enumerate([9, 4]) for number in range(length)
    )
    assert [set(one.reads) <= {shard} for one, shard in zip(data, (0, 0, 1, 1), strict=True)].count(True) in (0, 4)
    assert all(len(one.reads) == 1 for one in data)


class WithState(Shards):
    """Goes on from a state without reading again."""

    start = 0

    def __iter__(self) -> Iterator[Any]:
        (shard,) = self.which
        while self.start < self.lengths[shard]:
            self.start += 1
            self.reads[shard] += 1
            yield torch.tensor([shard, self.start, torch.rand(()).item()], dtype=torch.float64)

    def state_dict(self) -> dict[str, int]:
        return {"start": self.start}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["start"]


class Buffered(WithState):
    """Its state forgets the buffer in which it shuffles, as that of Hugging Face's shuffle does."""

    def __iter__(self) -> Iterator[Any]:
        buffer: list[Any] = []
        for sample in super().__iter__():
            buffer.append(sample)
            if len(buffer) == 8:
                yield buffer.pop(0)
        yield from buffer


@pytest.mark.parametrize("kind", [Shards, WithState, Buffered])
@pytest.mark.parametrize(("before", "after"), [(1, 3), slow(4, 2)])
def test_reading_goes_on_where_it_stopped_on_another_number_of_ranks(kind: Any, before: int, after: int) -> None:
    lengths, stop = [70, 90, 80, 75, 4, 95, 60], 2 * STATE_EVERY + 5
    expected = windows(kind(lengths), 6, num_epochs=2)
    places = {}
    for rank in range(before):
        place = windows(kind(lengths), 6, before, rank, num_steps=stop)[-1].place
        places |= place.lanes
    start = type(place)(place.epoch, place.batch, places)
    later, read = [], Counter()
    for rank in range(after):
        data = kind(lengths)
        later.append(windows(data, 6, after, rank, num_epochs=2, start_step=stop, start_place=start))
        read += data.reads
    for number, window in enumerate(expected[stop:]):
        assert sorted(row for one in later for row in rows(one[number])) == sorted(rows(window))
    has_states = any(one.state is not None for one in places.values())
    assert has_states == (kind is WithState)


def test_a_lost_place_is_found_again_by_reading() -> None:
    expected = windows(Shards(LENGTHS), 6, num_epochs=2)
    place = windows(Shards(LENGTHS), 6, num_steps=5)[-1].place
    lost = type(place)(place.epoch, place.batch, {lane: at for lane, at in place.lanes.items() if lane % 2})
    later = windows(Shards(LENGTHS), 6, num_epochs=2, start_step=5, start_place=lost)
    assert [rows(w) for w in later] == [rows(w) for w in expected[5:]]
    counted = windows(Shards(LENGTHS), 6, num_epochs=2, start_step=5)
    assert [rows(w) for w in counted] == [rows(w) for w in expected[5:]]


class Counting(IterableDataset[Any]):
    """A stream with a state and no shards."""

    def __init__(self, count: int) -> None:
        self.count, self.state, self.reads = count, {"next": 0}, 0

    def __iter__(self) -> Iterator[Any]:
        while self.state["next"] < self.count:
            self.state["next"] += 1
            self.reads += 1
            yield torch.tensor([self.state["next"]])
        self.state["next"] = 0

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state.update(state)


def test_a_stream_with_a_state_is_not_read_again() -> None:
    count, stop = 6 * STATE_EVERY, 2 * STATE_EVERY + 3
    expected = windows(Counting(count), 2, num_epochs=2)
    assert [rows(w) for w in expected[:2]] == [[(1,), (2,)], [(3,), (4,)]]
    place = windows(Counting(count), 2, num_steps=stop)[-1].place
    data = Counting(count)
    later = windows(data, 2, start_step=stop, start_place=place)
    assert [rows(w) for w in later] == [rows(w) for w in expected[stop : 3 * STATE_EVERY]]
    assert data.reads == count - 2 * 2 * STATE_EVERY


def test_an_error_names_the_shard() -> None:
    class Broken(Shards):
        def __iter__(self) -> Iterator[Any]:
            yield from list(super().__iter__())[:2]
            raise ValueError("torn")

    with pytest.raises(ValueError, match="torn") as caught:
        windows(Broken([4, 4]), 2, shuffle=False)
    assert "sample 2 of shard 0" in caught.value.__notes__[0]


def test_refused_data_sets_in_shards() -> None:
    with pytest.raises(DataError, match="num_shards = 0"):
        windows(Shards([]), 2)
    with pytest.raises(DataError, match="gave no sample in epoch 0"):
        windows(Shards([0, 0]), 2)
    with pytest.raises(DataError, match="3, 2 shards"):
        windows(Shards([4, 4, 4]), 2, 2, 0, exchange=lambda own: [own, [2, *own[1:]]])
