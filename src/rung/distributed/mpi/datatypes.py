"""Maps torch's types and reductions to MPI's, and refuses those that MPI does not have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

_TYPES = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.uint8: MPI.UINT8_T,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.bool: MPI.C_BOOL,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
}
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}  # MPI has no half types
_ORDERED = ("MIN", "MAX")
_BITS = ("BAND", "BOR", "BXOR")
# By torch's name: MPI's operation, its equivalent for bool, and torch's reduction over rows.
_OPERATIONS: dict[str, tuple[MPI.Op, MPI.Op, Callable[[Tensor], Tensor]]] = {
    "SUM": (MPI.SUM, MPI.LOR, lambda rows: rows.any(0) if rows.dtype is torch.bool else rows.sum(0, dtype=rows.dtype)),
    "AVG": (MPI.SUM, MPI.LOR, lambda rows: rows.sum(0)),
    "PRODUCT": (MPI.PROD, MPI.LAND, lambda rows: rows.all(0) if rows.dtype is torch.bool else _fold(torch.mul, rows)),
    "MIN": (MPI.MIN, MPI.LAND, lambda rows: rows.amin(0)),
    "MAX": (MPI.MAX, MPI.LOR, lambda rows: rows.amax(0)),
    "BAND": (MPI.BAND, MPI.LAND, lambda rows: _fold(torch.bitwise_and, rows)),
    "BOR": (MPI.BOR, MPI.LOR, lambda rows: _fold(torch.bitwise_or, rows)),
    "BXOR": (MPI.BXOR, MPI.LXOR, lambda rows: _fold(torch.bitwise_xor, rows)),
}


@dataclass(frozen=True)
class Reduction:
    name: str
    dtype: torch.dtype  # that it is computed in
    datatype: MPI.Datatype
    op: MPI.Op
    over_rows: Callable[[Tensor], Tensor]

    def finish(self, reduced: Tensor, size: int) -> Tensor:
        """Complete what MPI has reduced: the division of AVG."""
        return reduced.div_(size) if self.name == "AVG" else reduced


def reduction(op: Any, dtype: torch.dtype, operation: str) -> Reduction:
    """The reduction for torch's `op` on a type. Raises where MPI has none."""
    name = next((name for name in _OPERATIONS if op == getattr(dist.ReduceOp, name)), None)
    if name is None:
        raise RuntimeError(f"mpi: {operation} does not support {op}; it supports {', '.join(_OPERATIONS)}")
    wide = _WIDER.get(dtype, dtype)
    if wide not in _TYPES:
        raise RuntimeError(f"mpi: {operation} cannot reduce {dtype}; broadcast, all_gather and send/recv accept it")
    exact = not (wide.is_floating_point or wide.is_complex)
    if (name == "AVG" and exact) or (name in _ORDERED and wide.is_complex) or (name in _BITS and not exact):
        raise RuntimeError(f"mpi: {operation} cannot compute the {name} of {dtype}")
    plain, logical, over_rows = _OPERATIONS[name]
    return Reduction(name, wide, _TYPES[wide], logical if wide is torch.bool else plain, over_rows)


def memory(tensor: Tensor, start: int = 0, count: int | None = None) -> MPI.buffer:
    """The memory of a contiguous tensor, or of some of its elements. The caller must keep the tensor alive."""
    count = tensor.numel() - start if count is None else count
    return MPI.buffer.fromaddress(tensor.data_ptr() + start * tensor.itemsize, count * tensor.itemsize)


def num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def _fold(function: Callable[[Tensor, Tensor], Tensor], rows: Tensor) -> Tensor:
    total = rows[0]
    for row in rows[1:]:
        total = function(total, row)
    return total
