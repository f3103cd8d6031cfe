"""Data sets of Hugging Face, as they are: map-style ones, and streams that come in shards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rung.data.bad_samples import BadSamples
from rung.data.batch_shard import BatchPartition
from rung.data.batches import Batches
from rung.data.shards import STATE_EVERY
from rung.errors import DataError
from rung.spec.config import RunConfig
from rung.spec.task import Task
from tests.checkpoints import legs
from tests.marks import slow
from tests.tasks import text_data, text_task

datasets = pytest.importorskip("datasets")
CONFIG = RunConfig(precision="fp64", batch_size=12, device="cpu", epochs=2, seed=5, eval_every="never")


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


def streamed() -> Any:
    inputs, targets = text_data(206).tensors
    data = datasets.Dataset.from_dict({"tokens": inputs.tolist(), "target": targets.tolist()}).with_format("torch")
    return data.to_iterable_dataset(num_shards=8)


def stream_task() -> Task:
    return text_task(train_data=streamed, forward=lambda model, batch: model(batch["tokens"]))


def buffered_task() -> Task:
    return text_task(
        train_data=lambda: streamed().shuffle(seed=3, buffer_size=9),
        forward=lambda model, batch: model(batch["tokens"]),
    )


@pytest.mark.parametrize("make", [stream_task, slow(buffered_task)])
def test_a_run_resumes_on_another_number_of_ranks(make: Callable[[], Task], tmp_path: Path) -> None:
    # The states of shards, of every 16th batch, are used after the first leg; that of a buffer is not exact, and not.
    expected, state = legs(make, CONFIG, tmp_path / "whole", [("single", 1, 30)])
    losses, found = legs(make, CONFIG, tmp_path / "legs", [("ddp", 4, 17), ("zero3", 3, 22), ("single", 1, 30)])
    assert losses == pytest.approx(expected, abs=1e-9)
    assert max((found[name] - value).abs().max() for name, value in state.items()) < 1e-9


def test_a_part_for_one_rank_is_refused() -> None:
    from datasets.distributed import split_dataset_by_node

    data = numbers(64).to_iterable_dataset(num_shards=4)
    assert len(windows(split_dataset_by_node(data, 0, 1), 8)) == 8
    with pytest.raises(DataError, match=r"one part of 2, of split_dataset_by_node\(\)"):
        windows(split_dataset_by_node(data, 1, 2), 8)


@pytest.mark.filterwarnings("ignore:To copy construct")
def test_a_stream_that_raises_cannot_go_on() -> None:
    def read(row: Any) -> Any:
        if row["x"] == 21:
            raise OSError("torn")
        return row

    data = numbers(64).to_iterable_dataset(num_shards=4).map(read)
    with pytest.raises(OSError, match="torn") as error:
        windows(data, 8, bad_samples=BadSamples(3), shuffle=False)
    assert "sample 5 of shard 1 in epoch 0, which --skip-bad-samples cannot leave out" in error.value.__notes__[0]
