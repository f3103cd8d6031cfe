"""`rung calibrate`: measure this machine and write a hardware record for `rung plan --cluster Nxhere`.

On a CPU the processes of a job share cores and memory, so all of them measure at the same time.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from rung.distributed.torch_private import scaled_mm
from rung.distributed.world import World, open_world
from rung.hardware.bench.collectives import Case, SweepPlan
from rung.hardware.bench.sweep import run_on_ranks
from rung.hardware.cluster import HERE, HERE_FILE, Cluster, Device, Link
from rung.launch.fork_server import start_fork_server
from rung.launch.spawn import on_ranks
from rung.parallel.float8 import FIRST_CAPABILITY
from rung.planner.cost import duration, step_time
from rung.planner.dryrun import dry_run
from rung.planner.host_times import HostTimes, SmallTask, host_of_device, measure_small_step, small_config, works_of
from rung.planner.kernels import Point, measure_kernels
from rung.spec.strategy import parse
from rung.system.disk import check_file, writing
from rung.system.host import free_host_bytes, processor_name
from rung.system.processes import num_cores
from rung.system.units import human_bytes

# TF32 is fp32 for whoever asks torch for it.
_TYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
    "fp8": torch.float8_e4m3fn,
}
_OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send_recv")
_SIZES = (1024, 16384, 262144, 2**22, 2**24)
_SLOW = 0.1  # seconds: after a matrix product this slow, larger ones of its dtype are skipped


@dataclass(frozen=True)
class Abilities:
    """The rates of one process while the others measure too."""

    rates: dict[str, list[Point]]
    bandwidths: list[Point]
    kernels: dict[str, list[Point]]
    host: HostTimes


def measure_abilities(nproc: int, device: str) -> Abilities:
    """Measure matrix products by size and dtype, memory bandwidth by size, other kernels, and the cost of an issue."""
    with open_world(parse("ddp" if nproc > 1 else "single", nproc), device=device, timeout_seconds=120) as world:
        # If processes share a core, the fastest of several times had the core to itself and must not be taken.
        stopwatch = _Stopwatch(world, takes_turns=device == "cpu" and nproc > num_cores())
        names = [name for name in _TYPES if _is_computed(name, device)]
        rates = {name: _matrix_products(name, stopwatch) for name in names}
        types = (torch.float32,) if device == "cpu" else (torch.float32, torch.bfloat16)
        kernels = measure_kernels(world, stopwatch, types)
        found = Abilities(rates, _memory_bandwidths(stopwatch), kernels, HostTimes(0.0))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):  # each process trains alone
        os.environ.pop(name, None)
    host = host_of_device() if device == "cuda" else HostTimes(_issue_on_cpu(found))
    return replace(found, host=host)


class _Stopwatch:
    """Times calls while all other processes time theirs."""

    def __init__(self, world: World, *, takes_turns: bool) -> None:
        self.where = world.device
        self._world, self._takes_turns = world, takes_turns

    def __call__(self, function: Callable[[], Any], at_least: float = 0.03) -> float:
        """The seconds of one call."""
        self._run(function, 1)
        once = self._run(function, 1)
        if self.where.type == "cuda" and once < _SLOW:
            return self._device_seconds(function, max(3, min(50, int(at_least / 2 / max(once, 1e-7)))))
        times = max(1, min(1000, int(at_least / 2 / max(once, 1e-7))))
        self._world.barrier()
        rows = [self._run(function, times) for _ in range(2 if once < _SLOW else 1)]
        return sum(rows) / len(rows) if self._takes_turns else min(rows)

    def _device_seconds(self, function: Callable[[], Any], times: int) -> float:
        """The device's own time in a call, as its profiler counts it: a small kernel ends before the host has issued
        the next."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
            for _ in range(times):
                function()
            torch.cuda.synchronize(self.where)
        return float(sum(one.self_device_time_total for one in profile.key_averages())) / 1e6 / times

    def agree(self, condition: bool) -> bool:
        """Whether the condition holds on any process: all must take the same measurements."""
        flag = torch.tensor([int(condition)])
        if self._world.size > 1:
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag.item())

    def _run(self, function: Callable[[], Any], times: int) -> float:
        on_gpu = self.where.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize(self.where)
        started = time.perf_counter()
        for _ in range(times):
            function()
        if on_gpu:
            torch.cuda.synchronize(self.where)
        return (time.perf_counter() - started) / times


