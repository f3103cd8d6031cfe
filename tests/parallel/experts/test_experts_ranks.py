"""Expert parallelism gives the numbers of one process, wherever rows go."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from rung.distributed.world import open_world
from rung.runtime import build_runtime
from rung.spec.compatibility import micro_batch_size
from rung.spec.config import RunConfig
from rung.spec.strategy import parse, required_num_ranks
from rung.spec.task import Task
from rung.train.worker import make_batches
from tests import expert_models as models
from tests.harness import on_ranks
from tests.marks import slow
from tests.parity import by_hand, largest_difference, with_rung

HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None

# Of 103 samples windows of 49, 49 and 5, in global micro-batches of 24, 24 and 1: empty on all ranks but one.
CONFIG = RunConfig(batch_size=49, steps=3, precision="fp64", clip=0.3, device="cpu")


def difference(make_task: Callable[[], Task], strategy: str, config: RunConfig) -> float:
    num_ranks = required_num_ranks(strategy)
    assert num_ranks is not None
    layout = parse(strategy, num_ranks)
    if config.micro_batch:
        config = replace(config, micro_batch=config.micro_batch // layout.num_data_ranks)
    found = on_ranks(with_rung, num_ranks, make_task, strategy, config)
    own = micro_batch_size(config, layout)
    expected = by_hand(make_task(), config, None if own is None else own * layout.num_data_ranks)
    assert all(torch.isfinite(torch.tensor([*expected.losses, *expected.norms])))
    return largest_difference(expected, found[0])


@pytest.mark.parametrize(
    ("make_task", "strategy", "micro_batch"),
    [
        (models.padded_mixture_task, "ep4", 24),
        (models.lonely_mixture_task, "fsdp4,ep2", 24),
        (models.uneven_mixture_task, "ddp4,ep2", 24),
        slow(models.padded_mixture_task, "fsdp4,ep2", 24),
        slow(models.lonely_mixture_task, "ep4", None),
        slow(models.uneven_mixture_task, "ep4", None),
        slow(models.uneven_mixture_task, "fsdp2,ep2", 24),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_experts_by_hand(make_task: Callable[[], Task], strategy: str, micro_batch: int | None) -> None:
    assert difference(make_task, strategy, replace(CONFIG, micro_batch=micro_batch)) < 1e-9


@pytest.mark.parametrize("strategy", ["fsdp4,ep2", slow("ep2"), slow("ep4")])
def test_frozen_parameters_and_layers_that_are_not_run(strategy: str) -> None:
    config = replace(CONFIG, micro_batch=24, unused_parameters="allow")
    assert difference(models.frozen_mixture_task, strategy, config) < 1e-9


@pytest.mark.skipif(not HAS_TRANSFORMERS, reason="transformers not installed: pip install 'rung[models]'")
@pytest.mark.parametrize(
    ("make_task", "strategy", "micro_batch"),
    [
        (models.mixtral_task, "ep2", 24),
        slow(models.qwen_task, "fsdp4,ep2", 24),
        slow(models.mixtral_task, "ep4", 24),
        slow(models.mixtral_task, "fsdp2,ep2", None),
        slow(models.mixtral_task, "fsdp4,ep2", 24),
        slow(models.mixtral_task, "ddp4,ep2", 24),
        slow(models.qwen_task, "ep2", None),
        slow(models.qwen_task, "ep4", 24),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_experts_of_hugging_face(make_task: Callable[[], Task], strategy: str, micro_batch: int | None) -> None:
    assert difference(make_task, strategy, replace(CONFIG, micro_batch=micro_batch)) < 1e-9


def loads() -> list[dict[str, float]]:
    """What a rank adds to the figures of each step."""
    with open_world(parse("ep2", 2), device="cpu", timeout_seconds=60) as world:
        task = models.lonely_mixture_task()
        batches = make_batches(task, CONFIG, world)
        runtime = build_runtime(task, world, CONFIG, total_steps=batches.total_steps)
        steps = [runtime.step(window) for window in runtime.place(batches)]
        return [{one.name: float(one.value) for one in step.logged if one.reduce == "max"} for step in steps]


def test_how_unevenly_rows_choose_is_logged() -> None:
    """Every row chooses the same two of eight experts: four times an even choice, twice for the rank."""
    first, second = on_ranks(loads, 2)
    assert first == [{"expert_load_max": 4.0, "expert_rank_load_max": 2.0}] * 3
    assert second == [{"expert_load_max": 0.0, "expert_rank_load_max": 0.0}] * 3
