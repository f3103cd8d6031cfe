"""The global gradient norm over all ranks, clipping by it, and figures by which gradients are compared."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rung.distributed.torch_private import foreach_mul_, foreach_norm
from rung.parallel.gather import whole_tensor
from rung.parallel.materialize import is_absent

_NUM_GRADIENTS, _NUM_ELEMENTS = 4, 256  # whose elements are compared, and how many of each
_MANY_ELEMENTS = 2**22  # a gradient with more is not gathered
_WORTH_A_CALL = 2**16  # elements whose norm takes longer than a call of its own


@dataclass(frozen=True)
class GradientFigures:
    """What is compared of gradients, by name: the squared norm of each, and some elements of a few."""

    squares: dict[str, Tensor] = field(default_factory=dict)
    elements: dict[str, Tensor] = field(default_factory=dict)


@torch.no_grad()
def global_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The 2-norm of all gradients, as a single process would compute it, without a host synchronisation.

    Each rank takes the norm of its shards; gradients sharded over the same axes are reduced over these axes together.
    """
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for grad in _gradients(parameters):
        by_groups.setdefault(_groups_of(grad), []).append(_local(grad))
    norms = []
    for groups, grads in by_groups.items():
        norm = _norm_of(grads)
        if groups:
            squared = norm.square()
            for group in groups:
                dist.all_reduce(squared, group=group)
            norm = squared.sqrt()
        norms.append(norm)
    if not norms:
        return torch.zeros(())
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def _norm_of(tensors: list[Tensor]) -> Tensor:
    """As torch's `get_total_norm`, in fewer calls. That uses one core on a CPU, which took a third of a step with
    offloaded gradients; a dot product of large ones uses all of them."""
    large = [one for one in tensors if _has_quick_dot(one)] if torch.get_num_threads() > 1 else []
    if not large:
        norms = [norm for some in _by_kind(tensors) for norm in foreach_norm(some)]
        whole: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(tensors[0].device) for norm in norms]))
        return whole
    squares = [torch.dot(one.view(-1), one.view(-1)) for one in large]
    if rest := [one for one in tensors if not _has_quick_dot(one)]:
        squares.append(_norm_of(rest).square())
    return functools.reduce(torch.add, squares).sqrt()


def _has_quick_dot(tensor: Tensor) -> bool:
    is_plain = tensor.layout == torch.strided and tensor.dtype in (torch.float32, torch.float64)
    return tensor.device.type == "cpu" and is_plain and tensor.numel() >= _WORTH_A_CALL and tensor.is_contiguous()


def gradient_figures(trainable: list[tuple[str, nn.Parameter]], device: torch.device) -> GradientFigures:
    """Figures of the parameters that this rank has. All ranks that share parameters call it."""
    names = [name for name, parameter in trainable if 0 < parameter.numel() <= _MANY_ELEMENTS]
    # By checksum: those that one process chooses of the whole model are among those that a stage chooses of its part.
    chosen = sorted(names, key=lambda name: zlib.crc32(name.encode()))[:_NUM_GRADIENTS]
    own = [(name, parameter) for name, parameter in trainable if not is_absent(parameter)]
    elements = {name: _drawn_elements(parameter, device) for name, parameter in own if name in chosen}
    return GradientFigures(_squared_norms(own), elements)


def _drawn_elements(parameter: nn.Parameter, device: torch.device) -> Tensor:
    """The same elements of the whole gradient on any number of ranks, scaled so that their norm is about its norm."""
    grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()
    whole = whole_tensor(grad, device) if isinstance(grad, DTensor) else grad.to_dense() if grad.is_sparse else grad
    whole = torch.view_as_real(whole) if whole.is_complex() else whole
    places = torch.randperm(whole.numel(), generator=torch.Generator().manual_seed(0))[:_NUM_ELEMENTS]
    drawn: Tensor = whole.reshape(-1)[places.to(whole.device)].to("cpu", torch.float64)
    return drawn * math.sqrt(whole.numel() / len(drawn))


def _squared_norms(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    """The squared 2-norm of each parameter's whole gradient; 0 without one."""
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
    for grads in _by_kind(map(_local, _gradients(parameters))):
        foreach_mul_(grads, factor.to(grads[0].device))


def _by_kind(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Lists of one device and one type each, which torch's kernels for lists want."""
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return found.values()


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
