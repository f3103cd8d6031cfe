"""`rung compare`: flags to runs, and what they measured to a page, to files and to the terminal."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from rung.config import RunConfig, count_range, resolve
from rung.errors import ConfigError
from rung.launch.server import warm_up
from rung.machine import processor_name
from rung.processes import num_cores
from rung.task import Task, load_task
from rung.version import VERSION

FORMAT = "rung-compare 1"
DEFAULT_STRATEGIES = ("single", "ddp", "zero1", "zero2", "zero3")
_DEFAULT_STEPS, _MOST_WARMUP = 20, 5
_PRELOADED = ("rung.compare.measure", "torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo")


@dataclass(frozen=True)
class Asked:
    """What the flags say."""

    task: str
    strategies: tuple[str, ...] = DEFAULT_STRATEGIES
    flags: Mapping[str, Any] = field(default_factory=dict)
    assignments: Mapping[str, str] = field(default_factory=dict)
    config_file: str | None = None
    repeats: int = 2
    warmup: int | None = None
    out: str = "compare.html"
    json_file: str | None = None
    markdown: str | None = None
    predicts: bool = True


def compare_command(asked: Asked) -> int:
    """The command. Returns the exit code: 1 if nothing could be run."""
    _refuse(asked)
    warm_up(_PRELOADED)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # what ranks have to say is in their logs
    console = Console(file=sys.stdout, highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 160
    document, folder = compare(asked, Console(file=sys.stderr, highlight=False, markup=False))
    from rung.compare.view import show
    from rung.report import as_markdown, write_page

    show(document, console)
    console.print(f"\nruns: {folder}/", soft_wrap=True, markup=False)
    if asked.json_file is not None:
        _write(asked.json_file, json.dumps(document, indent=1) + "\n")
    if asked.markdown is not None:
        _write(asked.markdown, as_markdown(document))
    write_page(document, Path(asked.out))
    console.print(f"page: {asked.out}", soft_wrap=True, markup=False)
    return 0 if any(row["status"] == "ok" for row in document["rows"]) else 1


def compare(asked: Asked, messages: Console) -> tuple[dict[str, Any], Path]:
    """Measure, and say what was measured: the document, and the directory of the runs."""
    task = load_task(asked.task)
    given = {"steps": _DEFAULT_STEPS, **{key: value for key, value in asked.flags.items() if value is not None}}
    if "steps" in asked.assignments:
        del given["steps"]
    resolved = resolve(task, file=asked.config_file, flags=given, assignments=asked.assignments)
    config = replace(
        resolved.config,
        epochs=None,
        strategy=None,
        eval_every="never",
        save_weights=False,
        checkpoint_every=None,
        keep_best="none",
        replicate_state=False,
        out=None,
    )
    assert config.steps is not None
    warmup = asked.warmup if asked.warmup is not None else min(_MOST_WARMUP, config.steps // 2)
    if not 0 <= warmup < config.steps:
        raise ConfigError(f"--warmup {warmup} of {config.steps} steps leaves none to measure. Take more --steps.")
    return _measure(asked, task.bind(resolved.arguments), resolved.arguments, config, warmup, messages)


def _measure(
    asked: Asked,
    task: Task,
    arguments: Mapping[str, Any],
    config: RunConfig,
    warmup: int,
    messages: Console,
) -> tuple[dict[str, Any], Path]:
    import torch

    from rung.compare.run import Bench, keep_rows
    from rung.compare.variants import REFERENCE, choose_variants
    from rung.compare.verdict import make_verdict
    from rung.launch.local import new_run_dir
    from rung.launch.precision import half_precision_warning
    from rung.world import choose_device

    nproc = _num_ranks(config)
    variants = choose_variants(asked.strategies, nproc, config)
    device = choose_device(config.device, config.backend, 0, nproc)
    halves = {one.config.precision: one.config for one in variants}
    for warning in filter(None, map(half_precision_warning, halves.values())):
        messages.print(f"warning: {warning}", style="yellow", soft_wrap=True)
    folder = new_run_dir(task.name, "compare", None)
    bench = Bench(
        str(Path(asked.task).resolve()), dict(arguments), folder, asked.repeats, warmup, device.type == "cuda"
    )
    assert config.steps is not None
    total = len(variants) * (asked.repeats * config.steps + (config.steps + 1) // 2)
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
        console=messages,
        transient=True,
    ) as progress:
        bar = progress.add_task("starting", total=total)
        done = _Done(config.steps)

        def tell(what: str, step: int) -> None:
            progress.update(bar, description=what, completed=done.after(what, step))

        found = bench.compare(variants, tell)
        rows = bench.rows(found)
        if asked.predicts:
            progress.update(bar, description="predicting", completed=total)
            _predict(rows, found, task, device.type, nproc)
    notes = [
        f"{one.variant.text}: its memory and messages could not be told apart: {one.not_looked}"
        for one in found
        if one.is_going and one.not_looked is not None
    ]
    for note in notes:
        messages.print(note, style="yellow", soft_wrap=True, markup=False)
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
            "repeats": asked.repeats,
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
    keep_rows(found, document, folder)
    return document, folder


class _Done:
    """Steps that are done, over all runs."""

    def __init__(self, each: int) -> None:
        self._each, self._runs, self._what = each, -1, ""

    def after(self, what: str, step: int) -> int:
        if what != self._what:
            self._what, self._runs = what, self._runs + 1
        return self._runs * self._each + step


def _predict(rows: list[dict[str, Any]], found: list[Any], task: Task, device: str, nproc: int) -> None:
    """Put the planner's figures beside the measured ones."""
    import torch

    from rung.compare.predict import Predictor
    from rung.compare.rows import prediction_error
    from rung.planner.auto import recorded_cluster

    data = task.train_data()
    if hasattr(data, "__getitem__"):  # read once for all rows
        task = replace(task, train_data=lambda: data)
    shares = device == "cuda" and nproc > torch.cuda.device_count()
    predictor = Predictor(task, device, shares_gpus=shares)
    for row, one in zip(rows, found, strict=True):
        if row["status"] == "ok":
            cluster = recorded_cluster(one.variant.num_ranks, on_gpu=device == "cuda")
            row.update(predictor.predict(one.variant, cluster).as_json())
            if one.not_looked is not None and row["predicted"]:  # there is nothing to hold them against
                row["predicted"] |= {"peak_bytes": None, "bytes_per_step": None}
            row["prediction_error"] = prediction_error(row)


