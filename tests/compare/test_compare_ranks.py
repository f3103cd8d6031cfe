"""`rung compare` end to end: what it measures hangs together, planted slowness is named, and nothing is left behind."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rung.cli.main import main
from rung.launch.spawn import RankFailedError, on_ranks
from rung.system.launcher_env import environment_rank
from tests.tasks import EXAMPLES

SMALL = [
    "--set", "model.layers=2", "--set", "model.width=16", "--set", "model.heads=2", "--set", "model.context=8",
    "--set", "train_data.context=8", "--set", "train_data.characters=5000", "--batch-size", "8",
]  # fmt: skip
ROW_KEYS = {
    "strategy", "ranks", "status", "reason", "step_seconds", "samples_per_second", "speedup", "first_step_seconds",
    "data_wait_seconds", "memory", "messages", "bytes_per_step", "communication", "losses", "logged", "experts",
    "largest_difference", "timeline", "slow", "other_cores", "predicted", "not_predicted", "prediction_error",
}  # fmt: skip

# Rank 1 sleeps in backward, rank 2 in its data set, and a world of three fails.
PLANTED = """
import os, time
import torch
from torch import nn
from torch.utils.data import Dataset

RANK, SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.2 if RANK == 1 else 0)
        return gradient


class Layer(nn.Linear):
    def forward(self, x):
        if SIZE == 3:
            raise ValueError("three are a crowd")
        return Slow.apply(super().forward(x))


