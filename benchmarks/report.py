"""From the times of blocks to what is shown and kept: medians, ratios to the hand-written loop; a table and a file."""

from __future__ import annotations

import json
import os
import platform
import statistics
import textwrap
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table

from benchmarks.measure import Measured, Plan
from rung.spec.version import VERSION
from rung.system.processes import num_cores

YARDSTICK = "hand"


def summarise(plan: Plan, measured: Measured) -> dict[str, Any]:
    """The part of the report on one case. Ratios are taken within a repetition, before their median."""
    rows = {}
    yardstick = measured.seconds_per_step.get(YARDSTICK)
    for name, seconds in measured.seconds_per_step.items():
        row: dict[str, Any] = {
            "seconds_per_step": spread(seconds),
            "blocks_seconds_per_step": seconds,
            "mean_loss": measured.mean_loss[name],
        }
        if yardstick is not None:
            row["ratio_to_hand"] = spread([own / other for own, other in zip(seconds, yardstick, strict=True)])
        rows[name] = row
    settings = plan.case.settings() | {
        "steps": plan.steps,
        "repeats": plan.repeats,
        "threads_per_rank": plan.threads,
    }
    return {"settings": settings, "stolen": measured.stolen, "contenders": rows}


def machine_facts(device: str) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "rung": VERSION,
        "cores": num_cores(),
        "cpu": _cpu_name(),
        "load_average_before": round(os.getloadavg()[0], 2),
    }
    for package in ("accelerate", "deepspeed", "lightning", "lightning-fabric", "ray", "torchtitan", "transformers"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            continue
    if device == "cuda":
        facts |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return facts


def table(cases: dict[str, Any]) -> Table:
    shown = Table(title="ms a step, and the ratio to the hand-written loop", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for heading in ("case", "contender"):
        shown.add_column(heading, no_wrap=True)
    for heading in ("ms", "range", "ratio", "range", "loss"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for name, case in cases.items():
        for contender, row in case["contenders"].items():
            milliseconds = _texts(row["seconds_per_step"], 1000, 2)
            ratio = _texts(row["ratio_to_hand"], 1, 3) if "ratio_to_hand" in row else ("-", "-")
            shown.add_row(name, contender, *milliseconds, *ratio, f"{row['mean_loss']:.3f}")
        shown.add_section()
    return shown


def write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")


def fill_page(page: Path, source: Path, marks: Callable[[dict[str, Any]], dict[str, str]]) -> dict[str, Any] | None:
    """Write what results mean into a page; returns them. A trial, whose results lie elsewhere, is not for the page."""
    if not source.resolve().is_relative_to(Path("benchmarks/results").resolve()):
        return None
    content: dict[str, Any] = json.loads(source.read_text())
    fill_marks(page, marks(content))
    print(f"{source} -> {page}")
    return content


def fill_marks(page: Path, told: Mapping[str, str]) -> None:
    """Replace what stands between marks of a page: a table or a picture by itself, a sentence in its paragraph."""
    text = page.read_text()
    for name, new in told.items():
        start = f"<!-- measured: {name} -->"
        if text.count(start) != 1:
            raise RuntimeError(f"{page} has no mark {start}, or more than one")
        new = (
            f"\n\n{new}\n\n" if new.startswith(("|", "!")) else f"\n{textwrap.fill(new, 118, break_on_hyphens=False)} "
        )
        before, _, rest = text.partition(start)
        text = f"{before}{start}{new}<!-- end -->{rest.partition('<!-- end -->')[2]}"
    page.write_text(text)


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _texts(spread: dict[str, float], scale: float, digits: int) -> tuple[str, str]:
    median, least, greatest = (f"{spread[key] * scale:.{digits}f}" for key in ("median", "min", "max"))
    return median, f"{least}..{greatest}"


def _cpu_name() -> str:
    """The model's name where the system tells it, else the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(filter(None, names), platform.processor() or platform.machine())
