"""The tensors of a rank: on its device with values, or, in a dry run, without them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from rung.distributed import fake_world


@dataclass(frozen=True)
class Tensors:
    """How tensors are made, placed and read on one rank. `fake_mode` is torch's mode for tensors without storage."""

    device: torch.device
    fake_mode: Any = None
    has_values: bool = True  # in a dry run `read` returns NaN

    @property
    def has_storage(self) -> bool:
        """Without storage, building a model piece by piece saves no memory."""
        return self.fake_mode is None

    def mode(self) -> AbstractContextManager[Any]:
        """Around materialising and stepping: fake tensors where there is no storage, else nothing."""
        return fake_world.fake_tensors(self.fake_mode) if self.fake_mode is not None else nullcontext()

    def generator(self, device: torch.device, seed: int) -> torch.Generator | None:
        """Random numbers of this seed; None, which is torch's own generator, where there are no values."""
        return torch.Generator(device).manual_seed(seed) if self.has_values else None

    def place(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Copy a tensor of the batch to the device. `dtype` applies to floating types alone."""
        if self.fake_mode is not None:
            tensor = self.fake_mode.from_tensor(tensor)
        wanted = tensor.dtype
        if dtype is not None and (tensor.is_floating_point() or tensor.is_complex()):
            wanted = dtype.to_complex() if tensor.is_complex() else dtype
        return tensor.to(device=self.device, dtype=wanted, non_blocking=True)

    def read(self, tensors: Sequence[torch.Tensor]) -> list[float]:
        """Copy scalars of one type to the host in one transfer. Waits for the device."""
        return self.fetch(tensors)()

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[float]]:
        """Start to copy scalars to the host. The returned call waits for them, and for no later work of the device."""
        if not tensors:
            return list
        if not self.has_values:
            return lambda: [math.nan] * len(tensors)
        return self.fetch_all(torch.stack(list(tensors)))

    def fetch_all(self, tensor: torch.Tensor) -> Callable[[], list[float]]:
        """The same with the numbers of one flat tensor."""
        stacked = tensor.detach().to(torch.float64)
        if self.device.type != "cuda":
            return stacked.tolist
        host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True).copy_(stacked, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()

        def values() -> list[float]:
            arrived.synchronize()
            found: list[float] = host.tolist()
            return found

        return values
