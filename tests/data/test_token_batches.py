"""Batches by number of tokens: what fits, each sample once, and the same on any number of ranks."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.utils.data import TensorDataset

from rung.data.batch_shard import BatchPartition
from rung.data.batches import Batches
from rung.data.token_batches import TokenBatches
from rung.errors import CheckpointError, ConfigError, DataError
from rung.spec.config import RunConfig, read_toml, resolve, write_toml
from rung.spec.task import Task
from rung.train.sample_order import refuse_other_data, token_batches_of, with_fullest_batch
from tests.checkpoints import legs
from tests.harness import on_ranks
from tests.marks import slow
from tests.parity import by_hand, largest_difference, with_rung
from tests.tasks import text_data, text_task

LENGTHS = [(11 * n) % 37 for n in range(103)]
MOST = 120


def cut(order: TokenBatches, epoch: int) -> list[list[int]]:
    starts = order.starts(epoch).tolist()
    return [order.samples(epoch, a, b) for a, b in itertools.pairwise(starts)]


def cost(batch: list[int]) -> int:
    return len(batch) * max(max(LENGTHS[n], 1) for n in batch)


def test_each_sample_once_in_batches_that_are_full() -> None:
    order = TokenBatches(LENGTHS, 103, MOST, 5, shuffle=True)
    epochs = [cut(order, epoch) for epoch in (0, 1, 2)]
    for batches in epochs:
        assert sorted(n for batch in batches for n in batch) == list(range(103))
        assert all(cost(batch) <= MOST for batch in batches)
        by_length = sorted(batches, key=lambda batch: LENGTHS[batch[0]])
        # None takes one more: the shortest sample of the next batch would not fit.
        assert all(cost([*one, other[0]]) > MOST for one, other in itertools.pairwise(by_length))
    assert len({len(batches) for batches in epochs}) == 1, "the steps of an epoch are known beforehand"
    assert epochs[0] != epochs[1] != epochs[2]
    assert {frozenset(b) for b in epochs[0]} != {frozenset(b) for b in epochs[1]}, "others of a length come together"
    assert cut(TokenBatches(LENGTHS, 103, MOST, 5, shuffle=True), 1) == epochs[1]
    assert cut(TokenBatches(LENGTHS, 103, MOST, 6, shuffle=True), 1) != epochs[1]
    assert cost(order.fullest()) == max(map(cost, epochs[0]))


def test_the_own_order_of_a_data_set() -> None:
    batches = cut(TokenBatches(LENGTHS, 103, MOST, 5, shuffle=False), 3)
    assert [n for batch in batches for n in batch] == list(range(103))
    assert all(cost(batch) <= MOST for batch in batches)
    assert all(cost([*one, other[0]]) > MOST for one, other in itertools.pairwise(batches))


def test_a_sample_that_does_not_fit() -> None:
    with pytest.raises(DataError, match=r"sample 2 has 130 tokens, and a batch takes at most 120 \(batch_tokens\)"):
        TokenBatches([5, 7, 130, 9], 4, MOST, 5, shuffle=True)
    with pytest.raises(DataError, match="gives -1 tokens for sample 1"):
        TokenBatches([5, -1], 2, MOST, 5, shuffle=True)
    order = TokenBatches([5, 7, 130, 9], 4, MOST, 5, shuffle=False, takes_longer=True)
    assert cut(order, 0) == [[0, 1], [2], [3]]


@pytest.mark.parametrize(("ranks", "micro"), [(4, None), (3, 2)])
@pytest.mark.parametrize("workers", [0, slow(2)])
def test_ranks_share_out_each_batch(ranks: int, micro: int | None, workers: int) -> None:
    data = TensorDataset(torch.arange(103))
    order = TokenBatches(LENGTHS, 103, MOST, 5, shuffle=True)
    options: dict[str, Any] = {"num_epochs": 2, "by_tokens": order, "num_workers": workers}
    parts = [
        list(Batches(data, BatchPartition(int(order.sizes.max()), ranks, rank, micro), **options))
        for rank in range(ranks)
    ]
    assert parts[0][-1].step == 2 * len(order.sizes)
    assert [w.step for w in parts[0] if w.ends_epoch] == [len(order.sizes), 2 * len(order.sizes)]
    found = [
        sorted(n for w in step for m in w.micro_batches if m.num_samples for n in m.data[0].tolist())
        for step in zip(*parts, strict=True)
    ]
    assert found == [sorted(batch) for epoch in (0, 1) for batch in cut(order, epoch)]
    batches = Batches(data, BatchPartition(int(order.sizes.max()), 1, 0), by_tokens=order, num_epochs=2)
    assert batches.total_steps == len(found)
    assert sorted(batches.window(7).micro_batches[0].data[0].tolist()) == found[6]


CONFIG = RunConfig(precision="fp64", batch_tokens=MOST, device="cpu", clip=1.0, steps=20, seed=5)


def tokens() -> Task:
    return text_task(sample_lengths=lambda data: LENGTHS[: len(data)])


def steps_by_hand(num_steps: int = 20) -> list[list[Any]]:
    order, data = TokenBatches(LENGTHS, 103, MOST, 5, shuffle=True), text_data()
    return [[data[n] for n in batch] for epoch in (0, 1) for batch in cut(order, epoch)][:num_steps]


@pytest.mark.parametrize(
    ("strategy", "ranks", "micro"),
    [
        ("pp2", 2, None),
        slow("ddp", 4, None),
        slow("ddp", 2, 23),
        slow("zero3", 3, None),
        slow("tp2", 2, 40),
        slow("pp2,zero2", 4, 20),
        slow("ps", 3, None),
        slow("dp", 1, 50),
    ],
)
def test_the_numbers_of_one_process(strategy: str, ranks: int, micro: int | None) -> None:
    expected = by_hand(tokens(), CONFIG, steps=steps_by_hand())
    config = replace(CONFIG, micro_batch=micro)
    assert largest_difference(expected, on_ranks(with_rung, ranks, tokens, strategy, config)[0]) < 1e-9


def test_micro_batches_are_as_many_in_every_batch() -> None:
    assert BatchPartition(40, 2, 0, num_parts=3).micro_sizes(40) == [14, 14, 12]
    assert BatchPartition(40, 2, 0, num_parts=3).micro_sizes(12) == [4, 4, 4]
    assert BatchPartition(40, 2, 0, num_parts=3).micro_sizes(3) == [2, 1]
    assert BatchPartition(40, 2, 0, num_parts=3).num_micro_batches == 3


def test_resumed_in_the_middle_of_an_epoch_on_other_ranks(tmp_path: Path) -> None:
    expected = by_hand(tokens(), CONFIG, steps=steps_by_hand())
    losses, _ = legs(tokens, CONFIG, tmp_path, [("ddp", 2, 7), ("zero3", 3, 15), ("single", 1, 20)])
    assert losses == pytest.approx(expected.losses, abs=1e-9)


def test_a_batch_has_one_size(tmp_path: Path) -> None:
    task = text_task(defaults={"batch_size": 8})
    with pytest.raises(ConfigError, match="--batch-size 8 and --batch-tokens 100 are two sizes of a batch"):
        resolve(task, flags={"batch_size": 8, "batch_tokens": 100})
    found = resolve(task, flags={"batch_tokens": "100"})
    assert (found.config.batch_tokens, found.config.batch_size) == (100, 32)
    write_toml(found, tmp_path / "config.toml", "rung")
    again = resolve(task, base=read_toml(tmp_path / "config.toml"))
    assert (again.config.batch_tokens, again.config.batch_size) == (100, 32)
    by_samples = resolve(text_task(defaults={"batch_tokens": 100}), flags={"batch_size": "8"}).config
    assert (by_samples.batch_tokens, by_samples.batch_size) == (None, 8)


def test_what_it_needs() -> None:
    data = text_data()
    for task in (text_task(), text_task(sample_weights=lambda data: [1] * 103)):
        with pytest.raises(DataError, match=r"--batch-tokens 120 needs the number of tokens of each sample"):
            token_batches_of(task, CONFIG, data)
    with pytest.raises(DataError, match="is iterable"):
        token_batches_of(tokens(), CONFIG, iter(data))


def test_a_plan_is_about_the_fullest_batch() -> None:
    task, config = with_fullest_batch(tokens(), CONFIG)
    order = TokenBatches(LENGTHS, 103, MOST, 5, shuffle=True)
    assert (config.batch_tokens, config.batch_size) == (None, len(order.fullest()))
    expected = [text_data()[n][0].tolist() for n in order.fullest()]
    (window,) = Batches(task.train_data(), BatchPartition(config.batch_size, 1, 0), shuffle=False, num_steps=1)
    assert window.micro_batches[0].data[0].tolist() == expected


def test_other_tokens_are_another_order() -> None:
    data = text_data()

    def batches(most: int) -> Batches:
        order = TokenBatches([7] * 103, 103, most, 5, shuffle=False)
        return Batches(data, BatchPartition(64, 1, 0), by_tokens=order, num_epochs=1)

    class Saved:
        manifest: ClassVar = {"num_samples": 103, "order": batches(70).order_digest}

    refuse_other_data(Saved(), batches(70))  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="the batch size or number of tokens"):
        refuse_other_data(Saved(), batches(77))  # type: ignore[arg-type]
