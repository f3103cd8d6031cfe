"""ddp with compressed gradients: the step of ddp with another reduction of gradients."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rung.distributed.ddp import replicate
from rung.parallel.compression import GradientExchange, Slots, Wire, halve_gradients, make_exchange
from rung.parallel.gradients import clip, global_norm
from rung.parallel.sharding import HALF_TYPES
from rung.runtime.base import Traffic
from rung.runtime.context import RuntimeContext
from rung.runtime.mesh import ddp_parts, whole_model_parts
from rung.runtime.optimizer import local_bytes
from rung.runtime.rank_state import SavedRankState, shaped_like
from rung.runtime.step import StepParts
from rung.runtime.update import end_update, step_scaled


def half_gradient_parts(context: RuntimeContext) -> StepParts:
    """DDP that reduces gradients in fp16 or bf16."""
    world, kind, wire = context.world, context.config.compress, Wire(context.world)

    def replicate_halved(module: nn.Module) -> DistributedDataParallel:
        finds_unused = context.config.unused_parameters == "allow"
        ddp = replicate(world, module, find_unused=finds_unused, reduce_in=HALF_TYPES[kind])
        if not world.is_dry_run:
            halve_gradients(ddp, kind, wire)
        return ddp

    parts = ddp_parts(context, replicate_halved)
    parts.gradient_figures = None  # rounded
    parts.traffic = lambda: {"gradients": traffic_of(wire)}
    return parts


def compressed_parts(context: RuntimeContext) -> StepParts:
    """Without DDP: backward leaves each rank its own gradients, and a `GradientExchange` reduces them."""
    parts = whole_model_parts(context)
    parts.gradient_figures = None  # each rank has the gradient of its own share
    with context.world.tensors.mode():
        exchange = make_exchange(
            context.config, context.world, context.optimizer, context.trainable, context.total_steps
        )
    context.notes += exchange.notes
    parts.update = partial(exchange_and_update, context, exchange)
    parts.rank_state = UnsentGradients(context, exchange)
    parts.traffic = lambda: {"gradients": traffic_of(exchange.wire)}
    parts.further_bytes = lambda: {"compression": sum(map(local_bytes, exchange.vectors().values()))}
    return parts


def exchange_and_update(context: RuntimeContext, exchange: GradientExchange, want_norm: bool) -> Tensor | None:
    """Exchange after unscaling, and before the norm, which is of the gradients that the optimizer gets."""
    scaler, device = context.scaler, context.world.device
    if scaler is not None:
        scaler.unscale_(context.optimizer)
        if float(scaler.sync_overflow(context.optimizer, device)) > 0:
            # A rank's gradients overflowed: send nothing, and keep no residual of this step.
            scaler.update()
            end_update(context)
            return torch.full((), float("inf"), device=device) if want_norm else None
    parameters = context.parameters
    exchange.reduce()
    max_norm = context.config.clip if not exchange.clips else None  # else clipped in `reduce`, before compression
    norm = global_norm(parameters) if max_norm is not None or want_norm else None
    if max_norm is not None and norm is not None:
        clip(parameters, max_norm, norm)
    context.updates.begin()
    exchange.commit()
    exchange.apply(partial(step_scaled, context))
    end_update(context)
    return norm


class UnsentGradients:
    """This rank's residuals: the parts of gradients that its messages have omitted so far."""

    kind = "compress"

    def __init__(self, context: RuntimeContext, exchange: GradientExchange) -> None:
        self._notes, self.exchange = context.notes, exchange

    def tensors(self) -> dict[str, Tensor]:
        return self._views() | self.exchange.extras()

    def common_tensors(self, found: dict[str, Tensor], *, alone: bool) -> dict[str, Tensor]:
        return found

    def restore(self, saved: SavedRankState) -> bool:
        names = saved.names()
        keys = {name.rpartition("/")[2] for name in names if "/" in name}
        if keys != set(self.exchange.vectors()):
            return False
        for name, view in self._views().items():
            if view.numel() > 0:
                view.copy_(shaped_like(saved.get(name), view, name))
        self.exchange.restore({name: saved.get(name) for name in names if "/" not in name})
        if saved.own_rank is None and keys:
            self._notes.append(
                "compression: every rank starts with the mean of the residuals (gradients not sent yet) of "
                f"{saved.num_ranks} ranks"
            )
        return True

    def _views(self) -> dict[str, Tensor]:
        vectors = self.exchange.vectors().items()
        return {f"{name}/{key}": view for key, one in vectors for name, view in named_views(self.exchange.slots, one)}


def named_views(slots: Slots, vector: Tensor) -> list[tuple[str, Tensor]]:
    return list(zip(slots.names, slots.views(vector), strict=True))


def traffic_of(wire: Wire) -> Traffic:
    return Traffic(wire.num_messages, wire.num_bytes, wire.plain_bytes)
