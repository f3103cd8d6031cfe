"""DistributedDataParallel in a world, real or dry run."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rung.distributed import fake_world
from rung.distributed.world import World


def replicate(
    world: World, module: nn.Module, *, find_unused: bool, reduce_in: torch.dtype | None = None
) -> DistributedDataParallel:
    """DDP over all ranks that compute. Nothing is broadcast: the weights are equal already.

    `reduce_in` is the type in which a communication hook will reduce gradients; the DDP of a dry run has its own hook.
    """
    table = nullcontext() if world.tensors.has_storage else fake_world.known_table(world.tensors.fake_mode)
    with warnings.catch_warnings(), table:
        # `broadcast_buffers` is deprecated in torch 2.13 for a name that 2.11 does not have.
        warnings.simplefilter("ignore", FutureWarning)
        ddp = DistributedDataParallel(
            module,
            device_ids=[world.device.index] if world.device.type == "cuda" else None,
            broadcast_buffers=False,
            init_sync=False,
            gradient_as_bucket_view=True,
            find_unused_parameters=find_unused,
            process_group=world.trainers,
        )
    if world.is_dry_run:
        fake_world.adapt_ddp(ddp, world.size, reduce_in, has_storage=world.tensors.has_storage)
    elif not find_unused:
        _order_buckets(ddp)
    return ddp


def collective_futures(world: World) -> AbstractContextManager[None]:
    """Around code that takes an all-reduce's result from its future, which collectives of a dry run do not have."""
    return fake_world.results_of_all_reduces() if world.is_dry_run else nullcontext()


def _order_buckets(ddp: DistributedDataParallel) -> None:
    """Let DDP order its buckets now, by a backward of zero gradients, rather than after the first step.

    DDP guesses the buckets of the first step, and orders them anew by when gradients became ready in it. The position
    of an element in a bucket decides in which order three or more ranks add it up. A resumed run has its first step
    later, and would end with other bits.
    """
    if any(isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse for module in ddp.modules()):
        return  # DDP expects sparse gradients there, and refuses the dense zeros
    module, parameters = ddp.module, [p for p in ddp.module.parameters() if p.requires_grad]

    def touch_all(_: torch.Tensor) -> torch.Tensor:  # DDP on a GPU fails without an argument to move there
        sums = [parameter.sum() for parameter in parameters]
        real = [total.real if total.is_complex() else total for total in sums]
        return torch.stack([total.double() for total in real]).sum() * 0

    module.forward = touch_all
    try:
        ddp(torch.zeros(1)).backward()  # a tensor: global module hooks expect one
    finally:
        del module.forward
    for parameter in parameters:
        parameter.grad = None
