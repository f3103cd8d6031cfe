"""`rung explain` end to end, and its honesty: what a pretended step tells is what real ranks do."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from rung.cli.main import main
from rung.distributed.status_board import StatusWriter
from rung.distributed.world import World, open_fake_world, open_world
from rung.errors import ModelError
from rung.planner.explain.explanation import RankView, explain, record_step
from rung.runtime import build_runtime
from rung.spec.config import RunConfig
from rung.spec.strategy import Layout, parse, required_num_ranks
from rung.spec.task import Task
from rung.train.worker import make_batches
from tests.harness import on_ranks
from tests.marks import slow
from tests.tasks import EXAMPLES, TinyGPT, image_task, text_data, text_task

SMALL = [
    "--set", "model.width=16", "--set", "model.heads=2", "--set", "model.context=8", "--set", "train_data.context=8",
    "--set", "train_data.characters=5000", "--batch-size", "8",
]  # fmt: skip

TWO_LAYERS = ["--set", "model.layers=2"]


def told(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(["explain", str(EXAMPLES / "gpt"), *arguments]) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


# -- the command ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (
            ["ddp", "--nproc", "1024", *TWO_LAYERS],
            ["1024 replicas", "each of 1024 ranks", "blocks.*.mlp.up.weight", "x2", "all-reduce", "dp_replicate 1024"],
        ),
        (
            ["fsdp", "--nproc", "4", *TWO_LAYERS],
            ["4 x 16", "0 by dp_shard", "all-gather", "reduce-scatter", "dp_shard 4"],
        ),
        (["fsdp2,tp2", *TWO_LAYERS], ["4 ranks", "0 by dp_shard, 1 by tp", "0 by dp_shard and tp", "tp 2"]),
        slow(
            ["pp4"],
            ["0 and 3, tied", "stages 1-2 (ranks 1-2)", "pp neighbour", "(p-1) / (m+p-1) = 27.3%", "most: 4, 3, 2, 1"],
        ),
        slow(
            ["pp2:interleaved,fsdp2"],
            ["stages 0, 2 (ranks 0-1)", "stages 1+3", "»", "«", "(p-1) / (2m+p-1)", "dp_shard 2"],
        ),
    ],
    ids=lambda value: value[0] if "--" not in value[0] else None,
)
def test_explain_gpt(capsys: pytest.CaptureFixture[str], tmp_path: Path, strategy: list[str], words: list[str]) -> None:
    out = tmp_path / "picture.svg"
    text = told(capsys, "--strategy", *strategy, *SMALL, "--out", str(out))
    for word in words:
        assert word in text
    assert max(map(len, text.replace(str(out), "").splitlines())) <= 100
    assert f"drawn: {out}" in text
    ElementTree.parse(out)


def test_json_is_the_raw_explanation(capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(told(capsys, "--strategy", "pp2", *SMALL, *TWO_LAYERS, "--json"))
    assert [rank["stages"] for rank in document["ranks"]] == [[0], [1]]
    assert document["num_micro_batches"] == 4
    assert {slot["kind"] for slot in document["chart"]} == {"F", "B"}
    names = [place["name"] for place in document["ranks"][1]["parameters"]]
    assert "token.weight" in names and "blocks.0.mlp.up.weight" not in names


def test_what_cannot_be_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "picture.svg" in told(capsys, "--strategy", "ddp2", "--out", "picture.png", code=2)
    assert "there is no directory" in told(capsys, "--strategy", "ddp2", "--out", "not/here.svg", code=2)
    assert "Did you mean 'fsdp'?" in told(capsys, "--strategy", "fsp", "--nproc", "2", code=2)
    assert "as in --nproc 8" in told(capsys, "--strategy", "fsdp", code=2)
    assert "Use at most 8 stages" in told(capsys, "--strategy", "pp64", *SMALL, code=2)
    assert "is for a pipeline" in told(capsys, "--strategy", "ddp2", "--schedule", "zb", code=2)


def test_a_batch_that_leaves_ranks_without_samples_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    assert "56 of 64 data ranks get no sample" in told(capsys, "--strategy", "ddp64", *SMALL, *TWO_LAYERS)
    made = explain(text_task(), parse("ddp2,tp2", 4), RunConfig(batch_size=5))
    assert any("do not divide evenly" in note for note in made.notes)


def test_a_model_that_looks_at_values_cannot_be_explained() -> None:
    class Looking(TinyGPT):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            output = super().forward(tokens)
            return output * (2 if output.sum().item() > 0 else 1)

    with pytest.raises(ModelError, match="reads tensor values"):
        explain(text_task(model=Looking), parse("ddp", 2), RunConfig(batch_size=4))


def test_a_stream_of_samples_is_explained_like_a_list() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(text_data(12))

    config = RunConfig(batch_size=8, micro_batch=1)
    streamed = explain(text_task(train_data=Stream), parse("fsdp", 4), config)
    assert streamed == explain(text_task(), parse("fsdp", 4), config)


# -- honesty -------------------------------------------------------------------------------------------------------


def small_task() -> Task:
    return text_task(model=lambda: TinyGPT(layers=1))


def large_task() -> Task:
    """More than DDP sends at a time."""
    return text_task(model=lambda: TinyGPT(width=256))


def looked_at(world: World, make_task: Callable[[], Task], config: RunConfig, warm_up: int = 1) -> RankView:
    task, status = make_task(), StatusWriter()
    runtime = build_runtime(task, world, config, total_steps=9, status=status)
    return record_step(runtime, world, status, make_batches(task, config, world), warm_up=warm_up)


def looked_at_for_real(make_task: Callable[[], Task], layout: Layout, config: RunConfig, warm_up: int) -> RankView:
    with open_world(layout, device="cpu", timeout_seconds=60) as world:
        return looked_at(world, make_task, config, warm_up)


# What is sent is compared for all rows of the matrix in test_messages.
def compare(strategy: str, make_task: Callable[[], Task], micro_batch: int | None) -> None:
    """Ranks in their third step for real against those that `explain` looks at: all that is told of them."""
    size = required_num_ranks(strategy) or 2
    layout, config = parse(strategy, size), RunConfig(batch_size=12, micro_batch=micro_batch, device="cpu", clip=1.0)
    real = on_ranks(looked_at_for_real, size, make_task, layout, config, 2)
    for rank in range(0, size, size // layout.pp):
        with open_fake_world(layout, rank=rank) as world:
            pretended = looked_at(world, make_task, config)
        assert pretended.messages == real[rank].messages, f"rank {rank}"
        assert pretended.actions == real[rank].actions
        assert pretended == real[rank]
        assert layout.num_ranks == 1 or pretended.messages
        assert bool(pretended.actions) == (layout.pp > 1)


@pytest.mark.parametrize(
    "strategy",
    [
        "pp2",
        *(slow(name) for name in ("hsdp2x2", "tp2", "pp2,ddp2", "fsdp2,tp2")),
        *(slow(name) for name in ("fsdp", "zero2", "pp2:zb,fsdp2", "pp2:interleaved,fsdp2")),
    ],
)
def test_real_ranks_do_what_pretended_ones_tell(strategy: str) -> None:
    compare(strategy, small_task if "interleaved" not in strategy else text_task, 3)


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_real_ddp_does_what_a_pretended_one_tells(strategy: str) -> None:
    """Its C++ reducer sends through the dispatcher, too. (In the second step it also agrees on new buckets, once.)"""
    compare(strategy, image_task, 3)


def test_ddp_of_a_large_model_sends_in_buckets() -> None:
    """The first of 1 MiB, in the order in which gradients come; the reducer settles that after its first step."""
    layout, config = parse("ddp", 2), RunConfig(batch_size=4, device="cpu")
    real = on_ranks(looked_at_for_real, 2, large_task, layout, config, 2)[0]
    made = explain(large_task(), layout, config).ranks[0]
    assert real.messages == made.messages
    assert len({message.num_bytes for message in made.messages if message.num_bytes > 2**19}) > 1
