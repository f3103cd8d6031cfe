"""Differentiable collectives on plain tensors that ranks hold in parts, along one dimension as `torch.chunk` cuts it.

They come in pairs, each the derivative of the other, and every backward calls the other one of its pair: so they can be
differentiated as often as a model likes, as for a gradient penalty.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rung.distributed.collectives import gather_rows


def gather_parts(part: Tensor, dim: int, size: int, group: dist.ProcessGroup) -> Tensor:
    """All-gather along `dim`; backward takes this rank's chunk. The gradient must be equal on all ranks."""
    whole: Tensor = _Gather.apply(part, dim % part.dim(), size, group)  # type: ignore[no-untyped-call]
    return whole


def cut_part(whole: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's chunk of a replicated tensor; backward all-gathers."""
    part: Tensor = _Cut.apply(whole, dim % whole.dim(), group)  # type: ignore[no-untyped-call]
    return part


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, size: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _gather(part, dim, size, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return cut_part(gradient, ctx.dim, ctx.group), None, None, None


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.size, ctx.group = dim, whole.shape[dim], group
        return _chunk(whole, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gather_parts(gradient, ctx.dim, ctx.size, ctx.group), None, None


def _gather(part: Tensor, dim: int, size: int, group: dist.ProcessGroup) -> Tensor:
    num_ranks = dist.get_world_size(group)
    each = -(-size // num_ranks)
    missing = each - part.shape[dim]
    if missing:
        shape = [*part.shape[:dim], missing, *part.shape[dim + 1 :]]
        part = torch.cat([part, part.new_zeros(shape)], dim=dim)
    # In the form in which torch's compiler knows an all-gather along `dim` (see `tensor/overlap.py`).
    parts = gather_rows(part.contiguous(), group)
    whole = parts if dim == 0 else torch.cat(parts.chunk(num_ranks), dim=dim)
    return whole if each * num_ranks == size else whole.narrow(dim, 0, size)


def _chunk(whole: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return whole.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].contiguous()


def gather_for_parts(part: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """All-gather equal parts along `dim` for sharded work; backward reduce-scatters the gradients."""
    whole: Tensor = _GatherForParts.apply(part, dim, group)  # type: ignore[no-untyped-call]
    return whole


def sum_into_parts(partial: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Reduce-scatter along `dim`; backward all-gathers."""
    part: Tensor = _SumIntoParts.apply(partial, dim, group)  # type: ignore[no-untyped-call]
    return part


def copy_for_parts(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A replicated tensor as input of sharded work; backward all-reduces the gradients."""
    copy: Tensor = _CopyForParts.apply(whole, group)  # type: ignore[no-untyped-call]
    return copy


def sum_parts(partial: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-reduce; backward is the identity. The gradient must be equal on all ranks."""
    total: Tensor = _SumParts.apply(partial, group)  # type: ignore[no-untyped-call]
    return total


def exchange(
    rows: Tensor, group: dist.ProcessGroup, sends: list[int] | None = None, receives: list[int] | None = None
) -> Tensor:
    """All-to-all of rows, `sends[r]` of which go to rank r, in order; `receives[r]` come from it. One row each without
    these numbers. The derivative is the same with the numbers exchanged."""
    received: Tensor = _AllToAll.apply(rows, group, sends, receives)  # type: ignore[no-untyped-call]
    return received


def scale_gradient(tensor: Tensor, factor: float) -> Tensor:
    """The tensor; backward multiplies its gradient. Where ranks average a gradient that is a sum already: FSDP's own
    factor is applied twice where it reduces over one rank in float64 (torch 2.13)."""
    scaled: Tensor = _ScaledGradient.apply(tensor, factor)  # type: ignore[no-untyped-call]
    return scaled


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.factor, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, group: dist.ProcessGroup, sends: list[int] | None, receives: list[int] | None
    ) -> Tensor:
        ctx.group, ctx.sends, ctx.receives = group, sends, receives
        received = rows.new_empty(len(rows) if receives is None else sum(receives), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), receives, sends, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return exchange(gradient, ctx.group, ctx.receives, ctx.sends), None, None, None


class _CopyForParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return sum_parts(gradient, ctx.group), None


class _SumParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _sum(partial, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return copy_for_parts(gradient, ctx.group), None


class _GatherForParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _gather(part, dim, part.shape[dim] * dist.get_world_size(group), group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return sum_into_parts(gradient, ctx.dim, ctx.group), None, None


class _SumIntoParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _sum_into_parts(partial, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gather_for_parts(gradient, ctx.dim, ctx.group), None, None


def _sum_into_parts(partial: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    chunks = partial.chunk(dist.get_world_size(group), dim)
    part = partial.new_empty(chunks[0].shape)
    # torch 2.13 renames reduce_scatter_tensor.
    collective = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    collective(part, torch.cat(chunks), group=group)
    return part


def _sum(partial: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = partial.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
