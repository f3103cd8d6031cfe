"""Kernels in Triton. The only module that needs it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 8192  # of a row's classes, by measurement on an H200


def softmax_gradient(logits: Tensor, index: Tensor, factor: Tensor, smoothing: float) -> Tensor:
    """See `softmax_kernel.softmax_gradient_`."""
    assert logits.is_contiguous()
    num_rows, num_classes = logits.shape
    log_sums = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if num_rows:
        with torch.cuda.device(logits.device):
            _row[(num_rows,)](
                logits,
                index,
                factor,
                log_sums,
                num_classes,
                1 - smoothing,
                smoothing / num_classes,
                _BLOCK,
                num_warps=16,
            )
    return log_sums


@triton.jit  # type: ignore[untyped-decorator]
def _row(  # type: ignore[no-untyped-def]  # Triton reads annotations, and knows its own alone
    logits, index, factor, log_sums, num_classes, hit, share, BLOCK: tl.constexpr
):
    """The gradient is softmax less `hit` at the target and `share` everywhere. The largest logit and the sum of
    exponentials are found in one pass: the sum is scaled when the largest grows."""
    row = tl.program_id(0).to(tl.int64)  # rows x classes may be more than 2**31
    logits += row * num_classes
    largest = float("-inf")
    exponentials = 0.0
    for start in range(0, num_classes, BLOCK):
        place = start + tl.arange(0, BLOCK)
        x = tl.load(logits + place, mask=place < num_classes, other=float("-inf")).to(tl.float32)
        found = tl.maximum(largest, tl.max(x, 0))
        base = tl.where(found == float("-inf"), 0.0, found)  # all are -inf up to here
        exponentials = exponentials * tl.exp(largest - base) + tl.sum(tl.exp(x - base), 0)
        largest = found
    log_sum = largest + tl.log(exponentials)
    tl.store(log_sums + row, log_sum)

    target = tl.load(index + row)
    scale = tl.load(factor + row)
    for start in range(0, num_classes, BLOCK):
        place = start + tl.arange(0, BLOCK)
        x = tl.load(logits + place, mask=place < num_classes, other=float("-inf")).to(tl.float32)
        gradient = (tl.exp(x - log_sum) - share - tl.where(place == target, hit, 0.0)) * scale
        tl.store(logits + place, gradient.to(logits.dtype.element_ty), mask=place < num_classes)
