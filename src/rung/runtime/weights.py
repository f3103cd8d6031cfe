"""Gathers whole weights on the main rank, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from rung.distributed.collectives import broadcast_from
from rung.parallel.gather import whole_tensor
from rung.parallel.materialize import is_absent
from rung.runtime.base import Names
from rung.runtime.context import RuntimeContext

NamedWeights = Callable[[Names], Iterator[tuple[str, Tensor]]]  # of a module's state dict


def gathered_weights(context: RuntimeContext, names: Names = None) -> Iterator[tuple[str, Tensor]]:
    """The state dict, from ranks that each hold all tensors or a shard of each."""
    for name, value in wanted_tensors(context, names):
        context.status.touch()
        whole = gathered(context, name, value)
        yield name, whole.cpu() if context.world.is_main else torch.empty(0)


def wanted_tensors(context: RuntimeContext, names: Names) -> list[tuple[str, Tensor]]:
    """These tensors of the state dict as this rank has them. Without names all, after buffers were made the same."""
    if names is None:
        share_buffers(context)
    found = context.model.state_dict(keep_vars=True).items()
    return [(n, value) for n, value in found if isinstance(value, Tensor) and (names is None or n in names)]


def gathered(context: RuntimeContext, name: str, value: Tensor) -> Tensor:
    whole, device, experts = value.detach(), context.world.device, context.parallel.experts
    shared = experts.share_of(name) if experts is not None else None
    if shared is None:
        return whole_tensor(whole, device) if isinstance(whole, DTensor) else whole
    if not is_absent(value):
        whole = whole_tensor(whole, device) if isinstance(whole, DTensor) else whole
    else:
        whole = torch.empty(value.shape, dtype=value.dtype, device=device)
    holder = shared.holder_of(name)
    assert holder is not None
    if whole.numel() > 0:
        whole = whole.contiguous()
        with context.world.tensors.mode():
            broadcast_from(dist.get_global_rank(shared.group, holder), whole, shared.group)
    return whole


def share_buffers(context: RuntimeContext) -> None:
    """Broadcast the first data rank's buffers, where they may differ (running statistics of a local batch norm)."""
    world = context.world
    if world.layout.num_gradient_ranks == 1:
        return
    with world.tensors.mode():
        for _, buffer in context.own_buffers.named():
            if buffer.numel() > 0:
                broadcast_from(dist.get_global_rank(world.gradient_group, 0), buffer, world.gradient_group)
