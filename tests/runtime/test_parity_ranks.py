"""Every strategy gives the numbers of one process: float64, SGD with momentum and parameter groups, over an epoch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rung.runtime.passes as runtime_passes
import rung.runtime.staged as runtime_staged
from rung.spec.compatibility import micro_batch_size
from rung.spec.config import RunConfig
from rung.spec.strategy import parse
from tests.harness import on_ranks
from tests.marks import slow
from tests.matrix import BATCH_SIZE, ROWS, Row
from tests.parity import Outcome, by_hand, largest_difference, with_rung
from tests.tasks import TASKS


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.name, marks=[pytest.mark.slow] if row.is_slow else []) for row in ROWS]
)
def test_strategy_matches_one_process(row: Row) -> None:
    # Three steps are an epoch, the last of them short. Four go on into the next.
    steps = 3 if row.layout.is_composed else 4
    config = RunConfig(
        batch_size=BATCH_SIZE, micro_batch=row.micro_batch, steps=steps, precision="fp64", clip=0.5, device="cpu"
    )
    make_task = TASKS[row.model]
    expected = by_hand(make_task(), config, row.global_micro_batch)
    found = on_ranks(with_rung, row.num_ranks, make_task, row.strategy, config)
    assert largest_difference(expected, found[0]) < 1e-9
    for rank in found:
        assert rank.losses == found[0].losses, "the logged loss is the same on all ranks"
        assert rank.norms == pytest.approx(found[0].norms, abs=1e-12), "and so is the gradient norm"
        assert rank.evaluation == found[0].evaluation


@pytest.mark.parametrize(
    ("micro_batch", "strategy"),
    [
        (None, "zero3"),
        slow(None, "ddp"),
        *(slow(None, s) for s in ("zero1", "zero2", "hsdp", "pp4", "pp2:zb,ddp2", "pp2,fsdp2", "fsdp2,tp2", "pp2,tp2")),
        *((2, s) for s in ("ddp", "zero1", "hsdp", "pp2:zb,ddp2", "pp2,fsdp2")),
        *(slow(2, s) for s in ("zero2", "zero3", "pp4", "fsdp2,tp2", "pp2,tp2")),
    ],
)
def test_loss_weighted_by_tokens_matches_one_process(strategy: str, micro_batch: int | None) -> None:
    """Padded text: micro-batches count by their tokens, and some have none at all."""
    config = RunConfig(batch_size=25, micro_batch=micro_batch, steps=3, precision="fp64", clip=0.5, device="cpu")
    layout = parse(strategy, 4)
    taken = micro_batch_size(config, layout)
    expected = by_hand(TASKS["padded"](), config, None if taken is None else taken * layout.num_data_ranks)
    found = on_ranks(with_rung, 4, TASKS["padded"], strategy, config)
    assert largest_difference(expected, found[0]) < 1e-9


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_three_samples_on_four_ranks(strategy: str) -> None:
    config = RunConfig(batch_size=3, steps=3, precision="fp64", device="cpu")
    expected = by_hand(TASKS["images"](), config)
    found = on_ranks(with_rung, 4, TASKS["images"], strategy, config)
    assert largest_difference(expected, found[0]) < 1e-9


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_adamw_matches_one_process(strategy: str) -> None:
    config = RunConfig(batch_size=25, steps=6, precision="fp64", device="cpu")
    expected = by_hand(TASKS["adamw"](), config)
    found = on_ranks(with_rung, 2, TASKS["adamw"], strategy, config)
    assert largest_difference(expected, found[0]) < 1e-9


@pytest.mark.parametrize(
    "strategy", ["zero3", slow("tp4"), slow("pp4"), slow("fsdp2,tp2"), slow("pp2,ddp2"), "pp2:zb,zero1x2"]
)
def test_clipping_far_below_the_norm_scales_by_the_true_one(strategy: str) -> None:
    """At 0.1 every step is clipped: a norm that missed a stage or counted a tied weight twice would show at once."""
    config = RunConfig(batch_size=24, micro_batch=3, steps=3, precision="fp64", clip=0.1, device="cpu")
    layout = parse(strategy, 4)
    expected = by_hand(TASKS["text"](), config, 3 * layout.num_data_ranks)
    assert min(expected.norms) > 0.1
    found = on_ranks(with_rung, 4, TASKS["text"], strategy, config)
    assert largest_difference(expected, found[0]) < 1e-9


def _broken(make_task: Any, strategy: str, config: RunConfig, how: str) -> Outcome:
    """A runtime with a mistake in how micro-batches add up."""
    count = 0

    def wrong(loss: torch.Tensor, share: float | torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        if how == "sum":
            return loss
        return loss * share if count % 3 == 0 else loss * 0.0

    runtime_staged.weighted = wrong
    runtime_passes.weighted = wrong
    return with_rung(make_task, strategy, config)


@pytest.mark.parametrize("how", ["sum", "last only"])
@pytest.mark.parametrize("strategy", ["pp2", "pp2:zb", "ddp"])
def test_the_matrix_notices_micro_batches_that_add_up_wrongly(strategy: str, how: str) -> None:
    """A sum taken for a mean, or only the last micro-batch counted: the check that rows pass must fail here."""
    row = Row(strategy, "gpt", 2, accumulates=True)
    config = RunConfig(batch_size=48, micro_batch=row.micro_batch, steps=3, precision="fp64", device="cpu")
    expected = by_hand(TASKS["gpt"](), config, row.global_micro_batch)
    found = on_ranks(_broken, 2, TASKS["gpt"], strategy, config, how)
    assert largest_difference(expected, found[0]) > 1e-4
