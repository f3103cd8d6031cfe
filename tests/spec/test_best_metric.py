"""The best evaluation: how it is named, what is kept of it, and how its checkpoint is found again."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from rung.checkpoint.manifest import prune, read_checkpoint, steps_in
from rung.cli.main import main
from rung.errors import CheckpointError, ConfigError
from rung.runtime.measure import metric_names
from rung.spec.best_metric import Best, Goal, parse_best, refuse_unknown_metric
from rung.spec.compatibility import refuse_best_without_evaluation
from rung.spec.config import RunConfig, resolve
from rung.train.job import RankJob
from rung.train.worker import worker
from tests.made_checkpoints import make_checkpoint, rewrite
from tests.tasks import image_task

# After step n the weight is -n, and the score of an evaluation is SCORES[n].
TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

SCORES = [0.0, 0.2, 0.6, 0.3, float("nan"), 0.6, 0.5, 0.9, 0.1]

class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.steps.expand(len(x))

def model():
    return Counter()

def train_data():
    return TensorDataset(torch.zeros(16, 1), torch.zeros(16))

eval_data = train_data

def loss(output, target):
    return output.mean()

def metrics(output, target):
    return {"score": torch.tensor([SCORES[round(-float(value))] for value in output])}

def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=1.0)
"""


def train(folder: Path, steps: int, *, resume: bool = False, **settings: Any) -> Best | None:
    path = folder / "task.py"
    path.write_text(TASK)
    keep_best = settings.pop("keep_best", "score:max")
    config = RunConfig(batch_size=4, steps=steps, eval_every="1", keep_best=keep_best, keep=1, device="cpu", **settings)
    return worker(RankJob(str(path), "single", config, run_dir=str(folder), resume=resume)).best


def kept(folder: Path) -> list[int]:
    return list(steps_in(folder / "checkpoints"))


@pytest.mark.parametrize(
    ("text", "metric", "better"), [("loss", "loss", "min"), ("top1:max", "top1", "max"), ("error:min", "error", "min")]
)
def test_a_goal_is_a_metric_and_its_direction(text: str, metric: str, better: str) -> None:
    assert parse_best(text) == Goal(metric, better)


def test_without_a_goal_nothing_is_kept() -> None:
    assert parse_best("none") is None


@pytest.mark.parametrize(
    ("text", "told"),
    [("top1", "top1:max or top1:min"), ("top1:most", "METRIC:max or METRIC:min"), (":max", "name of a metric")],
)
def test_a_goal_that_is_none_is_refused(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        resolve(image_task(), assignments={"keep_best": text})


def test_the_first_of_equals_is_the_best_and_nan_never_is() -> None:
    goal, best = Goal("error", "min"), None
    for step, value in enumerate([math.nan, 3.0, 2.0, math.inf, -math.inf, 2.0, math.nan, 2.5], start=1):
        best = goal.take({"error": value}, step, best)
    assert best == Best("error", "min", 2.0, 3)


def test_a_metric_that_the_task_does_not_have_is_told_before_the_first_step() -> None:
    names = metric_names(image_task())
    assert names == ["loss", "accuracy"]
    with pytest.raises(ConfigError, match="Did you mean 'accuracy'"):
        refuse_unknown_metric(Goal("acuracy", "max"), names)
    with pytest.raises(ConfigError, match="has no 'top1'"):
        Goal("top1", "max").take({"loss": 1.0}, 1, None)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"eval_every": "never"}, "eval_every=never turns them off"),
        ({"no": "eval_data"}, "has no eval_data"),
        ({"no": "metrics"}, "Use keep_best=loss"),
    ],
)
def test_what_could_never_be_measured_is_refused(changes: dict[str, str], told: str) -> None:
    given = dict(changes)
    missing = {given.pop("no"): None} if "no" in given else {}
    with pytest.raises(ConfigError, match=told):
        refuse_best_without_evaluation(image_task(**missing), RunConfig(keep_best="accuracy:max", **given))


