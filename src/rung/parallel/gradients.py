"""The true global gradient norm, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm


def global_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The 2-norm of all gradients together, as one process would compute it. No host synchronisation.

    Each rank takes the norm of its own parts; those that are cut over the same axes are added up over these.
    """
    kinds: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for grad in _gradients(parameters):
        groups: tuple[dist.ProcessGroup, ...] = ()
        if isinstance(grad, DTensor):
            cut = [axis for axis, placement in enumerate(grad.placements) if not placement.is_replicate()]
            groups = tuple(grad.device_mesh.get_group(axis) for axis in cut)
        kinds.setdefault(groups, []).append(_local(grad))
    norms = []
    for groups, grads in kinds.items():
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


def clip(parameters: Iterable[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scale all gradients so that their norm is at most `max_norm`, as `torch.nn.utils.clip_grad_norm_` does."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in map(_local, _gradients(parameters)):
        by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
    for (device, _), grads in by_kind.items():
        torch._foreach_mul_(grads, factor.to(device))


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Of a sparse one, what it holds: rows that were not used have no part in a norm, and nothing to scale."""
    found = []
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None and grad.is_sparse:
            parameter.grad = grad = grad.coalesce()
            grad = grad._values()
        if grad is not None:
            found.append(grad)
    return found


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
