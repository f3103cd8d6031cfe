"""The true global gradient norm, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def global_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The 2-norm of all gradients together, as one process would compute it. No host synchronisation."""
    groups: dict[DeviceMesh | None, list[Tensor]] = {}
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None:
            groups.setdefault(grad.device_mesh if isinstance(grad, DTensor) else None, []).append(grad)
    norms = [get_total_norm(grads) for grads in groups.values()]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    if not whole:
        return torch.zeros(())
    return whole[0] if len(whole) == 1 else torch.linalg.vector_norm(torch.stack(whole))


def clip(parameters: Iterable[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None:
            groups.setdefault(grad.device_mesh if isinstance(grad, DTensor) else None, []).append(parameter)
    for group in groups.values():
        clip_grads_with_norm_(group, max_norm, norm)
