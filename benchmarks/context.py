"""What context parallelism gives on a GPU: time and memory of one rank on long sequences, and the longest that fits.

python -m benchmarks.context
python -m benchmarks.context --lengths 32768 --longest single

A GPT with 1.3 B parameters, one sequence a step, bf16, blocks computed again in backward. The rank has real tensors and
a process group that moves nothing, so times are without messages. The longest sequence is found by doubling.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import machine_facts, write
from rung.distributed.world import open_fake_world, open_world
from rung.runtime import build_runtime
from rung.spec.config import RunConfig
from rung.spec.strategy import Layout, parse
from rung.spec.task import load_task
from rung.train.worker import make_batches

_RESULTS = Path(__file__).parent / "results" / "context-cuda.json"
_SHAPE = {"layers": 24, "width": 2048, "heads": 16, "vocabulary": 50304}
_LAYOUTS = {"single": 1, "cp2": 2, "cp4": 4, "cp8": 8}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", choices=list(_LAYOUTS), default=list(_LAYOUTS))
    parser.add_argument("--lengths", nargs="*", type=int, default=[32768, 131072])
    parser.add_argument("--longest", nargs="*", choices=list(_LAYOUTS), default=["single", "cp8"])
    parser.add_argument("--layers", type=int, default=_SHAPE["layers"])
    parser.add_argument("--steps", type=int, default=3, help="the quickest after the first counts, if there are more")
    parser.add_argument("--form", default="auto")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=_RESULTS)
    options = parser.parse_args()
    found: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.context", *sys.argv[1:]]),
        "machine": machine_facts(options.device),
        "rows": [],
        "longest": {},
    }
    for length in options.lengths:
        for strategy in options.strategies:
            found["rows"].append(_measure(strategy, length, options))
            write(options.out, found)
    for strategy in options.longest:
        length = max(options.lengths, default=16384)
        while "failed" not in _known(found, strategy, length, options):
            found["longest"][strategy] = length
            write(options.out, found)
            length *= 2
    print({name: f"{length:,}" for name, length in found["longest"].items()})


def _known(found: dict[str, Any], strategy: str, length: int, options: argparse.Namespace) -> dict[str, Any]:
    for row in found["rows"]:
        if (row["strategy"], row["length"]) == (strategy, length):
            return dict(row)
    found["rows"].append(_measure(strategy, length, options))
    return dict(found["rows"][-1])


def _measure(strategy: str, length: int, options: argparse.Namespace) -> dict[str, Any]:
    layout = parse(strategy, _LAYOUTS[strategy])
    row: dict[str, Any] = {"strategy": strategy, "length": length}
    try:
        row |= _steps(layout, length, options)
        shown = f"{row['seconds']:.2f} s, {row['peak_bytes'] / 2**30:.1f} GiB"
    except torch.OutOfMemoryError as error:
        row["failed"] = shown = f"out of memory: {str(error).partition('.')[0]}"
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()
    print(f"{strategy}, {length:,} tokens: {shown}", flush=True)
    return row


def _steps(layout: Layout, length: int, options: argparse.Namespace) -> dict[str, Any]:
    shape = {**_SHAPE, "layers": options.layers, "context": length}
    task = load_task(Path(__file__).parent / "tasks" / "gpt.py").bind(
        {f"model.{key}": value for key, value in shape.items()}
        | {"train_data.context": length, "train_data.vocabulary": shape["vocabulary"], "train_data.samples": 8}
    )
    form = {"cp_form": options.form} if layout.cp > 1 else {}
    config = RunConfig(
        batch_size=1, steps=options.steps, precision="bf16", activation_checkpointing="full", eval_every="never", **form
    )
    cuda = options.device == "cuda"
    fake = open_fake_world(layout, device=options.device, fake=False)
    with fake if layout.is_distributed else open_world(layout, device=options.device) as world:
        batches = make_batches(task, config, world)
        runtime = build_runtime(task, world, config, total_steps=options.steps, seeded=False)
        times = []
        for window in runtime.place(batches):
            if cuda:
                torch.cuda.reset_peak_memory_stats()
                torch.cuda.synchronize()
            started = time.perf_counter()
            runtime.step(window)
            if cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
        peak = torch.cuda.max_memory_allocated() if cuda else 0
    return {"seconds": min(times[1:] or times), "peak_bytes": peak}


if __name__ == "__main__":
    main()
