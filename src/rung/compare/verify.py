"""`rung verify`: checks on the user's own task that every strategy computes the same as one process.

Each strategy runs as a real job in its own processes. Compared are the logged losses and gradient norms, and every
parameter and buffer of the saved model.
"""

from __future__ import annotations

import json
import math
import re
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

from rung.checkpoint.weights import load_weights
from rung.distributed.world import open_fake_world
from rung.errors import ConfigError, ModelError, RungError, StrategyError
from rung.launch.fork_server import start_fork_server
from rung.launch.launcher import launch
from rung.launch.prepare import prepare
from rung.parallel.batchnorm import batch_norms
from rung.runtime import build_runtime
from rung.spec.abilities import can, cuts_only_batch, runs_threads, stand_in
from rung.spec.compatibility import fit_settings, inapplicable_settings, micro_batch_size, refuse_task, validate_config
from rung.spec.config import SETTINGS, RunConfig, resolve
from rung.spec.presets import SCHEDULES, tried
from rung.spec.strategy import Layout, parse, required_num_ranks
from rung.spec.task import Task, load_task
from rung.train.first_step import collate_draws, draws_random_numbers
from rung.train.job import RankJob

TOLERANCE = {"fp64": 1e-9, "fp32": 1e-5}
OPTIMIZERS = ("sgd", "task")
_FP32_ROUNDING = 1e-4
# What torch says of an operation without a kernel for float64.
_NO_DOUBLE = re.compile(
    r"not implemented for 'Double'|grouped_mm|[Ee]xpected .*(float32|BFloat16|bf16).* but got .*(float64|Double)"
)


