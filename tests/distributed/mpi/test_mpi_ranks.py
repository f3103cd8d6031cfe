"""Jobs that mpirun starts: MPI's collectives one by one, strategies over them, and the command line as a rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rung.spec.config import RunConfig
from rung.spec.task import load_task
from rung.system.processes import is_running
from tests import mpi
from tests.cli.test_commands_ranks import events, warm_rung
from tests.harness import on_ranks
from tests.launcher import WarmLauncher
from tests.marks import slow
from tests.matrix import BATCH_SIZE
from tests.mpi_ranks import exercise_all
from tests.parity import Outcome, by_hand, largest_difference, with_rung
from tests.processes import processes_of
from tests.tasks import TASKS

pytestmark = pytest.mark.skipif(not mpi.is_available(), reason="mpi4py or mpirun is not installed")

RUNG = [sys.executable, "-m", "rung", "train"]
TASK = """
import os
import time
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

defaults = {"batch_size": 25, "steps": 5, "device": "cpu", "precision": "fp64", "log_every": 1}

def data(count):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(count, 8, generator=g)
    return TensorDataset(x, (x.sum(1) > 0).long())

class Net(nn.Module):
    def __init__(self, width, trouble):
        super().__init__()
        self.first = nn.Linear(8, width)
        self.norm = nn.BatchNorm1d(width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.last = nn.Linear(width, 2)
        self.trouble, self.calls = trouble, 0

    def forward(self, x):
        self.calls += 1
        if self.trouble == "slow":
            time.sleep(0.2)
        elif self.trouble and self.calls > 2 and os.environ["RANK"] == "1":
            if self.trouble == "raise":
                raise ValueError("a planned mistake")
            os.kill(os.getpid(), 9) if self.trouble == "kill" else time.sleep(600)
        return self.last(self.frozen(self.norm(self.first(x)).relu()))

def model(width=12, trouble=""): return Net(width, trouble)
def train_data(): return data(103)
def eval_data(): return data(41)
def loss(output, target): return F.cross_entropy(output, target)
def metrics(output, target): return {"accuracy": (output.argmax(1) == target).float()}
def optimizer(model, lr=0.1): return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
"""


@pytest.fixture
def task(tmp_path: Path) -> Path:
    path = tmp_path / "mine" / "task.py"
    path.parent.mkdir()
    path.write_text(TASK)
    return path


def outcome_of(run: Path) -> Outcome:
    steps = events(run, "step")
    return Outcome(
        losses=[row["loss"] for row in steps],
        norms=[row["grad_norm"] for row in steps],
        rates=[row["lr"] for row in steps],
        state=load_file(run / "model.safetensors"),
        evaluation={key: events(run, "eval")[-1][key] for key in ("loss", "accuracy")},
    )


# -- collectives and strategies --------------------------------------------------------------------------------------


def compare(outcomes: list[dict[str, Outcome]]) -> None:
    config = RunConfig(batch_size=BATCH_SIZE, steps=3, precision="fp64", clip=1.0)
    reference = by_hand(TASKS["gpt"](), config)
    for strategy, found in outcomes[0].items():
        assert largest_difference(reference, found) < 1e-9, strategy
        for rank in outcomes:
            assert rank[strategy].losses == found.losses, strategy
            assert rank[strategy].evaluation == found.evaluation, strategy


@pytest.mark.parametrize("size", [2, slow(4)])
def test_collectives_and_strategies_match_one_process(size: int) -> None:
    """One start for all of it: most of the time goes into imports."""
    results = mpi.on_mpi_ranks(exercise_all, size, [strategy for strategy, ranks in mpi.ROWS if ranks == size])
    refused = ("AVG of torch.int32", "float8", "BAND of torch.float32", "dense", "9 elements")
    for words, told in zip((*refused, f"all_reduce on rank 0 of {size}"), results[0][0], strict=True):
        assert words in told
    assert "timed out" in results[0][0][-1]
    compare([outcomes for _, outcomes in results])


# -- the command line ------------------------------------------------------------------------------------------------


def test_ddp_by_mpirun_is_ddp_over_gloo_and_goes_on_anywhere(
    launcher: WarmLauncher, task: Path, tmp_path: Path
) -> None:
    """Two ranks add up two numbers: the order is the same, and so is every bit."""
    flags = ["--backend", "mpi", "--out", "run", "--checkpoint-every", "3"]
    output = mpi.mpirun(2, *RUNG, str(task), *flags, cwd=tmp_path)
    assert output.count("mine, ddp: 2 replicas on cpu (mpi4py)") == 1
    assert output.count("done: 5 steps") == 1 and "\x1b" not in output
    folder = tmp_path / "run"
    assert sorted(path.name for path in (folder / "logs").iterdir()) == ["rank-0.log", "rank-1.log"]
    over_mpi = outcome_of(folder)
    config = RunConfig(batch_size=25, steps=5, precision="fp64", device="cpu")
    over_gloo = on_ranks(with_rung, 2, partial(load_task, task), "ddp", config)[0]
    assert largest_difference(over_gloo, over_mpi) == 0.0
    assert largest_difference(by_hand(load_task(task), config), over_mpi) < 1e-9

    # One more step with the backend of the run, two by no launcher at all, and one with mpirun as launcher alone.
    resumed = mpi.mpirun(2, *RUNG, str(task), "--resume", "run", "--steps", "6", cwd=tmp_path)
    assert "going on after step 5" in resumed and "ddp: 2 replicas on cpu (mpi4py)" in resumed
    flags = ["--resume", "run", "--strategy", "single", "--steps", "8"]
    alone = warm_rung(launcher, tmp_path, "train", str(task), *flags).output
    assert "going on after step 6" in alone and "saved under ddp on 2 processes" in alone
    flags = ["--resume", "run", "--strategy", "ddp", "--backend", "gloo", "--steps", "9"]
    resumed = mpi.mpirun(2, *RUNG, str(task), *flags, cwd=tmp_path)
    assert "going on after step 8" in resumed and "ddp: 2 replicas on cpu (gloo)" in resumed
    assert largest_difference(by_hand(load_task(task), replace(config, steps=9)), outcome_of(folder)) < 1e-9


def test_the_cause_of_a_failure_is_told_once_and_nobody_stays(task: Path, tmp_path: Path) -> None:
    flags = ["--backend", "mpi", "--out", "run", "--no-check", "--set", "model.trouble=raise"]
    output = mpi.mpirun(2, *RUNG, str(task), *flags, cwd=tmp_path, code=1)
    last = output.splitlines()[-24:]
    assert sum("rank 1 failed in step 3, phase forward: ValueError: a planned mistake" in line for line in last) == 1
    assert any("rank 0: stopped in step 3, phase forward, waits in" in line for line in last), output
    assert output.count("a planned mistake") == 3  # headline, source line, traceback's end
    assert nobody_runs(str(task))


@pytest.mark.parametrize("backend", ["mpi", slow("gloo")])
def test_a_rank_that_is_killed_is_named(task: Path, tmp_path: Path, backend: str) -> None:
    flags = ["--backend", backend, "--out", "run", "--no-check", "--set", "model.trouble=kill"]
    output = mpi.mpirun(2, *RUNG, str(task), *flags, cwd=tmp_path, code=137)
    assert output.count("rank 1 is gone in step 3, phase forward: it was killed, or ended without a report.") == 1
    assert nobody_runs(str(task))


def test_a_rank_that_does_not_come_is_named(task: Path, tmp_path: Path) -> None:
    flags = ["--backend", "mpi", "--out", "run", "--no-check", "--timeout", "6", "--set", "model.trouble=sleep"]
    output = mpi.mpirun(2, *RUNG, str(task), *flags, cwd=tmp_path, code=1)
    assert "the job hangs in step 3: rank 1 has not reached all_gather, in which rank 0 waits" in output
    assert nobody_runs(str(task))


@pytest.mark.parametrize("whom", ["mpirun", slow("rank")])
def test_a_request_to_leave_saves_the_state(launcher: WarmLauncher, task: Path, tmp_path: Path, whom: str) -> None:
    """mpirun passes SIGUSR1 on. A scheduler may also signal the ranks themselves."""
    flags = ["--backend", "mpi", "--out", "run", "--steps", "50", "--set", "model.trouble=slow"]
    process = mpi.start(2, *RUNG, str(task), *flags, cwd=tmp_path)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and '"event": "step"' in metrics.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    if whom == "mpirun":
        process.send_signal(signal.SIGUSR1)
    else:
        ranks = [pid for pid in processes_of(str(task)) if pid != process.pid]
        os.kill(ranks[-1], signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 75, output
    assert output.count("after a checkpoint; go on with: rung train") == 1
    flags = ["--resume", "run", "--nproc", "2", "--backend", "gloo", "--steps", "12"]
    resumed = warm_rung(launcher, tmp_path, "train", str(task), *flags).output
    assert "going on after step" in resumed and "done: 12 steps" in resumed


def test_torchrun_starts_ranks_as_well(task: Path, tmp_path: Path) -> None:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*start, "-m", "rung", "train", str(task), "--out", "run"],
        cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("done: 5 steps") == 1
    reference = by_hand(load_task(task), RunConfig(batch_size=25, steps=5))
    assert largest_difference(reference, outcome_of(tmp_path / "run")) < 1e-9


@pytest.mark.parametrize("backend", ["mpi", slow("gloo")])
def test_a_script_of_ones_own_by_mpirun(tmp_path: Path, backend: str) -> None:
    """`open_session` finds its place, and one failing rank does not leave the others waiting."""
    script = tmp_path / "loop.py"
    script.write_text(
        "import sys, torch, rung\n"
        "for fails in (False, True):  # one start for both: most of the time goes into imports\n"
        f"    with rung.open_session({str(tmp_path / 'task.py')!r}, strategy='ddp', backend=sys.argv[1]) as session:\n"
        "        for window in session.batches():\n"
        "            stats = session.step(window)\n"
        "            if fails and session.world.rank == 1: raise KeyError('planned')\n"
        "        print('loss', float(stats.loss), flush=True)\n"
    )
    (tmp_path / "task.py").write_text(TASK)
    output = mpi.mpirun(2, sys.executable, str(script), backend, cwd=tmp_path, code=1)
    losses = [line for line in output.splitlines() if line.startswith("loss")]
    assert len(losses) == 2 and len(set(losses)) == 1
    assert "planned" in output


def nobody_runs(word: str) -> bool:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if not any(is_running(pid) for pid in processes_of(word)):
            return True
        time.sleep(0.1)
    return False
