"""Jobs on several machines: network namespaces with addresses, names and disks of their own. Needs root."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rung.distributed.status_board import StatusBoard
from rung.spec.config import RunConfig
from rung.spec.task import load_task
from tests.faults.harness import BATCH, COMPARABLE, EPOCHS, Launched, done, examine
from tests.faults.harness import TASK as FAULTS
from tests.faults.hosts import Hosts, possible
from tests.marks import slow
from tests.parity import by_hand, with_rung

pytestmark = pytest.mark.skipif(not possible(), reason="network namespaces need root")

TASK = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

defaults = {"batch_size": 25, "steps": 5, "device": "cpu", "precision": "fp64", "log_every": 1}

def model():
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*blocks, nn.Linear(8, 2))

def data(count):
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum(1) > 0).long())

def train_data(): return data(103)
def eval_data(): return data(41)
def loss(output, target): return F.cross_entropy(output, target)
def metrics(output, target): return {"accuracy": (output.argmax(1) == target).float()}
def optimizer(model): return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
"""
# One command after the other in one process: most of the time of a command goes into imports.
SEVERAL = """
import json, os, sys
from rung.cli.main import main
for variables, words in json.loads(sys.argv[1]):
    for name in [name for name in os.environ if name.startswith(("PET_", "SLURM"))]:
        del os.environ[name]
    os.environ.update(variables)
    if code := main(words):
        sys.exit(code)
"""
_LIMIT = 300.0


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(3, named=True) as made:
        yield made


def on_hosts(hosts: Hosts, folder: Path, commands: list[list[str]], variables: list[dict[str, str]]) -> list[str]:
    """A command on each of the first machines, which share no disk. What each said; all must end well."""
    running, outputs = [], []
    for number, (command, told) in enumerate(zip(commands, variables, strict=True)):
        place = folder / f"disk{number}"
        place.mkdir(exist_ok=True)
        (place / "task.py").write_text(TASK)
        outputs.append(place / "output.txt")
        with outputs[-1].open("wb") as file:
            running.append(
                subprocess.Popen(
                    [*hosts.prefix(number), *command],
                    cwd=place,
                    env={**os.environ, "OMP_NUM_THREADS": "1", **told},
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            )
    deadline = time.monotonic() + _LIMIT
    while time.monotonic() < deadline and any(process.poll() is None for process in running):
        time.sleep(0.05)
    codes = [process.poll() for process in running]
    for process in running:
        process.kill()
        process.wait()
    said = [output.read_text() for output in outputs]
    assert codes == [0] * len(running), f"{codes}\n" + "\n".join(said)
    return said


def difference(folder: Path, run: str) -> float:
    """Between the weights of a run, which lie on the machine of rank 0, and those of one process."""
    (path,) = folder.glob(f"disk*/{run}/model.safetensors")
    found, task = load_file(path), path.parents[1] / "task.py"
    expected = by_hand(load_task(task), RunConfig(batch_size=25, steps=5, precision="fp64", device="cpu")).state
    assert found.keys() == expected.keys()
    return max(float((found[name] - value).abs().max()) for name, value in expected.items())


def slurm_variables(rank: int, size: int) -> dict[str, str]:
    """What srun --ntasks-per-node=1 would say on machine `rank`."""
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_NUM_NODES": str(size),
        "SLURM_STEP_TASKS_PER_NODE": f"1(x{size})",
        "SLURM_STEP_NODELIST": f"host[0-{size - 1}]",
        "SLURMD_NODENAME": f"host{rank}",
    }


def test_ddp_on_three_hosts_and_fsdp_and_pp2_on_two_match_one_process(hosts: Hosts, tmp_path: Path) -> None:
    """By flags, by the variables that Kubeflow sets, and by srun with a launcher on each machine."""
    pet = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "host0", "PET_MASTER_PORT": "29502"}
    flags = ["train", "task.py", "--nproc", "1"]
    commands = []
    for number in range(3):
        steps: list[tuple[dict[str, str], list[str]]] = []
        steps.append(({}, [*flags, "--nnodes", "3", "--rdzv", "host0:29501", "--out", "by-flags"]))
        if number < 2:
            steps.append(({**pet, "PET_NODE_RANK": str(number)}, [*flags[:2], "--strategy", "fsdp", "--out", "by-pet"]))
            by_slurm = [*flags, "--nnodes", "2", "--strategy", "pp2", "--out", "by-slurm"]
            steps.append((slurm_variables(number, 2), by_slurm))
        commands.append([sys.executable, "-c", SEVERAL, json.dumps(steps)])
    said = "".join(on_hosts(hosts, tmp_path, commands, [{}] * 3))
    assert "ddp: 3 replicas on cpu (gloo)" in said and "fsdp: 2 shards" in said and "pp2: 2 stages" in said
    assert "--nnodes 2 (PET_NNODES), --nproc 1 (PET_NPROC_PER_NODE), --rdzv host0:29502 (PET_MASTER_ADDR)" in said
    assert "from the environment: --rdzv host0:" in said and "(SLURM_STEP_NODELIST)" in said
    for run in ("by-flags", "by-pet", "by-slurm"):
        assert difference(tmp_path, run) < 1e-9, run


