"""The fork server, from which ranks are forked: it has imported torch before the first rank starts."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any

from rung.system.processes import die_with_parent, importing, raise_file_limit

# Imports of every rank. The constructor of any optimizer imports dynamo, which takes a second.
_PRELOADED = [
    "rung.launch.entrypoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch._dynamo",
    "torch.utils.tensorboard",
]
# The server starts with these signals blocked. By itself it ignores Ctrl-C only after all imports, and a SIGTERM or
# SIGUSR1 that a scheduler sends to every process of the job must not end it, since the ranks would end with it.
SHIELDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# The path of a socket has at most 107 bytes; these names take 43: /pymp-12345678/rank-12345/listener-12345678.
_MAX_TEMPORARY_BYTES = 64


def start_fork_server(modules: Sequence[str] = _PRELOADED) -> None:
    """Start the server in the background.

    If this process has not imported torch yet, the server is forked from it right after that import, which takes two
    seconds and then is not made twice. Later would not do: a fork of a process that has asked for its GPUs cannot use
    them.
    """
    raise_file_limit()
    _shorten_temporary_folder()
    # On some processors oneDNN writes /tmp/perf-PID.map for a profiler, and leaves a file for each rank.
    os.environ.setdefault("ONEDNN_JIT_PROFILE", "0")
    multiprocessing.set_forkserver_preload([*modules, "rung.launch.fork_server_ready"])
    forks = "torch" not in sys.modules and sys.platform == "linux"
    with importing():  # a forked server goes on without garbage collection until it is ready
        if forks:
            import torch  # noqa: F401  (for the server)
        # The tracker starts first, because starting it unblocks the signals again.
        signal.pthread_sigmask(signal.SIG_BLOCK, SHIELDED)
        try:
            resource_tracker.ensure_running()
            signal.pthread_sigmask(signal.SIG_BLOCK, SHIELDED)
            with _forked() if forks else contextlib.nullcontext():
                forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SHIELDED)
    atexit.register(stop_fork_server)


@contextlib.contextmanager
def _forked() -> Iterator[None]:
    """Let multiprocessing fork its server from this process; it has no setting for that, it starts a new Python."""
    spawn = util.spawnv_passfds
    util.spawnv_passfds = _fork
    try:
        yield
    finally:
        util.spawnv_passfds = spawn


def _fork(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
    """Do in a fork what `python -c CODE`, the last argument, would do in a new process. Returns the process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    code = 1
    try:
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        atexit._clear()
        kept = {0, 1, 2, *passfds, resource_tracker.getfd()}
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in kept:
                with contextlib.suppress(OSError):  # the one that listed this folder
                    os.close(int(name))
        exec(args[-1], {})
    except SystemExit:
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        atexit._run_exitfuncs()
        os._exit(code)


def _shorten_temporary_folder() -> None:
    """Use /tmp if the path of TMPDIR is too long for sockets, as it is in some schedulers' directories for each job.
    Ranks and their data workers inherit the choice."""
    if len(os.fsencode(tempfile.gettempdir())) > _MAX_TEMPORARY_BYTES:
        before, tempfile.tempdir = tempfile.tempdir, "/tmp"
        try:
            util.get_temp_dir()  # creates and caches multiprocessing's directory
        finally:
            tempfile.tempdir = before


def stop_fork_server() -> None:
    """Kill the server, and with it any rank that the launcher does not know of."""
    server = getattr(forkserver, "_forkserver", None)
    pid = getattr(server, "_forkserver_pid", None)
    if pid is not None:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def remove_sockets() -> None:
    """Remove the folder with the sockets of the server and its ranks, for a process that exits by `os._exit`."""
    address = getattr(getattr(forkserver, "_forkserver", None), "_forkserver_address", None)
    if isinstance(address, str) and (folder := Path(address).parent).name.startswith("pymp-"):
        shutil.rmtree(folder, ignore_errors=True)


def belong_to_launcher() -> None:
    """In a rank: end with the launcher, however it ends, and let it handle Ctrl-C."""
    die_with_parent()
    # The parent is the fork server, which ends when the last holder of its pipe closes it. A rank must not hold it.
    server: Any = getattr(forkserver, "_forkserver", None)
    pipe = getattr(server, "_forkserver_alive_fd", None)
    if pipe is not None:
        os.close(pipe)
        server._forkserver_alive_fd = None
    os.setpgid(0, 0)  # so that the launcher can kill the rank with all processes that the task started
    signal.signal(signal.SIGINT, signal.SIG_IGN)
