"""Search layouts in several processes. A process takes all layouts of one tp size, because these share block traces and
tensor plans."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rung.hardware.cluster import Cluster
from rung.planner.estimate import Estimator
from rung.planner.search import SearchResult, search
from rung.planner.truncated_model import count_blocks
from rung.spec.config import RunConfig
from rung.spec.strategy import Layout
from rung.spec.task import Task, load_task
from rung.system.processes import num_cores
from rung.train.sample_order import with_fullest_batch

FEW = 24  # up to this many layouts, one process finishes before others would have started


@dataclass(frozen=True)
class TaskSource:
    """The path and arguments with which another process can load a task."""

    path: str | Path
    arguments: Mapping[str, Any]
    given: RunConfig | None = None  # of a plan whose batches are by tokens

    def load(self) -> Task:
        task = load_task(self.path).bind(self.arguments)
        return with_fullest_batch(task, self.given)[0] if self.given is not None else task


def search_in_processes(
    source: TaskSource,
    config: RunConfig,
    cluster: Cluster,
    layouts: Sequence[Layout],
    state: dict[str, int],
    progress: Callable[[str], None],
) -> list[SearchResult]:
    """Search `layouts` in a process pool; returns the results in the same order."""
    groups: dict[int, list[Layout]] = {}
    for layout in layouts:
        groups.setdefault(layout.tp, []).append(layout)
    # tp=1 first: it is fast to estimate and often contains the best. Then the largest tp, which takes longest.
    order = sorted(groups, key=lambda tp: (tp != 1, -tp))
    context = multiprocessing.get_context("forkserver")
    found: dict[str, SearchResult] = {}
    workers = min(num_cores(), len(groups))
    # Nothing is sent: workers exit when our end closes, which also happens if this process dies.
    theirs, ours = context.Pipe(duplex=False)
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(theirs,)) as pool,
    ):
        best = Path(folder, "best")
        np.full(len(order), np.inf).tofile(best)
        try:
            jobs: dict[Future[list[SearchResult]], int] = {
                pool.submit(_search_group, source, config, cluster, groups[tp], state, best, slot): tp
                for slot, tp in enumerate(order)
            }
            progress(f"{len(layouts)} layouts, {workers} at a time")
            for job in as_completed(jobs):
                found |= {one.layout.name: one for one in job.result()}
                progress(f"{len(found)} of {len(layouts)} layouts")
        finally:
            ours.close()
    return [found[layout.name] for layout in layouts]


def _start_worker(end: Connection) -> None:
    torch.set_num_threads(1)  # there may be a worker on every core
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches the parent, whose end of the pipe then closes
    threading.Thread(target=_exit_with_parent, args=(end,), daemon=True).start()


def _exit_with_parent(end: Connection) -> None:
    """Exit at once when the parent's end of the pipe closes."""
    with contextlib.suppress(EOFError, OSError):
        end.recv()
    os._exit(0)


def _search_group(
    source: TaskSource,
    config: RunConfig,
    cluster: Cluster,
    layouts: list[Layout],
    state: dict[str, int],
    best: Path,
    slot: int,
) -> list[SearchResult]:
    """Search the layouts of one group. The file `best` holds the seconds of each group's fastest layout; a group only
    writes its own `slot`, so no lock is needed."""
    task = source.load()
    estimator = Estimator(task, config, cluster, count_blocks(task))
    seconds = np.memmap(best, dtype=np.float64, mode="r+")

    def note(one: SearchResult | None) -> float:
        seconds[slot] = min([seconds[slot], *(row.time.seconds for row in (one.rows if one is not None else ()))])
        return float(seconds.min())

    return list(search(estimator, layouts, state, note))
