"""The process that ranks are forked from, without ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rung.launch.ranks import Ranks
from rung.status import StatusBoard

_START = """
import time
from multiprocessing import forkserver
from rung.launch.server import warm_up
from rung.launch.signals import leaving_at_once
with leaving_at_once(resumable=True):
    warm_up(["json"])
    print(forkserver._forkserver._forkserver_address, flush=True)
    time.sleep(60)
"""

_CONVOLVING_TASK = """
import os
import torch
from torch import nn
from torch.utils.data import TensorDataset
defaults = {"batch_size": 4}
def model(): return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(784, 2))
def train_data(): return TensorDataset(torch.randn(8, 3, 16, 16), torch.randint(0, 2, (8,)))
def loss(output, target):
    open("pids", "a").write(f"{os.getpid()} ")
    return nn.functional.cross_entropy(output, target)
def optimizer(model): return torch.optim.SGD(model.parameters(), lr=0.1)
"""


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def _start(started: list[subprocess.Popen[str]], temporary: Path) -> Path:
    temporary.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "TMPDIR": str(temporary)}
    process = subprocess.Popen([sys.executable, "-c", _START], stdout=subprocess.PIPE, text=True, env=environment)
    started.append(process)
    assert process.stdout is not None
    return Path(process.stdout.readline().strip())


def _is_gone(path: Path) -> bool:
    deadline = time.monotonic() + 20
    while path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not path.exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_launcher_that_ends_before_its_ranks_start_leaves_no_temporary_directory(
    started: list[subprocess.Popen[str]], number: signal.Signals
) -> None:
    address = _start(started, Path("/tmp"))
    assert address.exists()
    started[0].send_signal(number)
    assert _is_gone(address.parent)


def test_a_temporary_directory_too_long_for_sockets_gives_way(
    started: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    address = _start(started, tmp_path / ("long" * 25))
    assert address.is_relative_to("/tmp") and address.exists()
    started[0].send_signal(signal.SIGKILL)
    assert _is_gone(address.parent)


def test_what_killed_data_workers_leave_in_shared_memory_goes_with_their_rank(tmp_path: Path) -> None:
    """A worker is killed with its rank's group, perhaps between making a name for a tensor and removing it."""
    script = "import subprocess, sys; subprocess.Popen(['sleep', '60']); print(flush=True); sys.stdin.read()"
    rank = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert rank.stdout is not None
    rank.stdout.readline()
    worker = int(Path(f"/proc/{rank.pid}/task/{rank.pid}/children").read_text().split()[0])
    left, others = (Path(f"/dev/shm/torch_{pid}_123_0") for pid in (worker, os.getpid()))
    for path in (left, others):
        path.touch()
    try:
        ranks = Ranks(StatusBoard(tmp_path / "status", 1, create=True))
        ranks._pids = {0: rank.pid}
        ranks.end()
        assert not left.exists()
        assert others.exists(), "it belongs to a process that lives"
    finally:
        for path in (left, others):
            path.unlink(missing_ok=True)
        rank.kill()
        rank.wait()


def test_ranks_leave_no_file_for_a_profiler(tmp_path: Path) -> None:
    """oneDNN would write one for each process that convolves, on some processors."""
    (tmp_path / "task.py").write_text(_CONVOLVING_TASK)
    words = ["train", "task.py", "--strategy", "ddp", "--nproc", "2", "--steps", "2", "--set", "device=cpu"]
    command = [sys.executable, "-m", "rung", *words, "--out", "run"]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert told.returncode == 0, told.stdout + told.stderr
    pids = (tmp_path / "pids").read_text().split()
    assert len(set(pids)) == 2 and not [pid for pid in pids if Path(f"/tmp/perf-{pid}.map").exists()]
