"""`rung train`: from flags to a finished run directory on this machine."""

from __future__ import annotations

import importlib
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from rung.config import Resolved, RunConfig, refuse_contradictions, resolve, write_toml
from rung.errors import ConfigError
from rung.launch.local import Interrupted, launch, leaving_at_once, new_run_dir, warm_up
from rung.strategy import Layout, default_name, natural_num_ranks, parse
from rung.task import Task, load_task
from rung.version import VERSION


@dataclass(frozen=True)
class Plan:
    """A checked job: nothing has started yet, and what can be wrong beforehand is not."""

    task: Task
    resolved: Resolved
    layout: Layout
    strategy: str

    @property
    def config(self) -> RunConfig:
        return self.resolved.config


def prepare(
    path: str | Path,
    *,
    config_file: str | None = None,
    flags: Mapping[str, Any] | None = None,
    assignments: Mapping[str, str] | None = None,
) -> Plan:
    """Read task and settings, choose layout and device, and refuse what cannot be, before any process starts."""
    with leaving_at_once():
        task = load_task(path)
        for name in ("rung.launch.agent", "rung.launch.rank"):  # what `launch` needs of torch
            importlib.import_module(name)
        from rung.world import choose_backend, choose_device
    resolved = resolve(task, file=config_file, flags=flags, assignments=assignments)
    config = resolved.config
    num_ranks = config.nproc
    if num_ranks is None and config.strategy is not None:
        num_ranks = natural_num_ranks(config.strategy)
    if num_ranks is None:
        num_ranks = _num_gpus() if config.device != "cpu" else 0
    num_ranks = num_ranks or 1
    strategy = config.strategy or default_name(num_ranks)
    layout = parse(strategy, num_ranks, num_ranks, config.schedule)
    refuse_contradictions(config, layout)
    task.bind(resolved.arguments)
    device = choose_device(config.device, config.backend, 0, num_ranks)
    if layout.is_distributed:
        choose_backend(config.backend, device)
    return Plan(task, resolved, layout, strategy)


def train(
    path: str | Path, *, config_file: str | None, flags: Mapping[str, Any], assignments: Mapping[str, str]
) -> int:
    """The command. Returns the exit code."""
    warm_up()
    console = Console(file=sys.stdout)
    plan = prepare(path, config_file=config_file, flags=flags, assignments=assignments)
    from rung.launch.precision import half_precision_warning
    from rung.train import Job

    warning = half_precision_warning(plan.config)
    if warning:
        console.print(f"[yellow]warning: {warning}[/yellow]", highlight=False, soft_wrap=True)
    folder = new_run_dir(plan.task.name, plan.layout.name, plan.config.out)
    if (folder / "metrics.jsonl").exists() and plan.config.out is not None:
        raise ConfigError(f"--out {folder} holds a run already. Choose another directory, or remove it.")
    write_toml(plan.resolved, folder / "config.toml", f"rung {VERSION}: {plan.task.name}, {plan.layout.describe()}")
    job = Job(str(Path(path).resolve()), plan.strategy, plan.config, plan.resolved.arguments, str(folder))
    started = time.monotonic()
    try:
        summary, _ = launch(job, plan.layout.num_ranks, console=console)
    except Interrupted as error:
        console.print(f"{error}; what was written lies in {folder}", highlight=False, soft_wrap=True)
        return 128 + int(error.signal_number) if error.signal_number != signal.SIGINT else 130
    figures = [f"{summary.steps} steps in {time.monotonic() - started:.1f} s"]
    if summary.last is not None:
        figures.append(f"loss {summary.last.loss:.4g}")
    if summary.evaluation is not None:
        figures += [f"eval {name} {value:.4g}" for name, value in summary.evaluation.metrics.items()]
    console.print("done: " + ", ".join(figures), highlight=False, soft_wrap=True)
    console.print(
        f"results: {folder}/ (metrics.jsonl, model.safetensors, tensorboard/, logs/, config.toml)",
        highlight=False,
        soft_wrap=True,
    )
    return 0


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