@pytest.mark.parametrize("launcher", [slow("torchrun"), "srun"])
def test_ranks_that_others_started_on_two_hosts_match_one_process(hosts: Hosts, tmp_path: Path, launcher: str) -> None:
    words = ["-m", "rung", "train", "task.py", "--strategy", "fsdp", "--out", "run"]
    variables: list[dict[str, str]] = [{}, {}]
    if launcher == "torchrun":
        meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "host0:29503"]
        run = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *meet]
        own = [["--local-addr", hosts.address(number)] for number in range(2)]
        commands = [[sys.executable, *run, *address, *words] for address in own]
    else:
        commands = [[sys.executable, *words]] * 2
        variables = [slurm_variables(number, 2) for number in range(2)]
    said = on_hosts(hosts, tmp_path, commands, variables)
    assert "fsdp: 2 shards on cpu (gloo)" in said[0] and "done: 5 steps" in said[0]
    assert difference(tmp_path, "run") < 1e-9


def test_a_host_taken_away_and_brought_back_leaves_no_trace_in_the_weights(hosts: Hosts, tmp_path: Path) -> None:
    """Three machines under --nnodes 1:3. The cable of one is pulled in the middle of a step, and plugged in again."""
    config = RunConfig(batch_size=BATCH, epochs=EPOCHS, precision="fp64", dropout=False, device="cpu")
    alone = with_rung(partial(load_task, FAULTS), "single", config).state
    known = {name: torch.from_numpy(value) for name, value in alone.items()}
    asked = ["--strategy", "ddp", "--nproc", "1", "--nnodes", "1:3", "--rdzv", "host0:29505", "--checkpoint-every", "4"]
    # Without a check before the first step, in which a held model would wait.
    asked += ["--no-check", "--set", "log_every=1", "--set", "model.pause=0.05", *COMPARABLE]
    jobs = [Launched(tmp_path / f"disk{n}", asked, num_ranks=3, prefix=hosts.prefix(n)) for n in range(3)]
    try:
        _wait(jobs, lambda: _world(jobs) == 3, "three machines")
        _wait(jobs, lambda: _step(jobs) >= 5, "steps of three machines", hold=False)
        hosts.cut(2)
        _wait(jobs, lambda: _world(jobs[:2]) == 2, "two machines")
        reached = _step(jobs[:2])
        _wait(jobs, lambda: _step(jobs[:2]) >= reached + 2, "steps of two machines", hold=False)
        hosts.mend(2)
        _wait(jobs, lambda: _world(jobs) == 3, "three machines again")
        _wait(jobs, lambda: all(job.over() for job in jobs), "the end", hold=False)
        assert [job.process.returncode for job in jobs] == [0, 0, 0]
        main = next(job for job in jobs if (job.run_dir / "model.safetensors").exists())
        assert not examine(main, known, tolerance=1e-9, has_all_files=False)
    finally:
        for job in jobs:
            job.close()


def _wait(jobs: list[Launched], condition: Callable[[], object], what: str, *, hold: bool = True) -> None:
    """Meanwhile ranks are held in their step, unless they are asked to leave it: the job cannot end before."""
    deadline = time.monotonic() + _LIMIT
    while True:
        for job in jobs:
            job.over()  # starts it again if it wants that
            boards = [StatusBoard(path, 1).writer(0) for path in job.run_dir.glob(".state/*/status")]
            job.hold(hold and not any(board.stop_requested() for board in boards))
        if condition():
            return
        told = "\n".join(job.output()[-2000:] for job in jobs)
        assert time.monotonic() < deadline, f"waited in vain for {what}:\n{told}"
        time.sleep(0.02)


def _newest(jobs: list[Launched]) -> list[dict[str, Any]]:
    """The lines of the machine of rank 0, which may be another one in each world."""
    files = {job: job.run_dir / "metrics.jsonl" for job in jobs}
    there = [job for job, path in files.items() if path.exists()]
    return max(there, key=lambda job: files[job].stat().st_mtime).rows() if there else []


def _world(jobs: list[Launched]) -> int:
    """How many ranks take part at present."""
    return next((row["ranks"] for row in reversed(_newest(jobs)) if row["event"] in ("start", "resume")), 0)


def _step(jobs: list[Launched]) -> int:
    return done(_newest(jobs))
