"""A loss that is not a number: it is said at once, the last good checkpoint stays, and the run does not end well."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rung
from rung.checkpoint.manifest import read_checkpoint, steps_in
from rung.errors import NonFiniteError
from rung.spec.config import RunConfig
from rung.spec.task import Task
from tests.checkpoints import Leg, one_leg
from tests.harness import on_ranks
from tests.launcher import Outcome, WarmLauncher
from tests.tasks import image_data, image_task

TASK = """
import torch
from torch import nn
from torch.nn import functional as F


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 120

    def __getitem__(self, index):
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return x * float("nan") if index == 65 else x, index % 4


def model():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def train_data():
    return Data()


def loss(output, target):
    return F.cross_entropy(output, target)


def optimizer(model):
    return torch.optim.AdamW(model.parameters(), 0.01)
"""


def command(launcher: WarmLauncher, folder: Path, *arguments: str) -> Outcome:
    return launcher.call(folder, *arguments)


def start(launcher: WarmLauncher, folder: Path, *arguments: str) -> Outcome:
    """Of steps of 10 in the data's own order, the seventh has a nan in it."""
    (folder / "task.py").write_text(TASK)
    settings = ["--set", "shuffle=false", "--set", "log_every=3", "--out", "run", "--batch-size", "10", "--steps", "12"]
    return command(
        launcher, folder, "train", "task.py", "--checkpoint-every", "2", "--keep", "2", *settings, *arguments
    )


def test_the_run_stops_and_names_the_last_good_checkpoint(launcher: WarmLauncher, tmp_path: Path) -> None:
    run = start(launcher, tmp_path, "--strategy", "zero3", "--nproc", "2")
    assert run.code == 1
    assert "warning: step 7: loss nan" in run.output
    assert "the loss of step 7 is nan" in run.output
    assert "the last good checkpoint is run/checkpoints/step-00000006: --resume run goes on from it" in run.output
    assert sorted(steps_in(tmp_path / "run/checkpoints")) == [4, 6]
    assert not (tmp_path / "run/model.safetensors").exists()
    (tmp_path / "task.py").write_text(TASK.replace("index == 65", "False"))  # the data is mended
    resumed = command(launcher, tmp_path, "train", "task.py", "--resume", "run")
    assert resumed.code == 0, resumed.output
    assert "going on after step 6" in resumed.output and "done: 12 steps" in resumed.output


def test_states_in_memory_and_of_rescues_are_not_gone_on_from(launcher: WarmLauncher, tmp_path: Path) -> None:
    run = start(launcher, tmp_path, "--replicate-state", "--max-restarts", "1")
    assert run.code == 1
    assert "going on with 1 rank from step 6" in run.output
    assert not (tmp_path / "run/rescue").exists()
    listed = json.loads(command(launcher, tmp_path, "checkpoints", "run", "--json").output)
    assert listed["resume"] == "run/checkpoints/step-00000006"


def test_a_run_that_was_to_go_on_ends_with_an_error_and_keeps_the_last_good_checkpoint(
    launcher: WarmLauncher, tmp_path: Path
) -> None:
    run = start(launcher, tmp_path, "--set", "on_nan=warn")
    assert run.code == 1
    assert run.output.count("warning: step 7: loss nan, gradient norm") == 0  # the norm is read every third step
    assert "warning: step 7: loss nan; training goes on: on_nan=warn" in run.output
    assert "the loss of step 7 is nan and no later one is finite, up to step 12" in run.output
    assert sorted(steps_in(tmp_path / "run/checkpoints")) == [6, 10, 12]
    shown = command(launcher, tmp_path, "checkpoints", "run")
    assert shown.output.count("whole, not finite") == 2 and "--resume goes on after step 6" in shown.output
    records = json.loads(command(launcher, tmp_path, "checkpoints", "run", "--json").output)["checkpoints"]
    assert [record["finite"] for record in records] == [True, False, False]
    resumed = command(launcher, tmp_path, "train", "task.py", "--resume", "run")
    assert "step-00000010 is left out: the loss or the gradient norm of its step was not finite" in resumed.output
    assert "going on after step 6" in resumed.output


