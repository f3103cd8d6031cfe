"""`rung submit slurm` against a real Slurm on this machine: jobs that are preempted, run out of time, lose a node."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

import rung
from rung.cli.main import main
from tests.cli.test_commands_ranks import events
from tests.marks import slow
from tests.slurm import Slurm, is_available

pytestmark = pytest.mark.skipif(not is_available(), reason="Slurm and munge are not installed (slurm-wlm, munge)")

TASK = """
import pathlib
import time
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

defaults = {"batch_size": 10, "steps": 12, "device": "cpu", "precision": "fp64", "log_every": 1}

class Net(nn.Module):
    def __init__(self, pause, go):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2)
        self.pause, self.go = pause, pathlib.Path(go)

    def forward(self, x):
        if not self.go.exists():  # what the job was slow for has not happened yet
            time.sleep(self.pause)
        return self.last(torch.tanh(self.norm(self.first(x))))

def train_data():
    x = torch.randn(103, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum(1) > 0).long())

def model(pause=0.0, go="go"): return Net(pause, go)
def loss(output, target): return F.cross_entropy(output, target)
def optimizer(model): return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where jobs run, with the task and what one process makes of it."""
    folder = tmp_path_factory.mktemp("jobs of slurm")  # a name that must be quoted
    (folder / "net.py").write_text(TASK)
    (folder / "alone").mkdir()
    with rung.open_session(folder / "net.py", strategy="single") as session:
        for window in itertools.islice(session.batches(), 12):
            session.step(window)
        session.save(folder / "alone" / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with Slurm(tmp_path_factory.mktemp("slurm")) as cluster:
        cluster.environment["OMP_NUM_THREADS"] = "1"
        yield cluster


def submit(slurm: Slurm, folder: Path, out: str, *flags: str, steps: int = 12, task: str = "net.py") -> str:
    """The number of a new job."""
    command = ["submit", "slurm", task, "--out", out, "--steps", str(steps), *flags]
    said = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(said), mock.patch.dict(os.environ, slurm.environment):
        assert main(command) == 0
    found = re.match(r"submitted job (\d+): ", said.getvalue())
    assert found is not None, said.getvalue()
    assert f"scancel {found.group(1)}" in said.getvalue() and f"{out}.sbatch" in said.getvalue()
    return found.group(1)


def slowly(out: str) -> list[str]:
    """Steps that take half a second each, until the test has done what it does to the job."""
    return ["--set", "model.pause=0.5", "--set", f"model.go={out}.go"]


def hurry(folder: Path, out: str) -> None:
    (folder / f"{out}.go").touch()


def finish(slurm: Slurm, number: str, folder: Path, out: str, seconds: float = 240) -> None:
    """Wait for the end of a job. Slurm lets one that was requeued wait for two minutes, unless it is told not to."""
    deadline = time.monotonic() + seconds
    released = set()
    while (state := slurm.job(number)["JobState"]) != "COMPLETED":
        said = (folder / f"{out}.out").read_text() if (folder / f"{out}.out").exists() else ""
        assert state in ("PENDING", "RUNNING", "SIGNALING", "COMPLETING", "CONFIGURING"), f"{state}: {said}"
        assert time.monotonic() < deadline, f"{state}: {said}"
        if state == "PENDING" and (restarts := slurm.job(number)["Restarts"]) not in released:
            released.add(restarts)
            slurm.release(number)
        time.sleep(0.3)


def wait_for_steps(folder: Path, out: str, count: int, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    path = folder / out / "metrics.jsonl"
    while not path.exists() or len(events(folder / out, "step")) < count:
        assert time.monotonic() < deadline, f"{out} does not train"
        time.sleep(0.1)


def assert_like_one_process(folder: Path, out: str) -> None:
    weights, expected = (load_file(folder / name / "model.safetensors") for name in (out, "alone"))
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-9)


def test_a_preempted_job_comes_back_and_ends_with_the_right_weights(slurm: Slurm, folder: Path) -> None:
    flags = ("--strategy", "fsdp", "--nodes", "2", "--nproc", "1", "--sbatch", "exclusive")
    number = submit(slurm, folder, "preempted", *flags, *slowly("preempted"))
    wait_for_steps(folder, "preempted", 3)
    urgent = ["--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true"]
    other = slurm.run("sbatch", "--parsable", *urgent, cwd=folder).strip()
    slurm.wait_for(other, "COMPLETED")
    hurry(folder, "preempted")
    finish(slurm, number, folder, "preempted")
    assert slurm.job(number)["Restarts"] == "1"
    said = (folder / "preempted.out").read_text()
    assert "after a checkpoint" in said and "going on after step" in said
    steps = [row["step"] for row in events(folder / "preempted", "step")]
    assert steps == list(range(1, 13))  # none lost, none taken twice
    assert_like_one_process(folder, "preempted")


def test_ddp_on_two_nodes_equals_one_process_and_the_key_reaches_its_nodes_alone(slurm: Slurm, folder: Path) -> None:
    """Also where srun would pass on no variables. The name of the run is one that sbatch could misread."""
    out = 'it\'s "$(touch pwned)" %j #x'
    tells = "import os; print('the key:', os.environ['RUNG_RDZV_KEY'], flush=True)"
    head = 'def model(pause=0.0, go="go"):'
    (folder / "tell.py").write_text(TASK.replace(head, f"{head} {tells};"))
    flags = (
        "--nodes",
        "2",
        "--nproc",
        "2",
        "--name",
        "My job",
        "--sbatch",
        "export=NONE",
        "--env",
        "OMP_NUM_THREADS=1",
    )
    with mock.patch.dict(os.environ, {"RUNG_RDZV_KEY": "of the shell that submits"}):
        number = submit(slurm, folder, out, *flags, task="tell.py")
    finish(slurm, number, folder, out)
    assert slurm.job(number)["JobName"] == "my-job"
    (start,) = events(folder / out, "start")
    assert (start["strategy"], start["ranks"]) == ("ddp", 4)
    said = (folder / f"{out}.out").read_text()
    (key,) = set(re.findall(r"the key: (\S+)", said))
    assert re.fullmatch("[0-9a-f]{64}", key)
    assert key not in slurm.run("scontrol", "show", "job", number) + (folder / f"{out}.sbatch").read_text()
    assert not (folder / "pwned").exists()
    assert_like_one_process(folder, out)


def test_a_job_that_is_told_of_its_time_limit_goes_on_later(slurm: Slurm, folder: Path) -> None:
    """Slurm counts a limit in minutes; the signal that comes before it can be sent by hand."""
    number = submit(slurm, folder, "told", "--nproc", "2", *slowly("told"))
    wait_for_steps(folder, "told", 3)
    slurm.run("scancel", "--signal=USR1", number)
    slurm.wait_for(number, "PENDING")
    hurry(folder, "told")
    finish(slurm, number, folder, "told")
    assert slurm.job(number)["Restarts"] == "1"
    assert [row["step"] for row in events(folder / "told", "step")] == list(range(1, 13))
    assert_like_one_process(folder, "told")


@pytest.mark.slow
def test_a_job_longer_than_its_time_limit_ends_in_several_parts(slurm: Slurm, folder: Path) -> None:
    flags = ("--strategy", "zero1", "--nodes", "2", "--time", "3", "--notice", "60", "--set", "model.pause=12")
    number = submit(slurm, folder, "long", *flags)
    finish(slurm, number, folder, "long", seconds=900)
    assert int(slurm.job(number)["Restarts"]) >= 1
    assert "DUE TO TIME LIMIT" not in (folder / "long.out").read_text()
    assert [row["step"] for row in events(folder / "long", "step")] == list(range(1, 13))
    assert_like_one_process(folder, "long")


def test_a_cancelled_job_does_not_come_back(slurm: Slurm, folder: Path) -> None:
    number = submit(slurm, folder, "cancelled", "--nproc", "2", *slowly("cancelled"))
    wait_for_steps(folder, "cancelled", 2)
    slurm.run("scancel", number)
    slurm.wait_for(number, "CANCELLED")
    assert "after a checkpoint" in (folder / "cancelled.out").read_text()
    hurry(folder, "cancelled")
    again = submit(slurm, folder, "cancelled", "--resume", "cancelled")
    finish(slurm, again, folder, "cancelled")
    assert slurm.job(number)["JobState"] == "CANCELLED"  # as long as another job took from its start to its end
    assert_like_one_process(folder, "cancelled")


def test_a_job_that_fails_does_not_come_back(slurm: Slurm, folder: Path) -> None:
    number = submit(slurm, folder, "failing", "--set", "model.pause=-1")
    assert slurm.wait_for(number, "FAILED")["ExitCode"] == "1:0"
    assert "sleep length must be non-negative" in (folder / "failing.out").read_text()


def test_a_job_that_loses_a_node_goes_on_from_its_checkpoint(slurm: Slurm, folder: Path) -> None:
    number = submit(slurm, folder, "lost", "--nodes", "2", "--checkpoint-every", "2", *slowly("lost"))
    wait_for_steps(folder, "lost", 5)
    slurm.run("scontrol", "update", "NodeName=n1", "State=DOWN", "Reason=test")
    slurm.wait_for(number, "PENDING")
    slurm.run("scontrol", "update", "NodeName=n1", "State=IDLE")
    hurry(folder, "lost")
    finish(slurm, number, folder, "lost")
    assert_like_one_process(folder, "lost")


@pytest.mark.parametrize(
    "strategies", [["single", "fsdp"], slow(["single", "ddp", "zero2", "fsdp"])], ids=["two", "four"]
)
def test_an_array_trains_each_strategy(slurm: Slurm, folder: Path, strategies: list[str]) -> None:
    out = f"array-of-{len(strategies)}"
    number = submit(slurm, folder, out, "--nodes", "2", "--nproc", "1", "--strategies", *strategies)
    for index, strategy in enumerate(strategies):
        slurm.wait_for(f"{number}_{index}", "COMPLETED", seconds=300)
        (start,) = events(folder / out / strategy, "start")
        assert (start["strategy"], start["ranks"]) == (strategy, 1 if strategy == "single" else 2)
        assert_like_one_process(folder, f"{out}/{strategy}")
    runs = [f"{out}/{strategy}" for strategy in strategies]
    with contextlib.chdir(folder):
        assert main(["report", *runs, "--out", "array.md"]) == 0
    assert all(strategy in (folder / "array.md").read_text() for strategy in strategies)


@pytest.mark.parametrize("each", [1, slow(2)])
def test_tasks_of_srun_are_ranks(slurm: Slurm, folder: Path, each: int) -> None:
    out = f"{each}-ranks"
    rung = [sys.executable, "-m", "rung", "train", "net.py", "--strategy", "fsdp", "--out", out]
    command = ["srun", "--nodes=2", f"--ntasks-per-node={each}", *rung]
    done = subprocess.run(command, cwd=folder, env=slurm.environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (start,) = events(folder / out, "start")
    assert start["ranks"] == 2 * each
    assert_like_one_process(folder, out)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ([], ""),
        (["--sbatch", "no-such=1"], "unrecognized option '--no-such=1'"),
        (["--gpus-per-node", "3"], "Requested node configuration is not available"),
    ],
)
def test_slurm_takes_every_option_of_the_script_and_judges_those_of_the_user(
    slurm: Slurm, folder: Path, flags: list[str], complaint: str
) -> None:
    (folder / "gpu.py").write_text(TASK.replace(', "device": "cpu"', ""))
    command = ["submit", "slurm", "gpu.py", "--dry-run", "--nodes", "2", "--gpus-per-node", "2", "--time", "4:00:00"]
    command += ["--mem", "100M", "--cpus-per-task", "3", "--qos", "normal", "--account", "me", "--partition", "urgent"]
    command += ["--sbatch", "exclusive", "--sbatch", "mail-type=END", *flags]
    made = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(made):
        assert main(command) == 0
    (folder / "try.sbatch").write_text(made.getvalue())
    tried = ["sbatch", "--test-only", "try.sbatch"]
    done = subprocess.run(tried, cwd=folder, env=slurm.environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode == 0) == (not complaint), done.stderr
    assert complaint in done.stderr
