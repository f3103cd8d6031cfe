"""The way of a matrix into float8: its scales, and its elements row by row and column by column.

A product reads both factors along the dimension it sums over. Forward sums over the columns of an input, the weight's
gradient over its rows, so both orders are needed. torch's operations read the matrix again for each of them and turn
what they have written; the kernel for GPUs reads it once.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor
from torch.nn import functional as F

MULTIPLE = 16  # the kernels of products take factors whose sizes are multiples of this
FACTOR = torch.float8_e4m3fn  # the type of both factors in forward


def scale_for(largest: Tensor, kind: torch.dtype) -> Tensor:
    return torch.finfo(kind).max / largest.float().clamp(min=1e-12)


def cast(tensor: Tensor, kind: torch.dtype, scale: Tensor) -> Tensor:
    most = torch.finfo(kind).max  # a value that rounding puts above it would become no number
    return (tensor.float() * scale).clamp(-most, most).to(kind)


def to_float8(
    matrix: Tensor, kind: torch.dtype, *, scales_rows: bool, plain: bool, turned: bool
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The scaled matrix and the scaled turned one, each with what its elements must be multiplied by to be the old.
    With `scales_rows`, each row of either has a scale of its own. One that is not wanted is empty."""
    if scales_rows:
        row_scale = _power_of_two(_largest(matrix, 1), kind) if plain else None
        column_scale = _power_of_two(_largest(matrix, 0), kind) if turned else None
    else:
        scale = scale_for(_largest(matrix, 1).amax(), kind)  # compiled, one reduction of all elements takes far longer
        row_scale, column_scale = scale if plain else None, scale if turned else None
    rows, columns = cast_both_ways(matrix, kind, row_scale, column_scale)
    inverse = _inverse(column_scale, columns)
    return (rows, _inverse(row_scale, rows)), (columns, inverse.view(-1, 1) if inverse.dim() else inverse)


def _largest(matrix: Tensor, dim: int) -> Tensor:
    """The largest absolute value, without a copy of the matrix where no compiler joins operations."""
    largest: Tensor = torch.linalg.vector_norm(matrix, float("inf"), dim, keepdim=True)
    return largest


def _power_of_two(largest: Tensor, kind: torch.dtype) -> Tensor:
    """The largest scale that is exact both ways."""
    return torch.exp2(torch.floor(torch.log2(scale_for(largest, kind))))


def _inverse(scale: Tensor | None, unused: Tensor) -> Tensor:
    return unused.new_empty(0, dtype=torch.float32) if scale is None else scale.reciprocal()


@torch.library.custom_op("rung::cast_both_ways", mutates_args=())
def cast_both_ways(
    matrix: Tensor, kind: torch.dtype, row_scale: Tensor | None, column_scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The matrix times `row_scale`, and the turned matrix, times `column_scale` and with zeros up to a multiple of 16
    columns. A scale has one element, or one for each row or column; without it that matrix is empty."""
    plain, turned = _empty(matrix, kind, row_scale, column_scale)
    if matrix.is_cuda and _has_triton():
        from rung.parallel.triton_kernels import cast_tiles  # Triton is there with torch for GPUs alone

        cast_tiles(matrix, plain, turned, row_scale, column_scale, torch.finfo(kind).max)
        return plain, turned
    if row_scale is not None:
        plain.copy_(cast(matrix, kind, row_scale))
    if column_scale is not None:
        turned.copy_(F.pad(cast(matrix, kind, column_scale).t(), (0, turned.shape[1] - len(matrix))))
    return plain, turned


@cast_both_ways.register_fake
def _empty(
    matrix: Tensor, kind: torch.dtype, row_scale: Tensor | None, column_scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    num_rows, num_columns = matrix.shape
    padded = (num_rows + MULTIPLE - 1) // MULTIPLE * MULTIPLE
    plain = matrix.new_empty((num_rows, num_columns) if row_scale is not None else (0, 0), dtype=kind)
    return plain, matrix.new_empty((num_columns, padded) if column_scale is not None else (0, 0), dtype=kind)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
