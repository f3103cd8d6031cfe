"""What gloo takes by itself for so many ranks on this machine: `python -m benchmarks.contenders.bare_gloo 16`.

Prints the median seconds of an all_reduce and of an all_gather of a few hundred numbers, as JSON.
"""

from __future__ import annotations

import json
import socket
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_REPEATS = 20


def _work(rank: int, size: int, port: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    whole, own = torch.ones(576), torch.ones(576 // size + 1)
    parts = [torch.empty_like(own) for _ in range(size)]
    found = {
        "all_reduce": _time(lambda: dist.all_reduce(whole)),
        "all_gather": _time(lambda: dist.all_gather(parts, own)),
    }
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _time(operation: Callable[[], object]) -> float:
    times = []
    for number in range(_REPEATS + 3):
        dist.barrier()
        started = time.perf_counter()
        operation()
        if number >= 3:
            times.append(time.perf_counter() - started)
    return statistics.median(times)


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    count = int(sys.argv[1])
    mp.start_processes(_work, args=(count, free), nprocs=count, start_method="fork")  # type: ignore[no-untyped-call]
