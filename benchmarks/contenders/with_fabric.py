"""The job with Lightning Fabric."""

from __future__ import annotations

import logging
from statistics import fmean
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
from rung.distributed.world import World


class WithFabric:
    """The process group is there already; Fabric finds it and uses it."""

    def __init__(self, case: Case, world: World, tuned: bool) -> None:
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
        module: nn.Module = seeded_module(case, task) if tuned else seeded_module(case, task).model
        optimizer = task.optimizer(module)
        if case.compile:
            module = torch.compile(module)  # before setup, which takes it off and puts it back around the wrapper
        self._module, self._optimizer = self._fabric.setup(module, optimizer)
        self._batches = endless(self._fabric.setup_dataloaders(shuffled_loader(case, task, world)))
        self._clip, self._tuned = case.clip, tuned
        self._loss = None if tuned else task.loss

    def run(self, num_steps: int, stopwatch: Stopwatch) -> float:
        fabric, module, optimizer = self._fabric, self._module, self._optimizer
        module.train()
        losses = []
        for step in range(1, num_steps + 1):
            inputs, targets = next(self._batches)
            # As its documentation writes it, the loss is taken of the model's output, which it has turned to fp32.
            loss = module(inputs, targets) if self._loss is None else self._loss(module(inputs), targets)
            fabric.backward(loss)
            # Its default looks at the norm on the host in every step, which no other contender does.
            fabric.clip_gradients(module, optimizer, max_norm=self._clip, error_if_nonfinite=not self._tuned)
            optimizer.step()
            optimizer.zero_grad()
            if step % LOG_EVERY == 0:
                losses.append(loss.item())
                stopwatch.mark(step)
        return fmean(losses)


def build(case: Case, world: World, *, tuned: bool = False) -> Contender:
    return WithFabric(case, world, tuned)
