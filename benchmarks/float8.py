"""What `--precision fp8` gives on one GPU: time and memory of a step beside bf16, and the losses of a run in both.

python -m benchmarks.float8
python -m benchmarks.float8 --cases 124m --repeats 5 --curve-steps 0

GPTs with a vocabulary of 50,304 on 1,024 tokens a sample, compiled. All variants of a case are built once and kept in
one process; blocks of steps alternate between them. The losses are those of the text of examples/gpt, with one seed.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import Case, find_cases
from benchmarks.report import machine_facts, write
from rung.distributed.world import World, open_world
from rung.runtime import Runtime, build_runtime
from rung.spec.config import RunConfig
from rung.spec.strategy import parse
from rung.spec.task import load_task
from rung.train.worker import make_batches

_RESULTS = Path(__file__).parent / "results" / "float8-cuda.json"
_VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "fp8": {"precision": "fp8"},
    "fp8, a scale for each row": {"precision": "fp8", "fp8_scaling": "row"},
}
_SIZES = {"124m": (12, 768, 12), "1.3b": (24, 2048, 16)}
_PEAK = 989e12  # bf16 of an H100 or H200, without sparsity
_WARM_UP = 4


@dataclass
class _Contender:
    """One variant, which is kept, and the figures of its blocks."""

    runtime: Runtime
    batches: list[Any]
    seconds: list[float]
    first_seconds: float
    peak_bytes: int

    def take(self, steps: int) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        for step in range(steps):
            self.runtime.step(self.batches[step % len(self.batches)])
        torch.cuda.synchronize()
        return (time.perf_counter() - started) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", choices=list(_SIZES), default=list(_SIZES))
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=10, help="in one timed block")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--curve-steps", type=int, default=1000, help="of the runs whose losses are compared; 0: none")
    parser.add_argument("--out", type=Path, default=_RESULTS)
    options = parser.parse_args()
    found: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.float8", *sys.argv[1:]]),
        "machine": machine_facts("cuda"),
        "cases": {},
    }
    with open_world(parse("single", 1), device="cuda") as world:
        for name in options.cases:
            found["cases"][name] = _compare(_case(name), world, options)
            write(options.out, found)
        if options.curve_steps:
            found["curves"] = {name: _losses(options.curve_steps, world, **_VARIANTS[name]) for name in ("bf16", "fp8")}
            for name, losses in found["curves"].items():
                print(f"{name}: loss {statistics.mean(losses[-50:]):.4f} over the last 50 of {len(losses)} steps")
    write(options.out, found)


def _case(name: str) -> Case:
    layers, width, heads = _SIZES[name]
    case = find_cases("cuda", [True])[0]
    size = {"model.layers": layers, "model.width": width, "model.heads": heads}
    return replace(case, arguments={**case.arguments, **size})


def _compare(case: Case, world: World, options: argparse.Namespace) -> dict[str, Any]:
    contenders: dict[str, _Contender] = {}
    for name, settings in _VARIANTS.items():
        contenders[name] = _build(case, world, options.batch_size, settings)
    for repetition in range(options.repeats):
        names = list(contenders)
        for name in names[repetition % len(names) :] + names[: repetition % len(names)]:
            contenders[name].take(2)
            contenders[name].seconds.append(contenders[name].take(options.steps))
    size = sum(parameter.numel() for parameter in contenders["bf16"].runtime.model.parameters())
    rows = {}
    for name, one in contenders.items():
        seconds = statistics.median(one.seconds)
        share = _flops(case, size, options.batch_size) / seconds / _PEAK
        rows[name] = {
            "seconds_per_step": {"median": seconds, "min": min(one.seconds), "max": max(one.seconds)},
            "peak_bytes": one.peak_bytes,
            "share_of_bf16_peak": share,
            "seconds_of_first_steps": one.first_seconds,
        }
        print(
            f"{size / 1e6:.0f} M, batch {options.batch_size}, {name}: {seconds * 1e3:.1f} ms "
            f"({min(one.seconds) * 1e3:.1f} to {max(one.seconds) * 1e3:.1f}), {one.peak_bytes / 2**30:.1f} GiB, "
            f"{share:.1%} of {_PEAK / 1e12:.0f} TFLOP/s",
            flush=True,
        )
    del contenders
    gc.collect()
    torch.cuda.empty_cache()
    return {"parameters": size, "batch_size": options.batch_size, "variants": rows}


def _build(case: Case, world: World, batch_size: int, settings: dict[str, Any]) -> _Contender:
    task = case.load_task()
    config = RunConfig(batch_size=batch_size, steps=8, clip=1.0, compile=True, eval_every="never", **settings)
    before = torch.cuda.memory_allocated()
    runtime = build_runtime(task, world, config, total_steps=1000)
    contender = _Contender(runtime, list(runtime.place(make_batches(task, config, world))), [], 0.0, 0)
    contender.first_seconds = contender.take(_WARM_UP) * _WARM_UP
    torch.cuda.reset_peak_memory_stats()
    contender.take(2)
    contender.peak_bytes = torch.cuda.max_memory_allocated() - before
    return contender


def _flops(case: Case, size: int, batch_size: int) -> float:
    """Six for each parameter and token, and those of causal attention, of which half is not computed."""
    layers, width, length = (case.arguments[f"model.{key}"] for key in ("layers", "width", "context"))
    return float(6 * size + 6 * layers * width * length) * batch_size * length


def _losses(steps: int, world: World, **settings: Any) -> list[float]:
    """Of each step of the example, with a model that is large enough for float8 to matter."""
    context = {f"{part}.context": 256 for part in ("model", "train_data", "eval_data")}
    task = load_task(Path("examples/gpt")).bind({"model.size": "25m", **context})
    config = RunConfig(batch_size=64, steps=steps, clip=1.0, compile=True, eval_every="never", **settings)
    runtime = build_runtime(task, world, config, total_steps=steps)
    shares = [runtime.step(window).loss_share for window in runtime.place(make_batches(task, config, world))]
    return [float(share) for share in shares]


if __name__ == "__main__":
    main()
