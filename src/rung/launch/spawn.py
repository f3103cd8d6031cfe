"""Runs a function on ranks of this machine and returns the result of each: for benchmarks and checks.

Training jobs, which also need logs, a status board and restarts, are started by `launcher.py`.
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

from rung.distributed.job_key import new_key, shared_key
from rung.distributed.signed_store import LOOPBACK, serve_store
from rung.errors import RungError
from rung.launch.fork_server import belong_to_launcher
from rung.launch.rendezvous.job_store import LauncherLost
from rung.launch.rendezvous.rendezvous import local_rendezvous, open_rendezvous
from rung.spec.config import RunConfig
from rung.system.launcher_env import WORLD_KEY_VARIABLE, use_interface
from rung.system.network import interface_of
from rung.system.processes import num_cores

_LEAVE_SECONDS = 10.0
_CAUSE_SECONDS = 2.0  # how long to wait for the failure that caused a lost connection
# Errors of a rank whose peer has ended.
_LOST_PEER = re.compile(
    r"closed by peer|reset by peer|connection refused|broken pipe|pair closure|remote process exited", re.IGNORECASE
)


class RankFailedError(RungError):
    """A rank raised, died or sent nothing for too long. The other ranks were killed."""

    def __init__(self, rank: int, what: str, error: str = "") -> None:
        super().__init__(f"rank {rank} {what}" + (f":\n{error}" if error else ""))
        self.rank, self.what, self.error = rank, what, error


@dataclass(frozen=True)
class LocalRanks:
    """This machine's ranks of a world."""

    size: int  # ranks of the world
    num_local: int
    port: int
    key: str = field(repr=False)  # with which the ranks sign messages
    first_rank: int = 0
    address: str = "127.0.0.1"
    interface: str | None = "lo"  # explicit, because otherwise gloo depends on how the machine's name resolves

    def environment(self, local_rank: int) -> dict[str, str]:
        """The variables that torchrun would set for a rank, and the key."""
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
    """Run function(*args) on `size` ranks of this machine; see `on_local_ranks`."""
    store = serve_store(LOOPBACK)
    local_ranks = LocalRanks(size, size, store.port, new_key(), interface=interface_of(LOOPBACK))
    return on_local_ranks(function, local_ranks, *args, threads=threads, listen=listen, timeout=timeout)


@contextlib.contextmanager
def local_ranks_of_world(
    nproc: int, nodes: int, rdzv: str | None, key_file: str | None, say: Callable[[str], None]
) -> Iterator[LocalRanks]:
    """Form a world with the other machines as training jobs do. Closes it for all machines when the work is done."""
    rendezvous = (
        local_rendezvous() if rdzv is None else open_rendezvous(rdzv, shared_key(key_file), (nodes, nodes), say)
    )
    try:
        while True:
            with contextlib.suppress(LauncherLost):
                round_ = rendezvous.form(nproc, "ddp", RunConfig(), resume=False)
                break
            time.sleep(0.1)
        yield LocalRanks(
            size=round_.size,
            num_local=round_.num_local,
            port=round_.port,
            key=rendezvous.key_of(round_),
            first_rank=round_.first_rank,
            address=round_.address,
            interface=rendezvous.interface,
        )
        rendezvous.close("finished", "")
    finally:
        rendezvous.leave()


