"""Training on a data set in shards: a plain loop over the same samples, on ranks that each read their part."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from rung.data.permutation import Permutation, mix
from rung.spec.config import RunConfig
from rung.spec.task import Task
from tests.checkpoints import legs
from tests.harness import RankFailed, on_ranks
from tests.marks import slow
from tests.parity import by_hand, largest_difference, with_rung
from tests.tasks import text_data, text_task

LENGTHS = [9, 14, 0, 11, 3, 10, 12, 8]
CONFIG = RunConfig(precision="fp64", batch_size=12, device="cpu", clip=1.0, epochs=2, seed=5)


class Texts(IterableDataset[Any]):
    def __init__(self, which: list[int]) -> None:
        self.which = which
        self.num_shards = len(which)

    def shard(self, num_shards: int, index: int) -> Texts:
        return Texts(self.which[index::num_shards])

    def __iter__(self) -> Iterator[Any]:
        data = text_data(sum(LENGTHS), padded=True)
        for shard in self.which:
            first = sum(LENGTHS[:shard])
            for place in range(first, first + LENGTHS[shard]):
                yield data[place]


def sharded_task(**changes: Any) -> Task:
    return text_task(padded=True, train_data=lambda: Texts(list(range(len(LENGTHS)))), **changes)


def steps_by_hand(config: RunConfig, epochs: int) -> list[list[Any]]:
    """The samples of each step: three slots of a batch read from each of four lanes of two shards."""
    order = Permutation(len(LENGTHS), mix(config.seed, 2), shuffle=True)
    steps = []
    for epoch in range(epochs):
        shards = order.samples(epoch, 0, len(LENGTHS))
        lanes = [iter(Texts([shards[lane], shards[lane + 4]])) for lane in range(4)]
        while taken := [s for slot in range(12) if (s := next(lanes[slot // 3], None)) is not None]:
            steps.append(taken)
    return steps


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [("ddp", 4), slow("zero3", 4), slow("tp2", 2), slow("pp2", 2), slow("pp2,ddp,tp2", 8), slow("cp2,ddp", 4)],
)
def test_the_numbers_of_one_process(strategy: str, ranks: int) -> None:
    expected = by_hand(sharded_task(), CONFIG, steps=steps_by_hand(CONFIG, 2))
    found = on_ranks(with_rung, ranks, sharded_task, strategy, CONFIG)[0]
    assert largest_difference(expected, found) < 1e-9


@pytest.mark.parametrize(
    "plan", [[("ddp", 4, 4), ("zero3", 2, 9), ("single", 1, 12)], slow([("zero2", 3, 5), ("pp2,ddp", 4, 12)])]
)
def test_reading_goes_on_in_the_middle_of_an_epoch_on_other_ranks(
    plan: list[tuple[str, int, int]], tmp_path: Path
) -> None:
    expected = by_hand(sharded_task(), CONFIG, steps=steps_by_hand(CONFIG, 2)[:12])
    losses, state = legs(sharded_task, CONFIG, tmp_path, plan)
    assert losses == pytest.approx(expected.losses, abs=1e-9)
    assert max((state[name] - value).abs().max() for name, value in expected.state.items()) < 1e-9
    (newest,) = tmp_path.glob("checkpoints/*12/manifest.json")
    stream = json.loads(newest.read_text())["stream"]
    assert sorted(map(int, stream["lanes"])) == [0, 1, 2, 3], "of all ranks together"


def contrastive_task() -> Task:
    return text_task(train_data=lambda: Texts([0, 1]), loss_scope="batch")


def test_a_loss_of_the_whole_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match='loss_scope = "batch" needs the same share'):
        on_ranks(with_rung, 2, contrastive_task, "ddp", CONFIG)
