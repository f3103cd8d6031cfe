"""The global gradient norm over all ranks, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from rung.distributed.torch_private import foreach_mul_


def global_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The 2-norm of all gradients, as a single process would compute it, without a host synchronisation.

    Each rank takes the norm of its shards; gradients sharded over the same axes are reduced over these axes together.
    """
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for grad in _gradients(parameters):
        by_groups.setdefault(_groups_of(grad), []).append(_local(grad))
    norms = []
    for groups, grads in by_groups.items():
        norm = get_total_norm(grads)
        if groups:
            squared = norm.square()
            for group in groups:
                dist.all_reduce(squared, group=group)
            norm = squared.sqrt()
        norms.append(norm)
    if not norms:
        return torch.zeros(())
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def norms_by_name(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    """The squared 2-norm of each parameter's whole gradient; 0 without one. All ranks that share parameters call it."""
    by_groups: dict[tuple[dist.ProcessGroup, ...], dict[str, Tensor]] = {}
    for name, parameter in named:
        grad = _gradients([parameter])
        local = torch.linalg.vector_norm(_local(grad[0])) if grad else torch.zeros((), device=_local(parameter).device)
        by_groups.setdefault(_groups_of(parameter), {})[name] = local.to(torch.float64).square()
    found: dict[str, Tensor] = {}
    for groups, squares in by_groups.items():
        device = next(iter(squares.values())).device  # gradients of a model may lie on several
        stacked = torch.stack([square.to(device) for square in squares.values()])
        for group in groups:
            dist.all_reduce(stacked, group=group)
        found |= dict(zip(squares, stacked.unbind(), strict=True))
    return found


def clip(parameters: Iterable[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scale all gradients so that their norm is at most `max_norm`, as `torch.nn.utils.clip_grad_norm_` does."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    by_dtype: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in map(_local, _gradients(parameters)):
        by_dtype.setdefault((grad.device, grad.dtype), []).append(grad)
    for (device, _), grads in by_dtype.items():
        foreach_mul_(grads, factor.to(device))


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """The gradients; of a sparse one its values, since its other rows are 0."""
    found = []
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None and grad.is_sparse:
            parameter.grad = grad = grad.coalesce()
            grad = grad.values()
        if grad is not None:
            found.append(grad)
    return found


def _groups_of(tensor: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The groups whose ranks hold different shards of a tensor."""
    if not isinstance(tensor, DTensor):
        return ()
    cut = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    return tuple(tensor.device_mesh.get_group(axis) for axis in cut)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
