"""Runs a function on ranks of this machine and brings back what each returns: for benchmarks and checks.

What a training job needs beside that (logs, a status board, restarts) is in `local.py`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from rung.config import RunConfig
from rung.environment import WORLD_KEY_VARIABLE, use_interface
from rung.errors import RungError
from rung.job_key import new_key, shared_key
from rung.launch.server import belong_to_launcher
from rung.network import interface_of
from rung.processes import num_cores
from rung.signed_store import LOOPBACK, serve_store

_LEAVE_SECONDS = 10.0
_CAUSE_SECONDS = 2.0
# What a rank says when another one went away under it.
_LOST_PEER = re.compile(
    r"closed by peer|reset by peer|connection refused|broken pipe|pair closure|remote process exited", re.IGNORECASE
)


class CrewFailed(RungError):
    """A rank raised, died or kept silent for too long. The others were ended with it."""

    def __init__(self, rank: int, what: str, error: str = "") -> None:
        super().__init__(f"rank {rank} {what}" + (f":\n{error}" if error else ""))
        self.rank, self.what, self.error = rank, what, error


@dataclass(frozen=True)
class Seats:
    """The part of a world that this machine has."""

    size: int  # ranks of the world
    num_local: int
    port: int
    key: str = field(repr=False)  # what the ranks sign with
    first_rank: int = 0
    address: str = "127.0.0.1"
    interface: str | None = "lo"  # between the machines; on one, do not depend on how its name resolves

    def environment(self, local_rank: int) -> dict[str, str]:
        """What torchrun would say to a rank."""
        return {
            "RANK": str(self.first_rank + local_rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.num_local),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            WORLD_KEY_VARIABLE: self.key,
        }


def on_ranks(
    function: Callable[..., Any],
    size: int,
    *args: Any,
    threads: int | None = None,
    listen: Callable[[Any], None] | None = None,
    timeout: float | None = None,
) -> list[Any]:
    """function(*args) on `size` ranks of this machine alone; see `on_seats`."""
    store = serve_store(LOOPBACK)
    seats = Seats(size, size, store.port, new_key(), interface=interface_of(LOOPBACK))
    return on_seats(function, seats, *args, threads=threads, listen=listen, timeout=timeout)


@contextlib.contextmanager
def seats_among(
    nproc: int, nodes: int, rdzv: str | None, key_file: str | None, say: Callable[[str], None]
) -> Iterator[Seats]:
    """Meet the other machines as those of a training job do. All of them leave when the work is done."""
    from rung.launch.meeting import LauncherLost, meet_here, open_meeting

    meeting = meet_here() if rdzv is None else open_meeting(rdzv, shared_key(key_file), (nodes, nodes), say)
    try:
        while True:
            with contextlib.suppress(LauncherLost):
                round_ = meeting.form(nproc, "ddp", RunConfig(), resume=False)
                break
            time.sleep(0.1)
        yield Seats(
            size=round_.size,
            num_local=round_.num_local,
            port=round_.port,
            key=meeting.key_of(round_),
            first_rank=round_.first_rank,
            address=round_.address,
            interface=meeting.interface,
        )
        meeting.close("finished", "")
    finally:
        meeting.leave()


def on_seats(
    function: Callable[..., Any],
    seats: Seats,
    *args: Any,
    threads: int | None = None,
    listen: Callable[[Any], None] | None = None,
    timeout: float | None = None,
) -> list[Any]:
    """function(*args) on this machine's ranks, fresh processes from the fork server; their results in rank order.

    With `listen`, the function gets a further argument `tell`, and here `listen` is called with all that any rank
    tells. A store listens at the port of `seats` already. `timeout` is the longest silence of all ranks together.
    """
    context = multiprocessing.get_context("forkserver")
    threads = threads or (None if "OMP_NUM_THREADS" in os.environ else max(1, num_cores() // seats.num_local))
    ranks: list[BaseProcess] = []
    ends: dict[Connection, int] = {}
    found: dict[int, Any] = {}
    try:
        for local_rank in range(seats.num_local):
            ours, theirs = context.Pipe(duplex=False)
            told = (function, args, seats, local_rank, threads, theirs, listen is not None)
            process = context.Process(target=_rank, args=told)
            process.start()
            theirs.close()  # so that the end of the rank is the end of the pipe
            ranks.append(process)
            ends[ours] = local_rank
        _collect(ends, ranks, seats, found, listen, timeout)
    finally:
        deadline = time.monotonic() + (_LEAVE_SECONDS if len(found) == seats.num_local else 0)
        for rank in ranks:
            rank.join(max(0.0, deadline - time.monotonic()))
            if rank.is_alive():
                rank.kill()
                rank.join()
        for end in ends:
            end.close()
    return [found[local_rank] for local_rank in range(seats.num_local)]


def _collect(
    ends: dict[Connection, int],
    ranks: list[BaseProcess],
    seats: Seats,
    found: dict[int, Any],
    listen: Callable[[Any], None] | None,
    timeout: float | None,
) -> None:
    while len(found) < seats.num_local:
        waiting = [end for end, local_rank in ends.items() if local_rank not in found]
        ready = wait(waiting, timeout)
        if not ready:
            raise CrewFailed(seats.first_rank + ends[waiting[0]], f"and others said nothing for {timeout:.0f} s")
        for end in ready:
            assert isinstance(end, Connection)
            local_rank = ends[end]
            outcome = _hear(end, local_rank, ranks, seats)
            if isinstance(outcome, CrewFailed):
                others = [other for other in waiting if other is not end]
                raise _first_cause(outcome, others, ends, ranks, seats)
            kind, value = outcome
            if kind == "done":
                found[local_rank] = value
            elif listen is not None:
                listen(value)


def _hear(end: Connection, local_rank: int, ranks: list[BaseProcess], seats: Seats) -> tuple[str, Any] | CrewFailed:
    rank = seats.first_rank + local_rank
    try:
        kind, value = end.recv()
    except EOFError:
        return CrewFailed(rank, _describe_end(ranks[local_rank]))
    return CrewFailed(rank, "failed", value) if kind == "failed" else (kind, value)


def _first_cause(
    failure: CrewFailed,
    others: list[Connection],
    ends: dict[Connection, int],
    ranks: list[BaseProcess],
    seats: Seats,
) -> CrewFailed:
    """A rank whose peer went away under it may be the first to say so: then the peer has a moment to tell why."""
    deadline = time.monotonic() + _CAUSE_SECONDS
    waiting = list(others)
    while waiting and _LOST_PEER.search(failure.error) and time.monotonic() < deadline:
        for end in wait(waiting, max(0.0, deadline - time.monotonic())):
            assert isinstance(end, Connection)
            outcome = _hear(end, ends[end], ranks, seats)
            if isinstance(outcome, CrewFailed):
                waiting.remove(end)
                failure = failure if _LOST_PEER.search(outcome.error) else outcome
    return failure


def _describe_end(process: BaseProcess) -> str:
    process.join(_LEAVE_SECONDS)
    code = process.exitcode
    if code is not None and code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"left with exit code {code} and no result"


def _rank(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    seats: Seats,
    local_rank: int,
    threads: int | None,
    end: Connection,
    tells: bool,
) -> None:
    belong_to_launcher()
    os.dup2(2, 1)  # standard output is the launcher's
    os.environ.update(seats.environment(local_rank))
    use_interface(seats.interface)
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        further = (lambda value: end.send(("told", value)),) if tells else ()
        end.send(("done", function(*args, *further)))
        code = 0
    except BaseException:
        end.send(("failed", traceback.format_exc()))
        code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Not a normal exit: threads of a broken process group may never end.
    os._exit(code)
