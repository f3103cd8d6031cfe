"""Data sets of Hugging Face, as they are: map-style ones, and streams that come in shards."""

from __future__ import annotations

from typing import Any

import pytest

from rung.data.batch_shard import BatchPartition
from rung.data.batches import Batches
from rung.data.shards import STATE_EVERY
from tests.marks import slow

datasets = pytest.importorskip("datasets")


def windows(data: Any, batch: int, ranks: int = 1, rank: int = 0, **options: Any) -> list[Any]:
    options.setdefault("num_epochs", 1)
    return list(Batches(data, BatchPartition(batch, ranks, rank), **options))


def texts(window: Any) -> list[int]:
    return [number for micro in window.micro_batches if micro.num_samples for number in micro.data["x"].tolist()]


def numbers(count: int) -> Any:
    return datasets.Dataset.from_dict({"x": list(range(count))}).with_format("torch")


def test_a_map_style_data_set() -> None:
    found = windows(numbers(23), 8)
    assert sorted(number for window in found for number in texts(window)) == list(range(23))
    parts = [windows(numbers(23), 8, 2, rank, num_workers=rank) for rank in (0, 1)]
    assert [texts(a) + texts(b) for a, b in zip(*parts, strict=True)] == [texts(w) for w in found]


@pytest.mark.parametrize("workers", [2, slow(0)])
@pytest.mark.filterwarnings("ignore:To copy construct")
def test_a_stream_gives_each_rank_its_shards(workers: int) -> None:
    data = numbers(103).to_iterable_dataset(num_shards=8).map(lambda row: {"x": row["x"] + 1})
    single = windows(data, 16, num_epochs=2)
    for epoch in (0, 1):
        assert sorted(n for w in single if w.epoch == epoch for n in texts(w)) == list(range(1, 104))
    parts = [windows(data, 16, 2, rank, num_epochs=2, num_workers=workers) for rank in (0, 1)]
    assert [sorted(texts(a) + texts(b)) for a, b in zip(*parts, strict=True)] == [sorted(texts(w)) for w in single]
    assert Batches(data, BatchPartition(16, 2, 0), exchange=lambda own: [own]).num_shards == (8, 4)


@pytest.mark.parametrize("shuffled", [False, True])
def test_its_state_is_used_where_it_is_exact(shuffled: bool) -> None:
    def make() -> Any:
        data = numbers(400).to_iterable_dataset(num_shards=4)
        return data.shuffle(seed=3, buffer_size=30) if shuffled else data

    stop = STATE_EVERY * 2 + 3
    expected = windows(make(), 8)
    place = windows(make(), 8, num_steps=stop)[-1].place
    assert all((one.state is None) == shuffled for one in place.lanes.values()), "the state of a buffer is not exact"
    later = windows(make(), 8, 2, 0, start_step=stop, start_place=place)
    other = windows(make(), 8, 2, 1, start_step=stop, start_place=place)
    assert [sorted(texts(a) + texts(b)) for a, b in zip(later, other, strict=True)] == [
        sorted(texts(w)) for w in expected[stop:]
    ]
