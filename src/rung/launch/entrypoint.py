"""The process of one rank around the training loop: its log file, its signals, its failure record."""

from __future__ import annotations

import concurrent.futures.thread
import contextlib
import faulthandler
import io
import json
import logging
import multiprocessing.util
import os
import shutil
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TextIO

import torch

from rung.distributed.status_board import StatusBoard, StatusWriter
from rung.errors import RESUME_EXIT_CODE
from rung.launch.console import ATTEMPT_MARK, FAILURE_MARK, WARNING_MARK
from rung.launch.diagnostics.failure import read_failures, record_failure, release_room, reserve_room
from rung.launch.diagnostics.stacks import answer_with_stack
from rung.launch.fork_server import SHIELDED, belong_to_launcher
from rung.launch.worker_spec import WorkerSpec
from rung.system.launcher_env import (
    environment_local_size,
    environment_rank,
    set_environment_sizes,
    set_environment_world_key,
    use_interface,
)
from rung.system.network import close_connections
from rung.system.processes import name_semaphores, num_cores
from rung.train.job import RankJob
from rung.train.worker import FailureContext, worker

# How long threads of the task may run after training, to finish writing.
_THREAD_SECONDS = 5.0
_LISTEN_SECONDS = 0.2  # between two reads of the launcher's request
_LOG_WAITING_BYTES = 256 * 1024


def rank_main(environment: Mapping[str, str], job: RankJob, spec: WorkerSpec) -> NoReturn:
    """Run one rank; the agent starts it in each process. `environment` is added to the fork server's variables."""
    os.environ.update(environment)
    assert job.run_dir is not None
    folder, state, rank = Path(job.run_dir), Path(spec.state), environment_rank()
    board = StatusBoard(state / "status", spec.size)
    status = board.writer(rank)
    status.phase("starting")
    reserve_room(state, rank)
    belong_to_launcher()
    name_semaphores()
    use_folder_of_rank(rank)
    exit_on_request(status)
    answer_with_stack(state, rank)
    code, failure = 0, FailureContext()
    try:
        redirect_output(folder / "logs" / f"rank-{rank}.log", f"{spec.attempt}, {job.strategy}, {spec.used} ranks")
        if rank >= spec.used:
            _wait_as_spare(status)
        set_environment_sizes(spec.used, spec.local_used)
        set_environment_world_key(spec.key)
        use_interface(spec.interface)
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, num_cores() // environment_local_size()))
        _hang_up_on_request(status)
        summary = worker(job, status, failure)
        code = RESUME_EXIT_CODE if summary.stopped else 0
        release_room(state, rank)
        if rank == 0 and not summary.stopped:
            state.mkdir(parents=True, exist_ok=True)  # the user may have removed the run's directory
            (state / "summary").write_text(json.dumps(asdict(summary)))
        wait_for_threads()
    except BaseException as error:
        try:
            report_failure(state, rank, board, error, failure)
            _emergency_save(failure, status, state)
        finally:
            # Not a normal exit: threads of a broken process group may never end.
            os._exit(1)
    flush()
    # Not a normal exit here either: it would wait without limit for threads and processes that the task left.
    os._exit(code)


def use_folder_of_rank(rank: int) -> None:
    """Use a temporary folder of this rank for its sockets and its data workers'. Removes the sockets that an earlier
    rank of this number left when it was killed, which would otherwise pile up in the launcher's folder."""
    config: Any = getattr(multiprocessing.current_process(), "_config", {})
    if config.get("tempdir") is None:  # not forked by a launcher
        return
    own = Path(config["tempdir"]) / f"rank-{rank}"
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir(parents=True, exist_ok=True)
    config["tempdir"] = str(own)


