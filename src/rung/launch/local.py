"""Starts a job on this machine: torch's elastic agent over processes forked from a warm server."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import time
import uuid
from multiprocessing import forkserver
from pathlib import Path

from rich.console import Console

from rung.errors import JobFailed
from rung.launch.console import JobConsole
from rung.launch.failure import read_failures, report
from rung.status import StatusBoard
from rung.train import Job, Summary

_SHUTDOWN_SECONDS = "5"


class Interrupted(Exception):
    """Ctrl-C, or a polite request to end."""

    def __init__(self, signal_number: int, step: int) -> None:
        super().__init__(f"interrupted in step {step}")
        self.signal_number = signal_number


def warm_up() -> None:
    """Start the server that ranks are forked from, in the background: it imports torch while the launcher does, too."""
    multiprocessing.set_forkserver_preload(["rung.launch.rank", "torch.distributed.fsdp", "torch.distributed.tensor"])
    forkserver.ensure_running()


def launch(job: Job, num_ranks: int, *, console: Console, quiet: bool = False) -> tuple[Summary, JobConsole]:
    """Run a job to its end in `num_ranks` processes. Raises JobFailed with the report of a failure."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from rung.launch.rank import rank_main

    assert job.run_dir is not None
    folder = Path(job.run_dir)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    state = folder / ".state"
    state.mkdir(exist_ok=True)
    for old in state.glob("rank-*.json"):
        old.unlink()
    board = StatusBoard(state / "status", num_ranks, create=True)
    _silence_agent()
    _prepare_environment()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",  # a port of the system's choice: any number of jobs at once
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="forkserver",
    )
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)}
    view = JobConsole(folder, num_ranks, board, console, quiet=quiet)
    try:
        with view:
            results = elastic_launch(config, rank_main)(job, str(folder), num_ranks)
    except SignalException as error:
        raise Interrupted(error.sigval, board.read(0).step) from None
    except ChildFailedError:
        raise JobFailed(_explain(folder, board, view)) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if not all(board.read(rank).finished for rank in range(num_ranks)):
        raise JobFailed(_explain(folder, board, view))
    return results[0], view


def _explain(folder: Path, board: StatusBoard, view: JobConsole) -> str:
    statuses = [board.read(rank) for rank in range(board.num_ranks)]
    exit_codes: dict[int, int | None] = {}
    for rank in range(board.num_ranks):
        process = view.processes.get(rank)
        if process is not None:
            process.join(1)
        exit_codes[rank] = process.exitcode if process is not None else None
    return report(read_failures(folder / ".state"), statuses, exit_codes, view.deaths, folder / "logs")


def _prepare_environment() -> None:
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _SHUTDOWN_SECONDS)
    if sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # one machine: do not depend on how its name resolves


def _silence_agent() -> None:
    """The agent's own account of a failure is longer than a screen and names the wrong rank as often as the right one."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)


def new_run_dir(task: str, strategy: str, out: str | None) -> Path:
    """runs/<task>-<strategy>-<time>, or what --out says. Two jobs of the same second get two directories."""
    if out is not None:
        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    stem = f"{task}-{strategy.replace(',', '-')}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in range(1, 1000):
        folder = Path("runs") / (stem if number == 1 else f"{stem}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise AssertionError("a thousand runs in one second")
