"""Training without the samples that cannot be read: a plain loop that leaves them out of their batches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset, IterableDataset

from rung.data.permutation import Permutation
from rung.spec.config import RunConfig
from rung.spec.task import Task
from tests.checkpoints import legs
from tests.data.test_shards_ranks import LENGTHS, Texts
from tests.data.test_shards_ranks import steps_by_hand as steps_of_shards
from tests.harness import RankFailed, on_ranks
from tests.marks import slow
from tests.parity import by_hand, largest_difference, with_rung
from tests.tasks import image_data, image_task, text_data, text_task

CONFIG = RunConfig(precision="fp64", batch_size=24, device="cpu", clip=1.0, steps=8, seed=5, skip_bad_samples=20)
ORDER = Permutation(103, 5, shuffle=True)
# The whole short batch at the end of the first epoch, the first rank's part of the second batch, and three others.
BAD = {*ORDER.samples(0, 96, 103), *ORDER.samples(0, 24, 32), 5, 40, 77}
LAST = {sum(LENGTHS[: shard + 1]) - 1 for shard in range(len(LENGTHS))}  # of shards: there, an error looks like the end


class Broken(Dataset[Any]):
    def __init__(self, data: Any, bad: Any) -> None:
        self.data, self.bad = data, bad

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        if index in self.bad:
            raise OSError(f"file {index} is truncated")
        return self.data[index]


class BrokenTogether(Broken):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class BrokenStream(IterableDataset[Any]):
    """Its iterator goes on after an error."""

    def __init__(self, data: Any, bad: Any) -> None:
        self.data, self.bad = Broken(data, bad), bad

    def __iter__(self) -> Iterator[Any]:
        return map(self.data.__getitem__, range(len(self.data)))


class BrokenShards(Texts):
    def shard(self, num_shards: int, index: int) -> BrokenShards:
        return BrokenShards(self.which[index::num_shards])

    def __iter__(self) -> Iterator[Any]:
        data = Broken(text_data(sum(LENGTHS), padded=True), BAD - LAST)
        places = [n for shard in self.which for n in range(sum(LENGTHS[:shard]), sum(LENGTHS[: shard + 1]))]
        return map(data.__getitem__, places)


def texts() -> Task:
    return text_task(padded=True, train_data=lambda: BrokenTogether(text_data(padded=True), BAD))


def images() -> Task:
    return image_task(train_data=lambda: Broken(image_data(), BAD), schedule=None)


def stream() -> Task:
    return text_task(train_data=lambda: BrokenStream(text_data(), BAD))


def shards() -> Task:
    return text_task(padded=True, train_data=lambda: BrokenShards(list(range(len(LENGTHS)))))


def steps_by_hand(make: Any, config: RunConfig = CONFIG) -> list[list[Any]]:
    """The readable samples of each batch."""
    if make is shards:
        whole = {id_of(sample): n for n, sample in enumerate(text_data(sum(LENGTHS), padded=True))}
        return [[s for s in step if whole[id_of(s)] not in BAD - LAST] for step in steps_of_shards(config, 2)]
    data = make().train_data().data
    data = data.data if isinstance(data, Broken) else data
    places = [
        ORDER.samples(epoch, start, min(start + 24, 103)) if make is not stream else range(start, min(start + 24, 103))
        for epoch in (0, 1)
        for start in range(0, 103, 24)
    ]
    return [[data[n] for n in batch if n not in BAD] for batch in places[: config.steps]]


def id_of(sample: Any) -> Any:
    return tuple(tuple(part.tolist()) for part in sample)


SHARDS = replace(CONFIG, batch_size=12, steps=None, epochs=2, skip_bad_samples=60)
ROWS = [
    (images, "ddp", 2, CONFIG),
    slow(texts, "ddp", 2, CONFIG),
    (texts, "single", 1, CONFIG),
    (shards, "ddp", 2, SHARDS),
    slow(images, "ddp", 3, CONFIG),
    slow(stream, "ddp", 2, replace(CONFIG, skip_bad_samples=60)),
    slow(stream, "ddp", 2, replace(CONFIG, skip_bad_samples=60, workers=2)),
    slow(texts, "ddp", 4, replace(CONFIG, workers=2)),
    slow(texts, "ddp", 2, replace(CONFIG, micro_batch=4)),
    slow(stream, "zero2", 2, replace(CONFIG, skip_bad_samples=60, micro_batch=5)),
    slow(texts, "zero3", 2, CONFIG),
    slow(texts, "pp2", 2, CONFIG),
    slow(texts, "pp2,zero2", 4, replace(CONFIG, micro_batch=3)),
    slow(texts, "tp2", 2, CONFIG),
    slow(texts, "ps", 3, CONFIG),
    slow(texts, "rpc-pp", 2, CONFIG),
    slow(texts, "dp", 1, CONFIG),
    slow(texts, "pp2:zb", 2, replace(CONFIG, micro_batch=6)),
    slow(texts, "cp2,ddp", 4, CONFIG),
    slow(shards, "zero3", 4, SHARDS),
]


@pytest.mark.parametrize(("make", "strategy", "ranks", "config"), ROWS)
def test_the_numbers_of_one_process(make: Any, strategy: str, ranks: int, config: RunConfig) -> None:
    expected = by_hand(make(), config, steps=steps_by_hand(make, config))
    assert 0.0 in expected.losses or make in (stream, shards), "a batch without any sample"
    assert largest_difference(expected, on_ranks(with_rung, ranks, make, strategy, config)[0]) < 1e-9


@pytest.mark.parametrize("make", [texts, slow(shards)])
def test_a_run_that_resumes_on_other_ranks_goes_on_counting(make: Any, tmp_path: Path) -> None:
    config = SHARDS if make is shards else CONFIG
    config = replace(config, skip_bad_samples=len(BAD) * (2 if make is shards else 1), eval_every="never")
    expected = by_hand(make(), config, steps=steps_by_hand(make, config)[:8])
    losses, state = legs(make, config, tmp_path, [("ddp", 2, 3), ("zero3", 3, 6), ("single", 1, 8)])
    assert losses == pytest.approx(expected.losses, abs=1e-9)
    assert max((state[name] - value).abs().max() for name, value in expected.state.items()) < 1e-9
    (newest,) = tmp_path.glob("checkpoints/*08/manifest.json")
    skipped = json.loads(newest.read_text())["skipped"]
    assert len(set(skipped)) == len(skipped) > 6
    if make is texts:
        assert skipped[:8] == [f"sample {n} of the data set" for n in ORDER.samples(0, 0, 32) if n in BAD][:8]
        assert {f"sample {n} of the data set" for n in BAD} >= set(skipped)


def few() -> Task:
    return text_task(train_data=lambda: Broken(text_data(), BAD))


def contrastive() -> Task:
    return text_task(train_data=lambda: Broken(text_data(), BAD), loss_scope="batch")


def test_one_more_ends_the_run(tmp_path: Path) -> None:
    first = [n for n in ORDER.samples(0, 0, 103) if n in BAD]
    config = replace(CONFIG, skip_bad_samples=9, eval_every="never")
    legs(few, config, tmp_path, [("ddp", 2, 2)])
    message = f"sample {first[9]} of the data set cannot be read, and 9 others were left out before it"
    with pytest.raises(RankFailed, match=message) as failure:
        legs(few, config, tmp_path, [("ddp", 2, 8)])
    assert f"file {first[9]} is truncated" in str(failure.value)


@pytest.mark.parametrize(
    ("make", "skips", "message"),
    [
        (few, 0, "This is sample [0-9]+ of the data set"),
        slow(contrastive, 20, 'loss_scope = "batch" needs the same share'),
    ],
)
def test_what_ends_a_run_on_ranks(make: Any, skips: int, message: str) -> None:
    with pytest.raises(RankFailed, match=message):
        on_ranks(with_rung, 2, make, "ddp", replace(CONFIG, skip_bad_samples=skips))
