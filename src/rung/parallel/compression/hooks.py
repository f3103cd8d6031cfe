"""fp16 and bf16: torch's hooks, which DDP calls for each bucket during backward.

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
    """Make DDP all-reduce its buckets in fp16 or bf16."""
    reduce_in_half = _HOOKS[kind]

    # DDP recognizes torch's bf16 hook by its function name and refuses it without NCCL, hence this wrapper.
    def halve(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        buffer = bucket.buffer()
        wire.plain_bytes += ring_bytes(buffer.numel() * buffer.element_size(), wire.num_ranks)
        wire.count_reduce(buffer.numel() * 2)
        done: torch.futures.Future[torch.Tensor] = reduce_in_half(wire.group, bucket)
        return done

    ddp.register_comm_hook(None, halve)
