"""Kernels in Triton. The only module that needs it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 8192  # of a row's classes, by measurement on an H200
_TILE = 128  # rows and columns that are cast at once


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


def cast_tiles(
    matrix: Tensor, plain: Tensor, turned: Tensor, row_scale: Tensor | None, column_scale: Tensor | None, most: float
) -> None:
    """See `float8_cast.cast_both_ways`."""
    num_rows, num_columns = matrix.shape
    if not matrix.numel():
        return
    grid = (triton.cdiv(max(num_rows, turned.shape[1]), _TILE), triton.cdiv(num_columns, _TILE))
    with torch.cuda.device(matrix.device):
        _tile[grid](
            matrix,
            plain,
            turned,
            matrix if row_scale is None else row_scale,
            matrix if column_scale is None else column_scale,
            num_rows,
            num_columns,
            turned.shape[1],
            *matrix.stride(),
            0 if row_scale is None or row_scale.numel() == 1 else 1,
            0 if column_scale is None or column_scale.numel() == 1 else 1,
            most,
            WRITES_PLAIN=row_scale is not None,
            WRITES_TURNED=column_scale is not None,
            TILE=_TILE,
            num_warps=8,
        )


# A kernel made for one row alone read what its mask leaves out (Triton 3.6).
@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _tile(  # type: ignore[no-untyped-def]
    matrix, plain, turned, row_scale, column_scale, num_rows, num_columns, num_padded, row_stride, column_stride,
    row_step, column_step, most, WRITES_PLAIN: tl.constexpr, WRITES_TURNED: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Reads a tile once, and writes it in both orders with neighbours beside each other."""
    rows = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    place = rows[:, None] * row_stride + columns[None, :] * column_stride
    values = tl.where(inside, tl.load(matrix + place, mask=inside, other=0.0).to(tl.float32), 0.0)
    if WRITES_PLAIN:
        scale = tl.load(row_scale + rows * row_step, mask=rows < num_rows, other=0.0)
        scaled = values * scale[:, None]
        scaled = tl.where(scaled == scaled, tl.clamp(scaled, -most, most), scaled)  # what is no number stays none
        place = rows[:, None] * num_columns + columns[None, :]
        tl.store(plain + place, scaled.to(plain.dtype.element_ty), mask=inside)
    if WRITES_TURNED:
        scale = tl.load(column_scale + columns * column_step, mask=columns < num_columns, other=0.0)
        scaled = values * scale[None, :]
        scaled = tl.where(scaled == scaled, tl.clamp(scaled, -most, most), scaled)
        place = columns[None, :] * num_padded + rows[:, None]
        written = (rows < num_padded)[:, None] & (columns < num_columns)[None, :]
        tl.store(turned + place, scaled.to(turned.dtype.element_ty), mask=written)


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
