"""Measurements of layouts on the device that is here: each in a process of its own, all within a minute, and kept.

Where the planned device is here, a plan measures the layouts that it may recommend, the quickest first.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import Any

import torch

from rung.hardware.cluster import Cluster
from rung.launch.fork_server import start_fork_server
from rung.launch.spawn import RankFailedError, on_ranks
from rung.planner.at_hand import MeasuredRank, measure_rank
from rung.planner.estimate import Estimate, Estimator
from rung.planner.parallel_search import TaskSource
from rung.planner.search import WORTH_IT, Rejected, gib
from rung.spec.abilities import mechanisms, rung_of
from rung.spec.config import RunConfig
from rung.spec.strategy import Layout
from rung.spec.task import files_of

KEPT = Path("runs/measured.json")
_SECONDS = 60.0  # for all measurements of a plan
_NEAR = 1.1  # a layout that is modelled to be this much slower than the best may still be the best


def device_at_hand(cluster: Cluster) -> str | None:
    """The kind of this machine's device, if it is the one that the cluster has."""
    if cluster.device.kind != "cuda" or not torch.cuda.is_available():
        return None
    here, planned = torch.cuda.get_device_name().lower(), cluster.device.name.lower().split("-")[0]
    return "cuda" if planned in here or planned == "here" else None


def open_measurements(source: TaskSource, cluster: Cluster) -> Measurements | None:
    """Measurements on this machine's device; None if it is not the planned one."""
    device = device_at_hand(cluster)
    if device is None:
        return None
    start_fork_server()
    return Measurements(source, device)


class NotMeasured(Exception):
    """A layout could not be measured. `str` is the reason."""


class OutOfTime(NotMeasured):
    """The minute is over."""


class Measurements:
    """Measures ranks of one task. What it measures is kept in a file, for the next plan."""

    def __init__(
        self, source: TaskSource, device: str = "cuda", *, kept: Path = KEPT, seconds: float = _SECONDS
    ) -> None:
        self._source, self._device, self._path = source, device, kept
        self._seconds, self._until = seconds, 0.0
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

    def _ask(self, layout: Layout, config: RunConfig, ranks: tuple[int, ...]) -> MeasuredRank | None:
        self._until = self._until or time.monotonic() + self._seconds  # from the first measurement on
        left = self._until - time.monotonic()
        if left <= 0:
            raise OutOfTime("the time for measurements was over")
        arguments = (self._source, layout, config, ranks, self._device)
        try:
            # A process of its own: the context of a GPU, and what a model breaks there, end with it.
            (found,) = on_ranks(_measure, 1, *arguments, timeout=left)
        except RankFailedError as failure:
            if time.monotonic() >= self._until:
                raise OutOfTime("the time for measurements was over") from None
            cause = failure.error.strip().splitlines()[-1] if failure.error else f"its process {failure.what}"
            raise NotMeasured(f"{layout.name} could not be measured: {cause}") from None
        assert found is None or isinstance(found, MeasuredRank)
        return found

    def _key(self, layout: Layout, config: RunConfig, ranks: tuple[int, ...]) -> str:
        """Changes with whatever may change the figures."""
        name = torch.cuda.get_device_name() if self._device == "cuda" else self._device
        parts = [layout.name, layout.num_ranks, ranks, name, torch.__version__, asdict(config)]
        code = [path.read_text(errors="replace") for path in files_of(self._source.path)]
        given = self._source.given
        parts += [
            dict(self._source.arguments),
            code,
            *([given.batch_tokens] if given is not None and given.batch_tokens else []),
        ]
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


def _measure(
    source: TaskSource, layout: Layout, config: RunConfig, ranks: tuple[int, ...], device: str
) -> MeasuredRank | None:
    """In the process that measures: the largest figures of these ranks, or None if one does not fit."""
    task = source.load()
    try:
        first, *others = (measure_rank(task, layout, config, rank=rank, device=device) for rank in ranks)
    except torch.OutOfMemoryError:
        return None
    for other in others:
        first = first.with_other(other)
    return first


