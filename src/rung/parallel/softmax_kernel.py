"""The gradient of a cross entropy in one kernel, which reads the logits twice and writes the gradient in their place.

torch's operations go over the logits ten times, in fp32. The kernel is an operation of torch, so that a run without
values, which has no GPU, knows its shapes.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

from rung.distributed.world import World


def why_no_kernel(world: World) -> str | None:
    """Why this device computes with torch's operations instead, which is slower."""
    if world.device_type != "cuda":
        return f"there is none for {world.device_type}"
    return _why_not(world.device) if world.tensors.has_storage else None


@functools.cache
def _why_not(device: torch.device) -> str | None:
    """By trying: Triton needs a C compiler, and not every GPU adds products of bf16 in fp32."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    try:
        row, total = torch.zeros(1, 16, device=device, dtype=torch.bfloat16), torch.zeros(16, 16, device=device)
        softmax_gradient_(row, torch.zeros(1, dtype=torch.int64, device=device), torch.ones(1, device=device), 0.0)
        add_product_(total, row.t(), row)
    except Exception as error:  # a compiler's, the driver's, Triton's own
        return f"{type(error).__name__}: {error}"
    return None


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`total += a @ b` without a tensor between, also where the total is in fp32 and the others are not."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


@torch.library.custom_op("rung::softmax_gradient_", mutates_args={"logits"}, device_types="cuda")
def softmax_gradient_(logits: Tensor, index: Tensor, factor: Tensor, smoothing: float) -> Tensor:
    """The logarithm of the sum of each row's exponentials. The logits become the gradient of the cross entropy with the
    class at `index`, times the factor of the row."""
    from rung.parallel.triton_kernels import softmax_gradient  # Triton is there with torch for GPUs alone

    return softmax_gradient(logits, index, factor, smoothing)


@softmax_gradient_.register_fake
def _(logits: Tensor, index: Tensor, factor: Tensor, smoothing: float) -> Tensor:
    return torch.empty(len(logits), dtype=torch.float32, device=logits.device)
