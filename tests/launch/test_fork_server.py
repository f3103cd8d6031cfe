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

from rung.distributed.status_board import StatusBoard
from rung.launch.worker_processes import WorkerProcesses
from tests.launcher import WarmLauncher

_START = """
import time
from multiprocessing import forkserver
from rung.launch.fork_server import start_fork_server
from rung.launch.signals import leaving_at_once
with leaving_at_once(resumable=True):
    start_fork_server(["json"])
    print(forkserver._forkserver._forkserver_address, flush=True)
    while True:  # a signal that comes right before a sleep is only handled after it
        time.sleep(0.05)
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
    memory = Path("/dev/shm")
    left = [memory / f"torch_{worker}_123_0", memory / f"sem.mp-{rank.pid}-abcdefgh"]
    others = [memory / f"torch_{os.getpid()}_123_0", memory / f"sem.mp-{os.getpid()}-abcdefgh"]
    for path in (*left, *others):
        path.touch()
    for semaphore in (left, others):  # glibc's first name for it
        semaphore.append(memory / f"sem.{semaphore[1].name[-14:-8]}")
        semaphore[2].hardlink_to(semaphore[1])
    try:
        ranks = WorkerProcesses(StatusBoard(tmp_path / "status", 1, create=True))
        ranks._pids = {0: rank.pid}
        ranks.end()
        assert not [path for path in left if path.exists()]
        assert all(path.exists() for path in others), "they belong to a process that lives"
    finally:
        for path in (*left, *others):
            path.unlink(missing_ok=True)
        rank.kill()
        rank.wait()


def test_the_semaphores_of_a_rank_carry_its_number() -> None:
    script = """
import os
from multiprocessing.synchronize import SemLock
from rung.system.processes import name_semaphores

name_semaphores()
print(os.getpid(), SemLock._make_name())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    pid, name = done.stdout.split()
    assert name.startswith(f"/mp-{pid}-")


def test_ranks_leave_no_file_for_a_profiler(launcher: WarmLauncher, tmp_path: Path) -> None:
    """oneDNN would write one for each process that convolves, on some processors."""
    (tmp_path / "task.py").write_text(_CONVOLVING_TASK)
    before = _profiler_files()  # of other processes, some with a process id that is used again
    words = ["train", "task.py", "--strategy", "ddp", "--nproc", "2", "--steps", "2", "--set", "device=cpu"]
    outcome = launcher.call(tmp_path, *words, "--out", "run", limit=120)
    assert outcome.code == 0, outcome.output
    ranks = {f"perf-{pid}.map" for pid in (tmp_path / "pids").read_text().split()}
    assert len(ranks) == 2 and not [name for name, _ in _profiler_files() - before if name in ranks]


def _profiler_files() -> set[tuple[str, int]]:
    return {(entry.name, entry.stat().st_mtime_ns) for entry in os.scandir("/tmp") if entry.name.startswith("perf-")}
