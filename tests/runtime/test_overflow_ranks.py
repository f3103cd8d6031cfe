"""fp16: a step whose gradients overflow, on whichever ranks, is skipped by all of them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rung.distributed.world import open_world
from rung.parallel.gather import local_part
from rung.runtime import build_runtime
from rung.runtime.step import StepRuntime
from rung.spec.config import RunConfig
from rung.spec.strategy import parse
from rung.spec.task import Task
from rung.system.launcher_env import environment_size
from rung.train.worker import make_batches
from tests.checkpoints import legs
from tests.harness import on_ranks
from tests.marks import slow
from tests.tasks import image_task, text_task


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(36, 36), nn.ReLU()) for _ in range(4)])
        self.head = nn.Linear(36, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.01)


def make_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1, momentum=0.9)


def make_muon_and_sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices, rest = ([p for p in model.parameters() if (p.dim() == 2) is wanted] for wanted in (True, False))
    return [torch.optim.Muon(matrices, 0.01), torch.optim.SGD(rest, 0.1, momentum=0.9)]


OPTIMIZERS: dict[str, Any] = {"adamw": make_adamw, "sgd": make_sgd, "several": make_muon_and_sgd}


def make_task(optimizer: str, model: Any = Layers) -> Task:
    return image_task(model=model, optimizer=OPTIMIZERS[optimizer], schedule=None)


def train(task: Task, strategy: str, overflows: dict[int, list[int]], **changes: Any) -> dict[str, Any]:
    """Four steps on this rank; in each step of `overflows` the gradients of the ranks named there overflow."""
    config = RunConfig(**{"batch_size": 8, "steps": 4, "precision": "fp16", "device": "cpu", **changes})
    with open_world(parse(strategy, environment_size()), device="cpu", timeout_seconds=60) as world:
        runtime = build_runtime(task, world, config, total_steps=4)
        assert isinstance(runtime, StepRuntime)
        step = 0

        def overflow() -> None:
            if world.rank in overflows.get(step, []):
                for parameter in runtime.context.parameters:
                    if parameter.grad is not None and local_part(parameter.grad).numel():
                        local_part(parameter.grad).fill_(float("inf"))

        runtime.parts.finalizers.append(overflow)
        for window in runtime.place(make_batches(task, config, world)):
            step = window.step
            runtime.step(window, want_norm=step == 3)
        assert runtime.scaler is not None
        state = {name: value.numpy() for name, value in runtime.named_weights()}
        return {"scale": runtime.scaler.get_scale(), "updates": runtime.updates.count, "state": state}


def trained(optimizer: str, strategy: str, overflows: dict[int, list[int]], changes: dict[str, Any]) -> dict[str, Any]:
    return train(make_task(optimizer), strategy, overflows, **changes)


def check(found: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    assert [one["scale"] for one in found] == [expected["scale"]] * len(found)
    for name, value in expected["state"].items():
        assert np.isfinite(found[0]["state"][name]).all(), name
        assert np.abs(found[0]["state"][name] - value).max() < 2e-2, name


@functools.cache
def alone(optimizer: str, fused: bool, *steps: int) -> dict[str, Any]:
    found: dict[str, Any] = on_ranks(trained, 1, optimizer, "single", {step: [0] for step in steps}, {"fused": fused})[
        0
    ]
    assert found["scale"] == 65536.0 / 2 ** len(steps)
    return found


def _rows() -> list[Any]:
    rows = []
    for strategy in ("ddp", "zero1", "zero2", "zero3", "tp2", "pp2"):
        for optimizer, fused in (("adamw", True), ("adamw", False), ("sgd", True), ("sgd", False)):
            is_repetition = not fused and strategy not in ("zero1", "zero3", "pp2")
            is_repetition = is_repetition or (optimizer == "adamw" and strategy in ("zero1", "zero2", "pp2"))
            marks = [pytest.mark.slow] if is_repetition or (strategy, fused) == ("ddp", True) else []
            name = f"{strategy}-{optimizer}-{'fused' if fused else 'plain'}"
            rows.append(pytest.param(strategy, optimizer, fused, marks=marks, id=name))
    several = [slow(strategy, "several", True) for strategy in ("ddp", "zero1", "tp2", "pp2")]
    return [*rows, pytest.param("zero3", "several", True), *several]


@pytest.mark.parametrize(("strategy", "optimizer", "fused"), _rows())
def test_an_overflow_on_any_ranks_is_skipped_by_all(strategy: str, optimizer: str, fused: bool) -> None:
    # On one rank, then on both. The gradients of ddp are the same on all ranks.
    overflows = {2: [0, 1] if strategy == "ddp" else [1], 3: [0, 1]}
    check(on_ranks(trained, 2, optimizer, strategy, overflows, {"fused": fused}), alone(optimizer, fused, 2, 3))


@pytest.mark.parametrize(
    "strategy", [slow("hsdp"), "pp2,fsdp2", "fsdp2,tp2", slow("pp2:zb,ddp2"), slow("pp2,tp2"), "zero1x4"]
)
def test_an_overflow_on_some_of_four_ranks_is_skipped_by_all(strategy: str) -> None:
    overflows = {2: [0, 3], 3: [0, 1, 2, 3]}
    check(on_ranks(trained, 4, "adamw", strategy, overflows, {}), alone("adamw", True, 2, 3))


@pytest.mark.parametrize("optimizer", ["sgd", slow("several")])
@pytest.mark.parametrize("strategy", ["single", "ddp", "zero1", "zero3", "pp2"])
def test_an_overflow_in_the_first_step_leaves_no_momentum(strategy: str, optimizer: str) -> None:
    """torch's fused SGD makes its momentum in the first step, whether that is skipped or not."""
    num_ranks = 1 if strategy == "single" else 2
    check(on_ranks(trained, num_ranks, optimizer, strategy, {1: [0, 1]}, {}), alone(optimizer, False, 1))


