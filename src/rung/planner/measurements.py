"""Measurements of layouts on the device that is here: made in a process of their own, within a minute, and kept.

Where the planned device is here, a plan measures the layouts that it may recommend, the quickest first.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

import torch

from rung.hardware.cluster import Cluster
from rung.planner.at_hand import MeasuredRank, measure_rank
from rung.planner.estimate import Estimate, Estimator
from rung.planner.parallel_search import TaskSource
from rung.planner.search import WORTH_IT, Rejected, gib
from rung.spec.abilities import rung_of
from rung.spec.config import RunConfig
from rung.spec.strategy import Layout
from rung.spec.task import load_task

KEPT = Path("runs/measured.json")
_SECONDS = 60.0  # for all measurements of a plan
_NEAR = 1.1  # a layout that is modelled to be this much slower than the best may still be the best


def device_at_hand(cluster: Cluster) -> str | None:
    """The kind of this machine's device, if it is the one that the cluster has."""
    if cluster.device.kind != "cuda" or not torch.cuda.is_available():
        return None
    here, planned = torch.cuda.get_device_name().lower(), cluster.device.name.lower().split("-")[0]
    return "cuda" if planned in here or planned == "here" else None


@contextlib.contextmanager
def measuring(source: TaskSource, cluster: Cluster, *, measures: bool = True) -> Iterator[Measurements | None]:
    """Measurements on this machine's device; None if it is not the planned one, or none are wanted."""
    device = device_at_hand(cluster) if measures else None
    found = Measurements(source, device) if device is not None else None
    try:
        yield found
    finally:
        if found is not None:
            found.close()


class OutOfTime(Exception):
    """The minute is over, or the process that measures cannot be had any more. `str` is the reason."""


class Measurements:
    """Measures ranks of one task. What it measures is kept in a file, for the next plan."""

    def __init__(
        self, source: TaskSource, device: str = "cuda", *, kept: Path = KEPT, seconds: float = _SECONDS
    ) -> None:
        self._source, self._device, self._path = source, device, kept
        self._seconds, self._until = seconds, 0.0
        self._pool: ProcessPoolExecutor | None = None
        self._known: dict[str, Any] = _read(kept)

    def measure(self, layout: Layout, config: RunConfig, ranks: tuple[int, ...]) -> MeasuredRank | None:
        """The largest figures of these ranks, or None if one does not fit on the device."""
        key = self._key(layout, config, ranks)
        if key not in self._known:
            found = self._ask(layout, config, ranks)
            self._known[key] = None if found is None else astuple(found)
            self._write()
        known = self._known[key]
        return None if known is None else MeasuredRank(*known)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _ask(self, layout: Layout, config: RunConfig, ranks: tuple[int, ...]) -> MeasuredRank | None:
        self._until = self._until or time.monotonic() + self._seconds  # from the first measurement on
        left = self._until - time.monotonic()
        if left <= 0:
            raise OutOfTime("the time for measurements was over")
        if self._pool is None:
            # Its own process: the context of a GPU, and what a model breaks there, end with it.
            self._pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        asked: Future[MeasuredRank | str] = self._pool.submit(
            _measure, self._source, layout, config, ranks, self._device
        )
        try:
            found = asked.result(timeout=left)
        except FutureTimeoutError:
            for process in multiprocessing.active_children():
                process.kill()
            raise OutOfTime("the time for measurements was over") from None
        except BrokenProcessPool:
            raise OutOfTime(f"the process that measured {layout.name} died") from None
        if isinstance(found, str):
            if found:
                raise OutOfTime(f"{layout.name} could not be measured: {found}")
            return None
        return found

    def _key(self, layout: Layout, config: RunConfig, ranks: tuple[int, ...]) -> str:
        """Changes with whatever may change the figures."""
        name = torch.cuda.get_device_name() if self._device == "cuda" else self._device
        parts = [layout.name, layout.num_ranks, ranks, name, torch.__version__, asdict(config)]
        parts += [dict(self._source.arguments), _code_of(self._source.path)]
        return hashlib.sha256(json.dumps(parts, default=str, sort_keys=True).encode()).hexdigest()[:24]

    def _write(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self._known, indent=1) + "\n")
        except OSError:
            pass  # only the next plan would have been quicker


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _code_of(path: str | Path) -> dict[str, str]:
    """The task's file and the modules beside it that it imports."""
    file = Path(path).resolve()
    file = file / "task.py" if file.is_dir() else file
    names = {str(file), *(getattr(module, "__file__", None) or "" for module in list(sys.modules.values()))}
    beside = [name for name in names if name.startswith(f"{file.parent}/") and "site-packages" not in name]
    return {name: Path(name).read_text(errors="replace") for name in sorted(beside)}


