"""On which terms a job runs: how many processes and machines it may have, and how often it starts again."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rung.checkpoint.places import refuse_escapes
from rung.config import RunConfig, count_range
from rung.errors import ConfigError
from rung.network import address_among_others, split_endpoint
from rung.processes import is_running, machine_name, started_at
from rung.untrusted import read_json, read_regular

_RESTARTS = 3  # in a row without progress, for a job that may change its size
_SCALE = "scale"
_LAUNCHER = "launcher"
_MAX_NOTE = 2**16  # bytes of what launchers write for each other
FINISHED = "rung/finished"  # in the store, once a job that met there has come to its end
_FAREWELL_SECONDS = 5.0


@dataclass(frozen=True)
class Terms:
    """What a launcher may do when something happens to its job."""

    processes: tuple[int, int]  # the least and the most on this machine
    nodes: tuple[int, int] = (1, 1)
    rdzv: str | None = None
    max_restarts: int = 0
    grace_seconds: int = 30
    is_polite: bool = False  # SIGTERM and SIGUSR1 ask for a checkpoint, and are not the end

    @property
    def is_elastic(self) -> bool:
        """Whether the number of ranks may change while the job runs."""
        return self.processes[0] != self.processes[1] or self.nodes[0] != self.nodes[1]

    @property
    def restarts(self) -> bool:
        return self.max_restarts > 0 or self.is_elastic


def terms_of(config: RunConfig, num_local: int) -> Terms:
    """The terms of `rung train`; `num_local` is how many processes this machine has when nothing says so."""
    processes = count_range(config.nproc) if config.nproc is not None else (num_local, num_local)
    nodes = count_range(config.nnodes, "nnodes")
    if nodes[1] > 1 and config.rdzv is None:
        raise ConfigError(
            f"--nnodes {config.nnodes} is several machines, which must know where to meet. Give all of them the same "
            "--rdzv HOST:PORT, the address of one of them and a free port there."
        )
    if nodes[1] == 1 and config.rdzv is not None:
        raise ConfigError(f"--rdzv {config.rdzv} is for several machines. Say how many with --nnodes, as in 2 or 1:4.")
    if nodes[1] == 1 and config.rdzv_key is not None:
        raise ConfigError(
            f"--rdzv-key {config.rdzv_key} is for several machines. A job of one makes a key of its own: leave it out."
        )
    changes = processes[0] != processes[1] or nodes[1] > 1
    restarts = config.max_restarts if config.max_restarts is not None else (_RESTARTS if changes else 0)
    return Terms(processes, nodes, config.rdzv, restarts, config.grace_seconds, is_polite=True)


class Restarts:
    """Counts failures in a row. One after which the job came further than before begins a new row."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._furthest = -1
        self.in_a_row = 0

    def after_failure(self, step: int) -> bool:
        """Whether the job may go on after a failure in this step."""
        self.in_a_row = 1 if step > self._furthest else self.in_a_row + 1
        self._furthest = max(self._furthest, step)
        return self.in_a_row <= self._limit


# -- changing the number of processes while the job runs -------------------------------------------------------------


def announce(state: Path, terms: Terms) -> None:
    """Tell `rung scale` who runs the job, and within which limits."""
    (state / _SCALE).unlink(missing_ok=True)
    told = {
        "pid": os.getpid(),
        "since": started_at(os.getpid()),
        "least": terms.processes[0],
        "most": terms.processes[1],
        "machine": machine_name(),
    }
    (state / _LAUNCHER).write_text(json.dumps(told))


def launchers(run: Path) -> dict[Path, dict[str, Any]]:
    """What the launchers of a run told of themselves, on whatever machine. One that was killed may be among them."""
    paths = [run / ".state" / _LAUNCHER, *(run / ".state").glob(f"*/{_LAUNCHER}")]
    found = {}
    for path in paths:
        with contextlib.suppress(OSError, ValueError):  # it may be gone meanwhile
            told = read_json(path, _MAX_NOTE)
            if _is_launcher(told):
                found[path] = told
    return found


