"""Blocks that are told again: the trace of a dry run with them is that of one in which every block has run."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rung.errors import ModelError
from rung.hardware.cluster import parse_cluster
from rung.planner import block_cache
from rung.planner.block_cache import BlockTraceCache
from rung.planner.cost import step_time
from rung.planner.dryrun import DryRun, dry_run
from rung.planner.memory import find_peak
from rung.spec.config import RunConfig
from rung.spec.strategy import parse
from rung.spec.task import Task
from tests.marks import slow
from tests.tasks import TinyGPT, image_task, text_task

CLUSTER = parse_cluster("2 nodes x 4 H100")
UNSTARTED = "not started"


def traces(task: Task, strategy: str, ranks: int, repeats: BlockTraceCache | None, **changes: Any) -> list[DryRun]:
    layout = parse(strategy, ranks, 4)
    config = RunConfig(batch_size=4 * layout.num_data_ranks, micro_batch=2, precision="bf16", clip=1.0)
    config = replace(config, **changes)
    each = layout.num_ranks // layout.pp
    return [
        dry_run(task, layout, config, rank=stage * each, device="cuda", repeats=repeats) for stage in range(layout.pp)
    ]


def figures(runs: list[DryRun]) -> list[Any]:
    """What must be the same: state, messages and operations of each rank.

    A sum in place counts as a sum: a gradient that came from another stage is held there, and one told again is not.
    What is done before the first step does not count: tensor parallelism traces one of the blocks that are alike.
    """
    names = {"add_": "add"}
    rows = [
        [(names.get(w.name, w.name), w.phase, w.flops, w.num_bytes) for w in run.trace.works() if w.phase != UNSTARTED]
        for run in runs
    ]
    return [
        [run.state_bytes for run in runs],
        [Counter(run.trace.messages()) for run in runs],
        [Counter(row) for row in rows],
    ]


def peaks(runs: list[DryRun]) -> list[int]:
    return [find_peak(run.trace, rounding=512).num_bytes for run in runs]


@pytest.mark.parametrize(
    ("strategy", "ranks", "checkpointing"),
    [slow("single", 1, "none"), slow("zero3", 8, "full"), ("pp2,zero3x2", 4, "none"), slow("zero3x2,tp2", 4, "full")],
)
def test_a_block_told_again_is_a_block_run_again(strategy: str, ranks: int, checkpointing: str) -> None:
    task, repeats = text_task(model=partial(TinyGPT, layers=3, width=64)), BlockTraceCache()
    whole = traces(task, strategy, ranks, None, activation_checkpointing=checkpointing)
    for _ in range(2):  # with the templates made on the way, and with those that there are
        told = traces(task, strategy, ranks, repeats, activation_checkpointing=checkpointing)
        assert figures(told) == figures(whole)
        assert peaks(told) == pytest.approx(peaks(whole), rel=0.02)  # gradients of a block wait for each other
        assert step_time(told, CLUSTER).seconds == pytest.approx(step_time(whole, CLUSTER).seconds, rel=1e-3)
    assert repeats.templates


def test_buckets_of_ddp_may_be_others_but_hold_the_same() -> None:
    """A block's gradients come all at its end, so they may be put into buckets in another order."""
    task = text_task(model=partial(TinyGPT, layers=3, width=64))
    whole, told = (traces(task, "ddp", 4, repeats)[0] for repeats in (None, BlockTraceCache()))
    sums = [sum(m.num_bytes for m in run.trace.messages() if m.operation == "all-reduce") for run in (whole, told)]
    assert sums[0] == sums[1]
    assert peaks([told]) == pytest.approx(peaks([whole]), rel=0.02)


class Different(nn.Module):
    """Blocks of one type that do not do the same."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.times = 1 + number % 2

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.linear(x).relu()
        return x


def test_blocks_that_differ_in_a_number_are_not_taken_for_each_other() -> None:
    def model() -> nn.Module:
        return nn.Sequential(*(Different(number) for number in range(4)))

    def data() -> Any:
        return torch.utils.data.TensorDataset(torch.zeros(64, 32), torch.zeros(64, 32))

    task = Task(
        model,
        data,
        lambda output, target: (output - target).square().mean(),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        name="different",
    )
    repeats = BlockTraceCache()
    whole, told = (traces(task, "single", 1, some) for some in (None, repeats))
    assert figures(told) == figures(whole)
    assert len(repeats.templates) == 3  # of the first, whose input needs no gradient; and of each kind


class WithNone(nn.Module):
    """A block of transformers' kind: it also returns what it was not asked for."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.linear(x).relu(), None


class Vision(nn.Module):
    """A layer before the blocks, whose cast weights autocast keeps, and rates that the constructor reads as numbers."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Linear(36, width)
        rates = [rate.item() for rate in torch.linspace(0, 0.1, 3, device="cpu")]
        self.drops = nn.ModuleList(nn.Dropout(rate) for rate in rates)
        self.blocks = nn.ModuleList(WithNone(width) for _ in rates)
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x.flatten(1))
        for block, drop in zip(self.blocks, self.drops, strict=True):
            x = drop(block(x)[0])
        return self.head(x)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_layer_before_the_blocks_and_blocks_that_return_nothing_beside(precision: str) -> None:
    task, repeats = image_task(model=Vision), BlockTraceCache()
    whole = traces(task, "single", 1, None, precision=precision)
    for _ in range(2):
        told = traces(task, "single", 1, repeats, precision=precision)
        assert figures(told) == figures(whole)
        assert peaks(told) == pytest.approx(peaks(whole), rel=0.02)
    assert repeats.templates


def test_blocks_that_cannot_be_told_again_are_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*args: Any) -> None:
        raise KeyError("a block of a new kind")

    task = text_task(model=partial(TinyGPT, layers=3, width=64))
    whole = traces(task, "single", 1, None)
    monkeypatch.setattr(block_cache, "_record", breaks)
    assert figures(traces(task, "single", 1, BlockTraceCache())) == figures(whole)


def test_a_model_that_fails_on_fake_tensors_cannot_be_planned() -> None:
    class Fails(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise TypeError("no such thing")

    with pytest.raises(ModelError, match=r"(?s)test_block_cache.*fails here with TypeError: no such thing"):
        traces(image_task(model=lambda: Fails(36, 5)), "single", 1, BlockTraceCache())