def _is_computed(name: str, device: str) -> bool:
    """Whether the device multiplies in this type."""
    if name == "fp8":
        return device == "cuda" and torch.cuda.get_device_capability() >= FIRST_CAPABILITY
    return device == "cuda" or name != "tf32"


def _matrix_products(name: str, stopwatch: _Stopwatch) -> list[Point]:
    found, dtype = [], _TYPES[name]
    where = stopwatch.where
    sizes = (16, 32, 64, 128, 256, 512, 1024, 2048) if where.type == "cpu" else (64, 256, 512, 1024, 2048, 4096, 8192)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    for size in sizes:
        left, right = (torch.randn(size, size, device=where).to(dtype) for _ in range(2))
        product = partial(torch.mm, left, right)
        if name == "fp8":
            one = torch.ones((), device=where)
            product = partial(scaled_mm, left, right.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
        seconds = stopwatch(product)
        found.append((2.0 * size**3, 2.0 * size**3 / seconds))
        if stopwatch.agree(seconds > _SLOW):
            break
    torch.set_float32_matmul_precision(before)
    return found


def _memory_bandwidths(stopwatch: _Stopwatch) -> list[Point]:
    found = []
    largest = 26 if stopwatch.where.type == "cpu" else 30
    for power in range(10, largest + 1, 2):
        values = torch.zeros(2**power // 4, device=stopwatch.where)
        other = torch.ones_like(values)
        out = torch.empty_like(values)
        seconds = stopwatch(partial(torch.add, values, other, out=out))
        found.append((3.0 * 2**power, 3.0 * 2**power / seconds))
    return found


def _issue_on_cpu(found: Abilities) -> float:
    """The overhead of one operation: the step time of a small model divided by its number of operations."""
    works = works_of(SmallTask(), "cpu")
    own = _as_device(found)
    seconds = measure_small_step(SmallTask(), "single", 1, "cpu") - sum(duration(work, own)[0] for work in works)
    return max(1e-6, seconds / len(works))


def _message_overhead(nproc: int, device: str, found: Abilities, times: dict[str, list[Point]]) -> float:
    """The extra cost of a message within a step over its time in a benchmark loop, because ranks are not in sync."""
    curves = {(key.rpartition(":")[0], nproc): tuple(c) for key, c in times.items() if key.endswith(f":{nproc}")}
    link = Link(HERE, "", 1e9, 1e-4, times=curves)
    layout = parse("zero3", nproc)
    run = dry_run(SmallTask().task(), layout, small_config(nproc), device=device)
    predicted = step_time([run], Cluster(_as_device(found), 1, nproc, link)).seconds
    measured: float = max(on_ranks(measure_small_step, nproc, SmallTask(), "zero3", nproc, device, timeout=300))
    return max(0.0, measured - predicted) / len(run.trace.messages(run.second_step))


def _as_device(found: Abilities) -> Device:
    rates = {name: tuple(curve) for name, curve in found.rates.items()}
    curves = {name: tuple(curve) for name, curve in found.kernels.items()}
    bandwidths = tuple(found.bandwidths)
    return Device(
        HERE, "", "cpu", 2**40, 1.0, HERE, {}, rates=rates, bandwidths=bandwidths, kernels=curves,
        issue=found.host.issue, launch=0.0, overlaps=False,
    )  # fmt: skip


def calibrate(
    nprocs: list[int], path: Path, progress: Callable[[str], None] = lambda text: None
) -> dict[int, Abilities]:
    """Measure this machine with each number of processes and write the record to `path`."""
    start_fork_server(["rung.hardware.bench.collectives", "rung.planner.calibrate"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found: dict[int, Abilities] = {}
    times: dict[str, list[Point]] = {}
    besides: dict[int, float] = {}
    for nproc in nprocs:
        progress(f"calibrating: {nproc} process{'es' if nproc > 1 else ''}")
        per_rank = on_ranks(measure_abilities, nproc, nproc, device, timeout=300)
        found[nproc] = per_rank[0]
        if nproc > 1:
            cases = tuple(Case(op, "float32", size) for op in _OPS for size in _SIZES)
            plan = SweepPlan(cases, "nccl" if device == "cuda" else "gloo", device, "sum", 0.1)
            for record in run_on_ranks(plan, nproc, lambda text: None).records:
                if record.seconds is not None:
                    times.setdefault(f"{record.op}:{nproc}", []).append((float(record.bytes), record.seconds))
            besides[nproc] = _message_overhead(nproc, device, found[nproc], times)
    with writing(path, "--out"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_record(device, found, times, besides))
    return found


def calibrate_command(nprocs: list[int], out: str | None, *, as_json: bool) -> int:
    """Run the command. Returns the exit code. Default: 1, 2, 4 and 8 processes, up to the number of GPUs, else 4."""
    path = check_file(out if out is not None else HERE_FILE, "--out")
    nprocs = nprocs or [n for n in (1, 2, 4, 8) if n <= (torch.cuda.device_count() or 4)]
    with Console(file=sys.stderr, markup=False).status("calibrating") as shown:
        found = calibrate(nprocs, path, shown.update)
    if as_json:
        sys.stdout.write(json.dumps({"file": str(path), "processes": nprocs}) + "\n")
        return 0
    console = Console(file=sys.stdout, highlight=False, markup=False)
    for nproc, one in found.items():
        rates = {name: max(rate for _, rate in curve) for name, curve in one.rates.items()}
        best = ", ".join(f"{name} {rate / 1e9:.3g} GFLOP/s" for name, rate in rates.items())
        moved = max(rate for _, rate in one.bandwidths) / 1e9
        who = "1 process" if nproc == 1 else f"{nproc} processes, each"
        console.print(f"{who}: {best}; {moved:.3g} GB/s; {one.host.issue * 1e6:.3g} us an operation", soft_wrap=True)
    console.print(f"written: {path}; use it with `rung plan TASK --cluster {max(nprocs)}x{HERE}`", soft_wrap=True)
    return 0


def _record(
    device: str, found: dict[int, Abilities], times: dict[str, list[Point]], besides: dict[int, float] | None = None
) -> str:
    """The record as TOML, in the format that `rung.hardware.cluster` reads."""
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
            *(f"{name} = {value:.4g}" for name, value in asdict(one.host).items() if value is not None),
            "launch = 0.0" if device == "cpu" else "launch = 2e-6",
            "matrix = {" + ", ".join(f"{n} = {max(r for _, r in c):.4g}" for n, c in one.rates.items()) + "}",
            "rates = {" + ", ".join(f"{n} = {_curve(c)}" for n, c in one.rates.items()) + "}",
            f"bandwidths = {_curve(one.bandwidths)}",
            "kernels = {" + ", ".join(f'"{n}" = {_curve(c)}' for n, c in one.kernels.items()) + "}",
        ]
        if device == "cpu":
            lines += ["context = 314572800", "communicator = 0"]
        lines.append("")
    lines += [f"[links.{HERE}]", f'source = "measured on {name}"', "bandwidth = 1e9", "latency = 1e-4"]
    if besides:
        lines.append("besides = {" + ", ".join(f"{n} = {seconds:.4g}" for n, seconds in besides.items()) + "}")
    if times:
        lines.append(f"[links.{HERE}.times]")
        lines += [f'"{key}" = {_curve(curve)}' for key, curve in times.items()]
    return "\n".join(lines) + "\n"


def _curve(points: list[tuple[float, float]]) -> str:
    return "[" + ", ".join(f"[{x:.6g}, {y:.6g}]" for x, y in points) + "]"