def _measure(
    source: TaskSource, layout: Layout, config: RunConfig, ranks: tuple[int, ...], device: str
) -> MeasuredRank | str:
    """In the process that measures: figures, an empty text if it does not fit, or why it could not be measured."""
    task = load_task(source.path).bind(source.arguments)
    try:
        first, *others = (measure_rank(task, layout, config, rank=rank, device=device) for rank in ranks)
    except torch.OutOfMemoryError:
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    for other in others:
        first = first.with_other(other)
    return first


def refine(
    rows: list[Estimate], estimator: Estimator, measurements: Measurements, progress: Callable[[str], None]
) -> tuple[list[Estimate], list[Rejected], list[str]]:
    """Measure the layouts that may be the best, until all of these are measured.

    Returns the estimates, the layouts that turned out not to fit, and what there is to say.
    """
    rows, rejected, said = list(rows), [], []
    slowdowns: list[float] = []
    while (row := _next(rows, min(slowdowns, default=1.0))) is not None:
        progress(f"measuring {row.layout.name} on this device")
        try:
            config = estimator.settings_of(row.layout, row.checkpointing, row.micro_batch)
            found = measurements.measure(row.layout, config, _ranks(row))
        except OutOfTime as reason:
            said.append(f"{reason}: figures of the other layouts are modelled.")
            break
        rows.remove(row)
        better = None
        if found is not None:
            better = estimator.estimate(row.layout, row.checkpointing, row.micro_batch, found)
        if better is not None and better.fits(estimator.cluster):
            rows.append(better)
            slowdowns.append(better.time.own / row.time.own)
        elif row.micro_batch > 1:
            rows.append(estimator.estimate(row.layout, row.checkpointing, row.micro_batch // 2))
        else:
            needs = better.memory.process if better is not None else estimator.cluster.device.memory
            rejected.append(Rejected(row.layout, f"needs more than {gib(needs)} when measured here", needs=needs))
    if slowdowns:  # what was not measured is slower, too, or as quick
        rows = [row if row.is_measured else estimator.slower(row, min(slowdowns)) for row in rows]
    rows.sort(key=lambda one: one.time.seconds)
    return rows, rejected, said


def _ranks(row: Estimate) -> tuple[int, ...]:
    """The fullest rank, and the first of the last stage, which has the loss."""
    last = row.layout.num_ranks - row.layout.num_ranks // row.layout.pp
    return tuple(sorted({row.memory.rank, last}))


def _next(rows: list[Estimate], slowdown: float) -> Estimate | None:
    """Of the layouts without a measurement that may be the best, the lowest rung; then the whole model on one device.

    `slowdown` is how much longer measured layouts took than was said, at least.
    """
    if not rows:
        return None
    best = min(row.time.seconds * (1.0 if row.is_measured else slowdown) for row in rows)
    left = [row for row in rows if not row.is_measured]
    near = [row for row in left if row.time.seconds * slowdown <= best * _NEAR / (1 - WORTH_IT)]
    alone = [row for row in left if row.layout.num_ranks == 1]
    return min(near or alone, key=lambda row: (rung_of(row.layout), row.time.seconds), default=None)