def on_local_ranks(
    function: Callable[..., Any],
    local_ranks: LocalRanks,
    *args: Any,
    threads: int | None = None,
    listen: Callable[[Any], None] | None = None,
    timeout: float | None = None,
) -> list[Any]:
    """Run function(*args) on this machine's ranks, new processes of the fork server. Returns results in rank order.

    With `listen`, the function gets a further argument, a callable that sends a value here, where `listen` is called
    with it. The store of `local_ranks` must already be open. Raises if no rank sends anything for `timeout` seconds.
    """
    context = multiprocessing.get_context("forkserver")
    threads = threads or (None if "OMP_NUM_THREADS" in os.environ else max(1, num_cores() // local_ranks.num_local))
    ranks: list[BaseProcess] = []
    ends: dict[Connection, int] = {}
    found: dict[int, Any] = {}
    try:
        for local_rank in range(local_ranks.num_local):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (function, args, local_ranks, local_rank, threads, theirs, listen is not None)
            process = context.Process(target=_rank, args=arguments)
            process.start()
            theirs.close()  # so that the pipe is closed when the rank ends
            ranks.append(process)
            ends[ours] = local_rank
        _collect(ends, ranks, local_ranks, found, listen, timeout)
    finally:
        deadline = time.monotonic() + (_LEAVE_SECONDS if len(found) == local_ranks.num_local else 0)
        for rank in ranks:
            rank.join(max(0.0, deadline - time.monotonic()))
            if rank.is_alive():
                rank.kill()
                rank.join()
        for end in ends:
            end.close()
    return [found[local_rank] for local_rank in range(local_ranks.num_local)]


def _collect(
    ends: dict[Connection, int],
    ranks: list[BaseProcess],
    local_ranks: LocalRanks,
    found: dict[int, Any],
    listen: Callable[[Any], None] | None,
    timeout: float | None,
) -> None:
    while len(found) < local_ranks.num_local:
        waiting = [end for end, local_rank in ends.items() if local_rank not in found]
        ready = wait(waiting, timeout)
        if not ready:
            raise RankFailedError(
                local_ranks.first_rank + ends[waiting[0]], f"and others sent nothing for {timeout:.0f} s"
            )
        for end in ready:
            assert isinstance(end, Connection)
            local_rank = ends[end]
            outcome = _receive(end, local_rank, ranks, local_ranks)
            if isinstance(outcome, RankFailedError):
                others = [other for other in waiting if other is not end]
                raise _first_cause(outcome, others, ends, ranks, local_ranks, listen)
            kind, value = outcome
            if kind == "done":
                found[local_rank] = value
            elif listen is not None:
                listen(value)


def _receive(
    end: Connection, local_rank: int, ranks: list[BaseProcess], local_ranks: LocalRanks
) -> tuple[str, Any] | RankFailedError:
    rank = local_ranks.first_rank + local_rank
    try:
        kind, value = end.recv()
    except EOFError:
        return RankFailedError(rank, _describe_end(ranks[local_rank]))
    return RankFailedError(rank, "failed", value) if kind == "failed" else (kind, value)


def _first_cause(
    failure: RankFailedError,
    others: list[Connection],
    ends: dict[Connection, int],
    ranks: list[BaseProcess],
    local_ranks: LocalRanks,
    listen: Callable[[Any], None] | None,
) -> RankFailedError:
    """The failure that caused this one: a rank that lost its connection may report before the peer that failed.

    What other ranks sent before they are killed is still received."""
    deadline = time.monotonic() + _CAUSE_SECONDS
    waiting = list(others)
    while waiting:
        is_consequence = _LOST_PEER.search(failure.error) is not None
        ready = wait(waiting, max(0.0, deadline - time.monotonic()) if is_consequence else 0)
        if not ready:
            break
        for end in ready:
            assert isinstance(end, Connection)
            outcome = _receive(end, ends[end], ranks, local_ranks)
            if isinstance(outcome, RankFailedError):
                waiting.remove(end)
                if is_consequence and not _LOST_PEER.search(outcome.error):
                    failure, is_consequence = outcome, False
            elif outcome[0] == "message" and listen is not None:
                listen(outcome[1])
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
    local_ranks: LocalRanks,
    local_rank: int,
    threads: int | None,
    end: Connection,
    sends: bool,
) -> None:
    belong_to_launcher()
    os.dup2(2, 1)  # only the launcher writes to standard output
    os.environ.update(local_ranks.environment(local_rank))
    use_interface(local_ranks.interface)
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        further = (lambda value: end.send(("message", value)),) if sends else ()
        end.send(("done", function(*args, *further)))
        code = 0
    except BaseException:
        end.send(("failed", traceback.format_exc()))
        code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Not a normal exit: threads of a broken process group may never end.
    os._exit(code)
