"""The `rung plan` command: makes a plan from flags and prints it as a table."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rung.errors import ConfigError
from rung.hardware.cluster import parse_cluster
from rung.planner.estimate import Estimate
from rung.planner.measurements import open_measurements
from rung.planner.parallel_search import TaskSource
from rung.planner.plan import Plan, in_tokens, make_plan, micro_batch_of
from rung.spec.config import resolve
from rung.spec.task import load_task
from rung.system.units import human_bytes, human_seconds
from rung.train.sample_order import with_fullest_batch

_MOST_ROWS = 15


def plan_command(
    path: str,
    *,
    cluster: str | None,
    hardware: str | None,
    config_file: str | None,
    flags: Mapping[str, Any],
    assignments: Mapping[str, str],
    measures: bool,
    show_all: bool,
    as_json: bool,
) -> int:
    """Run the command. Returns the exit code: 1 if nothing fits."""
    if cluster is None:
        raise ConfigError(
            "--cluster is required: the hardware to plan for, as in 8xH100 or '64 nodes x 8 H200, nvlink, 400Gb/s'; "
            "after `rung calibrate`, 2xhere is two processes on this machine."
        )
    task = load_task(path)
    resolved = resolve(task, file=config_file, flags=flags, assignments=assignments)
    config = resolved.config
    if config.local_steps > 1:
        raise ConfigError(
            f"--local-steps {config.local_steps} cannot be planned: its steps differ, and a plan estimates a single "
            "one. Plan without it; --compress can be planned."
        )
    target = parse_cluster(cluster, Path(hardware) if hardware is not None else None)
    messages = Console(file=sys.stderr, markup=False)
    source = TaskSource(path, resolved.arguments, config)
    task, config = with_fullest_batch(task.bind(resolved.arguments), config)
    measurements = open_measurements(source, target) if measures else None
    with messages.status("planning") as shown:
        plan = make_plan(
            task,
            config,
            target,
            only=config.strategy,
            source=source,
            measurements=measurements,
            progress=lambda text: shown.update(Text(f"planning {task.name}: {text}")),
        )
    plan = in_tokens(plan, resolved.config.batch_tokens)
    if as_json:
        sys.stdout.write(json.dumps(plan.as_json(), indent=2) + "\n")
    else:
        console = Console(file=sys.stdout, highlight=False, markup=False)
        if not console.is_terminal:
            console.width = 160
        show(plan, console, show_all=show_all)
    return 0 if plan.chosen is not None else 1


def show(plan: Plan, console: Console, *, show_all: bool = False) -> None:
    """Print the recommendation, the table, and the rejected layouts with their reasons."""
    console.print(Text(f"{plan.task} on {plan.cluster.describe()}", style="bold"))
    whole = ", ".join(f"{human_bytes(size)} {name}" for name, size in plan.state.items() if size)
    fullest = f" (the fullest batch of {plan.batch_tokens:,} tokens)" if plan.batch_tokens is not None else ""
    console.print(f"  batch {plan.batch_size}{fullest}, {plan.precision}; the whole model: {whole}")
    for line in plan.words:
        console.print(f"  {line}", style="green" if plan.chosen is not None else "red", soft_wrap=True)
    if plan.rows:
        console.print()
        console.print(_table(plan, plan.rows if show_all else _best(plan)))
        left = len(plan.rows) - _MOST_ROWS
        if left > 0 and not show_all:
            console.print(f"and {left} slower ones (--all)", style="dim")
    if plan.rejected:
        console.print("\nnot possible:")
        for one in plan.rejected if show_all else plan.rejected[:_MOST_ROWS]:
            console.print(f"  {one.layout.name}: {one.reason}", style="dim", soft_wrap=True)
        if len(plan.rejected) > _MOST_ROWS and not show_all:
            console.print(f"  and {len(plan.rejected) - _MOST_ROWS} more (--all)", style="dim")
    if plan.chosen is not None:
        console.print(f"\n{command_line(plan)}", soft_wrap=True)


def _best(plan: Plan) -> list[Estimate]:
    rows = plan.rows[:_MOST_ROWS]
    return rows if plan.chosen is None or plan.chosen in rows else [*rows[:-1], plan.chosen]


def _table(plan: Plan, rows: list[Estimate]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name, side in (
        ("", "left"),
        ("strategy", "left"),
        ("devices", "right"),
        ("step", "right"),
        ("samples/s", "right"),
        ("alive", "right"),
        ("reserved", "right"),
        ("process", "right"),
        ("grounds", "left"),
        ("micro-batches", "right"),
        ("limited by", "left"),
    ):
        table.add_column(name, justify=side, no_wrap=True)  # type: ignore[arg-type]
    for row in rows:
        memory = row.memory
        table.add_row(
            "*" if row is plan.chosen else "",
            row.layout.name,
            str(row.layout.num_ranks),
            human_seconds(row.time.seconds),
            f"{plan.batch_size / row.time.seconds:,.0f}",
            human_bytes(memory.allocated),
            human_bytes(memory.reserved),
            f"{human_bytes(memory.process)} to {human_bytes(row.most_bytes)}",
            "measured" if row.is_measured else "modelled",
            f"{row.num_micro_batches} x {row.micro_batch}{'' if row.checkpointing == 'none' else ' recomputed'}",
            row.time.limit,
            style="bold" if row is plan.chosen else None,
        )
    return table


def command_line(plan: Plan) -> str:
    """The `rung train` command for the chosen layout."""
    row = plan.chosen
    assert row is not None
    batch = f"--batch-size {plan.batch_size}" if plan.batch_tokens is None else f"--batch-tokens {plan.batch_tokens}"
    words = [f"rung train TASK --strategy {row.layout.name} {batch}"]
    words.append(f"--nproc {min(row.layout.num_ranks, plan.cluster.per_node)}")
    if row.layout.num_ranks > plan.cluster.per_node:
        words.append(f"--nnodes {plan.cluster.nodes} --rdzv HOST:PORT")
    if row.num_micro_batches > 1:
        words.append(f"--micro-batch {micro_batch_of(row, plan.batch_tokens)}")
    if row.checkpointing != "none":
        words.append(f"--activation-checkpointing {row.checkpointing}")
    if row.cp_form != "auto":
        words.append(f"--cp-form {row.cp_form}")
    if plan.compiles:
        words.append("--compile")
    if plan.offload != "none":
        words.append(f"--offload {plan.offload}")
    if plan.compress != "none":
        words.append(f"--compress {plan.compress}")
    if plan.precision != "fp32":
        words.append(f"--precision {plan.precision}")
    return " ".join(words)
