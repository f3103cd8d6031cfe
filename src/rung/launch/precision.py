"""Whether this machine computes in half precision at a reasonable speed: measured, before the first step."""

from __future__ import annotations

import time

import torch

from rung.config import RunConfig

_SLOW = 4.0


def half_precision_warning(config: RunConfig) -> str | None:
    if config.precision not in ("bf16", "fp16") or config.device == "cuda":
        return None
    if config.device == "auto" and torch.cuda.is_available():
        return None
    half = torch.bfloat16 if config.precision == "bf16" else torch.float16
    ratio = _product_seconds(half) / _product_seconds(torch.float32)
    if ratio < _SLOW:
        return None
    return (
        f"this CPU has no fast {config.precision} arithmetic: a matrix product takes {ratio:.0f} times as long as in "
        "fp32. Expect very slow steps; --precision fp32 is the quick choice here."
    )


def _product_seconds(dtype: torch.dtype, size: int = 160) -> float:
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    torch.mm(a, b)
    started = time.perf_counter()
    torch.mm(a, b)
    return max(time.perf_counter() - started, 1e-7)
