"""`rung calibrate`: what this machine can do, measured, as a record that `rung plan --cluster Nxhere` reads.

On a CPU the processes of a job share cores and memory, so everything is measured while all of them measure.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from rung.bench.collectives import Case, Plan
from rung.bench.command import run_on_ranks
from rung.launch.crew import on_ranks
from rung.launch.server import warm_up
from rung.machine import free_host_bytes, processor_name
from rung.planner.hardware import HERE, HERE_FILE
from rung.sizes import human_bytes

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
_OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send_recv")
_SIZES = (1024, 16384, 262144, 2**22, 2**24)
_SLOW = 0.4  # seconds: a product that takes longer is the last of its type


@dataclass(frozen=True)
class Abilities:
    """Of one process while others measure, too."""

    rates: dict[str, list[tuple[float, float]]]
    bandwidths: list[tuple[float, float]]
    issue: float


def measure_abilities(device: str) -> Abilities:
    """Products by size and type, simple operations by size, and what an operation costs by itself."""
    where = torch.device(device)
    rates = {name: _products(dtype, where) for name, dtype in _TYPES.items()}
    return Abilities({name: curve for name, curve in rates.items() if curve}, _movements(where), _issue(where))


def _products(dtype: torch.dtype, where: torch.device) -> list[tuple[float, float]]:
    found = []
    sizes = (16, 32, 64, 128, 256, 512, 1024, 2048) if where.type == "cpu" else (64, 256, 512, 1024, 2048, 4096, 8192)
    for size in sizes:
        left, right = (torch.randn(size, size, device=where).to(dtype) for _ in range(2))
        seconds = _time(partial(torch.mm, left, right), where)
        found.append((2.0 * size**3, 2.0 * size**3 / seconds))
        if seconds > _SLOW:
            break
    return found


def _movements(where: torch.device) -> list[tuple[float, float]]:
    found = []
    largest = 26 if where.type == "cpu" else 30
    for power in range(10, largest + 1, 2):
        values = torch.zeros(2**power // 4, device=where)
        other = torch.ones_like(values)
        out = torch.empty_like(values)
        seconds = _time(partial(torch.add, values, other, out=out), where)
        found.append((3.0 * 2**power, 3.0 * 2**power / seconds))
    return found


def _issue(where: torch.device) -> float:
    """Of one small operation with its part of autograd: what the host needs for it."""
    value = torch.ones(8, device=where, requires_grad=True)

    def chain() -> None:
        total = value
        for _ in range(50):
            total = total * 1.0
        total.sum().backward()  # type: ignore[no-untyped-call]
        value.grad = None

    return _time(chain, where) / 100


def _time(function: Callable[[], Any], where: torch.device, at_least: float = 0.06) -> float:
    """Seconds of a call: the best of several rows of calls."""

    def run(times: int) -> float:
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        started = time.perf_counter()
        for _ in range(times):
            function()
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        return (time.perf_counter() - started) / times

    run(1)
    once = run(1)
    times = max(1, min(1000, int(at_least / 3 / max(once, 1e-7))))
    return min(run(times) for _ in range(3 if once < _SLOW else 1))


def calibrate(nprocs: list[int], path: Path, tell: Callable[[str], None] = lambda text: None) -> dict[int, Abilities]:
    """Measure this machine with each number of processes, and write the record."""
    warm_up(["rung.bench.collectives", "rung.planner.calibrate"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found: dict[int, Abilities] = {}
    times: dict[str, list[tuple[float, float]]] = {}
    for nproc in nprocs:
        tell(f"calibrating: {nproc} process{'es' if nproc > 1 else ''}")
        everyone = on_ranks(measure_abilities, nproc, device, timeout=300)
        found[nproc] = everyone[0]
        if nproc > 1:
            cases = tuple(Case(op, "float32", size) for op in _OPS for size in _SIZES)
            plan = Plan(cases, "nccl" if device == "cuda" else "gloo", device, "sum", 0.1)
            for record in run_on_ranks(plan, nproc, lambda told: None).records:
                if record.seconds is not None:
                    times.setdefault(f"{record.op}:{nproc}", []).append((float(record.bytes), record.seconds))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_record(device, found, times))
    return found


def calibrate_command(nprocs: list[int], out: str | None, *, as_json: bool) -> int:
    """The command. Returns the exit code."""
    path = Path(out) if out is not None else HERE_FILE
    with Console(file=sys.stderr).status("calibrating") as shown:
        found = calibrate(nprocs, path, shown.update)
    if as_json:
        sys.stdout.write(json.dumps({"file": str(path), "processes": nprocs}) + "\n")
        return 0
    console = Console(file=sys.stdout, highlight=False)
    for nproc, one in found.items():
        rates = {name: max(rate for _, rate in curve) for name, curve in one.rates.items()}
        best = ", ".join(f"{name} {rate / 1e9:.3g} GFLOP/s" for name, rate in rates.items())
        moved = max(rate for _, rate in one.bandwidths) / 1e9
        who = "1 process" if nproc == 1 else f"{nproc} processes, each"
        console.print(f"{who}: {best}; {moved:.3g} GB/s; {one.issue * 1e6:.3g} us an operation", soft_wrap=True)
    console.print(f"written: {path}; use it with `rung plan TASK --cluster {max(nprocs)}x{HERE}`", soft_wrap=True)
    return 0


def _record(device: str, found: dict[int, Abilities], times: dict[str, list[tuple[float, float]]]) -> str:
    """TOML, as `hardware.py` reads it."""
    if device == "cuda":
        name, memory = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
    else:
        name, memory = processor_name(), free_host_bytes() or 2**33
    lines = [f"# {name}, measured by `rung calibrate` on {time.strftime('%Y-%m-%d')}; {human_bytes(memory)}", ""]
    for nproc, one in {0: found[min(found)], **found}.items():
        key = HERE if nproc == 0 else f"{HERE}-{nproc}"
        share = memory // max(1, nproc) if device == "cpu" else memory
        lines += [
            f'[devices."{key}"]',
            f'source = "measured on {name}"',
            f'kind = "{device}"',
            f"memory = {share}",
            f"bandwidth = {max(rate for _, rate in one.bandwidths):.4g}",
            f'link = "{HERE}"',
            f"overlaps = {'true' if device == 'cuda' else 'false'}",
            f"issue = {one.issue:.4g}",
            "launch = 0.0" if device == "cpu" else "launch = 2e-6",
            "matrix = {" + ", ".join(f"{n} = {max(r for _, r in c):.4g}" for n, c in one.rates.items()) + "}",
            "rates = {" + ", ".join(f"{n} = {_curve(c)}" for n, c in one.rates.items()) + "}",
            f"bandwidths = {_curve(one.bandwidths)}",
        ]
        if device == "cpu":
            lines += ["context = 314572800", "communicator = 0"]
        lines.append("")
    lines += [f"[links.{HERE}]", f'source = "measured on {name}"', "bandwidth = 1e9", "latency = 1e-4"]
    if times:
        lines.append("[links.here.times]")
        lines += [f'"{key}" = {_curve(curve)}' for key, curve in times.items()]
    return "\n".join(lines) + "\n"


def _curve(points: list[tuple[float, float]]) -> str:
    return "[" + ", ".join(f"[{x:.6g}, {y:.6g}]" for x, y in points) + "]"
