"""Checkpoints without topology: saved under one strategy, resumed under another, against the run never stopped."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rung
from rung.spec.config import RunConfig
from rung.spec.task import Task
from tests.checkpoints import legs
from tests.harness import RankFailed, on_ranks
from tests.marks import slow
from tests.tasks import adamw_task, dropping_task, gpt_task, image_task, text_task

FP64 = RunConfig(batch_size=10, steps=10, precision="fp64", clip=0.5, device="cpu", eval_every="never")


def _largest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert list(one) == list(other)
    return max(float((one[n].double() - other[n].double()).abs().max()) for n in one if one[n].numel())


def _scheduled_adamw() -> Task:
    return replace(adamw_task(), schedule=lambda o, total: torch.optim.lr_scheduler.CosineAnnealingLR(o, total))


CHAINS = {
    "issue": [("ddp", 4, 2), ("zero3", 2, 4), ("pp2,tp2", 4, 5), ("single", 1, 7), ("zero1", 3, 8), ("hsdp", 4, 10)],
    "cut": [("fsdp2,tp2", 4, 2), ("pp2,fsdp2", 4, 4), ("tp2", 2, 6), ("pp2:interleaved", 2, 8), ("zero2", 3, 10)],
}


@pytest.mark.parametrize(
    ("chain", "make_task"),
    [
        pytest.param("issue", _scheduled_adamw, id="issue-adamw"),
        slow("cut", gpt_task, id="cut-sgd"),
        slow("issue", gpt_task, id="issue-sgd"),
        slow("cut", _scheduled_adamw, id="cut-adamw"),
    ],
)
def test_any_to_any(tmp_path: Path, chain: str, make_task: Any) -> None:
    whole_losses, whole = legs(make_task, FP64, tmp_path / "whole", [("single", 1, 10)])
    losses, state = legs(make_task, FP64, tmp_path / "legs", CHAINS[chain])
    assert losses == pytest.approx(whole_losses, abs=1e-9)
    assert _largest(state, whole) < 1e-9


def test_batch_norm_and_frozen_weights(tmp_path: Path) -> None:
    plan = [("ddp", 2, 3), ("zero3", 2, 5), ("single", 1, 6), ("zero1", 3, 8)]
    config = replace(FP64, steps=8)
    losses, state = legs(image_task, config, tmp_path / "legs", plan)
    whole_losses, whole = legs(image_task, config, tmp_path / "whole", [("single", 1, 8)])
    assert losses == pytest.approx(whole_losses, abs=1e-9)
    assert _largest(state, whole) < 1e-9


class Counting(nn.Linear):
    """Counts its calls in its extra state, and has a buffer that forward replaces, or creates."""

    def __init__(self, mean: torch.Tensor | None) -> None:
        super().__init__(36, 36)
        self.register_buffer("mean", None if mean is None else mean.clone())
        self.calls = 0

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.training:
            self.calls += 1
            self.mean = y.detach().mean() + (0.0 if self.mean is None else 0.5 * self.mean)
        return y + 0.01 * self.calls + (0.0 if self.mean is None else self.mean)


def _counting_task(mean: torch.Tensor | None) -> Task:
    def model() -> nn.Module:
        return nn.Sequential(nn.Flatten(), Counting(mean), nn.Tanh(), Counting(mean), nn.Tanh(), nn.Linear(36, 5))

    return replace(image_task(), model=model)


_counting = partial(_counting_task, torch.zeros(()))
_creating = partial(_counting_task, None)


@pytest.mark.parametrize(("strategy", "num_ranks"), [("pp2", 2), ("ps", 2), slow("rpc-pp2", 2)])
def test_state_that_modules_keep_by_themselves(tmp_path: Path, strategy: str, num_ranks: int) -> None:
    """Of the rank that runs the module: a stage, a trainer and not its server. It is saved twice."""
    config = replace(FP64, steps=6)
    plan = [(strategy, num_ranks, until) for until in (2, 4, 6)]
    losses, state = legs(_counting, config, tmp_path / "legs", plan)
    whole_losses, whole = legs(_counting, config, tmp_path / "whole", plan[-1:])
    assert losses == whole_losses
    assert all(torch.equal(state[name], whole[name]) for name in whole)


def test_a_buffer_that_forward_creates(tmp_path: Path) -> None:
    """Ranks that do not run its module do not have it: refused. What one process saved of it goes to its stage."""
    config = replace(FP64, steps=6)
    for strategy in ("pp2", "ps"):
        with pytest.raises(RankFailed, match=r"forward creates the buffer \d.mean"):
            legs(_creating, config, tmp_path / strategy, [(strategy, 2, 6)])
    losses, state = legs(_creating, config, tmp_path / "legs", [("single", 1, 2), ("pp2", 2, 4), ("pp2", 2, 6)])
    others, straight = legs(_creating, config, tmp_path / "other legs", [("single", 1, 2), ("pp2", 2, 6)])
    assert losses == others
    assert all(torch.equal(state[name], straight[name]) for name in straight)


EXACT = RunConfig(batch_size=10, epochs=2, device="cpu", workers=1, eval_every="never")
# Of 103 samples in steps of 10: step 4 ends within the epoch, 11 at its end, 15 and 17 are in the second one.
STOPS = {"within": [4], "twice": [3, 8], "epoch": [11], "again": [4, 11, 17]}


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "stops"),
    [
        ("single", 1, "twice"),
        ("ddp", 2, "again"),
        ("zero1", 2, "within"),
        slow("zero3", 2, "epoch"),
        ("pp2", 2, "within"),
        ("tp2", 2, "within"),
        slow("pp2,fsdp2", 4, "epoch"),
    ],
)
def test_same_topology_is_bit_identical(tmp_path: Path, strategy: str, num_ranks: int, stops: str) -> None:
    plan = [(strategy, num_ranks, until) for until in [*STOPS[stops], 22]]
    losses, state = legs(dropping_task, EXACT, tmp_path / "legs", plan)
    whole_losses, whole = legs(dropping_task, EXACT, tmp_path / "whole", plan[-1:])
    assert losses == whole_losses
    assert all(torch.equal(state[name], whole[name]) for name in whole)


@pytest.mark.parametrize(
    "stops",
    [pytest.param([1], id="at sample 37"), slow([1, 2], id="twice in one epoch"), slow([3], id="at an epoch's end")],
)
def test_stopped_at_sample_37_of_103(tmp_path: Path, stops: list[int]) -> None:
    config = replace(EXACT, batch_size=37)
    losses, state = legs(dropping_task, config, tmp_path / "legs", [("ddp", 2, until) for until in [*stops, 6]])
    whole_losses, whole = legs(dropping_task, config, tmp_path / "whole", [("ddp", 2, 6)])
    assert losses == whole_losses
    assert all(torch.equal(state[name], whole[name]) for name in whole)


def test_half_precision_keeps_its_scale(tmp_path: Path) -> None:
    config = replace(EXACT, precision="fp16", epochs=None, steps=6, workers=0)
    losses, state = legs(text_task, config, tmp_path / "legs", [("ddp", 2, 3), ("ddp", 2, 6)])
    whole_losses, whole = legs(text_task, config, tmp_path / "whole", [("ddp", 2, 6)])
    assert losses == whole_losses
    assert all(torch.equal(state[name], whole[name]) for name in whole)


def _session_leg(strategy: str, folder: str, until: int) -> tuple[int, dict[str, Any]]:
    with rung.open_session(gpt_task(), strategy=strategy, total_steps=8, batch_size=10, precision="fp64") as session:
        began = session.load_checkpoint(folder)
        for window in session.batches():
            if window.step > until:
                break
            session.step(window)
        session.save_checkpoint(folder)
        return began, {name: value.numpy() for name, value in session.runtime.named_weights()}


def test_sessions_have_checkpoints_too(tmp_path: Path) -> None:
    assert on_ranks(_session_leg, 2, "ddp", str(tmp_path / "legs"), 4)[0][0] == 0
    began, state = on_ranks(_session_leg, 2, "zero3", str(tmp_path / "legs"), 8)[0]
    assert began == 4
    whole = on_ranks(_session_leg, 1, "single", str(tmp_path / "whole"), 8)[0][1]
    assert _largest(_as_tensors(state), _as_tensors(whole)) < 1e-9


def _as_tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.as_tensor(value) for name, value in state.items()}


@pytest.mark.parametrize("strategy", [slow("ddp"), slow("zero1"), "zero3"])
def test_three_ranks_that_resume_have_the_same_bits(strategy: str, tmp_path: Path) -> None:
    """Two ranks add in one order only; with three, each element's place in a message decides."""
    config = RunConfig(batch_size=6, steps=6, precision="fp64")
    losses, weights = legs(gpt_task, config, tmp_path / "whole", [(strategy, 3, 6)])
    others, resumed = legs(gpt_task, config, tmp_path / "legs", [(strategy, 3, 3), (strategy, 3, 6)])
    assert losses == others
    assert all(torch.equal(value, resumed[name]) for name, value in weights.items())
