"""The job with the Trainer of Lightning, which owns the loop."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from benchmarks.cases import Case
from benchmarks.contenders.common import LOG_EVERY, Contender, seeded_module, shuffled_loader
from benchmarks.contenders.loop_thread import LoopThread
from rung.distributed.world import World
from rung.spec.task import Task


class _Module(LightningModule):
    """As documented: the loss in `training_step`, and a value of it logged in every step."""

    def __init__(self, module: nn.Module, task: Task, clip: float | None) -> None:
        super().__init__()
        self.module = module
        self._task, self._clip = task, clip

    def training_step(self, batch: Any) -> Tensor:
        inputs, targets = batch
        loss = self._task.loss(self.module(inputs), targets)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._task.optimizer(self.module)

    def configure_gradient_clipping(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        # By hand: Trainer's `gradient_clip_val` refuses a fused optimizer under mixed precision.
        if self._clip is not None:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, self._clip)


class _TunedModule(_Module):
    """The loss inside the module, and nothing logged."""

    def training_step(self, batch: Any) -> Tensor:
        return self.module(*batch)


class _LossFromStep(Callback):
    def __init__(self, loop: LoopThread) -> None:
        self._loop = loop

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *args: Any) -> None:
        if trainer.global_step % LOG_EVERY == 0:
            self._loop.after_steps(outputs["loss"].item())


def build(case: Case, world: World, *, tuned: bool = False) -> Contender:
    """The process group is there already; Lightning finds it and uses it."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    task = case.load_task()
    module: nn.Module = seeded_module(case, task) if tuned else seeded_module(case, task).model
    if case.compile:
        module.compile()  # not the LightningModule: a `training_step` that logs cannot be compiled
    job = (_TunedModule if tuned else _Module)(module, task, case.clip)
    if tuned:
        features: dict[str, Any] = {"barebones": True}  # its own mode for raw speed: all of these off, and more
    else:
        # No other contender shows progress or saves. Without a logger, what is logged stays in memory.
        features = dict.fromkeys(
            ("logger", "enable_progress_bar", "enable_checkpointing", "enable_model_summary"), False
        )
    loop = LoopThread(world.device)
    trainer = Trainer(
        accelerator=case.device,
        devices=case.num_ranks,
        strategy=DDPStrategy(gradient_as_bucket_view=True) if case.is_distributed else "auto",
        precision="bf16-mixed" if case.precision == "bf16" else "32-true",
        max_epochs=-1,
        callbacks=[_LossFromStep(loop)],
        **features,
    )
    loader = shuffled_loader(case, task, world)
    loop.start(lambda: trainer.fit(job, loader))
    return loop