def test_the_best_and_the_last_are_kept(tmp_path: Path) -> None:
    assert train(tmp_path, 6, checkpoint_every=2) == Best("score", "max", pytest.approx(0.6), 2)
    assert kept(tmp_path) == [2, 6]
    told = read_checkpoint(tmp_path / "checkpoints" / "step-00000006").manifest
    assert told["best"]["step"] == 2 and told["evaluation"]["score"] == pytest.approx(0.5)
    saves = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in saves if row["event"] == "checkpoint" and row["best"]] == [1, 2]


def test_without_other_checkpoints_there_are_the_best_and_the_last(tmp_path: Path) -> None:
    train(tmp_path, 3)
    assert kept(tmp_path) == [2, 3]


def test_a_run_that_goes_on_knows_its_best(tmp_path: Path) -> None:
    train(tmp_path, 3)
    best = train(tmp_path, 6, resume=True)
    assert best is not None and best.step == 2 and kept(tmp_path) == [2, 6]
    best = train(tmp_path, 8, resume=True)
    assert best is not None and best.step == 7 and kept(tmp_path) == [7, 8]


def test_by_another_goal_the_best_is_looked_for_anew(tmp_path: Path) -> None:
    train(tmp_path, 3)
    assert train(tmp_path, 6, resume=True, keep_best="loss") == Best("loss", "min", -6.0, 6)
    assert kept(tmp_path) == [6]


def test_an_evaluation_that_was_still_to_be_done_may_be_the_best(tmp_path: Path) -> None:
    """Saved on the way out, before it was evaluated: what is found after the new start is kept."""
    train(tmp_path, 1)
    folder = tmp_path / "checkpoints" / "step-00000001"
    rewrite(folder, evaluation_due=True, evaluation=None, best=None)
    train(tmp_path, 3, resume=True, keep_best="score:min")
    assert kept(tmp_path) == [1, 3]


def test_prune_spares_the_best(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        make_checkpoint(tmp_path, step)
    assert prune(tmp_path, keep=1, keep_every=None, newest=8, best=4) == [2, 6]


def test_the_list_marks_the_best_and_export_takes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, 3)
    output = tmp_path / "best.safetensors"
    assert main(["checkpoints", str(tmp_path)]) == 0
    assert "0.6 best" in capsys.readouterr().out
    assert main(["checkpoints", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["best"]["path"] == str(tmp_path / "checkpoints" / "step-00000002")
    assert [one["evaluation"]["score"] for one in told["checkpoints"]] == pytest.approx([0.6, 0.3])
    assert main(["export", str(tmp_path), "--best", "--output", str(output)]) == 0
    assert load_file(output)["steps"].item() == -2


def test_export_of_the_best_says_when_it_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, 3)
    (tmp_path / "checkpoints" / "step-00000002" / "rank-00000.safetensors").write_bytes(b"x")
    assert main(["export", str(tmp_path), "--best", "--output", str(tmp_path / "best.safetensors")]) == 0
    assert "no whole checkpoint; the best that has one is step 3" in capsys.readouterr().out


def test_export_of_the_best_needs_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path / "checkpoints", 4)
    output = ["--output", str(tmp_path / "best.safetensors")]
    assert main(["export", str(tmp_path), "--best", *output]) == 2
    assert "keep_best" in capsys.readouterr().err
    assert main(["export", str(tmp_path), "--best", "--step", "4", *output]) == 2
    assert "Leave one out" in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes",
    [
        {"best": {"metric": "a", "better": "more", "value": 1.0, "step": 4}},
        {"best": {"metric": 3, "better": "max", "value": 1.0, "step": 4}},
        {"best": {"metric": "a", "better": "max", "value": "1", "step": 4}},
        {"best": {"metric": "a", "better": "max", "value": 1.0, "step": -4}},
        {"best": {"metric": "a"}},
        {"evaluation": [1.0]},
        {"evaluation": {"a": [1.0]}},
    ],
)
def test_nonsense_about_evaluations_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder, _ = make_checkpoint(tmp_path, 4)
    rewrite(folder, **changes)
    with pytest.raises(CheckpointError, match="is not the manifest of a checkpoint"):
        read_checkpoint(folder)
