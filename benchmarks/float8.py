"""What `--precision fp8` gives on one GPU: time and memory of a step beside bf16, and the losses of a run in both.

python -m benchmarks.float8
python -m benchmarks.float8 --cases 124m --repeats 5 --curve-steps 0
python -m benchmarks.float8 --cases --out /tmp/curves.json      # the losses alone

GPTs with a vocabulary of 50,304 on 1,024 tokens a sample, compiled. All variants of a case are built once and kept in
one process; blocks of steps alternate between them. The losses are those of examples/gpt with 25 M parameters, from
several seeds, at a rate that is right for that size: at the example's own, which is meant for a smaller model, two runs
in bf16 end a quarter apart, and would tell nothing of float8. The text is all that the example can read, four and a
half million characters: its own million is learnt by heart before the end. The last twentieth is held out.
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
from rung.system.svg import BLUE, GREY, LINE, MARGIN, ORANGE, WIDTH, Page
from rung.train.worker import make_batches, make_eval_batches

_RESULTS = Path(__file__).parent / "results" / "float8-cuda.json"
_VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "fp8": {"precision": "fp8"},
    "fp8, a scale for each row": {"precision": "fp8", "fp8_scaling": "row"},
}
_SIZES = {"124m": (12, 768, 12), "1.3b": (24, 2048, 16)}
_PEAK = 989e12  # bf16 of an H100 or H200, without sparsity
_WARM_UP = 4
_CHARACTERS = 10_000_000  # more than there are


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
    parser.add_argument("--curve-seeds", type=int, default=2, help="runs in each precision")
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
            found["curves"], found["held_out"] = {"bf16": [], "fp8": []}, {"bf16": [], "fp8": []}
            for seed in range(options.curve_seeds):
                for name, runs in found["curves"].items():
                    losses, held_out = _losses(options.curve_steps, world, seed=seed, **_VARIANTS[name])
                    runs.append(losses)
                    found["held_out"][name].append(held_out)
                    print(
                        f"{name}, seed {seed}: loss {_last(losses):.4f} over the last 50 steps, {held_out:.4f} on text "
                        "that was held out",
                        flush=True,
                    )
                    write(options.out, found)
            options.out.with_suffix(".svg").write_text(picture(found["curves"]))
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


def _last(losses: list[float]) -> float:
    return statistics.mean(losses[-50:])


def picture(curves: dict[str, list[list[float]]]) -> str:
    """Means of ten steps, one line for each run."""
    page = Page()
    page.text(MARGIN, page.y + 8, "Loss in bf16 and in float8", size=17, bold=True)
    page.text(MARGIN, page.y + 28, "GPT with 25 M parameters, means of ten steps, two seeds each", size=12, fill=GREY)
    left, top, width, height = MARGIN + 30, page.y + 56, WIDTH - 2 * MARGIN - 110, 260.0
    steps = len(curves["bf16"][0])
    most = max(statistics.mean(losses[:10]) for runs in curves.values() for losses in runs)
    for loss in range(int(most) + 1):
        y = top + height * (1 - loss / most)
        page.line([(left, y), (left + width, y)], LINE)
        page.text(left - 8, y + 4, str(loss), size=11, fill=GREY, anchor="end")
    for step in range(0, steps + 1, max(1, steps // 5)):
        page.text(left + width * step / steps, top + height + 18, str(step), size=11, fill=GREY, anchor="middle")
    for (name, runs), colour in zip(curves.items(), (BLUE, ORANGE), strict=True):
        for losses in runs:
            means = [statistics.mean(losses[step : step + 10]) for step in range(0, steps, 10)]
            page.line(
                [
                    (left + width * (10 * n + 5) / steps, top + height * (1 - mean / most))
                    for n, mean in enumerate(means)
                ],
                colour,
                width=1.4,
            )
        page.text(left + width + 10, top + height * (1 - _last(runs[0]) / most) + (14 if name == "fp8" else -4), name,
                  size=12, fill=colour)  # fmt: skip
    page.y = top + height + 30
    return page.render("Loss in bf16 and in float8")


def _losses(steps: int, world: World, seed: int, **settings: Any) -> tuple[list[float], float]:
    """Of each step of the example, with a model that is large enough for float8 to matter; and of text held out."""
    sizes = {f"{part}.context": 256 for part in ("model", "train_data", "eval_data")}
    sizes |= {f"{part}.characters": _CHARACTERS for part in ("train_data", "eval_data")}
    task = load_task(Path("examples/gpt")).bind({"model.size": "25m", "optimizer.lr": 6e-4, **sizes})
    config = RunConfig(batch_size=64, steps=steps, clip=1.0, compile=True, eval_every="never", seed=seed, **settings)
    runtime = build_runtime(task, world, config, total_steps=steps)
    shares = [runtime.step(window).loss_share for window in runtime.place(make_batches(task, config, world))]
    held_out = runtime.evaluate(make_eval_batches(task, config, world))["loss"]
    return [float(share) for share in shares], held_out


if __name__ == "__main__":
    main()
