"""Predicted step times against measured ones, on one GPU (`--device cuda`) or on this CPU after `rung calibrate`.

`--predict` and `--measure` may run on different machines; each adds to the file. On the CPU every case runs under
`rung.train.loop` in as many processes as it says, and the median of the steps after the first ten counts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rung.distributed.world import open_world
from rung.hardware.cluster import parse_cluster
from rung.launch.spawn import on_ranks
from rung.planner.estimate import Estimator
from rung.planner.truncated_model import count_blocks
from rung.runtime import build_runtime
from rung.spec.config import RunConfig
from rung.spec.strategy import parse
from rung.spec.task import load_task
from rung.train.worker import make_batches

_GPT = "benchmarks/tasks/gpt.py"
_STEPS, _WARM_UP = 30, 10


@dataclass(frozen=True)
class Case:
    name: str
    task: str
    arguments: dict[str, Any]
    strategy: str
    num_ranks: int
    batch_size: int
    precision: str = "fp32"
    checkpointing: str = "none"

    @property
    def config(self) -> RunConfig:
        base = RunConfig(batch_size=self.batch_size, precision=self.precision, clip=1.0, steps=_STEPS)
        return replace(base, activation_checkpointing=self.checkpointing, eval_every="never")


def cases(device: str) -> Iterator[Case]:
    if device == "cuda":
        text = {"model.context": 1024, "train_data.context": 1024, "model.vocabulary": 50304}
        text["train_data.vocabulary"] = 50304
        shapes = {"124m": (12, 768, 12), "350m": (24, 1024, 16), "1.3b": (24, 2048, 16)}
        for size, batch, precision, checkpointing in (
            ("124m", 32, "bf16", "none"),
            ("124m", 8, "bf16", "none"),
            ("124m", 32, "bf16", "full"),
            ("124m", 8, "fp32", "none"),
            ("350m", 16, "bf16", "none"),
            ("350m", 4, "fp32", "none"),
            ("1.3b", 8, "bf16", "none"),
            ("1.3b", 16, "bf16", "full"),
        ):
            layers, width, heads = shapes[size]
            model = {**text, "model.layers": layers, "model.width": width, "model.heads": heads}
            name = f"gpt-{size} batch {batch} {precision} {checkpointing}"
            yield Case(name, _GPT, model, "single", 1, batch, precision, checkpointing)
        return
    models = {
        "gpt-0.8m": (_GPT, {"model.layers": 4, "model.width": 128, "model.heads": 4}, 16),
        "gpt-5m": (_GPT, {"model.layers": 6, "model.width": 256, "model.heads": 4}, 8),
        "babycnn": ("examples/babycnn", {}, 64),
        "mlp": ("benchmarks/tasks/mlp.py", {}, 32),
    }
    for model, (path, arguments, batch) in models.items():
        for ranks, names in (
            (1, ("single",)),
            (2, ("ddp", "zero1", "zero2", "zero3", "tp2", "pp2")),
            (4, ("ddp", "zero3", "pp2,ddp2")),
        ):
            for strategy in names:
                if strategy in ("tp2", "pp2", "pp2,ddp2") and not model.startswith("gpt"):
                    continue
                yield Case(f"{model} {strategy} {ranks}", path, arguments, strategy, ranks, batch)


def predict(case: Case, cluster: str, hardware: Path | None) -> dict[str, Any]:
    task = load_task(case.task).bind(case.arguments)
    layout = parse(case.strategy, case.num_ranks)
    estimator = Estimator(task, case.config, parse_cluster(cluster, hardware), count_blocks(task))
    share = case.batch_size // layout.num_data_ranks
    found = estimator.estimate(
        layout, case.checkpointing, share if layout.pp == 1 else max(1, share // (4 * layout.pp))
    )
    return {"predicted": found.time.seconds, "limit": found.time.limit, "micro_batch": found.micro_batch}


def measure(case: Case, device: str) -> dict[str, Any]:
    found = on_ranks(measure_rank, case.num_ranks, case, device, timeout=300)
    return {"measured": max(found)}


def measure_rank(case: Case, device: str) -> float:
    layout = parse(case.strategy, case.num_ranks)
    share = case.batch_size // layout.num_data_ranks
    config = case.config if layout.pp == 1 else replace(case.config, micro_batch=max(1, share // (4 * layout.pp)))
    with open_world(layout, device=device, timeout_seconds=120) as world:
        task = load_task(case.task).bind(case.arguments)
        batches = make_batches(task, config, world)
        runtime = build_runtime(task, world, config, total_steps=_STEPS)
        times = []
        for window in runtime.place(batches):
            world.barrier()
            started = time.perf_counter()
            runtime.step(window)
            if device == "cuda":
                torch.cuda.synchronize()
            world.barrier()
            times.append(time.perf_counter() - started)
    return statistics.median(times[_WARM_UP:])


def kendall(pairs: list[tuple[float, float]]) -> float:
    """How far the order of the first agrees with that of the second: 1 if it is the same, -1 if the other way round."""
    signs = [(a - c) * (b - d) for (a, b), (c, d) in itertools.combinations(pairs, 2)]
    return sum((sign > 0) - (sign < 0) for sign in signs) / len(signs)


def summarize(rows: dict[str, Any]) -> dict[str, Any]:
    """Over all, and for each (task, number of processes): is the order right, and how good is the predicted best?"""
    done = {name: (row["predicted"], row["measured"]) for name, row in rows.items() if "measured" in row}
    errors = [abs(predicted / measured - 1) for predicted, measured in done.values()]
    settings: dict[str, dict[str, tuple[float, float]]] = {}
    for name, pair in done.items():
        task, strategy, ranks = name.split()
        settings.setdefault(f"{task} {ranks}", {})[strategy] = pair
        settings.setdefault(f"{task} any", {})[f"{strategy} of {ranks}"] = pair
    found = {}
    for setting, pairs in settings.items():
        if len(pairs) > 1:
            chosen, fastest = (min(pairs, key=lambda name: pairs[name][which]) for which in (0, 1))
            found[setting] = {
                "kendall": kendall(list(pairs.values())),
                "chosen": chosen,
                "fastest": fastest,
                "slower": pairs[chosen][1] / pairs[fastest][1] - 1,
            }
    return {
        "pairs": len(done),
        "kendall": kendall(list(done.values())),
        "mean_error": statistics.mean(errors),
        "largest_error": max(errors),
        "settings": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--hardware", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    file: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {"cases": {}}
    file["command"] = f"python -m benchmarks.step_time {' '.join(sys.argv[1:])}"
    rows = file["cases"]
    for case in cases(options.device):
        if options.only not in case.name:
            continue
        row = rows.setdefault(case.name, {})
        if options.predict:
            cluster = "1xH200" if options.device == "cuda" else f"{case.num_ranks}xhere"
            row.update(predict(case, cluster, options.hardware))
        if options.measure:
            row.update(measure(case, options.device))
        both = row.get("predicted", 0), row.get("measured", 0)
        error = f"{100 * (both[0] / both[1] - 1):+.1f} %" if all(both) else ""
        print(
            f"{case.name:<32} predicted {1000 * both[0]:8.2f} ms  measured {1000 * both[1]:8.2f} ms  {error}",
            flush=True,
        )
        options.out.write_text(json.dumps(file, indent=1) + "\n")
    if options.device == "cpu":
        file["summary"] = summary = summarize(rows)
        options.out.write_text(json.dumps(file, indent=1) + "\n")
        print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
