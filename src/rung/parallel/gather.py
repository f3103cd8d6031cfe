"""Gather DTensors, and cut whole tensors as they are."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from rung.distributed.collectives import gather_flat


def whole_tensor(sharded: DTensor, device: torch.device) -> Tensor:
    """Gather a DTensor on every rank of its mesh, through `device`, since the local shards may be offloaded.

    Axis by axis, because the functional all-gather behind `full_tensor` crashes on gloo with CUDA tensors (torch 2.11).
    FSDP shards after tensor parallelism although its mesh axis comes first; it marks that by a strided placement.
    """
    if sharded.numel() == 0:
        return torch.empty(sharded.shape, dtype=sharded.dtype, device=device)
    mesh = sharded.device_mesh
    axes = _sharded_axes(sharded)
    lengths: list[int] = []  # the length that each axis divided
    lengths_left: dict[int, int] = {}
    for axis in axes:
        dim = _dim_of(sharded, axis)
        length = lengths_left.get(dim, sharded.shape[dim])
        lengths.append(length)
        each = -(-length // mesh.size(axis))
        lengths_left[dim] = max(0, min(each, length - mesh.get_local_rank(axis) * each))
    part = sharded.to_local().to(device)
    for axis, length in zip(reversed(axes), reversed(lengths), strict=True):
        part = _gather_dim(part, _dim_of(sharded, axis), length, mesh.get_group(axis))
    return part


def own_shard(whole: Tensor, like: DTensor) -> Tensor:
    """This rank's part of a whole tensor that is sharded as `like` is. A view, and no message."""
    mesh = like.device_mesh
    for axis in _sharded_axes(like):
        dim = _dim_of(like, axis)
        length = whole.shape[dim]
        each = -(-length // mesh.size(axis))
        start = min(mesh.get_local_rank(axis) * each, length)
        whole = whole.narrow(dim, start, min(each, length - start))
    return whole


def local_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sharded_axes(sharded: DTensor) -> list[int]:
    """In the order of sharding: plain placements from the outermost axis inward, then the strided ones."""
    axes = [axis for axis, placement in enumerate(sharded.placements) if not placement.is_replicate()]
    return sorted(axes, key=lambda axis: (type(sharded.placements[axis]) is not Shard, axis))


def _dim_of(sharded: DTensor, axis: int) -> int:
    dim: int = sharded.placements[axis].dim  # type: ignore[attr-defined]
    return dim % sharded.dim()


def _gather_dim(part: Tensor, dim: int, length: int, group: dist.ProcessGroup) -> Tensor:
    """All-gather a dimension sharded in chunks of equal size, of which the last may be shorter or empty."""
    size = dist.get_world_size(group)
    each = -(-length // size)
    rows = part.transpose(0, dim)
    padded = rows.new_zeros(each, *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    whole = gather_flat(padded.flatten(), group).reshape(size * each, *rows.shape[1:])[:length]
    return whole.transpose(0, dim).contiguous()
