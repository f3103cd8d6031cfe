"""`rung verify`: proof, on the user's own task, that every strategy computes what one process computes.

Each strategy is a real job with its own processes, started like any other. What is compared is what a run leaves
behind: the logged losses and gradient norms, and every parameter and buffer.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text
from torch import nn

from rung.agreement import micro_batch_size, refuse_contradictions
from rung.config import RunConfig, resolve
from rung.errors import ConfigError, ModelError, RungError, StrategyError
from rung.exchange import OF_DDP
from rung.launch.command import prepare
from rung.launch.local import launch
from rung.launch.server import warm_up
from rung.parallel.batchnorm import batch_norms
from rung.runtime import build_runtime
from rung.strategy import SCHEDULES, WITH_SERVERS, Layout, natural_num_ranks, parse
from rung.task import load_task
from rung.train import Job
from rung.world import pretend_world

TOLERANCE = {"fp64": 1e-9, "fp32": 1e-5}
OPTIMIZERS = ("sgd", "task")
# Settings that one process refuses: each strategy gets those that it has a use for.
_FOR_CUT_MODELS = ("sequence_parallel", "split", "schedule")
_FOR_SERVERS = ("servers", "staleness", "rpc_host")


@dataclass(frozen=True)
class Row:
    """One strategy under one optimizer against one process."""

    strategy: str
    optimizer: str
    num_ranks: int
    parameters: float = math.nan
    buffers: float = math.nan
    losses: float = math.nan
    grad_norms: float = math.nan
    first_differing: str | None = None
    error: str | None = None
    impossible: str | None = None  # why the task cannot run so at all, where nobody asked for it by name

    def largest(self) -> float:
        values = (self.parameters, self.buffers, self.losses, self.grad_norms)
        return math.inf if any(math.isnan(value) for value in values) else max(values)

    def _is_same(self, tolerance: float) -> bool:
        return self.largest() <= tolerance and self.first_differing is None

    def reason(self) -> str:
        if self.error is not None:
            return self.error
        if self.first_differing is not None:
            return f"the first differing tensor is {self.first_differing}"
        return "losses or gradient norms differ"

    def passes(self, tolerance: float) -> bool:
        return self.impossible is not None or (self.error is None and self._is_same(tolerance))


@dataclass(frozen=True)
class Trace:
    """What one run left behind."""

    losses: list[float]
    grad_norms: list[float]
    tensors: dict[str, Any]
    buffer_names: set[str]


def verify_command(
    path: str,
    *,
    num_ranks: int,
    strategies: list[str],
    precision: str,
    flags: Mapping[str, Any],
    assignments: Mapping[str, str],
    as_json: bool,
) -> int:
    """The command. Returns the exit code."""
    warm_up()
    console = Console(file=sys.stderr if as_json else sys.stdout, markup=False)
    names = choose_strategies(strategies, num_ranks, has_remote=load_task(path).remote is not None)
    by_name = {name for name in strategies if name != "all"}
    asked = resolve(load_task(path), flags=flags, assignments=assignments).config
    elsewhere = ("offload", *_FOR_CUT_MODELS, *_FOR_SERVERS, *OF_DDP)
    alone = {key: value for key, value in assignments.items() if key not in elsewhere}
    plan = prepare(path, flags={**flags, "nproc": 1, "strategy": "single", "offload": "none"}, assignments=alone)
    config = replace(
        plan.config,
        precision=precision,
        batch_norm="sync",
        dropout=False,
        **{name: getattr(asked, name) for name in (*_FOR_CUT_MODELS, *_FOR_SERVERS, *OF_DDP)},
        log_every=1,
        eval_every="never",
        keep_best="none",
        profile=None,
        log=None,
        epochs=None,
        out=None,
    )
    tolerance = TOLERANCE[precision]
    console.print(
        f"verify {plan.task.name}: {config.steps} steps of {config.batch_size} samples in {precision}, "
        "dropout off, batch norm sync",
        highlight=False,
    )
    with tempfile.TemporaryDirectory(prefix="rung-verify-") as scratch:
        jobs = _Jobs(path, plan.resolved.arguments, config, asked.offload, Path(scratch), console)
        words = TextColumn("{task.description}", markup=False)
        with Progress(SpinnerColumn(), words, console=console, transient=True) as progress:
            shown = progress.add_task("starting")
            rows: list[Row] = []
            for optimizer in OPTIMIZERS:
                for name in names:
                    progress.update(
                        shown, description=f"{name}, {optimizer} ({len(rows) + 1} of {len(OPTIMIZERS) * len(names)})"
                    )
                    size = natural_num_ranks(name) or num_ranks
                    reason = None if name in by_name else jobs.why_impossible(name, size)
                    if reason is not None:
                        rows.append(Row(name, optimizer, size, impossible=reason))
                    else:
                        rows.append(jobs.row(name, size, optimizer, tolerance))
    failed = [row for row in rows if not row.passes(tolerance)]
    if as_json:
        document = {
            "task": plan.task.name,
            "precision": precision,
            "tolerance": tolerance,
            "steps": config.steps,
            "batch_size": config.batch_size,
            "passed": not failed,
            "rows": [{**_finite(asdict(row)), "passed": row.passes(tolerance)} for row in rows],
        }
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
        return 1 if failed else 0
    console.print(_table(rows, tolerance))
    for row in failed:
        console.print(Text(f"{row.strategy} ({row.optimizer}): {row.reason()}", style="red"), soft_wrap=True)
    impossible = {row.strategy: row.impossible for row in rows if row.impossible is not None}
    for name, why in impossible.items():
        console.print(Text(f"{name}: left out, this task cannot run so: {why}", style="yellow"), soft_wrap=True)
    ran = [row for row in rows if row.impossible is None]
    verdict = f"{len(ran) - len(failed)} of {len(ran)} agree with one process to {tolerance:g}"
    console.print(verdict, style="red" if failed else "green", highlight=False)
    return 1 if failed else 0


def choose_strategies(names: list[str], num_ranks: int, *, has_remote: bool = False) -> list[str]:
    """The strategies to run, checked against the number of processes. 'all' is `all_strategies`."""
    chosen: list[str] = []
    for name in names:
        if name == "all":
            chosen += all_strategies(num_ranks, has_remote=has_remote)
        else:
            own = natural_num_ranks(name)
            parse(name, own if own is not None else num_ranks)
            chosen.append(name)
    if not chosen:
        raise ConfigError("no strategy to verify.")
    return list(dict.fromkeys(chosen))


def all_strategies(num_ranks: int, *, has_remote: bool = False) -> list[str]:
    """Every kind of strategy for so many processes: data parallel, tensors and stages cut, the two composed, and over
    RPC, with `has_remote` also ddp+ps. Of dp it is so many devices, in one process. ps-async gives other numbers.
    """
    found = ["ddp", "zero1", "zero2", "zero3"]
    if num_ranks == 1 or num_ranks % 2 == 0:
        found.append("hsdp")
    if num_ranks == 1:
        return found
    found += [f"dp{num_ranks}", f"tp{num_ranks}", *(f"pp{num_ranks}:{schedule}" for schedule in SCHEDULES)]
    if num_ranks % 2 == 0 and num_ranks >= 4:
        half = num_ranks // 2
        found += [f"pp2,{name}" for name in ("ddp", "zero1", "zero2", "fsdp")]
        found += ["pp2:interleaved,fsdp", "pp2:zb,fsdp", f"pp2,tp{half}"]
        found += [f"{name},tp2" for name in ("ddp", "zero1", "zero2", "fsdp")]
    if num_ranks % 8 == 0:
        found += ["hsdp,tp2", "pp2,hsdp", "pp2,fsdp,tp2"]
    return [*found, "ps", *(["ddp+ps"] if has_remote else []), f"rpc-pp{num_ranks}"]


def compare(trace: Trace, reference: Trace) -> dict[str, Any]:
    """The largest differences, and the name of the first tensor that carries one."""
    largest = {"parameters": 0.0, "buffers": 0.0}
    differing: list[tuple[str, float]] = []
    if list(trace.tensors) != list(reference.tensors):
        missing = sorted(set(reference.tensors) ^ set(trace.tensors))
        raise RungError(f"the saved names differ: {', '.join(missing[:4])}")
    for name, value in trace.tensors.items():
        difference = _difference(value, reference.tensors[name])
        kind = "buffers" if name in trace.buffer_names else "parameters"
        largest[kind] = max(largest[kind], difference)
        differing.append((name, difference))
    return {
        **largest,
        "losses": _largest_gap(trace.losses, reference.losses),
        "grad_norms": _largest_gap(trace.grad_norms, reference.grad_norms),
        "differing": differing,
    }


class _Jobs:
    """Runs of one task, and the single-process runs that they are held against."""

    def __init__(
        self,
        path: str,
        arguments: Mapping[str, Any],
        config: RunConfig,
        offload: str,
        scratch: Path,
        console: Console,
    ) -> None:
        self._offload = offload
        self._path, self._arguments, self._config = path, arguments, config
        self._scratch, self._console = scratch, console
        self._references: dict[tuple[str, int | None], Trace] = {}
        self._reasons: dict[str, str | None] = {}

    def row(self, strategy: str, num_ranks: int, optimizer: str, tolerance: float) -> Row:
        try:
            reference = self._reference(optimizer, self._layout(strategy, num_ranks))
            found = compare(self._run(strategy, num_ranks, optimizer, self._config.micro_batch), reference)
        except RungError as error:
            # Its logs lie in a directory that goes with this command.
            told = "\n".join(line for line in str(error).splitlines() if not line.startswith("logs: "))
            return Row(strategy, optimizer, num_ranks, error=told)
        differing = [tensor for tensor, difference in found.pop("differing") if not difference <= tolerance]
        return Row(strategy, optimizer, num_ranks, **found, first_differing=differing[0] if differing else None)

    def why_impossible(self, strategy: str, num_ranks: int) -> str | None:
        """What stands in the way of a strategy that cuts the model or its batch; found in a pretend world."""
        layout = self._layout(strategy, num_ranks)
        if not layout.is_composed and layout.kind != "dp":
            return None
        if strategy not in self._reasons:
            job = self._job(strategy, num_ranks, "sgd", self._config.micro_batch, None)
            self._reasons[strategy] = None
            try:
                with pretend_world(_like(layout)) as world:
                    refuse_contradictions(job.config, layout)
                    runtime = build_runtime(job.load(), world, replace(job.config, device="cpu"))
                    if layout.kind == "dp":
                        self._reasons[strategy] = _why_not_in_parts(runtime.model)
            except (StrategyError, ModelError, ConfigError) as error:
                self._reasons[strategy] = str(error)
        return self._reasons[strategy]

    def _reference(self, optimizer: str, layout: Layout) -> Trace:
        """One process with the same micro-batches: batch norm sees micro-batches, so their samples must be the same."""
        micro = micro_batch_size(self._config, layout)
        if micro is not None:
            micro = min(micro * layout.num_data_ranks, self._config.batch_size)
        key = (optimizer, micro)
        if key not in self._references:
            self._references[key] = self._run("single", 1, optimizer, micro)
        return self._references[key]

    def _run(self, strategy: str, num_ranks: int, optimizer: str, micro_batch: int | None) -> Trace:
        from safetensors.torch import load_file

        folder = Path(tempfile.mkdtemp(dir=self._scratch))
        job = self._job(strategy, num_ranks, optimizer, micro_batch, folder)
        launch(job, num_ranks, console=self._console, quiet=True)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        steps = [row for row in rows if row["event"] == "step"]
        buffers = next(row["buffers"] for row in rows if row["event"] == "start")
        tensors = load_file(folder / "model.safetensors")
        shutil.rmtree(folder)
        losses, norms = ([float(row[key]) for row in steps] for key in ("loss", "grad_norm"))
        return Trace(losses, norms, tensors, set(buffers))

    def _layout(self, strategy: str, num_ranks: int) -> Layout:
        return parse(strategy, num_ranks, servers=self._config.servers if strategy in WITH_SERVERS else None)

    def _job(self, strategy: str, num_ranks: int, optimizer: str, micro_batch: int | None, folder: Path | None) -> Job:
        layout, plain = self._layout(strategy, num_ranks), RunConfig()
        config = replace(
            self._config,
            **{name: getattr(plain, name) for name in OF_DDP if layout.name != "ddp"},
            servers=self._config.servers if layout.servers else None,
            staleness=self._config.staleness if layout.kind == "ps-async" else None,
            rpc_host=self._config.rpc_host if layout.uses_rpc else None,
            strategy=strategy,
            nproc=str(num_ranks),
            micro_batch=micro_batch,
            offload=self._offload if layout.shards_parameters else "none",
            sequence_parallel=self._config.sequence_parallel and layout.tp > 1,
            split=self._config.split if layout.pp > 1 else None,
            schedule=None,
        )
        task = str(Path(self._path).resolve())
        where = str(folder) if folder is not None else None
        return Job(task, strategy, config, self._arguments, where, plain_sgd=optimizer == "sgd")


def _like(layout: Layout) -> Layout:
    """What can be pretended and asks the same of a model."""
    if layout.kind == "mesh":
        return layout
    return parse(f"pp{layout.pp}:gpipe", layout.pp) if layout.kind == "rpc-pp" else parse("single", 1)


def _why_not_in_parts(model: nn.Module) -> str | None:
    """Under dp a batch norm sees the part of one replica, as torch's DataParallel has it."""
    names = [name for name, _ in batch_norms(model)]
    if not names:
        return None
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"its batch norm ({names[0]}{others}) would be that of each replica's part of the batch, not of the whole"


