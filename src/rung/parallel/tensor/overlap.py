"""Messages of tensor parallelism beside the matrix products around them (async tensor parallelism).

torch's compiler does it: an all-gather and the products that take its result become one operation, and so do a product
and the reduce-scatter of its result. Such an operation works piece by piece, on memory that the GPUs see of each other.
"""

from __future__ import annotations

import torch.distributed as dist

from rung.distributed.torch_private import fuse_messages_with_products
from rung.distributed.world import World
from rung.spec.config import RunConfig


def overlap_messages(world: World, config: RunConfig) -> str:
    """Let the compiler do it from now on, if it can. Returns a line for the user."""
    why_not = _why_not(world, config)
    if why_not is not None:
        return f"async_tp is off: {why_not}"
    fuse_messages_with_products(world.axis("tp").get_group())
    return "async_tp: the compiler joins messages along the sequence with the products beside them, where it can"


def _why_not(world: World, config: RunConfig) -> str | None:
    if world.device_type != "cuda" or world.backend != "nccl" or not dist.is_nccl_available():
        return f"it needs GPUs with NCCL, and this run is on {world.device_type} with {world.backend}"
    if not config.compile:
        return "the compiler does it, and there is no --compile"
    if not config.sequence_parallel:
        return "it is for messages along the sequence, and there is no --sequence-parallel"
    if world.is_dry_run:
        return "plans are made without the compiler"
    return None
