"""Orders by weight, by length and of mixtures: functions of seed, epoch and position."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from rung.data.batch_shard import BatchPartition
from rung.data.batches import Batches
from rung.data.orders import ByLength, Mixture, WeightedDraws
from rung.errors import CheckpointError, DataError, TaskError
from rung.spec.config import RunConfig
from rung.train.sample_order import order_of, refuse_other_data
from tests.tasks import text_data, text_task


def numbers(count: int, first: int = 0) -> TensorDataset:
    return TensorDataset(torch.arange(first, first + count))


def lengths(count: int) -> list[int]:
    return [(7 * n) % 41 + 1 for n in range(count)]


def mixed(shares: Any = (0.5, 0.3, 0.2), sizes: tuple[int, ...] = (50, 7, 200), **options: Any) -> Mixture:
    return Mixture(ConcatDataset([numbers(size) for size in sizes]), shares, 1, **{"shuffle": True, **options})


ORDERS = {
    "weights": lambda: WeightedDraws(range(103), 103, 1),
    "lengths": lambda: ByLength(lengths(103), 103, 8, 1),
    "mixture": lambda: Mixture(ConcatDataset([numbers(50), numbers(53)]), [0.9, 0.1], 1, shuffle=True),
}


@pytest.mark.parametrize("kind", ORDERS)
def test_a_position_has_the_same_sample_wherever_reading_begins(kind: str) -> None:
    whole = [ORDERS[kind]().samples(epoch, 0, 103) for epoch in range(3)]
    assert whole[0] != whole[1]
    order = ORDERS[kind]()
    for epoch, start, stop in [(2, 40, 61), (0, 3, 4), (1, 99, 103), (2, 0, 7), (1, 5, 5)]:
        assert order.samples(epoch, start, stop) == whole[epoch][start:stop]


@pytest.mark.parametrize("kind", ORDERS)
@pytest.mark.parametrize(("ranks", "micro", "workers"), [(3, 2, 0), (4, None, 2)])
def test_ranks_and_loader_processes_share_out_the_same_batches(
    kind: str, ranks: int, micro: int | None, workers: int
) -> None:
    def read(ranks: int, rank: int, micro: int | None, workers: int = 0) -> list[list[int]]:
        cut = BatchPartition(24, ranks, rank, micro)
        windows = Batches(numbers(103), cut, order=ORDERS[kind](), num_epochs=2, num_workers=workers)
        return [[n for m in w.micro_batches if m.num_samples for n in m.data[0].tolist()] for w in windows]

    parts = [read(ranks, rank, micro, workers) for rank in range(ranks)]
    together = [sorted(n for part in parts for n in part[step]) for step in range(10)]
    assert together == [sorted(window) for window in read(1, 0, None)]


def test_draws_follow_the_weights() -> None:
    order = WeightedDraws([0, 1, 2, 0, 7, 0], 6, 3)
    found = Counter(n for epoch in range(3000) for n in order.samples(epoch, 0, 6))
    assert set(found) == {1, 2, 4}
    for sample, weight in ((1, 0.1), (2, 0.2), (4, 0.7)):
        assert found[sample] / 18_000 == pytest.approx(weight, abs=0.015)


def test_batches_have_samples_of_similar_length_and_each_sample_comes_once() -> None:
    known = lengths(1003)
    order = ByLength(known, 1003, 10, 1)
    firsts = []
    for epoch in range(2):
        found = order.samples(epoch, 0, 1003)
        assert sorted(found) == list(range(1003))
        batches = [[known[n] for n in found[start : start + 10]] for start in range(0, 1003, 10)]
        assert sum(max(batch) - min(batch) for batch in batches) / len(batches) < 4, "of 40"
        firsts.append([batch[0] for batch in batches[:20]])
    assert firsts[0] != sorted(firsts[0])
    assert firsts[0] != firsts[1]


def test_parts_of_a_mixture_have_their_shares_and_give_each_sample_before_one_again() -> None:
    order = mixed()
    found = [n for epoch in range(256) for n in order.samples(epoch, 0, 257)][: 2**16]
    parts = [[n for n in found if low <= n < high] for low, high in ((0, 50), (50, 57), (57, 257))]
    assert [len(part) for part in parts] == [2**15, 19661, 13107]
    for part, size in zip(parts, (50, 7, 200), strict=True):
        turns = [part[start : start + size] for start in range(0, len(part) - size, size)]
        assert all(len(set(turn)) == size for turn in turns)
        assert turns[0] != turns[1]
    plain = mixed(shuffle=False).samples(0, 0, 257)
    assert [n for n in plain if n < 50] == [n % 50 for n in range(sum(n < 50 for n in plain))]
    assert min(mixed([1e-9, 1, 1])._counts) == 1, "a part with a share is never left out"


def test_refused_orders() -> None:
    for weights, text in (([1, 2], r"3 finite numbers"), ([1, float("nan"), 2], "finite"), ([0, 0, 0], "all 0")):
        with pytest.raises(DataError, match=text):
            WeightedDraws(weights, 3, 0)
    with pytest.raises(DataError, match="negative"):
        WeightedDraws([1, -1, 3], 3, 0)
    with pytest.raises(DataError, match="sample_lengths must be 3 finite"):
        ByLength([1], 3, 2, 0)
    with pytest.raises(DataError, match="ConcatDataset, and train_data"):
        Mixture(numbers(3), [1], 0, shuffle=True)
    with pytest.raises(DataError, match="one for each of the parts"):
        mixed([1, 2])
    with pytest.raises(DataError, match="must be above 0"):
        mixed([1, 2, 0])
    with pytest.raises(DataError, match="part 1 of the mixture is empty"):
        mixed(sizes=(3, 0, 4))
    with pytest.raises(TaskError, match=r"sample_weights\(\) and mixture each give"):
        text_task(sample_weights=lambda data: [1] * len(data), mixture=[1.0])
    weighed = text_task(sample_weights=lambda data: [1] * len(data))
    with pytest.raises(DataError, match="--no-shuffle turns that off"):
        order_of(weighed, RunConfig(shuffle=False), text_data())
    with pytest.raises(DataError, match="is iterable"):
        order_of(weighed, RunConfig(), iter([1]))


def test_a_loader_with_a_sampler_is_told_what_takes_its_place() -> None:
    data = numbers(8)
    weighted = DataLoader(data, sampler=WeightedRandomSampler([1.0] * 8, 8))

    class Buckets(BatchSampler):
        pass

    for loader, text in (
        (weighted, r"WeightedRandomSampler define sample_weights\(data\)"),
        (DataLoader(data, batch_sampler=Buckets(SequentialSampler(data), 2, False)), r"sample_lengths\(data\)"),
        (DataLoader(data, batch_size=2, shuffle=True), "the setting workers.$"),
    ):
        with pytest.raises(DataError, match=text):
            Batches(loader, BatchPartition(2, 1, 0))


def test_a_run_is_not_resumed_in_another_order() -> None:
    def batches(order: Any) -> Batches:
        return Batches(numbers(103), BatchPartition(8, 1, 0, None), order=order, num_steps=1)

    own = {kind: batches(make()).order_digest for kind, make in ORDERS.items()}
    assert None not in own.values() and len(set(own.values())) == len(own)
    assert batches(None).order_digest is None
    other = batches(WeightedDraws([2, *range(1, 103)], 103, 1))
    saved: Any = SimpleNamespace(manifest={"num_samples": 103, "order": own["weights"]})
    refuse_other_data(saved, batches(ORDERS["weights"]()))
    for changed in (other, batches(None)):
        with pytest.raises(CheckpointError, match="the training samples have another order"):
            refuse_other_data(saved, changed)
