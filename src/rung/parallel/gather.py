"""Whole tensors from sharded ones, for saving."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from rung.world import gather_flat


def whole_tensor(sharded: DTensor, device: torch.device) -> Tensor:
    """All of a sharded tensor, on every rank of its mesh. Shards travel through `device` (they may be offloaded)."""
    cuts = [axis for axis, placement in enumerate(sharded.placements) if not placement.is_replicate()]
    if len(cuts) != 1 or sharded.placements[cuts[0]] != Shard(0):
        moved = sharded if sharded.device == device else sharded.to(device)
        assert isinstance(moved, DTensor)
        return moved.full_tensor()
    # Rows cut over one axis, as FSDP2 cuts them. Gathered by hand: the functional all-gather behind `full_tensor`
    # crashes when gloo carries CUDA tensors (torch 2.11).
    group = sharded.device_mesh.get_group(cuts[0])
    num_rows, num_ranks = sharded.shape[0], sharded.device_mesh.size(cuts[0])
    rows_each = -(-num_rows // num_ranks)
    local = sharded.to_local().to(device)
    padded = local.new_zeros(rows_each, *sharded.shape[1:])
    padded[: local.shape[0]] = local
    return gather_flat(padded.flatten(), group).reshape(num_ranks * rows_each, *sharded.shape[1:])[:num_rows]