@dataclass(frozen=True)
class VerifyRow:
    """One strategy with one optimizer, compared with one process: the largest differences, or why there are none."""

    strategy: str
    optimizer: str
    num_ranks: int
    parameters: float = math.nan
    buffers: float = math.nan
    losses: float = math.nan
    grad_norms: float = math.nan
    first_differing: str | None = None
    error: str | None = None
    impossible: str | None = None  # why the task cannot run under this strategy, unless it was named explicitly

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
class RunTrace:
    """The results of one run."""

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
    """Run the command. Returns the exit code: 1 if a strategy differs from one process or fails."""
    start_fork_server()
    console = Console(file=sys.stderr if as_json else sys.stdout, markup=False)
    names = choose_strategies(strategies, num_ranks, has_remote=load_task(path).remote is not None)
    named = {name for name in strategies if name != "all"}
    if "precision" in assignments:
        raise ConfigError("rung verify compares in fp64 or in fp32: say --precision fp32 instead of --set precision.")
    requested = resolve(load_task(path), flags=flags, assignments=assignments).config
    if requested.batch_tokens is not None:
        raise ConfigError(
            "rung verify takes batches of one number of samples, and batch_tokens gives others in every step. Give "
            "--batch-size."
        )
    # One process refuses these settings: leave them out for `prepare`. `_job` gives each strategy those that it uses.
    inapplicable = inapplicable_settings(parse("single", 1))
    given = {**flags, "nproc": 1, "strategy": "single", **{name: SETTINGS[name].default for name in inapplicable}}
    accepted = {key: value for key, value in assignments.items() if key not in inapplicable}
    plan = prepare(path, flags=given, assignments=accepted)
    # With dropout, each rank draws its own mask; local batch norm sees one rank's samples. Neither could agree.
    config = replace(
        plan.config,
        precision=precision,
        batch_norm="sync",
        dropout=False,
        check=False,  # this command compares whole runs
        **{name: getattr(requested, name) for name in inapplicable},
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
        runs = _Runs(path, plan.resolved.arguments, config, Path(scratch), console)
        words = TextColumn("{task.description}", markup=False)
        with Progress(SpinnerColumn(), words, console=console, transient=True) as progress:
            shown = progress.add_task("starting")
            rows: list[VerifyRow] = []
            for optimizer in OPTIMIZERS:
                for name in names:
                    progress.update(
                        shown, description=f"{name}, {optimizer} ({len(rows) + 1} of {len(OPTIMIZERS) * len(names)})"
                    )
                    size = required_num_ranks(name) or num_ranks
                    reason = None if name in named else runs.why_impossible(name, size)
                    if reason is not None:
                        rows.append(VerifyRow(name, optimizer, size, impossible=reason))
                    else:
                        rows.append(runs.row(name, size, optimizer, tolerance))
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
    for line in _advice(failed, plan.task.bind(plan.resolved.arguments), config):
        console.print(Text(line, style="yellow"), soft_wrap=True)
    impossible = {row.strategy: row.impossible for row in rows if row.impossible is not None}
    for name, why in impossible.items():
        console.print(Text(f"{name}: left out, this task cannot run with it: {why}", style="yellow"), soft_wrap=True)
    ran = [row for row in rows if row.impossible is None]
    verdict = f"{len(ran) - len(failed)} of {len(ran)} agree with one process to {tolerance:g}"
    console.print(verdict, style="red" if failed else "green", highlight=False)
    return 1 if failed else 0


def _advice(failed: list[VerifyRow], task: Task, config: RunConfig) -> list[str]:
    """Causes of failed rows that lie in the task or in the precision, and not in a strategy."""
    if any(row.error is not None and _NO_DOUBLE.search(row.error) for row in failed):
        return ["an operation of the model has no kernel for float64: --precision fp32 compares with its rounding."]
    differing = [row for row in failed if row.error is None]
    if not differing:
        return []
    if collate_draws(task, config):
        return [
            "collate draws random numbers, which differ with the number of ranks; draw them in the data set instead."
        ]
    if draws_random_numbers(task, config):
        return ["forward or loss draws random numbers (other than dropout), and each rank draws its own."]
    if config.precision == "fp64" and all(row.largest() <= _FP32_ROUNDING for row in differing):
        return [
            "differences as small as these are the rounding of fp32: something in the model or its loss computes in "
            "fp32, as the losses of transformers do. --precision fp32 compares with that rounding."
        ]
    if draws_random_numbers(task, config, of_any_use=True):
        return [
            "forward or loss draws random numbers (other than dropout), and each rank draws its own, which may be the "
            "reason, although two seeds gave the same first step."
        ]
    return []


def choose_strategies(names: list[str], num_ranks: int, *, has_remote: bool = False) -> list[str]:
    """The strategies to run, checked against the number of processes; 'all' expands to `all_strategies`."""
    chosen: list[str] = []
    for name in names:
        if name == "all":
            chosen += all_strategies(num_ranks, has_remote=has_remote)
        else:
            own = required_num_ranks(name)
            parse(name, own if own is not None else num_ranks)
            chosen.append(name)
    if not chosen:
        raise ConfigError("no strategy to verify. Name some, as in --strategies ddp fsdp, or use --strategies all.")
    return list(dict.fromkeys(chosen))


def all_strategies(num_ranks: int, *, has_remote: bool = False) -> list[str]:
    """Every kind of strategy for this number of processes: data, context, expert, tensor and pipeline parallel,
    compositions, and RPC (with `has_remote` also ddp+ps). dp uses this number of devices in one process. ps-async is
    left out: its numbers differ by design.
    """
    found = tried("alone")
    if num_ranks == 1 or num_ranks % 2 == 0:
        found.append("hsdp")
    if num_ranks == 1:
        return found
    found += [f"{name}{num_ranks}" for name in ("dp", "cp", "ep", "tp")]
    found += [f"pp{num_ranks}:{schedule}" for schedule in SCHEDULES]
    if num_ranks % 2 == 0 and num_ranks >= 4:
        half = num_ranks // 2
        found += [f"pp2,{name}" for name in tried("composed")]
        found += ["pp2:interleaved,fsdp", "pp2:zb,fsdp", f"pp2,tp{half}", "fsdp,cp2", f"pp2,cp{half}", "fsdp,ep2"]
        found += [f"{name},tp2" for name in tried("composed")]
    if num_ranks % 8 == 0:
        found += ["hsdp,tp2", "pp2,hsdp", "pp2,fsdp,tp2"]
    return [*found, "ps", *(["ddp+ps"] if has_remote else []), f"rpc-pp{num_ranks}"]


def compare(trace: RunTrace, reference: RunTrace) -> dict[str, Any]:
    """The largest differences, and that of each tensor in order."""
    largest = {"parameters": 0.0, "buffers": 0.0}
    differing: list[tuple[str, float]] = []
    if list(trace.tensors) != list(reference.tensors):
        missing = sorted(set(reference.tensors) ^ set(trace.tensors))
        raise RungError(f"the names of the saved tensors differ: {', '.join(missing[:4])}")
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


class _Runs:
    """Runs a task under strategies, and caches the single-process runs that they are compared with."""

    def __init__(
        self, path: str, arguments: Mapping[str, Any], config: RunConfig, scratch: Path, console: Console
    ) -> None:
        self._path, self._arguments, self._config = path, arguments, config
        self._scratch, self._console = scratch, console
        self._references: dict[tuple[str, int | None], RunTrace] = {}
        self._reasons: dict[str, str | None] = {}

    def row(self, strategy: str, num_ranks: int, optimizer: str, tolerance: float) -> VerifyRow:
        try:
            reference = self._reference(optimizer, self._layout(strategy, num_ranks))
            found = compare(self._run(strategy, num_ranks, optimizer, self._config.micro_batch), reference)
        except RungError as error:
            # Without the line on the logs: they are in a temporary directory that this command removes.
            message = "\n".join(line for line in str(error).splitlines() if not line.startswith("logs: "))
            return VerifyRow(strategy, optimizer, num_ranks, error=message)
        differing = [tensor for tensor, difference in found.pop("differing") if not difference <= tolerance]
        return VerifyRow(strategy, optimizer, num_ranks, **found, first_differing=differing[0] if differing else None)

    def why_impossible(self, strategy: str, num_ranks: int) -> str | None:
        """Why the task cannot run under a strategy that cuts the model or its batch; found in a fake world."""
        layout = self._layout(strategy, num_ranks)
        if cuts_only_batch(layout) and not runs_threads(layout):
            return None
        if strategy not in self._reasons:
            job = self._job(strategy, num_ranks, "sgd", self._config.micro_batch, None)
            self._reasons[strategy] = None
            try:
                with open_fake_world(stand_in(layout)) as world:
                    validate_config(job.config, layout)
                    refuse_task(job.load(), layout)
                    runtime = build_runtime(job.load(), world, replace(job.config, device="cpu"))
                    if not can(layout, "batch_norm_sync"):
                        self._reasons[strategy] = _why_not_in_parts(runtime.model)
            except (StrategyError, ModelError, ConfigError) as error:
                self._reasons[strategy] = str(error)
        return self._reasons[strategy]

    def _reference(self, optimizer: str, layout: Layout) -> RunTrace:
        """One process with the same micro-batches, since batch norm depends on the samples of a micro-batch."""
        micro = micro_batch_size(self._config, layout)
        if micro is not None:
            micro = min(micro * layout.num_data_ranks, self._config.batch_size)
        key = (optimizer, micro)
        if key not in self._references:
            self._references[key] = self._run("single", 1, optimizer, micro)
        return self._references[key]

    def _run(self, strategy: str, num_ranks: int, optimizer: str, micro_batch: int | None) -> RunTrace:
        folder = Path(tempfile.mkdtemp(dir=self._scratch))
        job = self._job(strategy, num_ranks, optimizer, micro_batch, folder)
        launch(job, num_ranks, console=self._console, quiet=True)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        steps = [row for row in rows if row["event"] == "step"]
        buffers = next(row["buffers"] for row in rows if row["event"] == "start")
        tensors = load_weights(folder / "model.safetensors")
        shutil.rmtree(folder)
        losses, norms = ([float(row[key]) for row in steps] for key in ("loss", "grad_norm"))
        return RunTrace(losses, norms, tensors, set(buffers))

    def _layout(self, strategy: str, num_ranks: int) -> Layout:
        return parse(strategy, num_ranks, servers=self._config.servers)

    def _job(
        self, strategy: str, num_ranks: int, optimizer: str, micro_batch: int | None, folder: Path | None
    ) -> RankJob:
        config = replace(
            fit_settings(self._config, self._layout(strategy, num_ranks)),
            strategy=strategy,
            nproc=str(num_ranks),
            micro_batch=micro_batch,
            schedule=None,
        )
        task = str(Path(self._path).resolve())
        where = str(folder) if folder is not None else None
        sgd = optimizer == "sgd"
        return RankJob(task, strategy, config, self._arguments, where, plain_sgd=sgd, calls_hooks=False)


def _why_not_in_parts(model: nn.Module) -> str | None:
    """Under dp a batch norm sees only its replica's part of the batch, as in torch's DataParallel."""
    names = [name for name, _ in batch_norms(model)]
    if not names:
        return None
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"its batch norm ({names[0]}{others}) would normalise each replica's part of the batch, not the whole"


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


def _table(rows: list[VerifyRow], tolerance: float) -> Table:
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
