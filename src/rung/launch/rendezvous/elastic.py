"""Elastic jobs: how many processes and machines a job may have, how often it restarts, and how it is scaled."""

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
from rung.errors import ConfigError, EnvironmentProblem
from rung.spec.config import RunConfig, count_range
from rung.system.network import address_among_others, split_endpoint
from rung.system.processes import is_running, machine_name, started_at
from rung.system.untrusted import read_json, read_regular

_RESTARTS = 3  # in a row without progress, for a job that may change its size
_SCALE = "scale"  # file in the state folder: the number of processes that `rung scale` requests
_LAUNCHER = "launcher"  # file in the state folder: which process runs the job
_MAX_FILE_BYTES = 2**16
SETTINGS = "settings"  # store key: the settings that all launchers of a job share
BEGINS = "begins"  # store key: whether the run begins or is resumed, as the launchers agreed
FINISHED = "rung/finished"  # store key: set once a job of this store has finished
_FINISHED_SECONDS = 5.0  # that the store stays up after that


class Unconfirmed(EnvironmentProblem):
    """The store held a value that none of the job's launchers has chosen. They must form the rendezvous again."""


@dataclass(frozen=True)
class ElasticPolicy:
    """The limits of a job: its numbers of processes and machines, and its restarts."""

    processes: tuple[int, int]  # minimum and maximum on this machine
    nodes: tuple[int, int] = (1, 1)
    rdzv: str | None = None
    max_restarts: int = 0
    grace_seconds: int = 30
    is_polite: bool = False  # SIGTERM and SIGUSR1 request a checkpoint before the job ends

    @property
    def is_elastic(self) -> bool:
        """Whether the number of ranks may change while the job runs."""
        return self.processes[0] != self.processes[1] or self.nodes[0] != self.nodes[1]

    @property
    def restarts(self) -> bool:
        return self.max_restarts > 0 or self.is_elastic


def elastic_policy(config: RunConfig, num_local: int) -> ElasticPolicy:
    """The policy that the settings of `rung train` ask for; `num_local` is the number of processes without --nproc."""
    processes = count_range(config.nproc) if config.nproc is not None else (num_local, num_local)
    nodes = count_range(config.nnodes, "nnodes")
    if nodes[1] > 1 and config.rdzv is None:
        raise ConfigError(
            f"--nnodes {config.nnodes} needs a rendezvous. Give all machines the same --rdzv HOST:PORT, the address of "
            "one of them and a free port there."
        )
    if nodes[1] == 1 and config.rdzv is not None:
        raise ConfigError(f"--rdzv {config.rdzv} is for several machines. Give --nnodes too, as in 2 or 1:4.")
    if nodes[1] == 1 and config.rdzv_key is not None:
        raise ConfigError(
            f"--rdzv-key {config.rdzv_key} is for several machines. A job on one machine makes its own key: leave it "
            "out."
        )
    may_change = processes[0] != processes[1] or nodes[1] > 1
    restarts = config.max_restarts if config.max_restarts is not None else (_RESTARTS if may_change else 0)
    return ElasticPolicy(processes, nodes, config.rdzv, restarts, config.grace_seconds, is_polite=True)


