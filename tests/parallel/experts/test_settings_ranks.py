"""Experts that are shared out under other settings: checkpoints, recomputed activations, optimizers, averages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rung.spec.config import RunConfig
from rung.spec.task import Task
from tests import expert_models as models
from tests.checkpoints import legs
from tests.harness import on_ranks
from tests.marks import slow
from tests.parallel.experts.test_experts_ranks import CONFIG, difference
from tests.parity import by_hand, largest_difference, with_rung, with_rung_traced
from tests.tasks import mixture_task


@pytest.mark.parametrize(
    "plan",
    [
        [("ddp", 4, 1), ("fsdp4,ep2", 4, 2), ("single", 1, 4)],
        slow([("single", 1, 1), ("ep4", 4, 2), ("fsdp2,ep2", 2, 3), ("zero1", 2, 4)]),
        slow([("zero3", 4, 1), ("ep2", 2, 2), ("zero1x4,ep2", 4, 4)]),
    ],
    ids=lambda plan: "-".join(name for name, _, _ in plan),
)
def test_checkpoints_know_nothing_of_ranks_of_experts(plan: list[tuple[str, int, int]], tmp_path: Path) -> None:
    """An epoch has three steps, so the legs begin within one; seven experts do not divide evenly."""
    config = replace(CONFIG, steps=4)
    expected = by_hand(models.uneven_mixture_task(), config)
    losses, state = legs(models.uneven_mixture_task, config, tmp_path, plan)
    assert losses == pytest.approx(expected.losses, abs=1e-9)
    assert max(float((state[name] - value).abs().max()) for name, value in expected.state.items()) < 1e-9


@pytest.mark.parametrize(
    ("strategy", "kind"), [("fsdp4,ep2", "full"), slow("ep2", "full"), slow("ep2", "selective"), slow("ep4", "full")]
)
def test_recomputed_activations(strategy: str, kind: Any) -> None:
    assert difference(mixture_task, strategy, replace(CONFIG, micro_batch=24, activation_checkpointing=kind)) < 1e-9


def adamw_task() -> Task:
    return replace(mixture_task(), optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01))


def several_task() -> Task:
    """Muon for matrices, and another optimizer for the experts, which are no matrices."""

    def optimizer(model: nn.Module) -> dict[str, torch.optim.Optimizer]:
        named = list(model.named_parameters())
        matrices = [p for name, p in named if p.dim() == 2 and "router" in name]
        others = [p for name, p in named if not (p.dim() == 2 and "router" in name)]
        return {"matrices": torch.optim.Muon(matrices, lr=0.02), "others": torch.optim.SGD(others, lr=0.05)}

    return replace(mixture_task(), optimizer=optimizer)


@pytest.mark.parametrize("strategy", ["ep2", slow("fsdp4,ep2"), slow("zero1x4,ep2")])
def test_adamw(strategy: str) -> None:
    assert difference(adamw_task, strategy, replace(CONFIG, micro_batch=24)) < 1e-9


def compared(make_task: Callable[[], Task], strategy: str, config: RunConfig, function: Any = with_rung) -> float:
    found = on_ranks(function, 2, make_task, strategy, config)
    return largest_difference(with_rung(make_task, "single", replace(config, compile=False)), found[0])


@pytest.mark.parametrize("strategy", ["ep2", slow("fsdp2,ep2")])
def test_an_average_of_the_weights_and_several_optimizers(strategy: str) -> None:
    """Muon computes in half precision, of the same matrices on every rank."""
    assert compared(several_task, strategy, replace(CONFIG, ema=0.9)) < 1e-9


@pytest.mark.parametrize("strategy", ["ep2", slow("fsdp2,ep2")])
def test_compiled_blocks(strategy: str) -> None:
    assert compared(mixture_task, strategy, replace(CONFIG, compile=True), with_rung_traced) < 1e-9


@pytest.mark.parametrize("strategy", ["ep2", slow("fsdp2,ep2")])
def test_half_precision(strategy: str) -> None:
    """As far as its rounding allows: a row whose choice is close may go elsewhere."""
    assert compared(mixture_task, strategy, replace(CONFIG, precision="bf16")) < 0.05
