"""Each strategy keeps less where its name says so: bytes counted on every rank, for a model of 6 M parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from rung.distributed.world import open_world
from rung.runtime import build_runtime
from rung.spec.config import RunConfig
from rung.spec.strategy import parse
from rung.spec.task import Task
from rung.system.launcher_env import environment_size
from rung.train.worker import make_batches
from tests.harness import on_ranks
from tests.tasks import TinyGPT

WIDTH, LAYERS, VOCABULARY = 256, 10, 256


def task() -> Task:
    return Task(
        model=lambda: TinyGPT(VOCABULARY, WIDTH, LAYERS, 4),
        train_data=lambda: TensorDataset(torch.arange(40).view(10, 4), torch.arange(40).view(10, 4)),
        loss=lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten()),
        optimizer=lambda model: torch.optim.AdamW(model.parameters()),
        blocks="blocks.*",
    )


def count_bytes(strategy: str) -> dict[str, int]:
    """The most bytes of parameters seen during forward, the gradients before the update, and what is kept at rest."""
    config = RunConfig(batch_size=4, steps=2, device="cpu", log_every=1)
    with open_world(parse(strategy, environment_size()), device="cpu") as world:
        runtime = build_runtime(task(), world, config, total_steps=2)
        seen = {"parameters_in_forward": 0, "gradients": 0}
        for module in runtime.model.modules():
            if not list(module.children()):
                module.register_forward_hook(lambda *_: _look(runtime.model, seen))
        runtime.optimizer.register_step_pre_hook(lambda *_: _look_at_gradients(runtime.model, seen))
        for window in runtime.place(make_batches(task(), config, world)):
            runtime.step(window)
        return {**seen, **{f"{k}_at_rest": v for k, v in runtime.state_bytes().items()}}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _look(model: nn.Module, seen: dict[str, int]) -> None:
    held = sum(_local(p).numel() * 4 for p in model.parameters())
    seen["parameters_in_forward"] = max(seen["parameters_in_forward"], held)


def _look_at_gradients(model: nn.Module, seen: dict[str, int]) -> None:
    seen["gradients"] = sum(_local(p.grad).numel() * 4 for p in model.parameters() if p.grad is not None)


def test_each_strategy_keeps_less_where_its_name_says_so() -> None:
    model = TinyGPT(VOCABULARY, WIDTH, LAYERS, 4)
    num_parameters = sum(p.numel() for p in model.parameters())
    assert num_parameters >= 5_000_000
    whole, num_ranks = 4 * num_parameters, 2
    half = whole // num_ranks
    block = 4 * sum(p.numel() for p in model.blocks[0].parameters())
    counted: dict[str, list[dict[str, Any]]] = {
        name: on_ranks(count_bytes, num_ranks, name) for name in ("ddp", "zero1", "zero2", "zero3")
    }
    steps = 4 * 2 * len(list(model.parameters()))  # AdamW's step counters
    for rank in range(num_ranks):
        ddp, zero1, zero2, zero3 = (counted[name][rank] for name in ("ddp", "zero1", "zero2", "zero3"))
        # The optimizer's two moments: whole under ddp, cut under every zero.
        assert abs(ddp["optimizer_at_rest"] - 2 * whole) <= steps
        for cut in (zero1, zero2, zero3):
            assert abs(cut["optimizer_at_rest"] - 2 * half) <= steps
        # Gradients: whole under ddp and zero1, cut under zero2 and zero3.
        assert ddp["gradients"] == zero1["gradients"] == whole
        assert zero2["gradients"] == zero3["gradients"] == half
        # Parameters while they are used: whole until zero2, one block at a time beside the shards under zero3.
        assert ddp["parameters_in_forward"] == zero1["parameters_in_forward"] == whole
        assert zero2["parameters_in_forward"] == whole
        assert zero3["parameters_in_forward"] < half + 2 * block
        # Between steps zero2 gives its gathered parameters back, too.
        assert zero3["parameters_at_rest"] == zero2["parameters_at_rest"] == half


def test_hsdp_shards_inside_its_groups_only() -> None:
    num_parameters = sum(p.numel() for p in TinyGPT(VOCABULARY, WIDTH, LAYERS, 4).parameters())
    for counted in on_ranks(count_bytes, 4, "hsdp2x2"):
        assert counted["parameters_at_rest"] == counted["gradients"] == 4 * num_parameters // 2
