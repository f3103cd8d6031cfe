"""A planted regression is named by rank and phase to whoever watches from another console; and traces of a run."""

from __future__ import annotations

import gzip
import json
import os
import pty
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rung.cli.main import main
from rung.distributed.status_board import StatusWriter
from rung.distributed.world import open_world
from rung.spec.strategy import parse
from rung.train.profiler import Profiler
from tests.metrics_file import committed

RUNG = [sys.executable, "-m", "rung"]
# One rank is late by 200 ms in backward, another by 150 ms in its loader.
TASK = """
import os
import time
import torch
from torch import nn
from torch.utils.data import Dataset

defaults = {"batch_size": 4, "device": "cpu", "log_every": 5}

class Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if os.environ["RANK"] == "0":
            time.sleep(0.2)
        return gradient

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return Late.apply(self.layer(x))

class Numbers(Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        if os.environ["RANK"] == "1":
            time.sleep(0.15 / 2)  # two samples in a step
        return torch.full((8,), index / 400), torch.zeros(8)

def model(): return Net()
def train_data(): return Numbers()
def loss(output, target): return ((output - target) ** 2).mean()
def optimizer(model): return torch.optim.SGD(model.parameters(), lr=1e-3)
"""


def watch_to_the_end(run: Path, shown: list[bytes]) -> subprocess.Popen[bytes]:
    """`rung watch` on a terminal of its own; what it shows is collected."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "140", "LINES": "40"}
    watching = subprocess.Popen([*RUNG, "watch", str(run)], stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)

    def collect() -> None:
        try:
            while content := os.read(ours, 65536):
                shown.append(content)
        except OSError:  # how a terminal ends
            os.close(ours)

    threading.Thread(target=collect, daemon=True).start()
    return watching


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of two ranks with a planted regression, and what somebody saw who watched it from its beginning."""
    folder = tmp_path_factory.mktemp("watched")
    (folder / "task.py").write_text(TASK)
    run, shown = folder / "run", list[bytes]()
    command = [*RUNG, "train", str(folder / "task.py"), "--nproc", "2", "--steps", "14", "--out", str(run)]
    training = subprocess.Popen([*command, "--profile", "3:4"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        while not (run / "metrics.jsonl").exists() and training.poll() is None:
            threading.Event().wait(0.05)
        watching = watch_to_the_end(run, shown)
        output = training.communicate(timeout=120)[0]
        assert training.returncode == 0, output.decode()
        assert watching.wait(timeout=60) == 0, "it ends with the run"
    finally:
        training.kill()
    assert b".cpp:" not in output, "what the profiler says stays in the log"
    return run, b"".join(shown).decode()


def test_a_planted_regression_is_named_by_rank_and_phase(
    watched: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    run, shown = watched
    assert main(["watch", "--once", str(run)]) == 0
    for words in (capsys.readouterr().out, shown):
        told = [text for text in words.replace("\r", "\n").splitlines() if " is slow: " in text]
        assert any("rank 0 is slow: " in text and "ms in backward" in text for text in told), words
        assert any("rank 1 is slow: " in text and "ms in data" in text for text in told), words
    assert "running" in shown and "left" in shown, "seen while it went on"
    assert "finished in" in shown and "step 14/14" in shown
    slow = {(row["rank"], row["phase"]) for row in committed(run / "metrics.jsonl") if row["event"] == "slow"}
    assert slow >= {(0, "backward"), (1, "data")}


def test_tensorboard_shows_slow_ranks_memory_and_throughput(watched: tuple[Path, str]) -> None:
    events = EventAccumulator(str(watched[0] / "tensorboard"))
    events.Reload()
    known = events.Tags()["scalars"]
    assert {"train/loss", "speed/samples_per_second", "memory/peak_bytes", "ranks/memory_bytes_least"} <= set(known)
    assert events.Scalars("ranks/slow")[-1].value == 2
    assert events.Scalars("ranks/own_seconds_most")[-1].value > 0.19
    assert "slow ranks/text_summary" in events.Tags()["tensors"]


def names_of(path: Path) -> list[tuple[int, str, float, float]]:
    with gzip.open(path, "rt") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    marks = [event for event in events if event.get("cat") == "user_annotation"]
    return [(event["pid"], event["name"], event["ts"], event["ts"] + event["dur"]) for event in marks]


def test_traces_have_the_chosen_steps_of_every_rank_on_one_clock(
    watched: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = watched
    for rank in (0, 1):
        names = [name for _, name, _, _ in names_of(run / "profile" / f"rank-{rank}-steps-3-4.json.gz")]
        assert [name for name in names if name.startswith("step ")] == ["step 3", "step 4"]
        for phase in ("reading data", "forward", "backward", "update"):
            assert names.count(phase) >= 2, (phase, names)
    assert main(["profile", "merge", str(run), "--out", str(run / "all.json.gz")]) == 0
    assert "2 ranks in" in capsys.readouterr().out
    found = names_of(run / "all.json.gz")
    spans = {(rank, name): (start, end) for rank, name, start, end in found if name.startswith("step ")}
    assert set(spans) == {(rank, f"step {step}") for rank in (0, 1) for step in (3, 4)}
    (start, end), (other_start, other_end) = spans[0, "step 4"], spans[1, "step 4"]
    overlap = min(end, other_end) - max(start, other_start)
    assert overlap > 0, "ranks take a step at the same time"


def test_writing_a_trace_is_no_part_of_a_step(watched: tuple[Path, str]) -> None:
    rows = [row for row in committed(watched[0] / "metrics.jsonl") if row["event"] == "step"]
    assert len(rows) == 14
    assert all(row["step_seconds"] > 0.15 for row in rows), "a step that began later than it ended would be below 0"


def test_a_run_that_ends_before_the_last_profiled_step_keeps_what_was_seen(tmp_path: Path) -> None:
    status = StatusWriter()
    with open_world(parse("single", 1), device="cpu") as world:
        profiler = Profiler(tmp_path, range(2, 10), world, status)
        for step in range(4):
            profiler.between(step, is_last=step == 3)
            status.phase("forward")
        assert not profiler.finish(), "nothing is left to write"
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0-steps-2-3.json.gz"]
    assert status.listener is None
    names = [name for _, name, _, _ in names_of(tmp_path / "rank-0-steps-2-3.json.gz")]
    assert [name for name in names if name.startswith("step ")] == ["step 2", "step 3"]