def _is_launcher(told: Any) -> bool:
    """Whether a file says of a launcher what `announce` writes. A number of a process is used in a path of /proc."""
    if not isinstance(told, dict) or not isinstance(told.get("machine", ""), str):
        return False
    counts = [told.get("pid"), told.get("least"), told.get("most")]
    return all(type(count) is int and 0 < count < 2**31 for count in counts)


def running_launcher(state: Path) -> int | None:
    """The process that runs a job of this machine alone in a directory at this moment."""
    try:
        told = read_json(state / _LAUNCHER, _MAX_NOTE)
    except (OSError, ValueError):
        return None
    if not _is_launcher(told):
        return None
    pid: int = told["pid"]
    return pid if is_running(pid) and told.get("since", started_at(pid)) == started_at(pid) else None


def retire(state: Path) -> None:
    """Best effort: the directory may be gone or read-only by now, and why the job ended matters more."""
    with contextlib.suppress(OSError):
        for path in [state / _SCALE, state / _LAUNCHER, *state.glob(".room-*")]:
            path.unlink(missing_ok=True)


def wanted_processes(state: Path) -> int | None:
    """What `rung scale` asked for, once."""
    try:
        text = read_regular(state / _SCALE, _MAX_NOTE)
    except OSError:
        return None
    (state / _SCALE).unlink(missing_ok=True)
    return int(text) if re.fullmatch(b"[0-9]{1,9}", text) else None


def scale(run: str | Path, count: int) -> str:
    """Ask the launcher of a running job for another number of processes. What to tell the user."""
    told = {path: launcher for path, launcher in launchers(Path(run)).items() if is_running(launcher["pid"])}
    if not told:
        where = (
            f"{run} is not a run that is running on this machine" if Path(run).is_dir() else f"there is no run {run}"
        )
        raise ConfigError(f"{where}. `rung scale` changes a job while it runs.")
    ((path, launcher), *_) = told.items()
    state, least, most = path.parent, launcher["least"], launcher["most"]
    if least == most:
        raise ConfigError(f"{run} runs with {most} processes for good. Start it with --nproc MIN:MAX to scale it.")
    if not least <= count <= most:
        raise ConfigError(f"{run} may have {least} to {most} processes, not {count}.")
    refuse_escapes(Path(run), ("state",))
    partial = state / f".{_SCALE}"
    partial.write_text(str(count))
    partial.rename(state / _SCALE)
    return f"asked {run} to go on with {count} processes; it does after the step that it is in"


# -- a place to meet -------------------------------------------------------------------------------------------------


def keep_store(place: str, when_ready: Callable[[str], None], *, once: bool = False) -> bool:
    """Hold the store where machines meet until a signal ends this process: no machine of the job is then special.

    `place` is a port, of all interfaces, or HOST:PORT, for one. With `once`, until a job that met here has finished,
    too. Returns whether one has. `when_ready` is told where it listens.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it would tell of every client whose address has no name
    from rung.signed_store import serve_store

    if not place.rpartition(":")[2].isdigit():
        raise ConfigError(f"rung rdzv takes PORT or HOST:PORT, as in 29500 or node1:29500, not {place!r}.")
    host, port = split_endpoint(place) if ":" in place else ("", int(place))
    # The own name may mean loopback here, where no other machine would find the store.
    address = address_among_others(host, port)[0] if host else "0.0.0.0"
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    try:
        store = serve_store(address, port, seconds=20)
    except (OSError, OverflowError, RuntimeError) as error:
        raise ConfigError(f"{place} cannot be listened at: {str(error).splitlines()[0]}") from None
    when_ready(f"port {port} of {f'{host} alone' if host else 'all interfaces of this machine'}")
    finished = False
    while not ended.wait(0.5) and not finished:
        finished = once and store.check([FINISHED])
    if finished:
        ended.wait(_FAREWELL_SECONDS)  # launchers that were not part of its last world look there how it ended
    del store
    return finished
