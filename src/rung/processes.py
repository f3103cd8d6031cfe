"""Small facts about operating-system processes that several parts need. No torch."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Iterator

from rung.errors import EnvironmentProblem

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def die_with_parent() -> None:
    """End this process when the one that started it ends, however that ends. Call from a process's first thread."""
    starter = multiprocessing.parent_process()
    if sys.platform != "linux":
        if starter is not None:
            threading.Thread(target=_follow, args=(starter,), name="rung-parent", daemon=True).start()
        return
    # By the kernel: a process that is busy in C++ and runs no Python ends as well.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if starter is not None and starter.pid is not None and not is_running(starter.pid):  # it was gone before the call
        os.kill(os.getpid(), signal.SIGKILL)


def leave_requests_to_parent() -> None:
    """A scheduler may ask every process of a job to end. One that serves another must outlive its last deeds."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def _follow(process: multiprocessing.process.BaseProcess) -> None:
    process.join()
    os.kill(os.getpid(), signal.SIGKILL)


def name_process(name: str) -> None:
    """What `ps` and `top` call this process: at most 15 characters. Call from its first thread."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie waiting to be reaped."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except FileNotFoundError:
        if os.path.isdir("/proc/self"):
            return False
    except ProcessLookupError:
        return False
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def started_at(pid: int) -> int | None:
    """When a process began, in ticks of the machine's clock: tells it from another that has its number, as the first
    one of every container has. None where the system does not say."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def raise_file_limit() -> int:
    """As many open files as this process may allow itself and those that it starts. How many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # macOS has another limit below this one
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return soft if soft != resource.RLIM_INFINITY else sys.maxsize


def needed_files(num_ranks: int, num_local: int, num_workers: int = 0) -> int:
    """Open files of one process of a job, at most: libraries, connections of a rank to every other in a few groups,
    pipes of a launcher to those of its machine. Measured with gloo: 60 to 82 with 4 ranks, and 71 in their launcher."""
    return 128 + 4 * num_ranks + 8 * num_local + 8 * num_workers


def refuse_few_files(num_ranks: int, num_local: int, num_workers: int = 0) -> None:
    """Before a rank starts: without a file left, processes wait for each other without a word."""
    allowed, needed = raise_file_limit(), needed_files(num_ranks, num_local, num_workers)
    if allowed < needed:
        raise EnvironmentProblem(
            f"{num_ranks} rank{'s' * (num_ranks > 1)} need up to {needed} open files in a process, and the hard limit "
            f"here is {allowed}. Raise it: ulimit -n {max(4096, needed)}, as root or in limits.conf; in a container, "
            "with --ulimit nofile."
        )


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_of_cores(num_processes: int) -> int:
    """How many cores each of the processes that one parent has started here has for itself.

    A parent that binds each of them to cores of its own has divided them already.
    """
    own = num_cores()
    try:
        total = len(os.sched_getaffinity(os.getppid()))
    except (AttributeError, OSError):
        total = own
    return max(1, min(own, total // num_processes))


def parent_has_terminal() -> bool:
    """Whether the process that started this one writes to a terminal. mpirun gives ranks one of their own, whatever
    becomes of what they write there."""
    try:
        return os.readlink(f"/proc/{os.getppid()}/fd/1").startswith(("/dev/pts/", "/dev/tty"))
    except OSError:
        return False


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Without what this process writes to standard error: torch's C++ tells of a connection that fails with its stack,
    several times."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def machine_name() -> str:
    """The same for all processes of a machine or container, and another one elsewhere: names alone may be alike."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{socket.gethostname()}-{file.read()[:8]}"
    except OSError:
        return socket.gethostname()