class Slowdowns:
    """How much longer measured layouts took than was said, and thereby how much longer others will take."""

    def __init__(self) -> None:
        self._found: list[tuple[frozenset[str], float]] = []

    def add(self, layout: Layout, slowdown: float) -> None:
        self._found.append((mechanisms(layout), slowdown))

    def of(self, layout: Layout) -> float:
        """The least of the measured layouts that are most like this one; 1 if none was measured.

        One process may take as long as was said where the hooks of FSDP, for which a slow host needs several times as
        long as a quick one, do not.
        """
        own = mechanisms(layout)
        likeness = [len(own & other) - len(own ^ other) for other, _ in self._found]
        return min(
            (slowdown for like, (_, slowdown) in zip(likeness, self._found, strict=True) if like == max(likeness)),
            default=1.0,
        )


def refine(
    rows: list[Estimate], estimator: Estimator, measurements: Measurements, progress: Callable[[str], None]
) -> tuple[list[Estimate], list[Rejected], list[str]]:
    """Measure the layouts that may be the best, until all of these are measured.

    Returns the estimates, the layouts that turned out not to fit, and what there is to say.
    """
    rows, rejected, said = list(rows), [], []
    slowdowns = Slowdowns()
    failed: list[Estimate] = []  # could not be measured
    while (row := _next(rows, failed, slowdowns)) is not None:
        progress(f"measuring {row.layout.name} on this device")
        try:
            config = estimator.settings_of(row.layout, row.checkpointing, row.micro_batch, row.cp_form)
            found = measurements.measure(row.layout, config, _ranks(row))
        except OutOfTime as reason:
            said.append(f"{reason}: figures of the other layouts are modelled.")
            break
        except NotMeasured as reason:
            said.append(f"{reason}. Its figures are modelled.")
            failed.append(row)
            continue
        rows.remove(row)
        better = None
        if found is not None:
            better = estimator.estimate_form(
                row.layout, row.checkpointing, row.micro_batch, row.cp_form, measured=found
            )
        if better is not None and better.fits(estimator.cluster):
            rows.append(better)
            slowdowns.add(row.layout, better.time.own / row.time.own)
        elif row.micro_batch > 1:
            smaller = row.micro_batch // 2
            rows.append(estimator.estimate_form(row.layout, row.checkpointing, smaller, row.cp_form))
        else:
            needs = better.memory.process if better is not None else estimator.cluster.device.memory
            rejected.append(Rejected(row.layout, f"needs more than {gib(needs)} when measured here", needs=needs))
    rows = [row if row.is_measured else replace(row, time=row.time.slowed(slowdowns.of(row.layout))) for row in rows]
    rows.sort(key=lambda one: one.time.seconds)
    return rows, rejected, said


def _ranks(row: Estimate) -> tuple[int, ...]:
    """The fullest rank, and the first of the last stage, which has the loss."""
    last = row.layout.num_ranks - row.layout.num_ranks // row.layout.pp
    return tuple(sorted({row.memory.rank, last}))


def _next(rows: list[Estimate], failed: list[Estimate], slowdowns: Slowdowns) -> Estimate | None:
    """Of the layouts without a measurement that may be the best, the lowest rung; then the whole model on one device.

    `failed` are not tried again.
    """
    if not rows:
        return None

    def expected(row: Estimate) -> float:
        return row.time.seconds if row.is_measured else row.time.slowed(slowdowns.of(row.layout)).seconds

    best = min(expected(row) for row in rows)
    left = [row for row in rows if not row.is_measured and row not in failed]
    near = [row for row in left if expected(row) <= best * _NEAR / (1 - WORTH_IT)]
    alone = [row for row in left if row.layout.num_ranks == 1]
    return min(near or alone, key=lambda row: (rung_of(row.layout), row.time.seconds), default=None)
