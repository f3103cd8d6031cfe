"""Predicted memory against the GPU's own count, one rank of each world.

`--predict FILE` needs no GPU: it dry-runs every case. `--measure FILE` builds the same rank with real CUDA tensors and
a process group that moves nothing, takes three steps, and reads the allocator. `--join FILE FILE` holds one against the
other, writes `benchmarks/results/memory.json` and prints the table of the docs.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from rung.spec.config import RunConfig
from rung.spec.strategy import parse
from rung.spec.task import Task, load_task

_GPT = "benchmarks/tasks/gpt.py"
_RESNET = "benchmarks/tasks/resnet.py"
_BABYCNN = "examples/babycnn"


@dataclass(frozen=True)
class Case:
    name: str
    task: str
    strategy: str
    num_ranks: int
    samples: int  # of one data rank in a step
    precision: str = "fp32"
    checkpointing: str = "none"
    rank: int = 0
    arguments: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def load(self) -> Task:
        return load_task(self.task).bind(self.arguments)

    @property
    def config(self) -> RunConfig:
        layout = parse(self.strategy, self.num_ranks)
        base = RunConfig(batch_size=self.samples * layout.num_data_ranks, precision=self.precision, clip=1.0)
        return replace(base, activation_checkpointing=self.checkpointing, **self.settings)


def cases() -> Iterator[Case]:
    text = {"model.context": 1024, "train_data.context": 1024, "model.vocabulary": 50304}
    text["train_data.vocabulary"] = 50304
    small = {**text, "model.layers": 12, "model.width": 768, "model.heads": 12}
    large = {**text, "model.layers": 24, "model.width": 2048, "model.heads": 16}
    middle = {**text, "model.layers": 24, "model.width": 1024, "model.heads": 16}
    for strategy, ranks, samples, precision, checkpointing, rank in (
        ("single", 1, 4, "fp32", "none", 0),
        ("single", 1, 16, "bf16", "none", 0),
        ("single", 1, 16, "bf16", "full", 0),
        ("single", 1, 8, "bf16", "selective", 0),
        ("ddp", 8, 8, "bf16", "none", 0),
        ("ddp", 64, 4, "fp32", "full", 0),
        ("zero1", 8, 8, "bf16", "none", 0),
        ("zero1", 64, 4, "fp32", "none", 0),
        ("zero2", 8, 8, "bf16", "none", 0),
        ("zero2", 64, 4, "fp32", "full", 0),
        ("zero3", 8, 8, "bf16", "none", 0),
        ("zero3", 64, 8, "bf16", "full", 0),
        ("zero3", 1024, 4, "fp32", "none", 5),
        ("hsdp8x8", 64, 8, "bf16", "none", 0),
        ("hsdp16x64", 1024, 8, "bf16", "full", 0),
        ("tp4", 4, 8, "bf16", "none", 0),
        ("tp4", 4, 4, "fp32", "full", 0),
        ("pp4", 4, 16, "bf16", "none", 0),
        ("pp4", 4, 16, "bf16", "none", 3),
        ("pp4:gpipe", 4, 8, "fp32", "full", 1),
        ("fsdp,tp4", 32, 8, "bf16", "none", 0),
        ("ddp,tp4", 16, 4, "fp32", "none", 0),
        ("pp4,ddp", 16, 16, "bf16", "full", 0),
        ("pp2,fsdp,tp2", 64, 16, "bf16", "none", 0),
    ):
        name = f"gpt-124m {strategy} {ranks}{f' rank {rank}' if rank else ''} {precision} {checkpointing}"
        yield Case(name, _GPT, strategy, ranks, samples, precision, checkpointing, rank, small)
    for strategy, ranks, samples, precision, checkpointing, arguments in (
        ("single", 1, 8, "bf16", "none", middle),
        ("ddp", 8, 4, "fp32", "full", middle),
        ("zero3", 64, 8, "bf16", "full", large),
        ("zero3", 1024, 4, "bf16", "none", large),
        ("fsdp,tp8", 1024, 8, "bf16", "full", large),
        ("zero1", 16, 2, "bf16", "full", large),
    ):
        size = "350m" if arguments is middle else "1.3b"
        name = f"gpt-{size} {strategy} {ranks} {precision} {checkpointing}"
        yield Case(name, _GPT, strategy, ranks, samples, precision, checkpointing, 0, arguments)
    for strategy, ranks, samples, precision, checkpointing, depth in (
        ("single", 1, 64, "fp32", "none", 50),
        ("single", 1, 64, "bf16", "none", 50),
        ("ddp", 8, 64, "bf16", "none", 50),
        ("zero3", 16, 64, "fp32", "none", 18),
        ("zero1", 8, 64, "bf16", "full", 50),
    ):
        name = f"resnet{depth} {strategy} {ranks} {precision} {checkpointing}"
        yield Case(name, _RESNET, strategy, ranks, samples, precision, checkpointing, 0, {"model.depth": depth})
    for strategy, ranks, samples, precision in (
        ("single", 1, 1024, "fp32"),
        ("ddp", 4, 256, "bf16"),
        ("zero3", 2, 512, "fp32"),
    ):
        name = f"babycnn {strategy} {ranks} {precision} none"
        yield Case(name, _BABYCNN, strategy, ranks, samples, precision, arguments={"model.width": 256})


def predict(case: Case) -> dict[str, Any]:
    from rung.hardware.cluster import devices
    from rung.planner.dryrun import dry_run
    from rung.planner.memory import ROUNDING, find_peak, reserve

    started = time.perf_counter()
    layout = parse(case.strategy, case.num_ranks)
    found = dry_run(case.load(), layout, case.config, rank=case.rank, device="cuda")
    peak, spaces = find_peak(found.trace, rounding=ROUNDING), dict(devices()["H200"].workspaces)
    return {
        "allocated": peak.num_bytes + sum(spaces.values()),
        "reserved": reserve(found.trace, spaces),
        "by_kind": peak.by_kind,
        "phase": peak.phase,
        "state": found.state_bytes,
        "seconds": time.perf_counter() - started,
    }


def measure(case: Case) -> dict[str, Any]:
    from rung.distributed.world import open_fake_world
    from rung.runtime import build_runtime
    from rung.train.worker import make_batches

    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # each case takes its own
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    layout = parse(case.strategy, case.num_ranks)
    config = replace(case.config, steps=3, eval_every="never")
    with open_fake_world(layout, rank=case.rank, device="cuda", fake=False) as world:
        task = case.load()
        batches = make_batches(task, config, world)
        runtime = build_runtime(task, world, config, total_steps=3, seeded=False)
        built = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        per_step = []
        for window in runtime.place(batches):
            runtime.step(window, want_norm=True)
            torch.cuda.synchronize()
            per_step.append(torch.cuda.max_memory_allocated())
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        state = runtime.state_bytes()
        after = torch.cuda.memory_allocated()
        del runtime, batches, window
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated": allocated,
        "reserved": reserved,
        "built": built,
        "before": before,
        "after": after,
        "per_step": per_step,
        "device_used": total - free,
        "state": state,
    }


def join(predicted: dict[str, Any], measured: dict[str, Any]) -> None:
    """Both in one file, and as a table."""
    rows = []
    print("| case | alive: predicted | measured | error | reserved: predicted | measured | error |")
    print("|---|---|---|---|---|---|---|")
    for name, truth in measured.items():
        guess = predicted[name]
        row: dict[str, Any] = {"case": name, "state_is_exact": guess["state"] == truth["state"]}
        for key in ("allocated", "reserved"):
            error = 100 * (guess[key] / truth[key] - 1)
            row[key] = {"predicted": guess[key], "measured": truth[key], "error_percent": error}
        rows.append(row)
        parts = [
            f"{one['predicted'] / 2**20:,.0f} | {one['measured'] / 2**20:,.0f} | {one['error_percent']:+.2f} %"
            for one in (row["allocated"], row["reserved"])
        ]
        print(f"| {name} | {' | '.join(parts)} |")
    summary = {}
    for key in ("allocated", "reserved"):
        errors = [abs(row[key]["error_percent"]) for row in rows]
        summary[key] = {"mean_error_percent": statistics.fmean(errors), "largest_error_percent": max(errors)}
    print(summary, "state exact:", sum(row["state_is_exact"] for row in rows), "of", len(rows))
    content = {
        "command": shlex.join(["python", "-m", "benchmarks.memory", *sys.argv[1:]]),
        "summary": summary,
        "rows": rows,
    }
    Path("benchmarks/results/memory.json").write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predict", type=Path)
    parser.add_argument("--measure", type=Path)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--join", type=Path, nargs=2, metavar=("PREDICTED", "MEASURED"))
    options = parser.parse_args()
    if options.join:
        join(*(json.loads(path.read_text()) for path in options.join))
        return
    function, path = (predict, options.predict) if options.predict else (measure, options.measure)
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for case in cases():
        if options.only not in case.name:
            continue
        try:
            found[case.name] = function(case)
            print(f"{case.name:<45} {found[case.name]['allocated'] / 2**20:10.1f} MiB", flush=True)
        except Exception as error:
            found[case.name] = {"error": f"{type(error).__name__}: {error}"}
            print(f"{case.name:<45} {type(error).__name__}: {str(error)[:300]}", flush=True)
        path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
