"""Runs a function on ranks of this machine, each a fresh process, for benchmarks that look at more than steps."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def on_ranks(function: Callable[..., Any], size: int, *args: Any, timeout: float = 3600) -> list[Any]:
    """function(*args) on `size` ranks of one thread each; the results in rank order."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    ranks = [
        context.Process(target=_rank, args=(function, rank, size, store.port, results, args)) for rank in range(size)
    ]
    for process in ranks:
        process.start()
    found: dict[int, Any] = {}
    try:
        while len(found) < size:
            rank, error, value = results.get(timeout=timeout)
            if error is not None:
                raise RuntimeError(f"rank {rank} failed:\n{error}")
            found[rank] = value
    finally:
        for process in ranks:
            process.join(10 if len(found) == size else 0)
            if process.is_alive():
                process.kill()
                process.join()
    return [found[rank] for rank in range(size)]


def _rank(function: Callable[..., Any], rank: int, size: int, port: int, results: Any, args: tuple[Any, ...]) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    try:
        results.put((rank, None, function(*args)))
    except BaseException:
        results.put((rank, traceback.format_exc(), None))