class Restarts:
    """Counts failures in a row. Progress since the last failure resets the count."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._furthest = -1
        self.in_a_row = 0

    def after_failure(self, step: int) -> bool:
        """Whether the job may restart after a failure in this step."""
        self.in_a_row = 1 if step > self._furthest else self.in_a_row + 1
        self._furthest = max(self._furthest, step)
        return self.in_a_row <= self._limit


# -- changing the number of processes while the job runs -------------------------------------------------------------


def announce(state: Path, policy: ElasticPolicy) -> None:
    """Write which process runs the job, and within which limits, for `rung scale` and `rung watch`."""
    (state / _SCALE).unlink(missing_ok=True)
    launcher = {
        "pid": os.getpid(),
        "since": started_at(os.getpid()),
        "least": policy.processes[0],
        "most": policy.processes[1],
        "machine": machine_name(),
    }
    (state / _LAUNCHER).write_text(json.dumps(launcher))


def launchers(run: Path) -> dict[Path, dict[str, Any]]:
    """What `announce` wrote for each launcher of a run, on any machine. Some of them may have been killed since."""
    found = {}
    for path in [run / ".state" / _LAUNCHER, *(run / ".state").glob(f"*/{_LAUNCHER}")]:
        launcher = _read_launcher(path)
        if launcher is not None:
            found[path] = launcher
    return found


def _read_launcher(path: Path) -> dict[str, Any] | None:
    try:
        launcher = read_json(path, _MAX_FILE_BYTES)
    except (OSError, ValueError):
        return None
    if not isinstance(launcher, dict) or not isinstance(launcher.get("machine", ""), str):
        return None
    counts = [launcher.get("pid"), launcher.get("least"), launcher.get("most")]
    # A run may have come from elsewhere, and its pid becomes part of a path below /proc.
    return launcher if all(type(count) is int and 0 < count < 2**31 for count in counts) else None


def running_launcher(state: Path) -> int | None:
    """The process that runs a single-machine job in this directory now."""
    launcher = _read_launcher(state / _LAUNCHER)
    if launcher is None:
        return None
    pid: int = launcher["pid"]
    # Another process may have the same pid by now; its start time differs.
    return pid if is_running(pid) and launcher.get("since", started_at(pid)) == started_at(pid) else None


def retire(state: Path) -> None:
    """Remove the files of `announce`. Best effort: an error here must not hide why the job ended."""
    with contextlib.suppress(OSError):
        for path in [state / _SCALE, state / _LAUNCHER, *state.glob(".room-*")]:
            path.unlink(missing_ok=True)


def wanted_processes(state: Path) -> int | None:
    """The number of processes that `rung scale` requested, once for each request."""
    try:
        text = read_regular(state / _SCALE, _MAX_FILE_BYTES)
    except OSError:
        return None
    (state / _SCALE).unlink(missing_ok=True)
    return int(text) if re.fullmatch(b"[0-9]{1,9}", text) else None


def scale(run: str | Path, count: int) -> str:
    """Request another number of processes from the launcher of a running job. Returns a line for the user."""
    running = {path: launcher for path, launcher in launchers(Path(run)).items() if is_running(launcher["pid"])}
    if not running:
        where = (
            f"{run} is not a run that is running on this machine" if Path(run).is_dir() else f"there is no run {run}"
        )
        raise ConfigError(f"{where}. `rung scale` changes a job while it runs.")
    ((path, launcher), *_) = running.items()
    state, least, most = path.parent, launcher["least"], launcher["most"]
    if least == most:
        raise ConfigError(f"{run} has a fixed number of processes, {most}. Start it with --nproc MIN:MAX to scale it.")
    if not least <= count <= most:
        raise ConfigError(f"{run} may have {least} to {most} processes, not {count}.")
    refuse_escapes(Path(run), ("state",))
    partial = state / f".{_SCALE}"  # renamed, so that the launcher never reads half a number
    partial.write_text(str(count))
    partial.rename(state / _SCALE)
    return f"asked {run} to continue with {count} processes, which it does after its current step"


# -- the rendezvous store as a process of its own --------------------------------------------------------------------


def serve_rendezvous(place: str, when_ready: Callable[[str], None], *, once: bool = False) -> bool:
    """Serve the rendezvous store until a signal ends this process, so that the job survives the loss of any machine.

    `place` is a port, on all interfaces, or HOST:PORT, on one. With `once`, the store also ends when a job that used
    it has finished. Returns whether one has. `when_ready` gets the address at which the store listens.
    """
    # Otherwise torch logs a line for every client whose address has no name.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from rung.distributed.signed_store import serve_store  # loads torch, which reads the variable then

    if not place.rpartition(":")[2].isdigit():
        raise ConfigError(f"rung rdzv takes PORT or HOST:PORT, as in 29500 or node1:29500, not {place!r}.")
    host, port = split_endpoint(place) if ":" in place else ("", int(place))
    # This machine's name may resolve to loopback here, where no other machine could reach the store.
    address = address_among_others(host, port)[0] if host else "0.0.0.0"
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    try:
        store = serve_store(address, port, seconds=20)
    except (OSError, OverflowError, RuntimeError) as error:
        raise ConfigError(f"cannot listen at {place}: {str(error).splitlines()[0]}") from None
    when_ready(f"port {port} of {f'{host} alone' if host else 'all interfaces of this machine'}")
    finished = False
    while not ended.wait(0.5) and not finished:
        finished = once and store.check([FINISHED])
    if finished:
        ended.wait(_FINISHED_SECONDS)  # launchers outside the job's last world still read the result here
    del store
    return finished
