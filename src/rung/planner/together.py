"""Many layouts looked at by several processes. Each takes all layouts that cut tensors alike, so that nothing that one
has found out about a block (what it does, how it can be cut) has to be found out by another."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from rung.config import RunConfig
from rung.planner.estimate import Estimator
from rung.planner.hardware import Cluster
from rung.planner.search import Found, search
from rung.planner.shorten import count_blocks
from rung.processes import num_cores
from rung.strategy import Layout
from rung.task import load_task

FEW = 24  # layouts that one process looks at in the time that others need to start

_best: Any = None  # in a worker: the seconds of the quickest layout that any has found


@dataclass(frozen=True)
class Source:
    """Where a task comes from, so that another process can load it."""

    path: str | Path
    arguments: Mapping[str, Any]


def search_together(
    source: Source,
    config: RunConfig,
    cluster: Cluster,
    layouts: Sequence[Layout],
    state: dict[str, int],
    tell: Callable[[str], None],
) -> list[Found]:
    """What is found of each layout, in their order."""
    groups: dict[int, list[Layout]] = {}
    for layout in layouts:
        groups.setdefault(layout.tp, []).append(layout)
    # Whole tensors are quick to look at, and the best is often among them; what is cut most takes longest.
    order = sorted(groups, key=lambda tp: (tp != 1, -tp))
    context = multiprocessing.get_context("forkserver")
    best = context.Value("d", float("inf"))
    found: dict[str, Found] = {}
    workers = min(num_cores(), len(groups))
    theirs, ours = context.Pipe(duplex=False)  # nothing is sent: when our end closes, however that comes, workers leave
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start, initargs=(best, theirs)) as pool:
        try:
            jobs: dict[Future[list[Found]], int] = {
                pool.submit(_look, source, config, cluster, groups[tp], state): tp for tp in order
            }
            tell(f"{len(layouts)} layouts, {workers} at a time")
            for job in as_completed(jobs):
                found |= {one.layout.name: one for one in job.result()}
                tell(f"{len(found)} of {len(layouts)} layouts")
        finally:
            ours.close()
    return [found[layout.name] for layout in layouts]


def _start(best: Any, end: Connection) -> None:
    global _best
    _best = best
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one that asked is told of it, too
    threading.Thread(target=_leave_with, args=(end,), daemon=True).start()


def _leave_with(end: Connection) -> None:
    """Wait for the other end to close, and leave at once: what this process is doing is wanted no more."""
    with contextlib.suppress(EOFError, OSError):
        end.recv()
    os._exit(0)


def _look(
    source: Source, config: RunConfig, cluster: Cluster, layouts: list[Layout], state: dict[str, int]
) -> list[Found]:
    task = load_task(source.path).bind(source.arguments)
    estimator = Estimator(task, config, cluster, count_blocks(task))

    def note(one: Found | None) -> float:
        with _best.get_lock():
            _best.value = min([_best.value, *(row.time.seconds for row in (one.rows if one is not None else ()))])
            return float(_best.value)

    return list(search(estimator, layouts, state, note))
