"""`rung train` as a rank that mpirun, torchrun or srun has started.

Nothing is launched. The ranks agree on the run's directory through a store and train, rank 0 with the console beside
it, and they monitor each other instead of a launcher.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TextIO

import torch
from rich.console import Console
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from rung.distributed.mpi import backend as mpi
from rung.distributed.status_board import StatusBoard
from rung.distributed.store import open_store
from rung.errors import RESUME_EXIT_CODE, EnvironmentProblem, JobFailed, StoreError
from rung.launch.console import JobConsole
from rung.launch.diagnostics.failure import release_room, reserve_room
from rung.launch.diagnostics.stacks import answer_with_stack
from rung.launch.entrypoint import exit_on_request, flush, redirect_output, report_failure, wait_for_threads
from rung.launch.peer_monitor import REPORTED, PeerMonitor
from rung.launch.rendezvous.elastic import ElasticPolicy, announce, retire
from rung.launch.stored_run import FolderMirror, send_result
from rung.system.launcher_env import (
    LauncherRank,
    describe,
    external_attempt,
    ignored_interfaces,
    set_environment_world_key,
    store_address,
    use_interface,
)
from rung.system.network import address_among_others, interface_of
from rung.system.processes import machine_name, parent_has_terminal, share_of_cores
from rung.system.untrusted import LAYOUT, printable
from rung.train.job import RankJob
from rung.train.records import Summary
from rung.train.worker import FailureContext, worker

_FINISH_SECONDS = 10.0


def open_console(place: LauncherRank, file: TextIO) -> Console:
    """The console of rank 0; on other ranks it prints nothing."""
    # mpirun gives its processes a terminal even if it has none itself.
    is_fake = place.launcher == "mpirun" and not parent_has_terminal()
    return Console(file=file, quiet=not place.is_main, force_terminal=False if is_fake else None, markup=False)


# -- agreement before training ---------------------------------------------------------------------------------------


class ExternalJob:
    """The store of an external launcher's ranks, through which rank 0 publishes its decisions before training."""

    def __init__(self, place: LauncherRank, backend: str, key: str) -> None:
        self.place = place
        # Slurm can run several nodes on one system, which then have the same machine name.
        self.machine = f"{machine_name()}-{place.node}" if place.node else machine_name()
        # Kept for the life of the process: all process groups use rank 0's store.
        self._whole = open_store(place, over_mpi=backend == "mpi", key=key)
        set_environment_world_key(self._whole.key)
        describe(place, self._whole.host, self._whole.port)
        self._store: Store = PrefixStore(f"rung/{external_attempt()}", self._whole)

    def from_main(self, key: str, decide: Callable[[], str]) -> str:
        """The value that rank 0 decides, on all ranks."""
        if self.place.is_main:
            self._store.set(key, decide())
        return bytes(self._store.get(key)).decode()

    def from_leader(self, key: str, prepare: Callable[[], object]) -> None:
        """Let the first rank of each machine prepare something for all of its ranks."""
        key = f"{key}/{self.machine}"
        if self.place.local_rank == 0:
            prepare()
            self._store.set(key, "done")
        self._store.wait([key])

    def wait_for_machine(self) -> None:
        """Until all ranks of this machine are here, or for a bounded time."""
        key, deadline = f"here/{self.machine}", time.monotonic() + _FINISH_SECONDS
        with contextlib.suppress(RuntimeError):
            self._store.add(key, 1)
            while self._store.add(key, 0) < self.place.local_size and time.monotonic() < deadline:
                time.sleep(0.01)

    def finish(self, print_summary: Callable[[], None]) -> None:
        """Let rank 0 print the summary before any rank exits: a launcher kills all ranks after a nonzero exit code."""
        with contextlib.suppress(RuntimeError):  # a rank that is gone already need not be waited for
            self._store.set_timeout(datetime.timedelta(seconds=_FINISH_SECONDS))
            if self.place.is_main:
                print_summary()
                self._store.set("said", "1")
                deadline = time.monotonic() + _FINISH_SECONDS
                while self._store.add("heard", 0) < self.place.size - 1 and time.monotonic() < deadline:
                    time.sleep(0.01)
            else:
                self._store.wait(["said"])
                self._store.add("heard", 1)


# -- the rank itself -------------------------------------------------------------------------------------------------