class SurvivingLoss:
    """Infinite in one step, with gradients of 0."""

    calls = 0

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        SurvivingLoss.calls += 1
        loss = torch.nn.functional.cross_entropy(output, target)
        return loss * 0 + torch.inf if SurvivingLoss.calls == 3 else loss


class LateNan(torch.autograd.Function):
    """A loss that is finite, with a gradient that is not."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * torch.nan


def _late_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    SurvivingLoss.calls += 1
    output = LateNan.apply(output) if SurvivingLoss.calls == 4 else output
    return torch.nn.functional.cross_entropy(output, target)


def surviving_task() -> Task:
    return image_task(loss=SurvivingLoss(), schedule=None)


def late_task() -> Task:
    return image_task(loss=_late_loss, schedule=None)


class Overflowing(torch.utils.data.Dataset[Any]):
    """One sample in which fp16 overflows in forward."""

    def __init__(self) -> None:
        self._data = image_data(64)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        x, target = self._data[index]
        return x * 1e7 if index == 17 else x, target


def overflowing_task() -> Task:
    return image_task(train_data=Overflowing, schedule=None)


CONFIG = RunConfig(batch_size=8, steps=6, device="cpu", eval_every="never", checkpoint_every=2, shuffle=False)


def leg(make_task: Any, config: RunConfig, folder: str) -> Leg:
    SurvivingLoss.calls = 0
    try:
        return one_leg(make_task, config.strategy or "ddp", config, folder, 6)
    except NonFiniteError as error:
        return Leg(notes=str(error).splitlines())


def _finite(folder: Path) -> dict[int, bool | None]:
    return {step: read_checkpoint(path).manifest["finite"] for step, path in steps_in(folder / "checkpoints").items()}


def test_a_loss_that_is_survived_is_no_failure_if_asked_for(tmp_path: Path) -> None:
    for found in on_ranks(leg, 2, surviving_task, replace(CONFIG, on_nan="warn"), str(tmp_path / "warn")):
        assert np.isinf(found.losses[2]) and np.isfinite(found.losses[3:]).all() and len(found.losses) == 6
    assert _finite(tmp_path / "warn") == {2: True, 4: True, 6: True}
    for found in on_ranks(leg, 2, surviving_task, CONFIG, str(tmp_path / "stop")):
        assert found.notes[0] == "the loss of step 3 is inf, the gradient norm 0.0."


@pytest.mark.parametrize("strategy", ["ddp", "pp2"])
def test_a_gradient_that_is_lost_is_seen_before_its_step_is_saved(tmp_path: Path, strategy: str) -> None:
    config = replace(CONFIG, strategy=strategy, batch_size=2, micro_batch=2 if strategy == "pp2" else 1, log_every=100)
    for found in on_ranks(leg, 2, late_task, config, str(tmp_path)):
        assert found.notes[0].endswith("the gradient norm nan.") and "step 4" in found.notes[0]
    assert _finite(tmp_path) == {2: True}


def test_a_step_that_fp16_leaves_out_is_no_failure(tmp_path: Path) -> None:
    config = replace(CONFIG, precision="fp16", strategy="zero3")
    for found in on_ranks(leg, 2, overflowing_task, config, str(tmp_path)):
        assert not np.isfinite(found.losses[2]) and np.isfinite(found.losses[3:]).all()
    assert _finite(tmp_path) == {2: True, 4: True, 6: True}


def _session(folder: str) -> list[str]:
    SurvivingLoss.calls = 0
    task = image_task(loss=_late_loss, schedule=None)
    with rung.open_session(task, batch_size=8, keep=1, shuffle=False) as session:
        for window in session.batches():
            session.step(window)
            session.save_checkpoint(folder)
            if session.num_steps == 6:
                break
    with rung.open_session(task, batch_size=8, keep=1, shuffle=False) as session:
        assert session.load_checkpoint(folder) == 3
    return sorted(path.name for path in Path(folder).iterdir())


def test_a_session_keeps_and_loads_the_last_good_checkpoint(tmp_path: Path) -> None:
    assert on_ranks(_session, 1, str(tmp_path)) == [["step-00000003", "step-00000006"]]
