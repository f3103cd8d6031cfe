"""A few faults of every family over several strategies. `make chaos` does many more."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.harness import COMPARABLE, Launched, arguments_for, done, examine
from tests.faults.kinds import KINDS, available_pairs
from tests.faults.plans import ROWS, SETTINGS, JobPlan, Row, draw_plans, order_faults
from tests.faults.play import play
from tests.faults.scene import stage
from tests.harness import SEED
from tests.launcher import WarmLauncher
from tests.marks import slow_if

# The families of faults; which rank and which moment is chance.
PLANS = {
    Row("ddp", 2): [("kill", "save"), ("exception", "evaluation"), ("disk-full", "step"), ("clock", "step")],
    Row("zero3", 2, "replicated"): [("term", "step"), ("kill", "resume"), ("disk-slow", "save")],
    Row("pp2:1f1b", 2): [("exit", "building"), ("stop", "step"), ("launcher", "step"), ("kill", "end")],
    Row("zero1", 2, "comparable"): [("oom", "step"), ("rlimit", "evaluation")],
    Row("tp2", 2): [("preempt", "evaluation"), ("disk-read-only", "save"), ("corrupt", "step")],
    Row("ps-async", 4, "async", num_servers=1): [("kill", "update"), ("exception", "step")],
}


@pytest.fixture(scope="module")
def base() -> Iterator[Path]:
    with stage() as folder:
        yield folder


@pytest.mark.parametrize("row", [slow_if(row.name != "ddp", row) for row in PLANS], ids=lambda row: row.name)
def test_comes_through(base: Path, row: Row, launcher: WarmLauncher) -> None:
    possible = {pair for pairs in available_pairs().values() for pair in pairs}
    faults = order_faults([pair for pair in PLANS[row] if pair in possible], random.Random(SEED))
    result = play(JobPlan(list(PLANS).index(row), row, faults, str(SEED)), base, launcher=launcher)
    told = "\n".join([f"seed {SEED}", *map(str, result.faults), *result.problems])
    assert not result.problems, told
    assert result.faults, "no fault struck"


def _wait_until(condition: Callable[[], bool], job: Launched) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline, job.output()
        time.sleep(0.01)


def test_a_seed_draws_the_same_jobs_again() -> None:
    pairs = available_pairs()
    first, second = draw_plans(5, pairs), draw_plans(5, pairs)
    assert [next(first) for _ in range(40)] == [next(second) for _ in range(40)]


def test_every_kind_and_every_setting_is_drawn() -> None:
    assert {row.setting for row in ROWS} == set(SETTINGS)
    pairs = available_pairs()
    plans = draw_plans(3, pairs)
    drawn = {(fault.kind, fault.phase) for _ in range(6 * len(ROWS)) for fault in next(plans).faults}
    assert drawn == {pair for own in pairs.values() for pair in own}
    assert all(kind.phases and kind.settings for kind in KINDS.values())


def test_a_run_whose_directory_is_removed_starts_its_ranks_again(base: Path) -> None:
    job = Launched(base / "removed", arguments_for("single", 1, *COMPARABLE), num_ranks=1)
    try:
        _wait_until(lambda: done(job.rows()) >= 7, job)
        rank = job.pid(0)
        shutil.rmtree(job.run_dir)
        assert rank
        os.kill(rank, signal.SIGKILL)
        _wait_until(job.over, job)
        assert not examine(job, {}, tolerance=None)
        assert (job.run_dir / "config.toml").exists(), "it could not be resumed"
    finally:
        job.close()


def test_what_looks_like_a_mistake_after_a_restart_is_tried_again(base: Path) -> None:
    """An error while the model is traced is final before the first step. A rank that was started again has made no step
    yet either, but the job has."""
    folder = base / "traced"
    job = Launched(folder, arguments_for("pp2", 2, *COMPARABLE), num_ranks=2)
    try:
        _wait_until(lambda: done(job.rows()) >= 13, job)  # all sizes of batches have been traced by now
        job.order(1, "exception", "tracing")
        job.kill(0)
        _wait_until(job.over, job)
        assert (job.orders / "struck-0").exists(), "nothing was traced again"
        assert job.process.returncode == 0, job.output()
        assert "ModelError" in job.output()
    finally:
        job.close()
