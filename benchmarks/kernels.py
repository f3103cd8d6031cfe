"""Where the time of a step on one GPU goes, by kind of kernel, and what single levers change.

python -m benchmarks.kernels
python -m benchmarks.kernels --size 124m --variants "as it is" fp8

GPTs of benchmarks.float8, compiled. Each variant is built, timed and profiled by itself: the first steps compile, then
a block of steps is timed without a profiler, then a few are profiled, and their kernels sorted by name. A gap is time
in which no kernel runs.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.float8 import _PEAK, _SIZES, _build, _case, _flops
from benchmarks.report import machine_facts, write
from rung.distributed.world import open_world
from rung.spec.strategy import parse

_RESULTS = Path(__file__).parent / "results" / "kernels-cuda.json"
_PROFILED = 3

# The first kind of which one word is in a kernel's name.
_KINDS = {
    "attention": ("flash", "fmha", "sdpa", "attention"),
    "matrix products": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "scaled_mm", "splitk", "triton_tem"),
    "casts to float8": ("_tile",),
    "update and norm of gradients": ("multi_tensor", "foreach", "adam", "lpnorm", "fused_adam"),
    "norms and element by element, fused": ("triton_",),
    "copies and casts": ("memcpy", "memset", "copy_kernel", "direct_copy", "fill"),
}


@contextlib.contextmanager
def _inductor(**options: Any) -> Iterator[None]:
    import torch._inductor.config as config

    with config.patch(options):
        yield


@contextlib.contextmanager
def _cudnn_attention() -> Iterator[None]:
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_flash_sdp(True)


# Settings of the run, and what else is changed around it.
_VARIANTS: dict[str, tuple[dict[str, Any], Any]] = {
    "as it is": ({"precision": "bf16"}, contextlib.nullcontext),
    "cuDNN's attention": ({"precision": "bf16"}, _cudnn_attention),
    "max_autotune": (
        {"precision": "bf16"}, lambda: _inductor(max_autotune_gemm=True, coordinate_descent_tuning=True)
    ),
    "CUDA graphs": ({"precision": "bf16"}, lambda: _inductor(**{"triton.cudagraphs": True})),
    "logits whole": ({"precision": "bf16", "chunked_loss": "never"}, contextlib.nullcontext),
    "coordinate descent": ({"precision": "bf16"}, lambda: _inductor(coordinate_descent_tuning=True)),
    "fp8": ({"precision": "fp8"}, contextlib.nullcontext),
    "fp8, max_autotune": (
        {"precision": "fp8"}, lambda: _inductor(max_autotune_gemm=True, coordinate_descent_tuning=True)
    ),
    "fp8, rows": ({"precision": "fp8", "fp8_scaling": "row"}, contextlib.nullcontext),
}  # fmt: skip


def kind_of(name: str) -> str:
    lowered = name.lower()
    return next((kind for kind, words in _KINDS.items() if any(word in lowered for word in words)), "other")


def measure(size: str, batch_size: int, variant: str, steps: int, world: Any) -> dict[str, Any]:
    settings, around = _VARIANTS[variant]
    torch.compiler.reset()
    with around():
        contender = _build(_case(size), world, batch_size, settings)
        seconds = contender.take(steps)
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            profiled = contender.take(_PROFILED)
    kinds: dict[str, float] = {}
    names: dict[str, float] = {}
    for event in found.key_averages():
        spent = event.self_device_time_total / 1e6 / _PROFILED
        kinds[kind_of(event.key)] = kinds.get(kind_of(event.key), 0.0) + spent
        names[event.key] = spent
    kinds["gaps"] = max(0.0, profiled - sum(kinds.values()))
    parameters = sum(parameter.numel() for parameter in contender.runtime.model.parameters())
    return {
        "seconds_per_step": seconds,
        "profiled_seconds_per_step": profiled,
        "peak_bytes": contender.peak_bytes,
        "share_of_bf16_peak": _flops(_case(size), parameters, batch_size) / seconds / _PEAK,
        "seconds_of_first_steps": contender.first_seconds,
        "seconds_by_kind": dict(sorted(kinds.items(), key=lambda item: -item[1])),
        "longest_kernels": dict(sorted(((n[:120], s) for n, s in names.items()), key=lambda item: -item[1])[:25]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(_SIZES), default="1.3b")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--variants", nargs="+", choices=list(_VARIANTS), default=list(_VARIANTS))
    parser.add_argument("--out", type=Path, default=_RESULTS)
    options = parser.parse_args()
    content: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.kernels", *sys.argv[1:]]),
        "machine": machine_facts("cuda"),
        "size": options.size,
        "batch_size": options.batch_size,
        "variants": {},
    }
    with open_world(parse("single", 1), device="cuda") as world:
        for variant in options.variants:
            try:
                row = measure(options.size, options.batch_size, variant, options.steps, world)
            except Exception as error:  # a lever that cannot be used here is a result, too
                row = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
            content["variants"][variant] = row
            write(options.out, content)
            gc.collect()
            torch.cuda.empty_cache()
            print(variant, row if "error" in row else _told(row), flush=True)


def _told(row: dict[str, Any]) -> str:
    kinds = ", ".join(f"{kind} {seconds * 1e3:.0f}" for kind, seconds in row["seconds_by_kind"].items())
    return (
        f"{row['seconds_per_step'] * 1e3:.1f} ms, {row['share_of_bf16_peak']:.1%}, "
        f"{row['peak_bytes'] / 2**30:.1f} GiB, first steps {row['seconds_of_first_steps']:.0f} s; "
        f"profiled {row['profiled_seconds_per_step'] * 1e3:.1f} ms: {kinds}"
    )


if __name__ == "__main__":
    main()
