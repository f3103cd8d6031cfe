"""The process that ranks are forked from: it has imported torch before the first of them is wanted."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any

from rung.processes import die_with_parent, raise_file_limit

# What every rank would import for itself. Any optimizer imports dynamo when it is made, which takes a second.
_PRELOADED = [
    "rung.launch.rank",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch._dynamo",
    "torch.utils.tensorboard",
]
# Born with these blocked: the server ignores Ctrl-C by itself only once it has imported everything, and a polite
# request to end that reaches every process of the job must not end it, since the ranks would end with it.
SHIELDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# The path of a socket has 107 bytes, of which these names take 43: /pymp-12345678/rank-12345/listener-12345678.
_MAX_TEMPORARY_BYTES = 64


def warm_up(modules: Sequence[str] = _PRELOADED) -> None:
    """Start the server in the background: it imports torch while the launcher does, too."""
    raise_file_limit()
    _shorten_temporary_folder()
    # On some processors oneDNN writes /tmp/perf-PID.map for a profiler, and leaves one behind for each rank.
    os.environ.setdefault("ONEDNN_JIT_PROFILE", "0")
    # The last is for its end. It comes last because what was registered last is called first.
    multiprocessing.set_forkserver_preload([*modules, "rung.launch.preloaded"])
    # The tracker comes first, because starting it unblocks the signals again.
    signal.pthread_sigmask(signal.SIG_BLOCK, SHIELDED)
    try:
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, SHIELDED)
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SHIELDED)
    atexit.register(cool_down)


def _shorten_temporary_folder() -> None:
    """Processes reach each other by sockets in the temporary directory; ranks and their data workers inherit its name.
    A TMPDIR that is too long for that, as some schedulers make one for each job, gives way to /tmp."""
    if len(os.fsencode(tempfile.gettempdir())) > _MAX_TEMPORARY_BYTES:
        before, tempfile.tempdir = tempfile.tempdir, "/tmp"
        try:
            util.get_temp_dir()  # which remembers it
        finally:
            tempfile.tempdir = before


def cool_down() -> None:
    """End the server with the launcher, not a moment after; a rank that nobody knows of ends with it."""
    server = getattr(forkserver, "_forkserver", None)
    pid = getattr(server, "_forkserver_pid", None)
    if pid is not None:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def remove_sockets() -> None:
    """For a process that ends without cleaning up: the folder with the socket of the server, and those of its ranks."""
    address = getattr(getattr(forkserver, "_forkserver", None), "_forkserver_address", None)
    if isinstance(address, str) and (folder := Path(address).parent).name.startswith("pymp-"):
        shutil.rmtree(folder, ignore_errors=True)


def belong_to_launcher() -> None:
    """In a rank: end with the launcher, however that ends, and leave Ctrl-C to it."""
    die_with_parent()
    # The parent is the fork server. It ends when nobody holds its pipe any more, and a rank must not be one who does.
    server: Any = getattr(forkserver, "_forkserver", None)
    pipe = getattr(server, "_forkserver_alive_fd", None)
    if pipe is not None:
        os.close(pipe)
        server._forkserver_alive_fd = None
    os.setpgid(0, 0)  # a group to be killed as one, with everything that the task starts
    signal.signal(signal.SIGINT, signal.SIG_IGN)