def run_rank(
    job: RankJob, external: ExternalJob, policy: ElasticPolicy, print_summary: Callable[[Summary, Console], None]
) -> NoReturn:
    """Train as the rank that this process is, and exit. Rank 0 calls `print_summary`."""
    assert job.run_dir is not None
    place, folder = external.place, Path(job.run_dir)
    state = folder / ".state" if place.is_one_machine else folder / ".state" / external.machine
    external.from_leader("state", lambda: _make_state(state, folder, place, policy))
    board = StatusBoard(state / "status", place.size)
    status = board.writer(place.rank)
    status.phase("starting")
    reserve_room(state, place.rank)
    answer_with_stack(state, place.rank)
    terminal, errors = os.fdopen(os.dup(1), "w"), os.fdopen(os.dup(2), "w")
    redirect_output(
        folder / "logs" / f"rank-{place.rank}.log", f"by {place.launcher}, {job.strategy}, {place.size} ranks"
    )
    console = open_console(place, terminal)
    mirror = _start_mirror(job, place, errors)
    _use_machine(place, console)
    with contextlib.ExitStack() as shown:
        if place.is_main:
            view = shown.enter_context(JobConsole(folder, console))
            view.follow(board, range(place.size))

        def show(text: str) -> None:
            shown.close()
            _print(errors, text)
            with contextlib.suppress(StoreError):
                # The rank that reports may not be the one that sends: that one may be dead.
                if (rest := mirror or _mirror_of(job, place)) is not None:
                    rest.finish()

        def interrupt(*_: Any) -> NoReturn:
            if place.is_main:
                _print(errors, f"interrupted in step {status.current().step}; what was written lies in {folder}")
            os._exit(130)

        exit_on_request(status)
        signal.signal(signal.SIGINT, interrupt)
        peers = PeerMonitor(place, board, state, folder / "logs", job.config.timeout, show)
        peers.start()
        failure = FailureContext()
        try:
            summary = worker(job, status, failure)
            # Before the threads end: fsspec starts some for each request.
            problem = _send_rest(job, mirror, external, is_finished=not summary.stopped)
            wait_for_threads()
        except BaseException as error:
            try:
                report_failure(state, place.rank, board, error, failure)
                peers.wait_for_report()
            finally:
                os._exit(1)
        peers.stop()
    release_room(state, place.rank)
    if problem is not None:
        _print(errors, problem)
    is_over = problem is None or summary.stopped
    external.finish(lambda: print_summary(summary, console) if is_over else None)
    if place.local_rank == 0:
        retire(state)
    mpi.finish()
    flush()
    # Not a normal exit: it would wait without limit for threads and processes that the task left.
    os._exit(RESUME_EXIT_CODE if summary.stopped else 0 if is_over else 1)


def _print(file: TextIO, text: str) -> None:
    file.write(f"{printable(text, keep=LAYOUT)}\n")
    file.flush()


def _start_mirror(job: RankJob, place: LauncherRank, errors: TextIO) -> FolderMirror | None:
    """On the first rank of each machine, the thread that sends the run's files to its store."""
    mirror = _mirror_of(job, place) if place.local_rank == 0 else None
    if mirror is not None:
        mirror.start(lambda text: _print(errors, text))
    return mirror


def _mirror_of(job: RankJob, place: LauncherRank) -> FolderMirror | None:
    if job.store is None:
        return None
    patience, only_new = job.config.store_timeout, not (place.is_main or place.is_one_machine)
    return FolderMirror(Path(str(job.run_dir)), job.store, patience=patience, only_new=only_new)


def _send_rest(job: RankJob, mirror: FolderMirror | None, external: ExternalJob, *, is_finished: bool) -> str | None:
    """At the end, send what has changed. Returns what is not in the store."""
    if job.store is None:
        return None
    flush()
    external.wait_for_machine()  # until their logs are whole
    try:
        if mirror is not None and is_finished:
            send_result(mirror, job.store, Path(str(job.run_dir)))
        elif mirror is not None:
            mirror.finish()
    except (JobFailed, StoreError) as error:
        return str(error)
    return None


def _make_state(state: Path, folder: Path, place: LauncherRank, policy: ElasticPolicy) -> None:
    """Create the folder in which the ranks of a machine exchange files, and remove files of an older job."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    state.mkdir(parents=True, exist_ok=True)
    for old in [*state.glob("rank-*.json"), *state.glob("stack-*"), state / REPORTED]:
        old.unlink(missing_ok=True)
    StatusBoard(state / "status", place.size, create=True)
    announce(state, policy)


def _use_machine(place: LauncherRank, console: Console) -> None:
    """Choose the network interface and the number of threads."""
    # Do not depend on how the machine's name resolves: often to loopback, which other machines cannot reach.
    with contextlib.suppress(EnvironmentProblem):
        address = "127.0.0.1" if place.is_one_machine else address_among_others(*store_address()[:2])[0]
        interface = interface_of(address)
        if (ignored := ignored_interfaces(interface)) is not None:
            console.print(printable(ignored), highlight=False, soft_wrap=True, markup=False)
        use_interface(interface)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(share_of_cores(place.local_size))
