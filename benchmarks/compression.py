"""Gradient compression and local steps over a slow cable: bytes, loss and time against uncompressed ddp.

The GPT example trains on two ranks, each in a network namespace of its own, with `tc` limiting the cable between them.
Every method takes the same steps with the same data and settings. For the first seed the cable has 100 Mbit/s, for the
others 1 Gbit/s: what is computed does not depend on it. The bytes are those of the interface's own counter. The fixed
loss that all train to is a little above what uncompressed ddp ends with, on the mean of the last steps' losses.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.limited import Cable, limit, sent_bytes
from rung.distributed.world import World, open_world
from rung.runtime import build_runtime
from rung.spec.config import RunConfig
from rung.spec.strategy import parse
from rung.spec.task import load_task
from rung.system.launcher_env import environment_rank
from rung.train.loop import Outputs, run
from rung.train.records import StepRecord
from rung.train.worker import make_batches, make_eval_batches

_TASK = "examples/gpt"
_MODEL = {"model.layers": 2, "model.width": 192, "model.heads": 4}
_CONTEXT = {"model.context": 32, "train_data.context": 32, "eval_data.context": 32}
_OPTIMIZER = {"optimizer.kind": "sgd", "optimizer.lr": 0.1, "optimizer.weight_decay": 0.0, "schedule.floor": 0.1}
_BASE = RunConfig(strategy="ddp", batch_size=8, clip=1.0, device="cpu", eval_every="never", log_every=10)
METHODS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fp16": {"compress": "fp16"},
    "bf16": {"compress": "bf16"},
    "powersgd:4": {"compress": "powersgd:4"},
    "topk:0.007": {"compress": "topk:0.007", "topk_values": "sign", "compress_warmup": 0},
    "onebit": {"compress": "onebit"},
    "ternary": {"compress": "ternary"},
    "local-steps 8": {"local_steps": 8},
    "diloco 20": {"local_steps": 20, "outer": "diloco"},
}
_FAST = 10_000  # Mbit/s, for what is not measured
_RECENT = 100  # steps whose mean loss is held against the fixed one


@dataclass
class Watch:
    """An observer: when each loss was reached, and after how many bytes."""

    began: float
    sent: int

    def __post_init__(self) -> None:
        self.losses: list[float] = []
        self.points: list[tuple[int, float, int, float]] = []  # step, seconds, bytes, recent mean of the loss

    def on_steps(self, records: list[StepRecord]) -> None:
        self.losses += [record.loss for record in records]
        recent = self.losses[-_RECENT:]
        seconds, num_bytes = time.perf_counter() - self.began, sent_bytes() - self.sent
        self.points.append((records[-1].step, seconds, num_bytes, statistics.fmean(recent)))

    def on_start(self, facts: Any, step: int) -> None: ...
    def on_evaluation(self, record: Any) -> None: ...
    def on_checkpoint(self, record: Any) -> None: ...
    def on_end(self, facts: Any) -> None: ...
    def close(self) -> None: ...


def measure(world: World, name: str, megabits: int, seed: int, steps: int) -> dict[str, Any]:
    """One run on this rank."""
    task = load_task(_TASK).bind({**_MODEL, **_CONTEXT, **_OPTIMIZER})
    config = replace(_BASE, seed=seed, steps=steps, **METHODS[name])
    batches = make_batches(task, config, world)
    runtime = build_runtime(task, world, config, total_steps=steps)
    limit(megabits)
    world.barrier()
    watch = Watch(time.perf_counter(), sent_bytes())
    run(runtime, batches, world=world, config=config, outputs=Outputs([watch]))
    world.barrier()
    seconds, num_bytes = time.perf_counter() - watch.began, sent_bytes() - watch.sent
    limit(_FAST)
    evaluation = runtime.evaluate(make_eval_batches(task, replace(config, batch_size=128), world))
    counted = [sum(t["num_bytes"] for t in row.values()) for row in world.gather_objects(_told(runtime))]
    return {
        "method": name,
        "megabits": megabits,
        "seed": seed,
        "steps": steps,
        "parameters": runtime.facts.num_trainable,
        "eval_loss": evaluation["loss"],
        "train_loss": statistics.fmean(watch.losses[-_RECENT:]),
        "seconds": seconds,
        "interface_bytes": int(statistics.fmean(row[0] for row in world.gather([float(num_bytes)]))),
        "counted_bytes": int(statistics.fmean(counted)),
        "points": watch.points,
    }


def _told(runtime: Any) -> dict[str, dict[str, int]]:
    return {kind: {"num_bytes": traffic.num_bytes} for kind, traffic in runtime.traffic().items()}


def run_rank(plan: list[tuple[str, int, int]], steps: int, out: Path) -> None:
    """All of the plan on one rank, one run after the other."""
    torch.set_num_threads(1)
    rows = []
    with open_world(parse("ddp", 2, 1), device="cpu", timeout_seconds=600) as world:
        for name, megabits, seed in plan:
            row = measure(world, name, megabits, seed, steps)
            rows.append(row)
            if environment_rank() == 0:
                print(
                    f"{name:<15} {megabits:>5} Mbit/s  seed {seed}  eval loss {row['eval_loss']:.4f}  "
                    f"{row['seconds']:7.1f} s  {row['interface_bytes'] / 1e6:9.2f} MB",
                    flush=True,
                )
                out.write_text(json.dumps(rows))


def summarise(rows: list[dict[str, Any]], margin: float) -> list[dict[str, Any]]:
    """A line for each method: gaps over the seeds; bytes and times against uncompressed ddp on the same cable."""
    plain = {row["seed"]: row for row in rows if row["method"] == "ddp"}
    lines = []
    for name in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == name]
        gaps = [row["eval_loss"] / plain[row["seed"]]["eval_loss"] - 1 for row in own]
        line: dict[str, Any] = {
            "method": name,
            "eval_loss": statistics.fmean(row["eval_loss"] for row in own),
            "gap_percent": 100 * statistics.fmean(gaps),
            "gap_percent_by_seed": [100 * gap for gap in gaps],
            "times_fewer_bytes": statistics.fmean(
                plain[row["seed"]]["interface_bytes"] / row["interface_bytes"] for row in own
            ),
            "interface_over_counted": statistics.fmean(
                row["interface_bytes"] / row["counted_bytes"] if row["counted_bytes"] else 0.0 for row in own
            ),
        }
        for megabits in sorted({row["megabits"] for row in own}):
            same = [row for row in own if row["megabits"] == megabits]
            reached = [_when(row, plain[row["seed"]]["train_loss"] * (1 + margin)) for row in same]
            plainly = [_when(plain[row["seed"]], plain[row["seed"]]["train_loss"] * (1 + margin)) for row in same]
            line[f"seconds_{megabits}"] = statistics.fmean(row["seconds"] for row in same)
            line[f"times_quicker_{megabits}"] = statistics.fmean(
                plain[row["seed"]]["seconds"] / row["seconds"] for row in same
            )
            pairs = [(a, b) for a, b in zip(plainly, reached, strict=True) if a is not None and b is not None]
            done = len(pairs) == len(same)
            line[f"times_quicker_to_loss_{megabits}"] = (
                statistics.fmean(a[1] / b[1] for a, b in pairs) if done else None
            )
            line[f"times_fewer_bytes_to_loss_{megabits}"] = (
                statistics.fmean(a[2] / b[2] for a, b in pairs) if done else None
            )
        lines.append(line)
    return lines


def _when(row: dict[str, Any], loss: float) -> tuple[int, float, int, float] | None:
    """The first point at which the recent mean of the loss was low enough."""
    points = [tuple(point) for point in row["points"] if point[0] >= _RECENT and point[3] <= loss]
    return points[0] if points else None  # type: ignore[return-value]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS), metavar="NAME")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--margin", type=float, default=0.02, help="by which the fixed loss is above that of ddp")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/compression.json"))
    parser.add_argument("--plan", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plan is not None:  # one of the two ranks
        run_rank(json.loads(options.plan.read_text()), options.steps, options.out)
        return
    names = list(dict.fromkeys(["ddp", *options.methods]))
    plan = [(name, 100 if seed == 0 else 1000, seed) for seed in range(options.seeds) for name in names]
    with tempfile.TemporaryDirectory() as folder, Cable() as cable:
        described, found = Path(folder, "plan.json"), Path(folder, "rows.json")
        described.write_text(json.dumps(plan))
        cable.run(
            "benchmarks.compression", "--plan", str(described), "--steps", str(options.steps), "--out", str(found)
        )
        rows = json.loads(found.read_text())
    lines = summarise(rows, options.margin)
    for line in lines:
        print(
            f"{line['method']:<15} gap {line['gap_percent']:+.2f} %, {line['times_fewer_bytes']:.0f} x fewer bytes, "
            + ", ".join(f"{key} {value:.2f}" for key, value in line.items() if "quicker" in key and value is not None)
        )
    content = {
        "command": shlex.join(["python", "-m", "benchmarks.compression", *sys.argv[1:]]),
        "machine": {"cpu": platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__},
        "task": {"path": _TASK, **_MODEL, **_CONTEXT, **_OPTIMIZER, "batch_size": _BASE.batch_size, "clip": _BASE.clip},
        "margin": options.margin,
        "summary": lines,
        "rows": [{key: value for key, value in row.items() if key != "points"} for row in rows],
    }
    options.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