@pytest.mark.parametrize("changes", [{"local_steps": 2}, {"compress": "topk:0.5"}, {"compress": "fp16"}, {"clip": 0.5}])
def test_neighbours_of_ddp_skip_it_too(changes: dict[str, Any]) -> None:
    ranks = [0, 1] if set(changes) & {"clip"} or changes.get("compress") == "fp16" else [1]
    for found in on_ranks(trained, 2, "adamw", "ddp", {2: ranks}, changes):
        assert found["scale"] == 65536.0 / 2
        assert all(np.isfinite(value).all() for value in found["state"].values())


class FrozenStage(Layers):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.requires_grad_(False)


def _frozen(strategy: str) -> dict[str, Any]:
    split = {"split": "head"} if strategy != "single" else {}
    return train(make_task("adamw", FrozenStage), strategy, {2: [environment_size() - 1]}, **split)


def test_a_stage_without_trainable_parameters_follows_the_scale() -> None:
    check(on_ranks(_frozen, 2, "pp2"), on_ranks(_frozen, 1, "single")[0])


def _exploding_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1).float(), target.flatten()) * 1e3  # above fp16 at a scale of 2 ** 16


def exploding_task() -> Task:
    return text_task(loss=_exploding_loss, optimizer=make_adamw)


@pytest.mark.parametrize("strategy", ["zero2", slow("tp2")])
def test_a_run_that_begins_with_overflows_resumes_with_its_scale(strategy: str, tmp_path: Path) -> None:
    config = RunConfig(batch_size=8, steps=6, precision="fp16", device="cpu", eval_every="never")
    losses, state = legs(exploding_task, config, tmp_path / "legs", [(strategy, 2, 2), (strategy, 2, 6)])
    whole_losses, whole = legs(exploding_task, config, tmp_path / "whole", [(strategy, 2, 6)])
    alone_losses, _ = legs(exploding_task, config, tmp_path / "alone", [("single", 1, 6)])
    assert losses == whole_losses
    assert np.isfinite(losses).all() and np.allclose(losses, alone_losses, rtol=0.02)
    assert all(torch.equal(state[name], whole[name]) and value.isfinite().all() for name, value in whole.items())
