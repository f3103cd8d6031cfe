"""Samples that cannot be read, in one process: what is left out, and what ends the run with its reason."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from rung.data.bad_samples import BadSamples
from rung.data.batch_shard import BatchPartition
from rung.data.batches import Batches
from rung.data.sample_reader import example_batch
from rung.errors import DataError
from tests.marks import slow


class Broken(Dataset[Any]):
    def __init__(self, count: int, bad: set[int], *, draws: bool = False, error: type[Exception] = OSError) -> None:
        self.count, self.bad, self.draws, self.error = count, bad, draws, error

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        drawn = random.random() if self.draws else 0.0
        if index in self.bad:
            raise self.error(f"file {index}")
        return torch.tensor([index, drawn], dtype=torch.float64)


class Together(Broken):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Rows(IterableDataset[Any]):
    """Goes on after an error: the function of a `map` raises, not what it goes through."""

    def __init__(self, count: int, bad: set[int]) -> None:
        self.data = Broken(count, bad)

    def __iter__(self) -> Iterator[Any]:
        return map(self.data.__getitem__, range(len(self.data)))


class Generated(Rows):
    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()


class Wrapped(Rows):
    """A generator inside of an iterator that could go on."""

    def __iter__(self) -> Iterator[Any]:
        inner = (self.data[index] for index in range(len(self.data)))
        return map(torch.clone, inner)


class Shards(Rows):
    num_shards = 2

    def shard(self, num_shards: int, index: int) -> Rows:
        return Rows(len(self.data), self.data.bad)


def windows(data: Any, batch: int, limit: int, *, ranks: int = 1, rank: int = 0, **options: Any) -> list[Any]:
    options = {"num_epochs": 1, "shuffle": False, **options}
    found = BadSamples(limit, options.pop("known", ()), say=options.pop("say", None))
    return list(Batches(data, BatchPartition(batch, ranks, rank), bad_samples=found, **options))


def numbers(found: list[Any]) -> list[list[int]]:
    return [[int(row[0]) for micro in w.micro_batches if micro.num_samples for row in micro.data] for w in found]


@pytest.mark.parametrize("workers", [0, slow(2)])
@pytest.mark.parametrize("make", [Broken, slow(Together), Rows])
def test_nothing_moves_to_another_position(make: Any, workers: int) -> None:
    data = make(11, {0, 1, 2, 5, 9})
    shuffle = False if make is not Rows else None
    found = windows(data, 3, 5, num_workers=workers, shuffle=shuffle)
    assert numbers(found) == [[], [3, 4], [6, 7, 8], [10]]
    assert [w.num_global_samples for w in found] == [0, 2, 3, 1]
    # What stands in for a batch without a sample is one that can be read.
    assert [int(row[0]) for row in found[0].micro_batches[0].data] == [3]
    assert len(found[-1].skipped) == 5


def test_a_line_names_each_sample_once_over_the_epochs() -> None:
    lines: list[str] = []
    windows(Broken(6, {4}), 3, 1, num_epochs=3, say=lines.append)
    (line,) = lines
    assert line.startswith(
        "sample 4 of the data set is left out (1 of at most 1): OSError: file 4 (test_bad_samples.py"
    )
    assert not windows(Broken(6, {4}), 3, 1, known=["sample 4 of the data set"], say=lines.append) or len(lines) == 1


@pytest.mark.parametrize("make", [Broken, Rows])
def test_one_more_ends_the_run(make: Any) -> None:
    shuffle = False if make is not Rows else None
    with pytest.raises(DataError, match=r"sample 5 .* cannot be read, and 2 others were left out before it") as error:
        windows(make(11, {1, 3, 5}), 4, 2, shuffle=shuffle)
    assert "OSError: file 5" in str(error.value)


@pytest.mark.parametrize("make", [Broken, Rows, Shards])
def test_without_the_setting_the_error_names_the_sample(make: Any) -> None:
    with pytest.raises(OSError, match="file 5") as error:
        list(Batches(make(11, {5}), BatchPartition(4, 1, 0), num_epochs=1, shuffle=False if make is Broken else None))
    (note,) = error.value.__notes__
    assert "sample 5 of" in note


def test_random_draws_are_those_of_the_position() -> None:
    kept = {
        int(row[0]): row[1] for w in windows(Broken(11, set(), draws=True), 4, 1) for row in w.micro_batches[0].data
    }
    found = windows(Broken(11, {1, 8}, draws=True), 4, 2)
    assert {int(row[0]): row[1] for w in found for row in w.micro_batches[0].data} == {
        n: drawn for n, drawn in kept.items() if n not in {1, 8}
    }


def test_ranks_read_the_rest_of_the_same_batches() -> None:
    parts = [numbers(windows(Shards(7, {2, 4}), 4, 4, ranks=2, rank=rank, shuffle=None)) for rank in (0, 1)]
    whole = numbers(windows(Shards(7, {2, 4}), 4, 4, shuffle=None))
    assert [a + b for a, b in zip(*parts, strict=True)] == whole
    assert sorted(n for batch in whole for n in batch) == sorted([0, 1, 3, 5, 6] * 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Generated, "cannot leave out: a Python generator that has raised is over"),
        (Wrapped, "a Python generator within"),
    ],
)
def test_a_generator_that_has_raised_cannot_go_on(make: Any, message: str) -> None:
    with pytest.raises((OSError, DataError)) as error:
        windows(make(11, {5}), 4, 3, shuffle=None)
    assert message in "\n".join([str(error.value), *getattr(error.value, "__notes__", [])])


@pytest.mark.parametrize("make", [Broken, Rows])
def test_data_that_cannot_be_read_at_all(make: Any) -> None:
    with pytest.raises(DataError, match=r"cannot be read.*\(--skip-bad-samples 3\): OSError"):
        windows(make(11, set(range(11))), 2, 3, shuffle=False if make is Broken else None)


def test_memory_that_is_full_is_no_bad_sample() -> None:
    with pytest.raises(MemoryError):
        windows(Broken(11, {5}, error=MemoryError), 4, 3)


def test_a_model_is_cut_by_the_first_samples_that_can_be_read() -> None:
    for data in (Broken(11, {0, 2}), Rows(11, {0, 2})):
        assert example_batch(data, None, num_skipped=2)[:, 0].tolist() == [1, 3]
        with pytest.raises(OSError, match="file 0"):
            example_batch(data, None)


def test_ranks_that_share_a_sample_must_both_read_it() -> None:
    def other_rank_reads_all(own: Any) -> list[tuple[int, Any]]:
        return [(0, own), (0, [[4], []])]

    bad = BadSamples(3, gather=other_rank_reads_all)
    found = iter(Batches(Broken(8, {1}), BatchPartition(4, 1, 0), shuffle=False, bad_samples=bad))
    with pytest.raises(DataError, match="sample 1 of the data set could be read on some of the ranks"):
        next(found)
