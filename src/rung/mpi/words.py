"""What MPI calls torch's types and operations, and what it cannot do with them."""

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
# By torch's name: MPI's operation, the one that means the same for truth values, and torch's own over rows.
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
    """How tensors of a type become one."""

    name: str
    dtype: torch.dtype  # in which it is computed
    datatype: MPI.Datatype
    op: MPI.Op
    over_rows: Callable[[Tensor], Tensor]

    def finish(self, reduced: Tensor, size: int) -> Tensor:
        """What is left to do when MPI is done."""
        return reduced.div_(size) if self.name == "AVG" else reduced


def reduction(op: Any, dtype: torch.dtype, operation: str) -> Reduction:
    """For an operation of torch on a type. Raises where MPI has no such thing."""
    name = next((name for name in _OPERATIONS if op == getattr(dist.ReduceOp, name)), None)
    if name is None:
        raise RuntimeError(f"mpi: {operation} knows no {op}; it knows {', '.join(_OPERATIONS)}")
    wide = _WIDER.get(dtype, dtype)
    if wide not in _TYPES:
        raise RuntimeError(f"mpi: {operation} cannot compute with {dtype}; broadcast, all_gather and send/recv take it")
    exact = not (wide.is_floating_point or wide.is_complex)
    lacks = (name == "AVG" and exact) or (name in _ORDERED and wide.is_complex) or (name in _BITS and not exact)
    if lacks:
        raise RuntimeError(f"mpi: {operation} cannot take the {name} of {dtype}")
    plain, logical, over_rows = _OPERATIONS[name]
    return Reduction(name, wide, _TYPES[wide], logical if wide is torch.bool else plain, over_rows)


def memory(tensor: Tensor, start: int = 0, count: int | None = None) -> MPI.buffer:
    """The bytes of a contiguous tensor, or of some of its elements. Whoever uses them keeps the tensor alive."""
    count = tensor.numel() - start if count is None else count
    return MPI.buffer.fromaddress(tensor.data_ptr() + start * tensor.itemsize, count * tensor.itemsize)


def num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def _fold(function: Callable[[Tensor, Tensor], Tensor], rows: Tensor) -> Tensor:
    total = rows[0]
    for row in rows[1:]:
        total = function(total, row)
    return total
