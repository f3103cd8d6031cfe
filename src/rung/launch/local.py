"""Starts a job on this machine: torch's elastic agent over processes forked from a warm server."""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import pickle
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from rung.errors import JobFailed
from rung.launch.console import JobConsole
from rung.launch.failure import read_failures, report
from rung.status import StatusBoard

if TYPE_CHECKING:  # torch is imported later, while the server that `warm_up` starts imports it, too
    from rung.launch.agent import Ranks, Signals
    from rung.train import Job, Summary


# What every rank would import for itself. Any optimizer imports dynamo when it is made, which takes a second.
_PRELOADED = [
    "rung.launch.rank",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch._dynamo",
    "torch.utils.tensorboard",
]


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, or a polite request to end, while ranks were running. They are gone now."""

    def __init__(self, signal_number: int, step: int) -> None:
        super().__init__(f"interrupted in step {step}" if step else "interrupted before the first step")
        self.signal_number = signal_number


def warm_up() -> None:
    """Start the server that ranks are forked from, in the background: it imports torch while the launcher does, too."""
    multiprocessing.set_forkserver_preload(_PRELOADED)
    # The server ignores Ctrl-C only once it has imported everything. Born with the signal blocked, it never shows a
    # traceback of its own. (The tracker comes first, because starting it unblocks the signal again.)
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    atexit.register(_cool_down)


@contextlib.contextmanager
def leaving_at_once() -> Iterator[None]:
    """Around imports of large libraries: Ctrl-C ends this process where it stands.

    An exception would not do. Some of those imports catch and forget it, and the job would start after all.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _leave) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, frame: object) -> None:
    os.write(2, b"interrupted\n")
    _cool_down()
    os._exit(128 + number)


def _cool_down() -> None:
    """End the server with the launcher, not a moment after; a rank that nobody knows of ends with it."""
    server = getattr(forkserver, "_forkserver", None)
    pid = getattr(server, "_forkserver_pid", None)
    if pid is not None:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def launch(job: Job, num_ranks: int, *, console: Console, quiet: bool = False) -> tuple[Summary, JobConsole]:
    """Run a job to its end in `num_ranks` processes. Raises JobFailed with the report of a failure."""
    from torch.distributed.elastic.multiprocessing import SignalException

    from rung.launch.agent import Ranks, Signals

    assert job.run_dir is not None
    folder = Path(job.run_dir)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    state = folder / ".state"
    state.mkdir(exist_ok=True)
    for old in [*state.glob("rank-*.json"), state / "summary"]:
        old.unlink(missing_ok=True)
    board = StatusBoard(state / "status", num_ranks, create=True)
    ranks = Ranks(board)
    view = JobConsole(folder, num_ranks, board, console, quiet=quiet)
    try:
        with view, Signals() as signals:
            try:
                _run_agent(job, num_ranks, ranks, signals)
            finally:
                signals.ignore()
                ranks.end()
    except SignalException as error:
        raise Interrupted(error.sigval, board.read(0).step) from None
    if not ranks.finished() or not (state / "summary").exists():
        failures, logs = read_failures(state), folder / "logs"
        raise JobFailed(report(failures, ranks.statuses(), ranks.exit_codes(), ranks.deaths, logs))
    summary: Summary = pickle.loads((state / "summary").read_bytes())
    return summary, view


def _run_agent(job: Job, num_ranks: int, ranks: Ranks, signals: Signals) -> None:
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
    from torch.distributed.launcher.api import LaunchConfig

    from rung.launch.agent import RankAgent
    from rung.launch.rank import rank_main

    _silence_agent()
    # No log directory of the agent's: it would stay behind in /tmp, and the ranks write their own.
    nowhere = DefaultLogsSpecs(log_dir=os.devnull)
    defaults = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=num_ranks, logs_specs=nowhere)
    rendezvous = get_rendezvous_handler(
        RendezvousParameters(
            backend="c10d",
            endpoint="127.0.0.1:0",  # a port of the system's choice: any number of jobs at once
            run_id=uuid.uuid4().hex,
            min_nodes=1,
            max_nodes=1,
            local_addr="127.0.0.1",
            **defaults.rdzv_configs,
        )
    )
    spec = WorkerSpec(
        role="rank",
        local_world_size=num_ranks,
        entrypoint=rank_main,
        args=(job, num_ranks),
        rdzv_handler=rendezvous,
        max_restarts=0,
        monitor_interval=0.05,
        local_addr="127.0.0.1",
        numa_options=defaults.numa_options,
    )
    try:
        RankAgent(ranks, signals, spec, logs_specs=nowhere, start_method="forkserver").run()
    finally:
        rendezvous.shutdown()


def _silence_agent() -> None:
    """Its account of a failure is longer than a screen, and names the wrong rank as often as the right one."""
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