class Numbers(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(0.15 if RANK == 2 else 0)
        return torch.full((4,), index / 64), torch.zeros(4)


def model():
    return nn.Sequential(Layer(4, 4))


def train_data():
    return Numbers()


def loss(output, target):
    return ((output - target) ** 2).mean()


def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.01)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def test_what_is_measured_hangs_together(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--strategies", "ddp", "pp2", "dp", "--nproc", "2", "--steps", "6", "--warmup", "2", "--repeats", "1"]
    assert main(["compare", str(EXAMPLES / "gpt"), *SMALL, *asked, "--json", "all.json", "--markdown", "all.md"]) == 0
    document = json.loads((here / "all.json").read_text())
    assert document["format"] == "rung-compare 1" and document["settings"]["warmup"] == 2
    rows = {row["strategy"]: row for row in document["rows"]}
    assert list(rows) == ["single", "ddp", "pp2", "dp"]
    for row in rows.values():
        assert row["status"] == "ok" and set(row) == ROW_KEYS
        _check_times(row)
        for rank in row["memory"]:
            assert sum(rank["kinds"].values()) == rank["peak_bytes"] < rank["process_bytes"]
        assert row["largest_difference"]["loss"] < 1e-5 and row["largest_difference"]["parameters"] < 1e-4
        _check_timeline(row)
    _check_predictions(rows)
    # The claims: each replica of ddp has half of the samples and so of the activations; dp has them all in one process.
    activations = {name: row["memory"][0]["kinds"]["activations"] for name, row in rows.items()}
    assert activations["ddp"] < 0.6 * activations["single"] < activations["dp"]
    assert [message["collective"] for message in rows["ddp"]["messages"]] == ["all-reduce"]
    assert len(rows["dp"]["messages"]) == 5
    # What it leaves: a page, the same as Markdown, and of each run its metrics and its row.
    assert "<html" in (here / "compare.html").read_text() and "pp2" in (here / "all.md").read_text()
    folder = next((here / "runs").glob("gpt-compare-*"))
    steps = [json.loads(line) for line in (folder / "pp2-1" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps if row["event"] == "step"] == [1, 2, 3, 4, 5, 6]
    kept = json.loads((folder / "pp2-1" / "comparison-row.json").read_text())
    assert kept["rows"] == [rows["pp2"]] and kept["task"] == "gpt"
    assert not list(folder.rglob("model.safetensors"))
    assert document["verdict"]["sentence"] in capsys.readouterr().out


def _check_times(row: dict[str, Any]) -> None:
    step, rate = row["step_seconds"], row["samples_per_second"]
    assert 0 < step["low"] <= step["median"] <= step["high"] and len(step["runs"]) == 1
    assert rate["median"] == pytest.approx(8 / step["median"])
    assert [number for number, _ in row["losses"]] == [1, 2, 3, 4, 5, 6]
    communication = row["communication"]
    assert 0 <= communication["exposed_seconds"] <= communication["seconds"]
    assert (communication["seconds"] > 0) == (row["ranks"] > 1)


def _check_timeline(row: dict[str, Any]) -> None:
    line = row["timeline"]
    assert [rank["rank"] for rank in line["ranks"]] == list(range(row["ranks"]))
    for rank in line["ranks"]:
        spans = rank["spans"]
        assert {"forward", "backward", "update"} <= {span["what"] for span in spans}
        assert all(0 <= span["start"] <= span["end"] <= line["seconds"] + 1e-9 for span in spans)
        computing = [span for span in spans if span["what"] != "data"]
        assert all(a["end"] <= b["start"] + 1e-9 for a, b in itertools.pairwise(computing))
        if row["strategy"] == "pp2":
            forwards = {span["micro_batch"] for span in spans if span["what"] == "forward"}
            assert forwards == {0, 1, 2, 3}


def _check_predictions(rows: dict[str, dict[str, Any]]) -> None:
    """A pretended step is a real one. How long a message to the next stage is kept depends on when it is taken."""
    for name in ("single", "ddp", "pp2"):
        row = rows[name]
        assert row["predicted"]["bytes_per_step"] == row["bytes_per_step"]
        peak = max(rank["peak_bytes"] for rank in row["memory"])
        assert row["predicted"]["peak_bytes"] == (pytest.approx(peak, rel=0.05) if name == "pp2" else peak)
        assert row["predicted"]["step_seconds"] is None and "rung calibrate" in row["not_predicted"]
    assert rows["dp"]["predicted"] is None and "the planner does not model" in rows["dp"]["not_predicted"]


def test_planted_slowness_is_named_and_a_failure_is_a_row(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "task.py").write_text(PLANTED)
    asked = ["--strategies", "ddp4", "ddp3", "--batch-size", "4", "--steps", "8", "--warmup", "2", "--repeats", "1"]
    assert main(["compare", "task.py", *asked, "--json", "all.json", "--no-predict"]) == 0
    single, slow, failed = json.loads((here / "all.json").read_text())["rows"]
    assert single["slow"] == []
    named = {(one["rank"], one["phase"]): one for one in slow["slow"]}
    assert set(named) == {(1, "backward"), (2, "data")}
    assert named[1, "backward"]["seconds"] > max(0.2, named[1, "backward"]["others_seconds"])
    assert named[2, "data"]["seconds"] > max(0.15, named[2, "data"]["others_seconds"])
    assert failed["status"] == "failed" and failed["reason"].endswith("ValueError: three are a crowd")
    assert set(failed) == {"strategy", "ranks", "status", "reason"}
    text = capsys.readouterr().out
    assert "rank 1 is slow" in text and "rank 2 is slow" in text and "three are a crowd" in text
    page = (here / "compare.html").read_text()
    assert "three are a crowd" in page and "rank 1" in page


def lose_a_peer() -> None:
    """Rank 1 learns of the end of rank 0 before anybody else does."""
    if environment_rank() == 1:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1")
    time.sleep(0.3)
    raise ValueError("this is why")


def test_the_cause_is_told_not_its_consequence() -> None:
    with pytest.raises(RankFailedError, match="this is why") as caught:
        on_ranks(lose_a_peer, 2)
    assert caught.value.rank == 0


def test_when_nothing_runs_the_command_fails(here: Path) -> None:
    (here / "task.py").write_text(PLANTED.replace("SIZE == 3", "True"))
    asked = ["--strategies", "single", "--steps", "2", "--batch-size", "4", "--repeats", "1"]
    assert main(["compare", "task.py", *asked]) == 1
    assert "three are a crowd" in (here / "compare.html").read_text()


def test_interrupted_it_leaves_no_process(here: Path) -> None:
    (here / "task.py").write_text(PLANTED.replace("0.2 if RANK == 1 else 0", "30"))
    mark = f"RUNG_TEST_MARK={os.getpid()}"
    environment = {**os.environ, "RUNG_TEST_MARK": str(os.getpid())}
    command = [sys.executable, "-m", "rung", "compare", "task.py", "--strategies", "ddp", "--batch-size", "4"]
    # A shell lets what it starts in the background ignore interrupts, and the tests may have been started so.
    listens = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=listens)
    deadline = time.monotonic() + 90
    while not list(here.glob("runs/*/*/metrics.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted" in errors
    while _marked(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _marked(mark) == []


def _marked(mark: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:  # it has gone, or is somebody else's
            continue
    return found


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--warmup", "9", "--steps", "9"], "leaves none to measure"),
        (["--repeats", "0"], "at least once"),
        (["--out", "page.txt"], "must end in .html"),
        (["--json", "not/here.json"], "there is no directory"),
        (["--nproc", "2:4"], "a fixed number"),
        (["--strategies", "fsp"], "Did you mean 'fsdp'"),
        (["--set", "model.depht=2"], "has no argument"),
    ],
)
def test_what_cannot_be_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    assert main(["compare", str(EXAMPLES / "gpt"), *flags]) == 2
    assert words in capsys.readouterr().err
    assert not (here / "runs").exists()
