"""fp16 and bf16: torch's own hooks, which DDP calls for each bucket while backward goes on.

No `from __future__ import annotations` here: DDP compares a hook's annotations with the real types.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from rung.parallel.compression.base import Wire, ring_bytes

_HOOKS: dict[str, Callable[..., Any]] = {"fp16": fp16_compress_hook, "bf16": bf16_compress_hook}


def halve_gradients(ddp: DistributedDataParallel, kind: str, wire: Wire) -> None:
    """Let DDP all-reduce its buckets in a type of 16 bits."""
    reduce_in_half = _HOOKS[kind]

    # A name of its own: DDP knows torch's bf16 hook by its name, and would refuse it without NCCL.
    def halve(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        buffer = bucket.buffer()
        wire.plain_bytes += ring_bytes(buffer.numel() * buffer.element_size(), wire.num_ranks)
        wire.count_reduce(buffer.numel() * 2)
        done: torch.futures.Future[torch.Tensor] = reduce_in_half(wire.group, bucket)
        return done

    ddp.register_comm_hook(None, halve)
