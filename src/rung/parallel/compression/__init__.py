"""Gradient compression for ddp.

fp16 and bf16 are torch's DDP hooks (`hooks`). The other methods keep errors per parameter and need the whole gradient,
so they run after backward and replace each rank's gradients by the reduced ones (`base`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from rung.distributed.world import World
from rung.parallel.combined_optimizer import kind_of
from rung.parallel.compression.base import GradientExchange, Slots, Wire, ring_bytes
from rung.parallel.compression.feedback import ErrorFeedback
from rung.parallel.compression.hooks import halve_gradients
from rung.parallel.compression.lowrank import LowRank
from rung.parallel.compression.quantised import OneBit, Ternary
from rung.parallel.compression.topk import TopK
from rung.spec.config import RunConfig
from rung.spec.gradient_sync import parse_compression

__all__ = ["GradientExchange", "Slots", "Wire", "halve_gradients", "make_exchange", "ring_bytes"]

_WARM_PART = 25  # topk warms up in 1/25 of the run's steps


def make_exchange(
    config: RunConfig,
    world: World,
    optimizer: Optimizer,
    trainable: list[tuple[str, nn.Parameter]],
    total_steps: int | None,
) -> GradientExchange:
    """The exchange for a `--compress` method that is not a DDP hook."""
    compression = parse_compression(config.compress)
    slots = Slots(trainable, world.device)
    max_norm, warm_up = config.clip, config.compress_warmup
    common: dict[str, Any] = {"max_norm": max_norm, "finds_unused": config.unused_parameters == "allow"}
    if compression.method == "powersgd":
        return LowRank(slots, world, rank=compression.rank, seed=config.seed, warm_up=warm_up or 0, **common)
    exchange: GradientExchange
    if compression.method == "onebit":
        exchange = OneBit(slots, world, optimizer, **common)
    elif compression.method == "ternary":
        exchange = Ternary(slots, world, seed=config.seed, **common)
    else:
        if warm_up is None:
            warm_up = (total_steps or 0) // _WARM_PART
        ratio, values = compression.ratio, config.topk_values
        exchange = TopK(slots, world, optimizer, ratio=ratio, values=values, warm_up=warm_up, **common)
    if isinstance(exchange, ErrorFeedback):
        exchange.notes.append(_momentum_note(compression.method, optimizer, exchange.takes_momentum))
    if max_norm is not None:
        exchange.notes.append(
            f"clip {max_norm:g} applies to each rank's own part of the gradient, at {max_norm:g} / sqrt({world.size}), "
            "before it is compressed"
        )
    return exchange


def _momentum_note(method: str, optimizer: Optimizer, takes_momentum: bool) -> str:
    if takes_momentum:
        return f"{method} takes over SGD's momentum: each rank applies it before gradients are exchanged"
    name = kind_of(optimizer)
    if type(optimizer) is torch.optim.SGD:
        return f"{method} is plain error feedback: {name} has no momentum to take over"
    return f"{method} is plain error feedback: momentum stays with {name}; it is taken over from SGD alone"
