"""Which output layers compute their loss in chunks, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from rung.distributed.world import open_fake_world, open_world
from rung.errors import RungError
from rung.parallel.chunked_loss import ChunkedLinear
from rung.planner.dryrun import dry_run
from rung.planner.memory import find_peak
from rung.planner.trace import Work
from rung.runtime import build_runtime
from rung.spec.config import RunConfig
from rung.spec.strategy import parse
from rung.spec.task import Task
from tests.tasks import TinyGPT, text_task

LARGE = 4096


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


class Capped(TinyGPT):
    def forward(self, tokens: Tensor) -> Tensor:
        return 30 * torch.tanh(super().forward(tokens) / 30)


class Deciding(TinyGPT):
    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = super().forward(tokens)
        return found if float(found.sum()) > 1e9 else -found


class Untied(TinyGPT):
    def __init__(self) -> None:
        super().__init__(LARGE)
        self.head = nn.Linear(12, LARGE, bias=False)


def heads(task: Task, strategy: str = "single", num_ranks: int = 1, **settings: Any) -> tuple[list[str], list[str]]:
    """The layers that compute in chunks, and the lines that a run begins with."""
    config = RunConfig(**{"batch_size": 8, "steps": 1, "device": "cpu", **settings})
    layout = parse(strategy, num_ranks)
    world = open_world(layout, device="cpu") if num_ranks == 1 else open_fake_world(layout)
    with world as one:
        runtime = build_runtime(task, one, config, total_steps=1)
        found = [n for n, m in runtime.model.named_modules() if isinstance(m, ChunkedLinear) and m.is_chunked]
        return found, [note for note in runtime.notes if "chunk" in note]


def test_a_large_vocabulary_is_found_and_told() -> None:
    found, notes = heads(text_task(model=lambda: TinyGPT(LARGE)))
    assert found == ["head"]
    assert notes == ["cross entropy in chunks: the logits of head are not kept; chunked_loss=never keeps them"]
    assert heads(text_task(model=lambda: TinyGPT(LARGE)), chunked_loss="never") == ([], [])
    assert heads(text_task(model=lambda: TinyGPT(LARGE - 1))) == ([], [])
    assert heads(text_task(model=lambda: TinyGPT(LARGE)), precision="fp16") == (found, notes)


@pytest.mark.parametrize(
    "strategy", ["ddp", "zero1", "zero2", "zero3", "hsdp2x2", "pp2,fsdp2", "tp4", "fsdp2,tp2", "pp2,tp2"]
)
def test_strategies_that_compute_in_chunks(strategy: str) -> None:
    assert heads(text_task(model=lambda: TinyGPT(LARGE)), strategy, 4)[0] == ["head"]


@pytest.mark.parametrize(
    "task",
    [
        text_task(model=lambda: Capped(LARGE)),
        text_task(model=lambda: Deciding(LARGE)),
        text_task(model=lambda: TinyGPT(LARGE), loss=lambda y, t: y.square().mean()),
        text_task(model=lambda: TinyGPT(LARGE), loss=lambda y, t: cross_entropy(y, t) + 1e-4 * y.logsumexp(-1).mean()),
    ],
    ids=["capped", "deciding by values", "another loss", "a penalty beside"],
)
def test_logits_with_another_use_stay(task: Task) -> None:
    assert heads(task) == ([], [])
    with pytest.raises(RungError, match=r"chunked_loss=7: no linear layer's output goes into cross_entropy"):
        heads(task, chunked_loss="7")


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "settings", "reason"),
    [
        ("tp2", 2, {}, 'gathers the logits of head.*"vocabulary_head"'),
        ("dp2", 1, {}, "handed on before the loss"),
        ("zero3", 2, {"shard_by": "size:1K"}, "in a unit, .* Use --shard-by block, or --shard-by whole"),
        ("zero3", 2, {"blocks": "head"}, 'in a unit, .* Use blocks = "..." for modules without it, or'),
    ],
)
def test_where_it_is_not_possible_auto_does_without(
    strategy: str, num_ranks: int, settings: dict[str, Any], reason: str
) -> None:
    styles = {"head": "colwise_gather"} if strategy == "tp2" else None
    task = text_task(model=Untied, tensor_parallel=styles, blocks=settings.pop("blocks", None))
    assert heads(task, strategy, num_ranks, **settings) == ([], [])
    with pytest.raises(RungError, match=f"chunked_loss=7.*{reason}"):
        heads(task, strategy, num_ranks, chunked_loss="7", **settings)


def test_a_loss_of_some_rows_chosen_by_a_mask() -> None:
    def masked(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output[target > 3], target[target > 3])

    assert heads(text_task(model=lambda: TinyGPT(LARGE), loss=masked))[0] == ["head"]


def test_logits_that_some_batches_change_in_place_stay() -> None:
    def banning(output: Tensor, target: Tensor) -> Tensor:
        banned = (target > 3).unsqueeze(-1).expand(output.shape)
        return cross_entropy(output.masked_fill_(banned, -1e4) if banned.any() else output, target)

    assert heads(text_task(model=lambda: TinyGPT(LARGE), loss=banning)) == ([], [])


def test_a_layer_whose_result_is_changed_in_place_does_not_hide_the_other() -> None:
    class InPlace(TinyGPT):
        def __init__(self) -> None:
            super().__init__(LARGE)
            self.wide = nn.Sequential(nn.Linear(12, LARGE), nn.ReLU(inplace=True), nn.Linear(LARGE, 12))

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.norm(self.wide(self.token(tokens))))  # type: ignore[no-any-return]

    assert heads(text_task(model=InPlace))[0] == ["head"]


def test_a_sharded_model_is_compiled_by_blocks_and_so_takes_chunks() -> None:
    found, (note,) = heads(text_task(model=Untied), "zero3", 2, compile=True)
    assert found == ["head"]
    assert "not kept, and the model is compiled block by block" in note


@pytest.mark.parametrize(("strategy", "num_ranks"), [("single", 1), ("ddp", 2)])
def test_a_compiled_model_stays_whole_unless_its_logits_are_large(strategy: str, num_ranks: int) -> None:
    task = text_task(model=Untied)
    enough = -(-(2**31) // (4 * 6 * LARGE)) * num_ranks  # samples of six rows: 2 GiB on each rank
    assert heads(task, strategy, num_ranks, compile=True) == ([], [])
    assert heads(task, strategy, num_ranks, compile=True, batch_size=enough - num_ranks) == ([], [])
    assert heads(task, strategy, num_ranks, compile=True, batch_size=enough, micro_batch=8) == ([], [])
    # Larger than a rank's share of the batch, it is that share.
    less: dict[str, Any] = {"batch_size": enough - num_ranks, "micro_batch": enough - num_ranks}
    assert heads(task, strategy, num_ranks, compile=True, **less) == ([], [])
    for settings in ({"batch_size": enough}, {"chunked_loss": "7"}):
        found, (note,) = heads(task, strategy, num_ranks, compile=True, **settings)
        assert found == ["head"]
        assert "not kept, and the model is compiled block by block" in note


def test_a_batch_by_tokens_has_a_row_of_logits_for_each() -> None:
    task, enough = text_task(model=Untied), 2**31 // (4 * LARGE)
    assert heads(task, compile=True, batch_tokens=enough)[0] == ["head"]
    assert heads(task, compile=True, batch_tokens=enough - 1) == ([], [])
    assert heads(task, compile=True, batch_tokens=enough, micro_batch=enough - 1) == ([], [])


def test_a_loss_of_the_whole_batch_needs_the_logits() -> None:
    task = text_task(model=lambda: TinyGPT(LARGE), loss_scope="batch")
    assert heads(task) == ([], [])
    with pytest.raises(RungError, match=r'chunked_loss=7.*loss_scope = "batch"'):
        heads(task, chunked_loss="7")


@pytest.mark.parametrize(("strategy", "num_ranks"), [("single", 1), ("tp2", 2)])
def test_a_plan_sees_the_memory_that_is_saved(strategy: str, num_ranks: int) -> None:
    tokens = torch.zeros(64, 64, dtype=torch.long)

    def task(make: Callable[[], nn.Module]) -> Task:
        return text_task(model=make, train_data=lambda: TensorDataset(tokens, tokens))

    def peak(setting: str) -> int:
        config = RunConfig(batch_size=64, device="cpu", chunked_loss=setting)
        run = dry_run(task(lambda: TinyGPT(LARGE, 32, 1, 64)), parse(strategy, num_ranks), config)
        return find_peak(run.trace).num_bytes

    logits = 64 * 64 * LARGE * 4 // num_ranks
    assert peak("never") > 2 * logits
    assert peak("512") < logits


def test_a_plan_for_a_gpu_sees_the_kernel_and_its_products() -> None:
    tokens = torch.zeros(8, 64, dtype=torch.long)
    task = text_task(model=lambda: TinyGPT(LARGE, 32, 1, 64), train_data=lambda: TensorDataset(tokens, tokens))
    config = RunConfig(batch_size=8, precision="bf16", chunked_loss="128")
    run = dry_run(task, parse("single", 1), config, device="cuda")
    works = [event for event in run.trace.events if isinstance(event, Work)]
    assert sum(one.name == "rung::softmax_gradient_" for one in works) == 2 * 4  # chunks of two steps
    products = [one for one in works if one.name == "addmm" and one.flops == 2 * 128 * 32 * LARGE]
    assert {one.dtype for one in products} == {"bfloat16"}  # though the sum is in fp32
    assert len(products) == 2 * 4
