"""ddp with local steps: each rank updates by its own share of the batch, and the ranks average their weights.

A rank's gradient is that of its share of the global loss, times the number of ranks: with the mean of the weights after
one step, that is ddp, however uneven the shares are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from rung.parallel.averaging import Averaging, OuterStep
from rung.parallel.compression import Slots
from rung.runtime.base import Traffic
from rung.runtime.compressed import traffic_of
from rung.runtime.mesh import MeshRuntime
from rung.windows import Window


class LocalStepsRuntime(MeshRuntime):
    """No DDP: steps are local. What others see of the weights, in evaluations and files, is the ranks' mean."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        config, world = self.config, self.world
        outer = OuterStep(config.outer_lr, config.outer_momentum) if config.outer == "diloco" else None
        with world.tensors():
            self.averaging = Averaging(Slots(self._trainable, world.device), world, config.local_steps, outer)
        if config.clip is not None:
            self.notes.append(f"clip {config.clip:g} holds for each rank's own gradient")
        if self._sync_norms:
            self.notes.append(
                "batch norm still exchanges its statistics in every step; --set batch_norm=local keeps them local"
            )

    def _replicate(self) -> DistributedDataParallel | None:
        return None

    @property
    def _sees_all_gradients(self) -> bool:
        return False  # with fp16, all ranks skip a step that overflowed on one of them

    def _update(self, want_norm: bool) -> Tensor | None:
        """The norm is that of each rank's own gradient: the root of the mean of their squares."""
        self.averaging.begin()
        norm = super()._update(want_norm)
        self.averaging.after_step()
        if norm is None or not want_norm:
            return None
        squared = norm.square().reshape(1)
        self.averaging.wire.all_reduce(squared)
        return squared.div_(self.averaging.wire.num_ranks).sqrt_().reshape(())

    def evaluate(self, windows: Iterable[Window]) -> dict[str, float]:
        with self.averaging.averaged():
            return super().evaluate(windows)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        with self.averaging.averaged():
            for name, value in super().named_weights():
                yield name, value.clone()  # the model will have others again

    def traffic(self) -> dict[str, Traffic]:
        return {"weights": traffic_of(self.averaging.wire)}
