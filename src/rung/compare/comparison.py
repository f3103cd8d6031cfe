"""Runs the strategies of a comparison in turns, and gathers what was measured and predicted into one document."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from rung.compare.options import CompareOptions
from rung.compare.predict import Predictor
from rung.compare.report import FORMAT
from rung.compare.rows import prediction_error
from rung.compare.run import Bench, keep_rows
from rung.compare.variants import REFERENCE, choose_variants
from rung.compare.verdict import make_verdict
from rung.distributed.devices import choose_device
from rung.errors import ConfigError
from rung.launch.half_precision import half_precision_warning
from rung.launch.launcher import new_run_dir
from rung.planner.auto import recorded_cluster
from rung.spec.config import RunConfig, count_range
from rung.spec.task import Task
from rung.spec.version import VERSION
from rung.system.host import processor_name
from rung.system.processes import num_cores


def measure_strategies(
    options: CompareOptions, task: Task, arguments: Mapping[str, Any], config: RunConfig, warmup: int, stderr: Console
) -> tuple[dict[str, Any], Path]:
    """Run every strategy as often as asked, with a progress bar. Returns the document and the runs' directory."""
    nproc = _num_ranks(config)
    variants = choose_variants(options.strategies, nproc, config)
    device = choose_device(config.device, config.backend, 0, nproc)
    by_precision = {one.config.precision: one.config for one in variants}
    for warning in filter(None, map(half_precision_warning, by_precision.values())):
        stderr.print(f"warning: {warning}", style="yellow", soft_wrap=True)
    folder = new_run_dir(task.name, "compare", None)
    path = str(Path(options.task).resolve())
    bench = Bench(path, dict(arguments), folder, options.repeats, warmup, on_gpu=device.type == "cuda")
    assert config.steps is not None
    # For the progress bar, a profile counts as half a run.
    total = len(variants) * (options.repeats * config.steps + (config.steps + 1) // 2)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=stderr, transient=True) as progress:
        bar = progress.add_task("starting", total=total)
        counter = _StepCounter(config.steps)

        def on_progress(what: str, step: int) -> None:
            progress.update(bar, description=what, completed=counter.after(what, step))

        measured = bench.compare(variants, on_progress)
        rows = bench.rows(measured)
        if options.predicts:
            progress.update(bar, description="predicting", completed=total)
            _predict(rows, measured, task, device.type, nproc)
    notes = [
        f"{one.variant.text}: its memory by kind and its messages were not measured: {one.not_profiled}"
        for one in measured
        if one.failed is None and one.not_profiled is not None
    ]
    notes += [
        f"{row['strategy']}: other programs kept {row['other_cores']:.1f} of {os.cpu_count()} cores busy while it ran"
        for row in rows
        if row.get("other_cores")
    ]
    for note in notes:
        stderr.print(note, style="yellow", soft_wrap=True, markup=False)
    document = {
        "format": FORMAT,
        "rung": VERSION,
        "torch": torch.__version__,
        "made": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "task": task.name,
        "machine": _machine(device),
        "settings": {
            "nproc": nproc,
            "steps": config.steps,
            "warmup": warmup,
            "repeats": options.repeats,
            "batch_size": config.batch_size,
            "precision": config.precision,
            "seed": config.seed,
            "command": shlex.join(["rung", *sys.argv[1:]]),
        },
        "reference": REFERENCE,
        "rows": rows,
        "verdict": make_verdict(rows, variants),
        "notes": notes,
    }
    keep_rows(measured, document, folder)
    return document, folder


class _StepCounter:
    """Counts finished steps over all runs, for the progress bar."""

    def __init__(self, steps_per_run: int) -> None:
        self._steps_per_run, self._runs, self._what = steps_per_run, -1, ""

    def after(self, what: str, step: int) -> int:
        if what != self._what:
            self._what, self._runs = what, self._runs + 1
        return self._runs * self._steps_per_run + step


def _predict(rows: list[dict[str, Any]], measured: list[Any], task: Task, device: str, nproc: int) -> None:
    """Add the planner's predictions and their errors to the rows."""
    data = task.train_data()
    if hasattr(data, "__getitem__"):  # load the data once for all rows
        task = replace(task, train_data=lambda: data)
    shares = device == "cuda" and nproc > torch.cuda.device_count()
    predictor = Predictor(task, device, shares_gpus=shares)
    for row, one in zip(rows, measured, strict=True):
        if row["status"] == "ok":
            cluster = recorded_cluster(one.variant.num_ranks, on_gpu=device == "cuda")
            row.update(predictor.predict(one.variant, cluster).as_json())
            if one.not_profiled is not None and row["predicted"]:  # nothing was measured to compare these with
                row["predicted"] |= {"peak_bytes": None, "bytes_per_step": None}
            row["prediction_error"] = prediction_error(row)


def _num_ranks(config: RunConfig) -> int:
    """The number of processes; without --nproc, one for each GPU, or two."""
    if config.nnodes != "1":
        raise ConfigError("rung compare runs on one machine: leave out --nnodes.")
    if config.nproc is None:
        gpus = torch.cuda.device_count() if config.device != "cpu" and torch.cuda.is_available() else 0
        return gpus or 2
    low, high = count_range(config.nproc)
    if low != high:
        raise ConfigError(f"--nproc {config.nproc}: a comparison needs a fixed number of processes.")
    return high


def _machine(device: Any) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": processor_name(),
        "cores": num_cores(),
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if on_gpu else processor_name(),
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory if on_gpu else pages,
    }