def exit_on_request(status: StatusWriter) -> None:
    """On SIGTERM or SIGUSR1, request that all ranks stop: a scheduler may signal every process of a job."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: status.ask_to_stop())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SHIELDED)


def _hang_up_on_request(status: StatusWriter) -> None:
    """Close this process's connections, from a thread, when the launcher requests it.

    A collective whose peer is gone blocks the main thread for minutes. Without its connections it raises at once, and
    the state can still be saved.
    """

    def listen() -> None:
        while not status.is_requested("hang up"):
            time.sleep(_LISTEN_SECONDS)
        close_connections()

    threading.Thread(target=listen, name="rung-listen", daemon=True).start()


def _wait_as_spare(status: StatusWriter) -> NoReturn:
    """Wait until the next world is formed, which ends this process."""
    status.phase("spare")
    while not status.stop_requested():
        time.sleep(0.05)
    status.phase("stopped")
    os._exit(RESUME_EXIT_CODE)


def report_failure(state: Path, rank: int, board: StatusBoard, error: BaseException, failure: FailureContext) -> None:
    record = partial(record_failure, state, rank, board, error, memory=failure.memory, smaller=failure.smaller)
    try:
        record()
    except BaseException:
        # Probably out of memory: release the locals of the failing frames, and try again. Memory may have run out once
        # more while the first error was handled; then the frames that fill it are those of that one.
        one: BaseException | None = error
        while one is not None:
            traceback.clear_frames(one.__traceback__)
            one = one.__cause__ or one.__context__
        with contextlib.suppress(OSError):  # the traceback in the log below must do
            record()
    status = board.read(rank)
    sys.stderr.write(f"{FAILURE_MARK}rank {rank}, step {status.step}, phase {status.phase}\n")
    traceback.print_exception(error)
    flush()


def _emergency_save(failure: FailureContext, status: StatusWriter, state: Path) -> None:
    """Save the state before the failing step, if the loop has provided a way and the job will restart from it: because
    it is protected, or because a rank ran out of memory, after which a smaller micro-batch is tried."""
    is_retried = any(record.smaller is not None for record in read_failures(state).values())
    if failure.rescue is not None and (is_retried or failure.is_protected):
        status.touch()
        try:
            failure.rescue()
        except Exception:
            sys.stderr.write("the emergency save failed:\n")
            traceback.print_exc()
            flush()


def wait_for_threads() -> None:
    """As Python does at its end, but not for ever."""
    deadline = time.monotonic() + _THREAD_SECONDS
    release = threading.Thread(target=_release, daemon=True)
    release.start()
    others = [t for t in threading.enumerate() if t is not threading.current_thread() and not t.daemon]
    for thread in others:
        thread.join(max(0.0, deadline - time.monotonic()))
    release.join(max(0.0, deadline - time.monotonic()))
    left = [thread.name for thread in others if thread.is_alive()]
    if left:
        logging.getLogger("rung").warning("training is over; threads still running are cut off: %s", ", ".join(left))


def _release() -> None:
    """Let go of what `torch.compile` and others keep for work to come: threads of pools, which wait until they are told
    that there is none, and semaphores. Python does so when it ends, and has no public name for it."""
    concurrent.futures.thread._python_exit()
    multiprocessing.util._run_finalizers(0)  # type: ignore[attr-defined]


def redirect_output(path: Path, attempt: str) -> None:
    """Send all output of this process, its C++ libraries included, to a log file, which the console reads. A heading
    with `attempt` separates it from earlier attempts in the same file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    flush()
    if os.fstat(descriptor).st_size:
        os.write(descriptor, f"\n{ATTEMPT_MARK}{attempt}, {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout, sys.stderr = _open_stream(1), _open_stream(2)
    faulthandler.enable()  # a crash in C++ leaves a Python traceback in the log
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_Formatter())
    root = logging.getLogger("rung")
    root.handlers, root.propagate = [handler], False
    root.setLevel(logging.INFO)
    warnings.showwarning = _show_warning


class _LogFile(io.FileIO):
    """A rank's log file. On a full disk `write` does not raise, so that a `print` of the task does not end training.

    Output that could not be written is kept, up to a limit, and written with the next line.
    """

    _waiting = b""

    def write(self, content: Any) -> int:
        self._waiting += bytes(content)
        try:
            while self._waiting:
                self._waiting = self._waiting[super().write(self._waiting) or 0 :]
        except OSError:
            self._waiting = self._waiting[-_LOG_WAITING_BYTES:]
        return len(content)


def _open_stream(descriptor: int) -> TextIO:
    raw = io.BufferedWriter(_LogFile(descriptor, "w", closefd=False))
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        mark = WARNING_MARK if record.levelno >= logging.WARNING else ""
        return mark + record.getMessage()


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: Any = None,
) -> None:
    text = " ".join(str(message).split())
    sys.stderr.write(f"{WARNING_MARK}{category.__name__}: {text} ({filename}:{lineno})\n")


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError):
            stream.flush()
