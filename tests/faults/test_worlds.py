"""The world changes under a run: ranks and machines are lost, join and are cut off. The numbers do not."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rung.checkpoint import memory_folder
from rung.cli.main import main
from tests.faults.harness import COMPARABLE, Launched, compile_shim, done, examine, reference
from tests.faults.hosts import Hosts, possible
from tests.launcher import WarmLauncher
from tests.marks import slow

_LIMIT = 90.0


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("references")


def _arguments(strategy: str, *more: str) -> list[str]:
    return ["--strategy", strategy, "--checkpoint-every", "4", "--set", "log_every=1", *COMPARABLE, *more]


def _wait(condition: Callable[[], object], what: str, *jobs: Launched) -> None:
    deadline = time.monotonic() + _LIMIT
    while not condition():
        told = "\n".join(job.output()[-2000:] for job in jobs)
        assert time.monotonic() < deadline, f"waited in vain for {what}:\n{told}"
        time.sleep(0.02)


def _at_step(job: Launched, step: int) -> bool:
    return any(row["event"] == "step" and row["step"] >= step for row in job.rows())


def _worlds(job: Launched) -> list[int]:
    """How many ranks took part, from one start to the next."""
    return [row["ranks"] for row in job.rows() if row["event"] in ("start", "resume")]


@pytest.mark.parametrize("strategy", ["fsdp", slow("pp2,ddp")])
def test_a_rank_dies_and_one_joins(tmp_path: Path, references: Path, launcher: WarmLauncher, strategy: str) -> None:
    """One machine: the run goes on with one rank fewer, and with one more when asked. Spares wait where it must."""
    known = reference(references, "single", 1, *COMPARABLE, launcher=launcher)
    job = Launched(tmp_path, _arguments(strategy, "--nproc", "2:4"), num_ranks=4)
    try:
        _wait(lambda: _at_step(job, 6), "step 6", job)
        job.kill(1)
        _wait(lambda: len(_worlds(job)) == 2 and _at_step(job, 12), "a smaller world", job)
        assert main(["scale", str(job.run_dir), "4"]) == 0
        before = max(row["step"] for row in job.rows() if row["event"] == "step")
        _wait(lambda: len(_worlds(job)) == 3, "a larger world", job)
        _wait(job.over, "the end", job)
        assert not examine(job, known, tolerance=1e-9)
        assert _worlds(job) == ([4, 3, 4] if strategy == "fsdp" else [4, 2, 4])
        assert ("waits as a spare" in job.output()) == (strategy != "fsdp")
        resumed = [row["step"] for row in job.rows() if row["event"] == "resume"]
        assert resumed[1] >= before, "a graceful change loses no step"
    finally:
        job.close()


@pytest.mark.parametrize("strategy", ["zero3", slow("pp2")])
def test_with_copies_in_memory_a_kill_costs_one_step_at_most(
    tmp_path: Path, references: Path, launcher: WarmLauncher, strategy: str
) -> None:
    known = reference(references, strategy, 2, launcher=launcher)
    arguments = ["--strategy", strategy, "--nproc", "2", "--replicate-state", "--max-restarts", "3"]
    job = Launched(tmp_path, [*arguments, "--set", "log_every=1", "--set", "workers=1"], num_ranks=2)
    try:
        for moment in (7, 15, 30):
            _wait(lambda moment=moment: done(job.rows()) >= moment, f"step {moment}", job)
            before, starts = done(job.rows()), len(_worlds(job))
            job.kill(moment % 2)
            _wait(lambda starts=starts: len(_worlds(job)) > starts, "a new start", job)
            resumed = [row for row in job.rows() if row["event"] == "resume"][-1]["step"]
            assert resumed >= before - 1, f"{before - resumed} steps lost"
        _wait(job.over, "the end", job)
        assert not examine(job, known, tolerance=0.0)
        assert not memory_folder(job.run_dir).exists(), "the copies go with the run"
    finally:
        job.close()
        shutil.rmtree(memory_folder(job.run_dir), ignore_errors=True)


@pytest.mark.slow  # the usual suite has one like it, in tests/launch/rendezvous/test_hosts_ranks.py
@pytest.mark.skipif(not possible(), reason="network namespaces need root")
def test_a_machine_is_cut_off_and_comes_back(tmp_path: Path, references: Path, launcher: WarmLauncher) -> None:
    """Two machines that share no disk. The cable between them is pulled, and plugged in again."""
    known = reference(references, "single", 1, *COMPARABLE, launcher=launcher)
    with Hosts(3) as hosts:
        port = 29517
        store = subprocess.Popen(
            [*hosts.prefix(2), sys.executable, "-m", "rung", "rdzv", str(port)], start_new_session=True
        )
        meet = f"{hosts.address(2)}:{port}"
        more = ("--nproc", "1", "--nnodes", "1:2", "--rdzv", meet, "--timeout", "5", "--set", "model.pause=0.1")
        jobs = [
            Launched(tmp_path / str(n), _arguments("ddp", *more), num_ranks=2, prefix=hosts.prefix(n)) for n in range(2)
        ]
        try:
            first = lambda: next((job for job in jobs if job.rows()), jobs[0])  # noqa: E731
            _wait(lambda: any(2 in _worlds(job) for job in jobs), "two machines", *jobs)
            main = next(job for job in jobs if 2 in _worlds(job))
            _wait(lambda: _at_step(main, 8), "step 8", *jobs)
            # Which of them came first, and so has told of a world of one before, is a matter of luck.
            alone, starts = jobs[0], len(_worlds(jobs[0]))
            hosts.cut(1)
            _wait(lambda: _worlds(alone)[starts:] == [1], "one machine", *jobs)
            _wait(lambda: alone.rows()[-1]["event"] == "step", "a step alone", *jobs)
            known_starts = [len(_worlds(job)) for job in jobs]
            hosts.mend(1)
            started = lambda: [_worlds(job)[n:] for job, n in zip(jobs, known_starts, strict=True)]  # noqa: E731
            _wait(lambda: [2] in started(), "two machines again", *jobs)
            _wait(lambda: len([job for job in jobs if job.over()]) == len(jobs), "the end", *jobs)
            ended = [job for job in jobs if (job.run_dir / "model.safetensors").exists()]
            assert ended, first().output()
            for job in ended:
                assert not examine(job, known, tolerance=1e-9, has_all_lines=False)
            assert [job.process.returncode for job in jobs] == [0, 0]
        finally:
            for job in jobs:
                job.close()
            store.kill()
            store.wait()


@pytest.mark.skipif(not possible(), reason="network namespaces need root")
def test_machines_whose_clocks_are_hours_apart_stay_together(
    tmp_path: Path, references: Path, launcher: WarmLauncher
) -> None:
    """One machine's clock is an hour ahead, and jumps two hours back while the run goes on: one world to the end."""
    known = reference(references, "single", 1, *COMPARABLE, launcher=launcher)
    shim = compile_shim(tmp_path / "shim")
    if shim is None:
        pytest.skip("a clock can be moved with a compiler only")
    with Hosts(2) as hosts:
        meet = f"{hosts.address(0)}:29518"
        more = ("--nproc", "1", "--nnodes", "2", "--rdzv", meet, "--set", "model.pause=0.1")
        first = Launched(tmp_path / "0", _arguments("ddp", *more), num_ranks=2, prefix=hosts.prefix(0))
        ahead = Launched(tmp_path / "1", _arguments("ddp", *more), num_ranks=2, prefix=hosts.prefix(1), shim=shim)
        ahead.disturb(clock=3600.0)
        jobs = (first, ahead)
        try:
            _wait(lambda: any(_at_step(job, 8) for job in jobs), "step 8", *jobs)
            ahead.disturb(clock=-3600.0)
            _wait(lambda: len([job for job in jobs if job.over()]) == len(jobs), "the end", *jobs)
            main = next(job for job in jobs if job.rows())
            assert _worlds(main) == [2]
            assert not examine(main, known, tolerance=1e-9)
        finally:
            for job in jobs:
                job.close()
