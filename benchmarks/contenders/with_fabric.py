"""The job with Lightning Fabric."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

try:  # the package `lightning` contains Fabric; `lightning-fabric` is Fabric alone
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy
except ImportError:
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import DDPStrategy

from benchmarks.cases import Case
from benchmarks.contenders.common import LOG_EVERY, Contender, Stopwatch, endless, seeded_module, shuffled_loader
from rung.world import World


class WithFabric:
    """The process group is there already; Fabric finds it and uses it."""

    def __init__(self, case: Case, world: World) -> None:
        task = case.load_task()
        for name in ("lightning.fabric", "lightning_fabric"):
            logging.getLogger(name).setLevel(logging.WARNING)
        strategy: Any = DDPStrategy(gradient_as_bucket_view=True) if case.is_distributed else "auto"
        self._fabric = Fabric(
            accelerator=case.device,
            devices=case.num_ranks,
            strategy=strategy,
            precision="bf16-mixed" if case.precision == "bf16" else "32-true",
        )
        self._fabric.launch()
        module: nn.Module = seeded_module(case, task)
        optimizer = task.optimizer(module)
        if case.compile:
            module = torch.compile(module)  # before setup, which takes it off and puts it back around the wrapper
        self._module, self._optimizer = self._fabric.setup(module, optimizer)
        self._batches = endless(self._fabric.setup_dataloaders(shuffled_loader(case, task, world)))
        self._clip = case.clip

    def run(self, num_steps: int, stopwatch: Stopwatch) -> float:
        fabric, module, optimizer = self._fabric, self._module, self._optimizer
        module.train()
        last_loss = float("nan")
        for step in range(1, num_steps + 1):
            inputs, targets = next(self._batches)
            loss = module(inputs, targets)
            fabric.backward(loss)
            # Its default looks at the norm on the host in every step, which no other contender does.
            fabric.clip_gradients(module, optimizer, max_norm=self._clip, error_if_nonfinite=False)
            optimizer.step()
            optimizer.zero_grad()
            if step % LOG_EVERY == 0:
                last_loss = loss.item()
                stopwatch.mark(step)
        return last_loss


def build(case: Case, world: World) -> Contender:
    return WithFabric(case, world)
