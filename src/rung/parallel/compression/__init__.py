"""Gradient compression for ddp: what ranks send instead of their gradients.

fp16 and bf16 are torch's hooks, inside DDP (`hooks`). The others keep errors by parameter and look at the gradient as a
whole; they take each rank's own gradients when backward is over and leave the common ones in their place (`base`).
"""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from rung.config import RunConfig
from rung.exchange import parse_compression
from rung.parallel.compression.base import Exchange, Slots, Wire, ring_bytes
from rung.parallel.compression.feedback import ErrorFeedback
from rung.parallel.compression.hooks import halve_gradients
from rung.parallel.compression.lowrank import LowRank
from rung.parallel.compression.quantised import OneBit, Ternary
from rung.parallel.compression.topk import TopK
from rung.world import World

__all__ = ["Exchange", "Slots", "Wire", "halve_gradients", "make_exchange", "ring_bytes"]

_WARM_PART = 25  # of the run's steps, in which the part that topk sends shrinks


def make_exchange(
    config: RunConfig,
    world: World,
    optimizer: Optimizer,
    trainable: list[tuple[str, nn.Parameter]],
    total_steps: int | None,
) -> Exchange:
    """What `--compress` asks for, where DDP has no hook for it."""
    asked = parse_compression(config.compress)
    slots = Slots(trainable, world.device)
    max_norm, finds_unused = config.clip, config.unused_parameters == "allow"
    warm_up = config.compress_warmup
    if asked.method == "powersgd":
        return LowRank(
            slots,
            world,
            rank=asked.rank,
            seed=config.seed,
            warm_up=warm_up or 0,
            max_norm=max_norm,
            finds_unused=finds_unused,
        )
    exchange: Exchange
    if asked.method == "onebit":
        exchange = OneBit(slots, world, optimizer, max_norm=max_norm, finds_unused=finds_unused)
    elif asked.method == "ternary":
        exchange = Ternary(slots, world, seed=config.seed, max_norm=max_norm, finds_unused=finds_unused)
    else:
        if warm_up is None:
            warm_up = (total_steps or 0) // _WARM_PART
        exchange = TopK(
            slots,
            world,
            optimizer,
            ratio=asked.ratio,
            values=config.topk_values,
            warm_up=warm_up,
            max_norm=max_norm,
            finds_unused=finds_unused,
        )
    if isinstance(exchange, ErrorFeedback):
        exchange.notes.append(_told_of_momentum(asked.method, optimizer, exchange.takes_momentum))
    if max_norm is not None:
        exchange.notes.append(
            f"clip {max_norm:g} holds for each rank's own part of the gradient, at {max_norm:g} / sqrt({world.size}), "
            "before it is compressed"
        )
    return exchange


def _told_of_momentum(method: str, optimizer: Optimizer, takes_momentum: bool) -> str:
    if takes_momentum:
        return f"{method} takes over the momentum of SGD: each rank has its own, before gradients are exchanged"
    name = type(optimizer).__name__
    if type(optimizer) is torch.optim.SGD:
        return f"{method} is plain error feedback: {name} has no momentum to take over"
    return f"{method} is plain error feedback: momentum stays with {name}, which is not torch.optim.SGD"
