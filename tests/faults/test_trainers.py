"""ps-async through the command line: a lost trainer costs nothing, a lost server ends the job with the cause."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

from rung.distributed.status_board import RankStatus, StatusBoard
from tests.launcher import Outcome, WarmLauncher, assert_soon
from tests.metrics_file import committed

# Large enough that a push takes a while, and slow enough that there is something to interrupt.
TASK = """
import os, time
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 1500), nn.Linear(1500, 1500)

    def forward(self, x):
        if os.environ.get("RANK") == FAILING and self.training:
            raise ValueError("boom in the task")
        time.sleep(0.02)
        return self.last(torch.relu(self.first(x)))[:, :4]

FAILING = {failing!r}
defaults = {{"batch_size": 4, "steps": 40, "log_every": 1, "save_weights": False, "checkpoint_every": 10}}
def model(): return Wide()
def train_data():
    g = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(103, 4, generator=g), torch.randn(103, 4, generator=g))
def loss(output, target): return ((output - target) ** 2).mean()
def optimizer(model): return torch.optim.SGD(model.parameters(), lr=0.01)
"""
FLAGS = ("--strategy", "ps-async", "--servers", "2", "--staleness", "3")
RANKS = 4


def train(
    launcher: WarmLauncher, folder: Path, *flags: str, during: Callable[[Path], None], failing: str = ""
) -> Outcome:
    (folder / "task.py").write_text(TASK.format(failing=failing))
    return launcher.run(folder, *FLAGS, *flags, nproc=RANKS, during=during)


def status_of(folder: Path, rank: int) -> RankStatus | None:
    try:
        return StatusBoard(folder / "out" / ".state" / "status", RANKS).read(rank)
    except (FileNotFoundError, ValueError):
        return None


def kill_in(rank: int, phase: str, after: int) -> Callable[[Path], None]:
    """kill -9 while the rank is in this phase of a step after `after`."""

    def act(folder: Path) -> None:
        found: list[RankStatus] = []

        def strikes() -> bool:
            status = status_of(folder, rank)
            if status is not None and status.step > after and status.phase == phase:
                os.kill(status.pid, signal.SIGKILL)
                found.append(status)
            return bool(found)

        assert_soon(strikes, f"rank {rank} is not in {phase}", seconds=60)

    return act


def steps_of(folder: Path) -> list[int]:
    return [row["step"] for row in committed(folder / "out" / "metrics.jsonl") if row["event"] == "step"]


def test_a_trainer_killed_in_the_middle_of_a_push_is_not_missed(launcher: WarmLauncher, tmp_path: Path) -> None:
    outcome = train(launcher, tmp_path, during=kill_in(3, "update", after=5))
    assert outcome.code == 0, outcome.output
    assert "rank 3, a trainer, killed by SIGKILL in step" in outcome.output
    assert "phase update; the others go on" in outcome.output
    assert steps_of(tmp_path) == list(range(1, 41)), "what it was at was given to the other"
    late = [row.get("staleness", 0) for row in committed(tmp_path / "out" / "metrics.jsonl") if row["event"] == "step"]
    assert max(late) <= 3


def test_a_trainer_killed_before_it_has_joined_is_started_again(launcher: WarmLauncher, tmp_path: Path) -> None:
    """The others wait for it: going on without it would be a hang until --timeout."""
    outcome = train(launcher, tmp_path, "--max-restarts", "1", during=kill_in(3, "starting", after=-1))
    assert outcome.code == 0, outcome.output
    assert "rank 3 was killed by SIGKILL before the first step, phase starting" in outcome.output
    assert steps_of(tmp_path) == list(range(1, 41))


def test_a_trainer_that_fails_is_told_of_and_the_last_one_ends_the_job(launcher: WarmLauncher, tmp_path: Path) -> None:
    outcome = train(launcher, tmp_path, during=kill_in(3, "reading data", after=3), failing="2")
    assert outcome.code == 1, outcome.output
    assert "rank 2, a trainer, failed in step" in outcome.output and "boom in the task" in outcome.output
    assert "boom in the task" in outcome.screen or "SIGKILL" in outcome.screen


def test_a_killed_server_ends_the_job_with_the_cause_and_the_run_goes_on(
    launcher: WarmLauncher, tmp_path: Path
) -> None:
    outcome = train(launcher, tmp_path, during=kill_in(1, "update", after=12))
    assert outcome.code == 1, outcome.output
    assert "rank 1 was killed by SIGKILL in step" in outcome.screen
    outcome = launcher.run(tmp_path, "--resume", nproc=RANKS)
    assert outcome.code == 0, outcome.output
    assert re.search(r"going on after step [1-3]0\b", outcome.output), outcome.output  # it may be noticed a little late
    assert steps_of(tmp_path) == list(range(1, 41))


def test_asked_to_stop_it_saves_a_whole_step_and_resumes_in_one_process(launcher: WarmLauncher, tmp_path: Path) -> None:
    def ask(folder: Path) -> None:
        assert_soon(lambda: (s := status_of(folder, 0)) is not None and s.step > 13, "it does not train", seconds=60)
        os.kill(launcher.pid, signal.SIGTERM)

    outcome = train(launcher, tmp_path, during=ask)
    assert outcome.code == 75, outcome.output
    outcome = launcher.run(tmp_path, "--resume", "--strategy", "single", nproc=1)
    assert outcome.code == 0, outcome.output
    assert steps_of(tmp_path) == list(range(1, 41))
