"""Whole tensors from cut ones, for saving."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from rung.world import gather_flat


def whole_tensor(cut: DTensor, device: torch.device) -> Tensor:
    """All of a cut tensor, on every rank of its mesh. Parts travel through `device` (they may be offloaded).

    Gathered by hand, axis by axis: the functional all-gather behind `full_tensor` crashes when gloo carries CUDA
    tensors (torch 2.11). FSDP cuts last what tensor parallelism cut before, though its axis comes first; its placement
    (strided) says so.
    """
    if cut.numel() == 0:
        return torch.empty(cut.shape, dtype=cut.dtype, device=device)
    mesh = cut.device_mesh
    axes = [axis for axis, placement in enumerate(cut.placements) if not placement.is_replicate()]
    # In the order of cutting: plain ones from the outermost axis in, then the strided ones.
    axes.sort(key=lambda axis: (type(cut.placements[axis]) is not Shard, axis))
    lengths: list[int] = []  # what each cut divided
    reached: dict[int, int] = {}
    for axis in axes:
        dim = _dim_of(cut, axis)
        length = reached.get(dim, cut.shape[dim])
        lengths.append(length)
        each = -(-length // mesh.size(axis))
        reached[dim] = max(0, min(each, length - mesh.get_local_rank(axis) * each))
    part = cut.to_local().to(device)
    for axis, length in zip(reversed(axes), reversed(lengths), strict=True):
        part = _gather_dim(part, _dim_of(cut, axis), length, mesh.get_group(axis))
    return part


def _dim_of(cut: DTensor, axis: int) -> int:
    dim: int = cut.placements[axis].dim  # type: ignore[attr-defined]
    return dim % cut.dim()


def _gather_dim(part: Tensor, dim: int, length: int, group: dist.ProcessGroup) -> Tensor:
    """Parts of a dimension that was cut into chunks of equal size, the last ones shorter or empty."""
    size = dist.get_world_size(group)
    each = -(-length // size)
    rows = part.transpose(0, dim)
    padded = rows.new_zeros(each, *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    whole = gather_flat(padded.flatten(), group).reshape(size * each, *rows.shape[1:])[:length]
    return whole.transpose(0, dim).contiguous()
