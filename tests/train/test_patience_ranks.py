"""`--patience`: a run ends on all ranks after the evaluations that brought nothing better."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rung.errors import ConfigError
from rung.spec.best_metric import Best, Goal, read_best
from rung.spec.compatibility import refuse_best_without_evaluation
from rung.spec.config import RunConfig
from tests.launcher import WarmLauncher
from tests.tasks import text_task

# The weights follow a script: the evaluation's loss is best after step 3.
TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

defaults = {"batch_size": 4, "steps": 20, "device": "cpu", "eval_every": 1, "log_every": 1, "keep_best": "loss"}


def model():
    return nn.Linear(1, 1, bias=False)


def train_data():
    return TensorDataset(torch.ones(64, 1), torch.ones(64, 1))


eval_data = train_data


def loss(output, target):
    return output.mean()


def optimizer(model):
    found = torch.optim.SGD(model.parameters(), lr=1.0)
    return found


def schedule(optimizer, total_steps):
    # The gradient is 1: three steps down, then up.
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 3 else -1.0)
"""


def steps_of(run: Path) -> list[int]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["step"] for row in rows if row["event"] == "step"]


def test_a_run_ends_when_nothing_gets_better(launcher: WarmLauncher, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK)
    outcome = launcher.run(tmp_path, "--strategy", "ddp", "--patience", "4")
    assert outcome.code == 0, outcome.output
    assert steps_of(tmp_path / "out") == list(range(1, 8))
    assert "the last 4 evaluations gave no better loss" in outcome.output and "of step 3" in outcome.output
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_a_resumed_run_goes_on_counting(launcher: WarmLauncher, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK)
    flags = ("--patience", "4", "--checkpoint-every", "5", "--strategy")
    assert launcher.run(tmp_path, *flags, "ddp", "--steps", "5").code == 0
    resumed = ("--resume", "out", "--strategy", "zero3", "--nproc", "2", "--steps", "20", "--patience", "4")
    outcome = launcher.call(tmp_path, "train", "task.py", *resumed)
    assert outcome.code == 0, outcome.output
    assert steps_of(tmp_path / "out")[-1] == 7


def test_evaluations_after_the_best_are_counted_and_kept() -> None:
    goal, best = Goal("loss", "min"), None
    for step, value in enumerate([3.0, 2.0, 2.0, float("nan"), 2.5], start=1):
        best = goal.take({"loss": value}, step, best)
    assert best == Best("loss", "min", 2.0, 2) and best is not None and best.since == 3
    again = read_best({"best": best.as_json()})
    assert again is not None and again.since == 3
    older = {key: value for key, value in best.as_json().items() if key != "since"}
    found = read_best({"best": older})
    assert found is not None and found.since == 0, "a checkpoint of before"


def test_patience_needs_what_to_watch() -> None:
    with pytest.raises(ConfigError, match="keep_best=loss"):
        refuse_best_without_evaluation(text_task(), RunConfig(patience=3))
