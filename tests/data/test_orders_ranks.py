"""Training in other orders than a shuffled one: a plain loop over the same samples."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.utils.data import ConcatDataset, Subset

from rung.data.orders import ByLength, Mixture, WeightedDraws
from rung.spec.config import RunConfig
from rung.spec.task import Task
from tests.checkpoints import legs
from tests.harness import on_ranks
from tests.marks import slow
from tests.parity import by_hand, largest_difference, with_rung
from tests.tasks import text_data, text_task

CONFIG = RunConfig(precision="fp64", batch_size=24, device="cpu", clip=1.0, steps=8, seed=5)
LENGTHS = [(11 * n) % 37 for n in range(103)]


def halves() -> ConcatDataset[object]:
    data = text_data()
    return ConcatDataset([Subset(data, range(40)), Subset(data, range(40, 103))])


def weighted() -> Task:
    return text_task(sample_weights=lambda data: [1 + n % 5 for n in range(len(data))])


def by_length() -> Task:
    return text_task(sample_lengths=lambda data: LENGTHS)


def mixed() -> Task:
    return text_task(train_data=halves, mixture=[3, 1])


ORDERS = {
    weighted: lambda: WeightedDraws([1 + n % 5 for n in range(103)], 103, 5),
    by_length: lambda: ByLength(LENGTHS, 103, 24, 5),
    mixed: lambda: Mixture(halves(), [3, 1], 5, shuffle=True),
}


def steps_by_hand(make: object) -> list[list[object]]:
    order, data = ORDERS[make](), text_data()
    places = [order.samples(epoch, start, min(start + 24, 103)) for epoch in (0, 1) for start in range(0, 103, 24)]
    return [[data[n] for n in step] for step in places[:8]]


ROWS = [(mixed, "zero2,pp2", 4), slow(weighted, "ddp", 4), slow(by_length, "ddp", 3)]
ROWS += [slow(make, name, 2) for make in ORDERS for name in ("zero3", "tp2", "pp2")]


@pytest.mark.parametrize(("make", "strategy", "ranks"), ROWS)
def test_the_numbers_of_one_process(make: object, strategy: str, ranks: int) -> None:
    expected = by_hand(make(), CONFIG, steps=steps_by_hand(make))
    assert largest_difference(expected, on_ranks(with_rung, ranks, make, strategy, CONFIG)[0]) < 1e-9


@pytest.mark.parametrize("make", [weighted, slow(by_length), slow(mixed)])
def test_resumed_in_the_middle_of_an_epoch_on_other_ranks(make: object, tmp_path: Path) -> None:
    expected = by_hand(make(), CONFIG, steps=steps_by_hand(make))
    losses, _ = legs(make, CONFIG, tmp_path, [("ddp", 2, 3), ("zero3", 3, 7), ("single", 1, 8)])
    assert losses == pytest.approx(expected.losses, abs=1e-9)
