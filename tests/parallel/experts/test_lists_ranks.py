"""Lists of experts that a module calls one by one, shared out among ranks: the numbers of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rung.distributed.world import open_world
from rung.runtime import build_runtime
from rung.spec.strategy import parse
from rung.spec.task import Task
from rung.train.worker import make_batches
from tests import expert_models as models
from tests.checkpoints import legs
from tests.harness import on_ranks
from tests.marks import slow
from tests.parallel.experts.test_experts_ranks import CONFIG as OTHERS
from tests.parallel.experts.test_experts_ranks import difference
from tests.parallel.experts.test_settings_ranks import compared
from tests.parallel.tensor.test_experts_ranks import listed_task, stacked_task
from tests.parity import by_hand, with_rung_traced

# An expert that no row has chosen in a step has no gradient in one process.
CONFIG = replace(OTHERS, micro_batch=24, unused_parameters="allow")
FEW = {"micro_batch": 4}
FULL, SELECTIVE = ({"activation_checkpointing": kind} for kind in ("full", "selective"))


@pytest.mark.parametrize(
    ("make_task", "strategy", "changes"),
    [
        (models.list_task, "ep2", {}),
        (models.lonely_list_task, "fsdp2,ep2", FULL | FEW),
        slow(models.lonely_list_task, "ep2", {"micro_batch": None}),
        slow(models.lonely_list_task, "ep2", SELECTIVE | FEW),
        slow(models.list_task, "ep4", {}),
        slow(models.lonely_list_task, "ep4", FULL | FEW),
        slow(models.list_task, "ep4", SELECTIVE),
        slow(models.list_task, "fsdp4,ep2", FULL),
        slow(models.lonely_list_task, "fsdp4,ep2", SELECTIVE),
        slow(models.lonely_list_task, "ddp4,ep2", FEW),
        slow(models.list_task, "zero1x4,ep2", {"micro_batch": None}),
        slow(models.list_task, "pp2,ep2", {}),
        slow(models.list_task, "pp2,fsdp2,ep2", FULL),
        slow(listed_task, "cp2,ep2", {}),
        (models.two_lists_task, "ep2", FULL | FEW),
        slow(models.two_lists_task, "ep2", {}),
        slow(models.two_lists_task, "fsdp2,ep2", FULL),
        slow(models.two_lists_task, "pp2,fsdp2,ep2", {}),
        slow(models.two_lists_task, "ep2,tp2", SELECTIVE),
        slow(models.list_task, "ep2,tp2", {}),
        slow(models.lonely_list_task, "fsdp2,ep2,tp2", FULL | FEW),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_numbers_of_one_process(make_task: Callable[[], Task], strategy: str, changes: dict[str, Any]) -> None:
    assert difference(make_task, strategy, replace(CONFIG, **changes)) < 1e-9


@pytest.mark.parametrize("strategy", ["ep2", slow("fsdp2,ep2")])
def test_compiled_blocks(strategy: str) -> None:
    assert compared(models.list_task, strategy, replace(CONFIG, compile=True), with_rung_traced) < 1e-9


@pytest.mark.parametrize(
    "plan",
    [
        [("ep2", 2, 2), ("single", 1, 4)],
        slow([("single", 1, 1), ("ep4", 4, 2), ("tp2", 2, 3), ("fsdp4,ep2", 4, 4)]),
        slow([("zero3", 4, 1), ("fsdp2,ep2", 2, 2), ("pp2,ep2", 4, 3), ("ep4", 4, 4)]),
    ],
    ids=lambda plan: "-".join(name for name, _, _ in plan),
)
def test_checkpoints_name_experts_as_one_process_does(plan: list[tuple[str, int, int]], tmp_path: Path) -> None:
    config = replace(CONFIG, steps=4, micro_batch=None)
    expected = by_hand(models.list_task(), config)
    losses, state = legs(models.list_task, config, tmp_path, plan)
    assert losses == pytest.approx(expected.losses, abs=1e-9)
    assert max(float((state[name] - value).abs().max()) for name, value in expected.state.items()) < 1e-9


CHAIN = [("ddp", 4, 1), ("fsdp2,cp2", 4, 2), ("pp2,ep2", 4, 3), ("single", 1, 4)]


@pytest.mark.parametrize("make_task", [listed_task, slow(stacked_task)], ids=lambda value: value.__name__)
def test_a_run_goes_on_with_positions_and_then_experts_divided(make_task: Callable[[], Task], tmp_path: Path) -> None:
    config = replace(CONFIG, batch_size=10, micro_batch=None, steps=4, eval_every="never")
    losses, state = legs(make_task, config, tmp_path / "legs", CHAIN)
    whole_losses, whole = legs(make_task, config, tmp_path / "whole", [("single", 1, 4)])
    assert losses == pytest.approx(whole_losses, abs=1e-9)
    assert max(float((state[name] - whole[name]).abs().max()) for name in whole) < 1e-9


def loads() -> list[dict[str, float]]:
    """What a rank adds to the figures of each step."""
    with open_world(parse("ep2", 2), device="cpu", timeout_seconds=60) as world:
        task = models.lonely_list_task(is_dense=False)
        batches = make_batches(task, CONFIG, world)
        runtime = build_runtime(task, world, CONFIG, total_steps=batches.total_steps)
        steps = [runtime.step(window) for window in runtime.place(batches)]
        return [{one.name: float(one.value) for one in step.logged if one.reduce == "max"} for step in steps]


def test_how_unevenly_rows_choose_is_logged() -> None:
    """Every row chooses the same two of eight experts: four times an even choice, twice for the rank."""
    first, second = on_ranks(loads, 2)
    assert first[:2] == [{"expert_load_max": 4.0, "expert_rank_load_max": 2.0}] * 2
    assert second[:2] == [{"expert_load_max": 0.0, "expert_rank_load_max": 0.0}] * 2


def adamw_task() -> Task:
    return replace(models.list_task(), optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01))


def muon_task() -> Task:
    """Matrices of experts are updated as a whole, on the ranks that hold them."""

    def optimizer(model: torch.nn.Module) -> dict[str, torch.optim.Optimizer]:
        matrices = [p for name, p in model.named_parameters() if name.endswith("up.weight")]
        others = [p for name, p in model.named_parameters() if not name.endswith("up.weight")]
        return {"matrices": torch.optim.Muon(matrices, lr=0.02), "others": torch.optim.SGD(others, lr=0.05)}

    return replace(models.list_task(), optimizer=optimizer)


@pytest.mark.parametrize("strategy", ["fsdp2,ep2", slow("ddp4,ep2")])
def test_adamw(strategy: str) -> None:
    assert difference(adamw_task, strategy, CONFIG) < 1e-9


def test_adapters_of_experts() -> None:
    config = replace(CONFIG, lora="r=2,alpha=4,targets=up+down+router")
    assert compared(models.list_task, "ep2", config) < 1e-9


@pytest.mark.parametrize("strategy", ["ep2", slow("fsdp2,ep2")])
def test_an_average_of_the_weights_and_several_optimizers(strategy: str) -> None:
    assert compared(muon_task, strategy, replace(CONFIG, ema=0.9)) < 1e-9


def test_half_precision() -> None:
    assert compared(models.list_task, "ep2", replace(CONFIG, precision="bf16")) < 0.05
