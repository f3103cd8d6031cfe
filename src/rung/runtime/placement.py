"""Copies batches to the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from rung.data.batch_shard import LocalBatch
from rung.data.pytree import map_tensors
from rung.distributed.world import World
from rung.runtime.forward import laid_out
from rung.spec.config import RunConfig


class BatchPlacement:
    """Copies windows to this rank's device, in the type and memory format of the run."""

    def __init__(self, world: World, config: RunConfig) -> None:
        self._world, self._config = world, config
        as_they_are = config.precision != "fp64" and config.memory_format == "contiguous"
        self._in_place = world.device.type == "cpu" and world.tensors.has_storage and as_they_are
        self._copies: Any = None
        if world.trains_on_gpu:
            self._copies = torch.cuda.Stream(world.device)  # type: ignore[no-untyped-call]

    def place(self, windows: Iterable[LocalBatch]) -> Iterator[LocalBatch]:
        for window in windows:
            if self._in_place:
                yield window
                continue
            with self._world.tensors.mode():
                placed = [dataclasses.replace(m, data=self._place(m.data)) for m in window.micro_batches]
            yield dataclasses.replace(window, micro_batches=placed)

    def _place(self, data: Any) -> Any:
        dtype = torch.float64 if self._config.precision == "fp64" else None
        if self._copies is None:
            return map_tensors(data, lambda t: laid_out(self._config, self._world.tensors.place(t, dtype)))
        # A separate stream: the copy overlaps the previous step, which the device is still computing.
        here = torch.cuda.current_stream(self._world.device)
        with torch.cuda.stream(self._copies):
            placed = map_tensors(data, lambda t: laid_out(self._config, self._world.tensors.place(t, dtype)))
        here.wait_stream(self._copies)
        map_tensors(placed, lambda t: t.record_stream(here))
        return placed
