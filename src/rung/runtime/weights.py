"""Gathers whole weights on the main rank, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rung.distributed.collectives import broadcast_from
from rung.parallel.gather import whole_tensor
from rung.runtime.context import RuntimeContext

NamedWeights = Callable[[], Iterator[tuple[str, Tensor]]]  # of a module's state dict


def gathered_weights(context: RuntimeContext) -> Iterator[tuple[str, Tensor]]:
    """The state dict, from ranks that each hold all tensors or a shard of each."""
    share_buffers(context)
    for name, value in context.model.state_dict().items():
        if isinstance(value, Tensor):
            context.status.touch()
            whole = gathered(value, context.world.device)
            yield name, whole.cpu() if context.world.is_main else torch.empty(0)


def gathered(value: Tensor, device: torch.device) -> Tensor:
    whole = value.detach()
    return whole_tensor(whole, device) if isinstance(whole, DTensor) else whole


def share_buffers(context: RuntimeContext) -> None:
    """Broadcast the first data rank's buffers, where they may differ (running statistics of a local batch norm)."""
    world = context.world
    if world.layout.num_data_ranks == 1:
        return
    with world.tensors.mode():
        for _, buffer in context.own_buffers.named():
            if buffer.numel() > 0:
                broadcast_from(world.data_source, buffer, world.data_group)
