"""After a failure in the middle of a logging interval, the run that is resumed writes the lines of the steps before."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rung.train.lost_figures import OwnFigures, lost_records
from tests.launcher import WarmLauncher
from tests.marks import slow

TASK = """
import os
import signal
import torch
from torch import nn
from torch.utils.data import TensorDataset

defaults = {"batch_size": 10, "steps": 12, "device": "cpu", "precision": "fp64", "eval_every": "never", "log_every": 5}
seen = {"calls": 0}


def model():
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1))


def train_data():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(43, 8, generator=g)
    return TensorDataset(x, x.sum(1, keepdim=True))


def loss(output, target, log):
    seen["calls"] += 1
    if os.path.exists(f"fail-{seen['calls']}-{os.environ.get('RANK')}"):
        raise OSError("the disk of this rank is gone")
    if os.path.exists(f"die-{seen['calls']}-{os.environ.get('RANK')}"):
        os.kill(os.getpid(), signal.SIGKILL)
    log("largest", output.max(), reduce="max")
    return ((output - target) ** 2).mean()


def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
"""
EXACT = ("epoch", "samples", "lr")
CLOSE = ("loss", "grad_norm", "largest")


def lines(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["event"] == "step"]


def lacking_steps(output: str) -> set[int]:
    """Those that a run has told it has no line for."""
    told = re.findall(r"lacks steps? (\d+)(?: to (\d+))?: a rank that was lost", output)
    return {step for first, last in told for step in range(int(first), int(last or first) + 1)}


@pytest.mark.parametrize(
    ("strategy", "nproc", "how", "flags"),
    [
        ("ddp", 2, "fail", ()),
        slow("zero3", 2, "fail", ()),
        slow("ps", 3, "die", ("--replicate-state",)),
        slow("pp2", 2, "fail", ("--micro-batch", "10")),
        slow("ddp", 2, "die", ("--replicate-state",)),
    ],
)
def test_every_step_has_its_line_once(
    launcher: WarmLauncher, tmp_path: Path, strategy: str, nproc: int, how: str, flags: tuple[str, ...]
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
        (folder / "task.py").write_text(TASK)
    given = ("--strategy", strategy, "--checkpoint-every", "100", *flags)
    assert launcher.run(whole, *given, nproc=nproc).code == 0
    # In step 9 of the first attempt, and in step 11 of the second.
    first, second = (broken / f"{how}-{step}-{nproc - 1}" for step in (9, 3))
    first.touch()
    assert launcher.run(broken, *given, "--max-restarts", "0", nproc=nproc).code == 1
    assert max(row["step"] for row in lines(broken)) < 8
    first.unlink()
    second.touch()
    again = ("--resume", "out", "--max-restarts", "0", *flags)
    failed = launcher.run(broken, *again, nproc=nproc)
    assert failed.code == 1
    second.unlink()
    done = launcher.run(broken, *again, nproc=nproc)
    assert done.code == 0 and "going on after step" in done.output, done.output
    expected, found = lines(whole), lines(broken)
    if how == "die":  # the last copy may be of the step before, which is then done again, or lack a rank's figures
        found = sorted({row["step"]: row for row in found}.values(), key=lambda row: row["step"])
        lacking = lacking_steps(failed.output) | lacking_steps(done.output)
        expected = [row for row in expected if row["step"] not in lacking - {row["step"] for row in found}]
        assert len(expected) >= 8, lacking
    else:
        assert "lacks" not in failed.output + done.output
        assert "going on after step 10" in done.output
    assert [row["step"] for row in found] == [row["step"] for row in expected], Counter(row["step"] for row in found)
    for one, other in zip(expected, found, strict=True):
        assert one.keys() - {"compile_seconds"} == other.keys() - {"compile_seconds"}
        assert [one[key] for key in EXACT] == [other[key] for key in EXACT]
        assert all(
            abs(one[key] - other[key]) < 1e-9 for key in CLOSE if one[key] is not None and other[key] is not None
        )
        assert other["step_seconds"] > 0 and other["peak_memory_bytes"] > 0


def test_figures_that_a_lost_rank_had_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def row(step: int, loss: float) -> dict[str, Any]:
        figures = OwnFigures(step, 0, 10, loss, None, 0.1, {}, 0.5, 0.0, 0.0, 7, None, {("a", "mean"): (2.0, 4.0)})
        found: dict[str, Any] = json.loads(json.dumps(figures.as_json()))
        return found

    both = {"0": [row(4, 1.0), row(5, math.nan), row(6, 1.0)], "1": [row(4, 0.5), row(5, 1.0)]}
    manifest = {"step": 6, "samples": 60, "ranks": 2, "unreported": both}
    first, second = lost_records(manifest, tmp_path / "metrics.jsonl")
    assert (first.step, first.samples, first.loss, first.logged) == (4, 40, 1.5, {"a": 0.5})
    assert (second.step, second.samples) == (5, 50) and math.isnan(second.loss)
    assert "metrics.jsonl lacks step 6: a rank that was lost had a part of their figures" in caplog.text
    (tmp_path / "metrics.jsonl").write_text('{"event": "resume", "step": 3}\n{"step": 4, "event": "step"}\n')
    assert [record.step for record in lost_records(manifest, tmp_path / "metrics.jsonl")] == [5]
    assert lost_records({**manifest, "unreported": {"0": [{}]}}, tmp_path / "metrics.jsonl") == []
    assert "their figures are invalid" in caplog.text
