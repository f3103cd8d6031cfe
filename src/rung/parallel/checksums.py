"""Checksums of the parameters that several ranks hold alike, to find out whether they still do."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rung.spec.strategy import Layout, expert_axes

_AXES = ("dp_replicate", "dp_shard", "tp")
_EXPERT_AXES = ("expert_replicate", "expert_shard", "tp")
_OF_EXPERTS = {"ep", "expert_replicate", "expert_shard"}
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Named = list[tuple[str, Tensor]]  # parameters, or this rank's shards


def shared_parameters(named: Iterable[tuple[str, nn.Parameter]], layout: Layout) -> dict[str, Named]:
    """The parameters that the ranks along an axis of the mesh hold alike, by the axis."""
    found: dict[str, Named] = {}
    for name, parameter in named:
        names: tuple[str, ...] = ()
        cut: set[str] = set()
        if isinstance(parameter, DTensor):
            names = parameter.device_mesh.mesh_dim_names or ()
            pairs = zip(names, parameter.placements, strict=True)
            cut = {axis for axis, placement in pairs if not placement.is_replicate()}
        axes, among = (expert_axes(layout), _EXPERT_AXES) if {*names} & _OF_EXPERTS else (layout.axes, _AXES)
        for axis in among:
            if axes[axis] > 1 and axis not in cut:
                found.setdefault(axis, []).append((name, own_part(parameter)))
    return found


def own_part(parameter: nn.Parameter) -> Tensor:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()


def bit_sums(named: Named) -> Tensor:
    """For each tensor the sum of its values, taken as integers: any flipped bit changes it."""
    return torch.stack([_as_integers(tensor).sum(dtype=torch.int64) for _, tensor in named])


def _as_integers(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.contiguous().view(_INTEGERS[real.element_size()])
