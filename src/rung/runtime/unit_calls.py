"""Whether all ranks run the same FSDP units in the first step: where they do not, the messages of different units would
meet, and the job would hang or abort without a name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from rung.distributed.world import World
from rung.errors import ModelError


class UnitCalls:
    """Compares the unit that each rank is about to run. Through a group of its own, before any message of the unit."""

    def __init__(self, model: nn.Module, world: World) -> None:
        self._world = world
        self._units = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
        self._names = [*self._units, "nothing more"]
        self._group: dist.ProcessGroup | None = None

    @contextmanager
    def compared(self) -> Iterator[None]:
        """While a first step runs."""
        self._group = self._group or self._world.host_group()
        hooks = []
        for number, unit in enumerate(self._units.values()):
            module: Any = unit

            def before(module: nn.Module, inputs: Any, number: int = number) -> None:
                self._compare(number)

            hooks.append(module.register_forward_pre_hook(before, prepend=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def end_forward(self) -> None:
        self._compare(len(self._names) - 1)

    def _compare(self, number: int) -> None:
        own = torch.tensor([number])
        rows = [torch.empty_like(own) for _ in range(self._world.size)]
        dist.all_gather(rows, own, group=self._group)
        found = [int(row) for row in rows]
        if len(set(found)) == 1:
            return
        other = next(rank for rank, unit in enumerate(found) if unit != found[0])
        names = [self._names[found[rank]] or "the model" for rank in (0, other)]
        raise ModelError(
            f"rank 0 runs {names[0]}, while rank {other} runs {names[1]}. {self._world.layout.name} gathers the "
            "weights of each block from all ranks, so all must run the same blocks, whatever their samples are. Use "
            "ddp with --set unused_parameters=allow, or --shard-by whole."
        )
