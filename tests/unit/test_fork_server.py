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
