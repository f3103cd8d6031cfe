"""ddp with compressed gradients: the step of ddp, but for how gradients become common to all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from rung.parallel.compression import Exchange, Wire, halve_gradients, make_exchange
from rung.parallel.gradients import clip
from rung.runtime.base import Traffic
from rung.runtime.mesh import MeshRuntime
from rung.runtime.optimizer import local_bytes

_HALF_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class HalvedRuntime(MeshRuntime):
    """DDP reduces in a type of 16 bits."""

    def _replicate(self) -> DistributedDataParallel | None:
        kind, finds_unused = self.config.compress, self.config.unused_parameters == "allow"
        ddp = self.world.replicate(self._loss_module, find_unused=finds_unused, reduce_in=_HALF_TYPES[kind])
        self._wire = Wire(self.world)
        if not self.world.pretend:  # there, DDP has a hook already
            halve_gradients(ddp, kind, self._wire)
        return ddp

    def traffic(self) -> dict[str, Traffic]:
        return {"gradients": traffic_of(self._wire)}


class CompressedRuntime(MeshRuntime):
    """No DDP: each rank has its own gradients when backward is over, and an `Exchange` makes them common."""

    def __init__(self, *, total_steps: int | None, **parts: Any) -> None:
        super().__init__(**parts)
        with self.world.tensors():
            self.exchange: Exchange = make_exchange(
                self.config, self.world, self.optimizer, self._trainable, total_steps
            )
        self.notes += self.exchange.notes

    def _replicate(self) -> DistributedDataParallel | None:
        return None

    @property
    def _sees_all_gradients(self) -> bool:
        return False

    def _update(self, want_norm: bool) -> Tensor | None:
        """The exchange comes between unscaling and the norm, which is that of what the optimizer gets."""
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
            if float(self._scaler.agree(self.optimizer, self.world.device)) > 0:
                return self._skip(want_norm)
        exchange, parameters = self.exchange, [p for _, p in self._trainable]
        exchange.reduce()
        norm, max_norm = None, self.config.clip if not exchange.clips else None
        if max_norm is not None or want_norm:
            norm = self._norm(parameters)
        if max_norm is not None and norm is not None:
            clip(parameters, max_norm, norm)
        self.is_updating = True
        exchange.commit()
        exchange.apply(self._take_step)
        self._after_update()
        return norm

    def _skip(self, want_norm: bool) -> Tensor | None:
        """Some rank's gradients overflowed: nothing is sent, and nothing of this step is kept."""
        assert self._scaler is not None
        self._scaler.update()
        self._after_update()
        return torch.full((), float("inf"), device=self.world.device) if want_norm else None

    def traffic(self) -> dict[str, Traffic]:
        return {"gradients": traffic_of(self.exchange.wire)}

    def state_bytes(self) -> dict[str, int]:
        return {**super().state_bytes(), "compression": sum(map(local_bytes, self.exchange.vectors().values()))}


def traffic_of(wire: Wire) -> Traffic:
    return Traffic(wire.num_messages, wire.num_bytes, wire.plain_bytes)