def _refuse(asked: Asked) -> None:
    if asked.repeats < 1:
        raise ConfigError(f"--repeats {asked.repeats}: each strategy runs at least once.")
    files = {"--out": (asked.out, ".html"), "--json": (asked.json_file, ".json"), "--markdown": (asked.markdown, ".md")}
    for flag, (name, ending) in files.items():
        if name is None:
            continue
        if Path(name).suffix != ending:
            raise ConfigError(f"{flag} {name}: it is a file whose name ends with {ending}.")
        if not Path(name).resolve().parent.is_dir():
            raise ConfigError(f"{flag} {name}: there is no directory {Path(name).parent}.")
        _try_to_write(flag, Path(name))


def _try_to_write(flag: str, file: Path) -> None:
    """What cannot be written is said before anything is measured. A file that is there stays as it is."""
    is_new = not file.exists()
    try:
        file.open("a").close()
    except OSError as error:
        raise ConfigError(f"{flag} {file} cannot be written: {error.strerror}. Name another file.") from None
    if is_new:
        file.unlink()


def _write(name: str, words: str) -> None:
    try:
        Path(name).write_text(words, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{name} cannot be written: {error.strerror}. `rung report` makes it anew from the directory of the runs."
        ) from None


def _num_ranks(config: RunConfig) -> int:
    """Without --nproc, one process for each GPU, or two."""
    import torch

    if config.nnodes != "1":
        raise ConfigError("rung compare runs on one machine: leave out --nnodes.")
    if config.nproc is None:
        gpus = torch.cuda.device_count() if config.device != "cpu" and torch.cuda.is_available() else 0
        return gpus or 2
    low, high = count_range(config.nproc)
    if low != high:
        raise ConfigError(f"--nproc {config.nproc}: a comparison has a fixed number of processes.")
    return high


def _machine(device: Any) -> dict[str, Any]:
    import torch

    on_gpu = device.type == "cuda"
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": processor_name(),
        "cores": num_cores(),
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if on_gpu else processor_name(),
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory if on_gpu else pages,
    }
