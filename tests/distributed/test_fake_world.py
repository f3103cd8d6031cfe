"""The functions that train also run in a fake world: 64 ranks in one process, tensors without data."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from rung.distributed.world import open_fake_world
from rung.parallel.materialize import is_absent
from rung.runtime import build_runtime
from rung.spec.config import RunConfig
from rung.spec.strategy import parse
from rung.spec.task import Task
from rung.train.loop import run
from rung.train.worker import make_batches, make_eval_batches
from tests.marks import slow, slow_if
from tests.tasks import TASKS, TinyGPT, text_task

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "hsdp", "single")
COMPOSED = (
    "tp64",
    "ddp,tp4",
    "zero1,tp4",
    "zero2,tp4",
    "fsdp,tp4",
    "hsdp4x4,tp4",
    "pp4,ddp",
    "pp4:gpipe,ddp",
    "pp2:interleaved,ddp",
    "pp4:zb,ddp",
    "pp4,zero1",
    "pp4,zero2",
    "pp4,fsdp",
    "pp4:zb,fsdp",
    "pp2:interleaved,fsdp",
    "pp4,hsdp4x4",
    "pp4,ddp,tp2",
    "pp4,fsdp,tp4",
)


def dry_run(task: Task, strategy: str, size: int, rank: int, micro_batch: int | None) -> None:
    config = RunConfig(batch_size=64, micro_batch=micro_batch, steps=2, clip=1.0, device="cpu")
    with open_fake_world(parse(strategy, size), rank=rank) as world:
        runtime = build_runtime(task, world, config, total_steps=2)
        summary = run(
            runtime,
            make_batches(task, config, world),
            world=world,
            config=config,
            evaluation=lambda: make_eval_batches(task, config, world),
        )
        parameter = next(p for p in runtime.model.parameters() if not is_absent(p))
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        others = [p for p in runtime.model.parameters() if is_absent(p)]
        assert bool(others) == (world.layout.pp > 1), "a stage keeps its own parameters only"
    assert summary.steps == 2
    assert summary.evaluation is not None
    assert isinstance(local, FakeTensor)


@pytest.mark.parametrize("strategy", [slow_if(s in ("zero1", "zero2", "ddp"), s) for s in STRATEGIES])
@pytest.mark.parametrize("model", [slow("babycnn"), "gpt"])
def test_two_steps_of_64_ranks(strategy: str, model: str) -> None:
    size = 1 if strategy == "single" else 64
    dry_run(TASKS[model](), strategy, size, size // 2, 1 if size > 1 else 32)


@pytest.mark.parametrize(
    ("strategy", "model"),
    [
        *(slow_if(s != "tp64", s, "gpt") for s in COMPOSED),
        *(slow(s, "babycnn") for s in ("pp4,ddp", "pp4:zb,fsdp", "pp2:interleaved,fsdp")),
    ],
)
def test_two_steps_of_64_ranks_in_each_stage(strategy: str, model: str) -> None:
    layout = parse(strategy, 64)
    each = layout.num_ranks // layout.pp
    for stage in range(layout.pp):
        dry_run(TASKS[model](), strategy, 64, stage * each + each // 2, None if layout.num_data_ranks < 16 else 2)


@pytest.mark.parametrize(("stages", "stage"), [(8, 3), slow(64, 0), slow(64, 31), slow(64, 63)])
def test_many_stages(stages: int, stage: int) -> None:
    task = text_task(model=lambda: TinyGPT(layers=stages))
    dry_run(task, f"pp{stages}", stages, stage, 1)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "hsdp8x8"])
def test_state_bytes_of_a_large_world_are_a_rank_s_share(strategy: str) -> None:
    """A model that would not fit this machine 64 times over: only its shapes are needed."""
    task = text_task(
        model=lambda: TinyGPT(1024, 1024, 2, 6),
        optimizer=lambda model: torch.optim.AdamW(model.parameters()),
    )
    config = RunConfig(batch_size=64, steps=1, device="cpu")
    with open_fake_world(parse(strategy, 64), rank=3) as world:
        runtime = build_runtime(task, world, config)
        run(runtime, make_batches(task, config, world), world=world, config=config)
        kept = runtime.state_bytes()
    whole = 4 * sum(p.numel() for p in TinyGPT(1024, 1024, 2, 6).parameters())
    shards = {"ddp": 1, "zero1": 1, "zero2": 64, "zero3": 64, "hsdp8x8": 8}[strategy]
    states = {"ddp": 1, "zero1": 64, "zero2": 64, "zero3": 64, "hsdp8x8": 8}[strategy]
    assert kept["parameters"] == whole // shards
    assert kept["optimizer"] == pytest.approx(2 * whole / states, rel=0.01)
