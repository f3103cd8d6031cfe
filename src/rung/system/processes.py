"""Operating-system processes: their lifetime, limits, cores and names. No torch."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rung.errors import EnvironmentProblem

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
SEMAPHORES = "mp"  # that multiprocessing's names begin with


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Send this process a signal when its parent ends, however that happens. Call from the main thread."""
    parent = multiprocessing.parent_process()
    if sys.platform != "linux":
        if parent is not None:
            threading.Thread(target=_die_after, args=(parent,), name="rung-parent", daemon=True).start()
        return
    # By the kernel: it also ends a process that is busy in C++ and runs no Python.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, by, 0, 0, 0)
    if parent is not None and parent.pid is not None and not is_running(parent.pid):  # it ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


def leave_requests_to_parent() -> None:
    """Ignore the stop signals that a scheduler sends to every process of a job: a helper must outlive its parent's
    shutdown."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def _die_after(process: multiprocessing.process.BaseProcess) -> None:
    process.join()
    os.kill(os.getpid(), signal.SIGKILL)


def name_process(name: str) -> None:
    """Set the name that `ps` and `top` show: at most 15 characters. Call from the main thread."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import large packages without garbage collection, which walks all that was imported before, again and again: a
    fifth of the time of torch's import."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


def wait_for_idle_threads(name: str, *, timeout: float = 1.0) -> None:
    """Wait until no thread of this process with that name is running or about to run.

    The caller sleeps between looks, so that a thread that waits for Python's lock gets it.
    """
    deadline = time.monotonic() + timeout
    num_idle_looks = 0
    while num_idle_looks < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
        num_idle_looks = 0 if _has_running_thread(name) else num_idle_looks + 1


def _has_running_thread(name: str) -> bool:
    for task in Path("/proc/self/task").glob("*"):  # there is none outside of Linux
        with contextlib.suppress(OSError):  # the thread has ended
            before, _, after = (task / "stat").read_text().rpartition(")")
            if before.partition("(")[2] == name and after.split()[0] != "S":
                return True
    return False


def name_semaphores() -> None:
    """Put this process's number into the names of its semaphores and of its children's, so that a launcher can remove
    those that the process was killed too early to unlink. multiprocessing has no public way to choose a prefix."""
    settings: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    settings["semprefix"] = f"/{SEMAPHORES}-{os.getpid()}"


def own_temporary_folder() -> str | None:
    """The folder that multiprocessing uses in a rank of Rung's, which goes with the launcher; None elsewhere."""
    folder: str | None = getattr(multiprocessing.current_process(), "_config", {}).get("tempdir")
    return folder


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie waiting to be reaped."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # After the last ")": the command's name, in parentheses, may hold spaces and parentheses.
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except FileNotFoundError:
        if os.path.isdir("/proc/self"):  # without /proc, the signal below decides
            return False
    except ProcessLookupError:
        return False
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def started_at(pid: int) -> int | None:
    """The start time of a process, in clock ticks: distinguishes processes with the same pid, such as the first process
    of every container. None where the system does not provide it."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])  # starttime, field 22 of proc(5)
    except (OSError, IndexError, ValueError):
        return None


def raise_file_limit() -> int:
    """Raise the limit of open files to the hard limit, for this process and its children; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # macOS has another, lower limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return soft if soft != resource.RLIM_INFINITY else sys.maxsize


def needed_files(num_ranks: int, num_local: int, num_workers: int = 0) -> int:
    """An upper bound of the open files of one process of a job: libraries, a rank's connections to all others in a few
    groups, a launcher's pipes to its ranks. Measured with gloo: 60 to 82 with 4 ranks, and 71 in their launcher."""
    return 128 + 4 * num_ranks + 8 * num_local + 8 * num_workers


def refuse_few_files(num_ranks: int, num_local: int, num_workers: int = 0) -> None:
    """Check the limit before a rank starts: processes that run out of files wait for each other without an error."""
    allowed, needed = raise_file_limit(), needed_files(num_ranks, num_local, num_workers)
    if allowed < needed:
        raise EnvironmentProblem(
            f"{num_ranks} rank{'s' * (num_ranks > 1)} need up to {needed} open files in a process, but the hard limit "
            f"here is {allowed}. Raise it: ulimit -n {max(4096, needed)}, as root or in limits.conf; in a container, "
            "with --ulimit nofile."
        )


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_of_cores(num_processes: int) -> int:
    """The cores for each of the processes that one parent has started on this machine.

    A parent that binds each process to cores of its own has divided them already.
    """
    own = num_cores()
    try:
        total = len(os.sched_getaffinity(os.getppid()))
    except (AttributeError, OSError):
        total = own
    return max(1, min(own, total // num_processes))


def parent_has_terminal() -> bool:
    """Whether the parent of this process writes to a terminal. mpirun gives its ranks a pseudo-terminal, wherever their
    output goes then."""
    try:
        return os.readlink(f"/proc/{os.getppid()}/fd/1").startswith(("/dev/pts/", "/dev/tty"))
    except OSError:
        return False


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Discard this process's standard error: torch's C++ code prints a stack for each failed connection, several
    times."""
    sys.stderr.flush()
    saved, devnull = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(devnull)


def machine_name() -> str:
    """A name of this machine or container with its boot id, since host names may repeat."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{socket.gethostname()}-{file.read()[:8]}"
    except OSError:
        return socket.gethostname()
