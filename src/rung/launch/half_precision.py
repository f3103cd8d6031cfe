"""Measures before the first step whether this CPU is much slower in half precision than in fp32."""

from __future__ import annotations

import time

import torch

from rung.spec.config import RunConfig

SLOW = 4.0  # times the duration in fp32


def half_precision_warning(config: RunConfig) -> str | None:
    if config.precision not in ("bf16", "fp16") or config.device == "cuda":
        return None
    if config.device == "auto" and torch.cuda.is_available():
        return None
    ratio = half_precision_ratio(torch.bfloat16 if config.precision == "bf16" else torch.float16)
    if ratio < SLOW:
        return None
    return (
        f"this CPU has no fast {config.precision} arithmetic: a matrix product takes {ratio:.0f} times as long as in "
        "fp32. Expect very slow steps; --precision fp32 is the quick choice here."
    )


def half_precision_ratio(half: torch.dtype) -> float:
    """The duration of a matrix product on this CPU, relative to fp32."""
    return _product_seconds(half) / _product_seconds(torch.float32)


def _product_seconds(dtype: torch.dtype, size: int = 160) -> float:
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    torch.mm(a, b)  # warm up
    started = time.perf_counter()
    torch.mm(a, b)
    return max(time.perf_counter() - started, 1e-7)
