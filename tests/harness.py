"""Runs a function on several real ranks (gloo, this machine), each a fresh process forked from a warm server."""

from __future__ import annotations

import multiprocessing
import os
import queue
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_PRELOADED = [
    "torch.distributed.fsdp",
    "torch.distributed.optim",  # strategies over RPC need it; it compiles scripts for half a second
    "torch.distributed.tensor",
    "rung.train.session",
    "rung.train.worker",
    "tests.harness",
]
multiprocessing.set_forkserver_preload(_PRELOADED)

# Of the tests that draw bits, ranks and moments. Another draw: RUNG_TEST_SEED=7 pytest ...
SEED = int(os.environ.get("RUNG_TEST_SEED", "1"))
RETRIES: list[str] = []  # of the test that runs


def on_ranks(function: Callable[..., Any], size: int, *args: Any, timeout: float = 120) -> list[Any]:
    """function(*args) on `size` ranks; the results in rank order. A failure on any rank is raised with it.

    On a busy machine gloo may lose a connection while its ranks meet, before anything of ours has run: one retry, then,
    which pytest's summary counts (tests/conftest.py).
    """
    try:
        return _on_ranks(function, size, *args, timeout=timeout)
    except RankFailed as failure:
        if "connectFullMesh failed" not in str(failure):
            raise
        RETRIES.append(f"{getattr(function, '__name__', function)} on {size} ranks: gloo's connectFullMesh failed")
        return _on_ranks(function, size, *args, timeout=timeout)


def _on_ranks(function: Callable[..., Any], size: int, *args: Any, timeout: float) -> list[Any]:
    context = multiprocessing.get_context("forkserver")
    results: Any = context.Queue()
    # A store of the parent's on a port of the system's choice, as the elastic agent does: no two tests collide.
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    ranks = [
        context.Process(target=_rank, args=(function, rank, size, store.port, results, args), daemon=False)
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    outcome: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    try:
        while len(outcome) < size:
            try:
                rank, error, value = results.get(timeout=0.2)
            except queue.Empty:
                dead = [p.exitcode for r, p in enumerate(ranks) if not p.is_alive() and r not in outcome]
                if dead and results.empty():
                    raise AssertionError(f"a rank died with exit code {dead[0]}") from None
                if time.monotonic() > deadline:
                    raise AssertionError(f"ranks {sorted(set(range(size)) - set(outcome))} hang") from None
                continue
            if error is not None:
                raise RankFailed(rank, error)
            outcome[rank] = value
    finally:
        for process in ranks:
            process.join(5 if len(outcome) == size else 0)
            if process.is_alive():
                process.kill()
                process.join()
    return [outcome[rank] for rank in range(size)]


class RankFailed(AssertionError):
    def __init__(self, rank: int, error: str) -> None:
        super().__init__(f"rank {rank} failed:\n{error}")
        self.error = error


def _rank(function: Callable[..., Any], rank: int, size: int, port: int, results: Any, args: tuple[Any, ...]) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RUNG_WORLD_KEY="known to the ranks of tests",
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    torch.set_num_threads(1)
    try:
        results.put((rank, None, function(*args)))
    except BaseException:
        results.put((rank, traceback.format_exc(), None))
        results.close()
        results.join_thread()
        os._exit(1)