def _difference(value: Any, other: Any) -> float:
    if value.shape != other.shape or value.dtype != other.dtype:
        return math.inf
    if value.numel() == 0:
        return 0.0
    wide = torch.complex128 if value.is_complex() else torch.float64
    gap = float((value.to(wide) - other.to(wide)).abs().max())
    return math.inf if math.isnan(gap) else gap


def _largest_gap(values: list[float], others: list[float]) -> float:
    if len(values) != len(others):
        return math.inf
    gaps = [abs(a - b) for a, b in zip(values, others, strict=True)]
    return math.inf if any(math.isnan(gap) for gap in gaps) else max(gaps, default=0.0)


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}


def _table(rows: list[Row], tolerance: float) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("strategy", "ranks", "optimizer", "parameters", "buffers", "losses", "grad norms", ""):
        table.add_column(column, justify="left" if column in ("strategy", "optimizer", "") else "right")
    for row in rows:
        figures = [f"{value:.1e}" for value in (row.parameters, row.buffers, row.losses, row.grad_norms)]
        if row.error is not None or row.impossible is not None:
            figures = ["-"] * 4
        verdict = (
            Text("left out", style="yellow")
            if row.impossible is not None
            else Text("same", style="green")
            if row.passes(tolerance)
            else Text("DIFFERS", style="red")
            if row.error is None
            else Text("FAILED", style="red")
        )
        table.add_row(row.strategy, str(row.num_ranks), row.optimizer, *figures, verdict)
    return table
