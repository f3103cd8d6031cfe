"""The functions that train also run in a pretend world: 64 ranks in one process, tensors without data."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from rung.config import RunConfig
from rung.runtime import build_runtime
from rung.strategy import parse
from rung.train import make_batches, make_eval_batches, run
from rung.world import pretend_world
from tests.matrix import STRATEGIES
from tests.tasks import TASKS


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", ["babycnn", "gpt"])
def test_two_steps_of_64_ranks(strategy: str, model: str) -> None:
    size = 1 if strategy == "single" else 64
    config = RunConfig(batch_size=64, micro_batch=1 if size > 1 else 32, steps=2, clip=1.0, device="cpu")
    task = TASKS[model]()
    with pretend_world(parse(strategy, size), rank=size // 2) as world:
        runtime = build_runtime(task, world, config, total_steps=2)
        summary = run(
            runtime,
            make_batches(task, config, world),
            world=world,
            config=config,
            evaluation=lambda: make_eval_batches(task, config, world),
        )
        parameter = next(runtime.model.parameters())
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    assert summary.steps == 2
    assert summary.evaluation is not None
    assert isinstance(local, FakeTensor)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "hsdp8x8"])
def test_state_bytes_of_a_large_world_are_a_rank_s_share(strategy: str) -> None:
    """A model that would not fit this machine 64 times over: only its shapes are needed."""
    from tests.tasks import TinyGPT, text_task

    task = text_task(
        model=lambda: TinyGPT(1024, 1024, 2, 6),
        optimizer=lambda model: torch.optim.AdamW(model.parameters()),
    )
    config = RunConfig(batch_size=64, steps=1, device="cpu")
    with pretend_world(parse(strategy, 64), rank=3) as world:
        runtime = build_runtime(task, world, config)
        run(runtime, make_batches(task, config, world), world=world, config=config)
        kept = runtime.state_bytes()
    whole = 4 * sum(p.numel() for p in TinyGPT(1024, 1024, 2, 6).parameters())
    shards = {"ddp": 1, "zero1": 1, "zero2": 64, "zero3": 64, "hsdp8x8": 8}[strategy]
    states = {"ddp": 1, "zero1": 64, "zero2": 64, "zero3": 64, "hsdp8x8": 8}[strategy]
    assert kept["parameters"] == whole // shards
    assert kept["optimizer"] == pytest.approx(2 * whole / states, rel=0.01)
