"""What one rank's process does around the training loop: its log file, its signals, its last words."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import traceback
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TextIO

import torch

from rung.environment import (
    environment_local_size,
    environment_rank,
    set_environment_sizes,
    set_environment_world_key,
    use_interface,
)
from rung.errors import RESUME_EXIT_CODE
from rung.launch.console import ATTEMPT_MARK, FAILURE_MARK, WARNING_MARK
from rung.launch.failure import read_failures, record_failure, release_room, reserve_room
from rung.launch.server import SHIELDED, belong_to_launcher
from rung.launch.stacks import answer_with_stack
from rung.network import close_connections
from rung.processes import num_cores
from rung.status import StatusBoard, StatusWriter
from rung.train import Job, worker

# How long threads of the task may go on after training, to finish what they write.
_THREAD_SECONDS = 5.0
_LISTEN_SECONDS = 0.2
_LOG_WAITING_BYTES = 256 * 1024


@dataclass(frozen=True)
class Seat:
    """What the launcher tells each of its ranks of the world they are in."""

    state: str  # the folder of the status board and of last words
    size: int  # processes of the job
    used: int  # those that take part; the ranks from here on are spares
    local_used: int
    attempt: int
    interface: str | None  # the network between the machines of the job
    key: str = field(repr=False)  # what the ranks of this world sign with


def rank_main(job: Job, seat: Seat) -> NoReturn:
    """The entry point that the elastic agent starts in each process."""
    assert job.run_dir is not None
    folder, state, rank = Path(job.run_dir), Path(seat.state), environment_rank()
    board = StatusBoard(state / "status", seat.size)
    status = board.writer(rank)
    status.phase("starting")
    reserve_room(state, rank)
    belong_to_launcher()
    use_folder_of_rank(rank)
    leave_when_asked(status)
    answer_with_stack(state, rank)
    code = 0
    try:
        speak_into(folder / "logs" / f"rank-{rank}.log", f"{seat.attempt}, {job.strategy}, {seat.used} ranks")
        if rank >= seat.used:
            _wait_as_spare(status)
        # The store that the launcher has made for this world.
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        set_environment_sizes(seat.used, seat.local_used)
        set_environment_world_key(seat.key)
        use_interface(seat.interface)
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, num_cores() // environment_local_size()))
        _hang_up_when_asked(status)
        summary = worker(job, status)
        code = RESUME_EXIT_CODE if summary.stopped else 0
        release_room(state, rank)
        if rank == 0 and not summary.stopped:
            state.mkdir(parents=True, exist_ok=True)  # somebody may have removed the run's directory meanwhile
            (state / "summary").write_text(json.dumps(asdict(summary)))
        wait_for_threads()
    except BaseException as error:
        try:
            say_last_words(state, rank, board, error)
            _rescue(error, status, state)
        finally:
            # Not a normal exit: threads of a broken process group may never end.
            os._exit(1)
    flush()
    # Not a normal exit here either: it waits without limit for threads and processes that the task may have left.
    os._exit(code)


def use_folder_of_rank(rank: int) -> None:
    """A temporary folder for the sockets of this rank and its loader processes, emptied of those that an earlier rank
    of this number left when it was killed. Without it they would gather in the folder of the launcher."""
    config: Any = getattr(multiprocessing.current_process(), "_config", {})
    if config.get("tempdir") is None:  # not forked by a launcher
        return
    own = Path(config["tempdir"]) / f"rank-{rank}"
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir(parents=True, exist_ok=True)
    config["tempdir"] = str(own)


def leave_when_asked(status: StatusWriter) -> None:
    """A scheduler may signal every process of a job: this rank then asks the others to stop with it."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: status.ask_to_stop())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SHIELDED)


def _hang_up_when_asked(status: StatusWriter) -> None:
    """A collective whose peer is silent waits for minutes, and Python does not run meanwhile: the launcher asks this
    thread to close its connections. The wait then ends with an error, and the state can still be saved."""

    def listen() -> None:
        while not status.is_requested("hang up"):
            time.sleep(_LISTEN_SECONDS)
        close_connections()

    threading.Thread(target=listen, name="rung-listen", daemon=True).start()


def _wait_as_spare(status: StatusWriter) -> NoReturn:
    """Take no part until the world is formed anew, which ends this process."""
    status.phase("spare")
    while not status.stop_requested():
        time.sleep(0.05)
    status.phase("stopped")
    os._exit(RESUME_EXIT_CODE)


def say_last_words(state: Path, rank: int, board: StatusBoard, error: BaseException) -> None:
    try:
        record_failure(state, rank, board, error)
    except BaseException:
        # Out of memory, most likely: let go of what the failing frames hold, and try again.
        traceback.clear_frames(error.__traceback__)
        with contextlib.suppress(OSError):  # else the log has it, if anything can be written at all
            record_failure(state, rank, board, error)
    status = board.read(rank)
    sys.stderr.write(f"{FAILURE_MARK}rank {rank}, step {status.step}, phase {status.phase}\n")
    traceback.print_exception(error)
    flush()


def _rescue(error: BaseException, status: StatusWriter, state: Path) -> None:
    """Save the state as it was before the failing step, where the loop has left word how and somebody goes on from it:
    always, or because a rank ran out of memory, which is tried again."""
    save = getattr(error, "rung_rescue", None)
    tried_again = any(record.smaller is not None for record in read_failures(state).values())
    if save is not None and (tried_again or getattr(error, "rung_protected", False)):
        status.touch()
        try:
            save()
        except Exception:
            sys.stderr.write("the state could not be rescued:\n")
            traceback.print_exc()
            flush()


def wait_for_threads() -> None:
    deadline = time.monotonic() + _THREAD_SECONDS
    others = [t for t in threading.enumerate() if t is not threading.current_thread() and not t.daemon]
    for thread in others:
        thread.join(max(0.0, deadline - time.monotonic()))
    left = [thread.name for thread in others if thread.is_alive()]
    if left:
        logging.getLogger("rung").warning("training is over; threads still running are cut off: %s", ", ".join(left))


def speak_into(path: Path, attempt: str) -> None:
    """Everything this process and its C++ libraries print goes to its own file; the launcher shows what matters.
    `attempt` describes this one, where the file has words of others already."""
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
    """A rank's log: a disk that does not take a line is no reason for a `print` of the task to end training.

    What was not taken is tried again with the next line, up to a limit.
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
