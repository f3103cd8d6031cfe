"""The job with torchtitan's Trainer, which owns the loop and the optimizer; the model is registered with it.

As its documentation shows for a model of one's own: each block compiled by itself, and so the loss; bfloat16 by
autocast on a single GPU. Activation checkpointing, which is on by default, is off: no other contender recomputes.
"""

from __future__ import annotations

import gc
import logging
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import build_cross_entropy_loss
from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import build_optimizers
from torchtitan.config import JobConfig
from torchtitan.protocols.model import BaseModelArgs, ModelProtocol
from torchtitan.protocols.train_spec import TrainSpec, register_train_spec
from torchtitan.train import Trainer

from benchmarks.cases import Case
from benchmarks.contenders.common import LOG_EVERY, Contender, Stopwatch, endless, seeded_module, shuffled_loader
from benchmarks.contenders.loop_thread import LoopThread
from rung.distributed.world import World


@dataclass
class _Shape(BaseModelArgs):
    case: Case | None = None

    def update_from_config(self, job_config: JobConfig, **others: Any) -> None: ...

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        count = sum(parameter.numel() for parameter in model.parameters())
        return count, 6 * count


class _Model(ModelProtocol):
    def __init__(self, shape: _Shape) -> None:
        super().__init__(shape)
        assert shape.case is not None
        self._case = shape.case
        self.gpt = shape.case.load_task().model()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.gpt(tokens)  # type: ignore[no-any-return]

    def init_weights(self, buffer_device: Any = None) -> None:
        """torchtitan makes the model on the meta device; these are the numbers that the other contenders begin with."""
        self.gpt.head.weight = self.gpt.token.weight  # moving off the meta device has made two of them
        self.gpt.load_state_dict(seeded_module(self._case, self._case.load_task()).model.state_dict())


class _Batches(BaseDataLoader):
    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        return (({"input": inputs}, targets) for inputs, targets in endless(self._loader))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def _compile_blocks(model: _Model, dims: object, config: JobConfig) -> nn.Module:
    if config.compile.enable:
        for block in model.gpt.blocks:
            block.compile(fullgraph=True)
    return model


class _Loop(LoopThread):
    """torchtitan turns Python's garbage collection off for the process, and collects every 50 steps."""

    def __init__(self, world: World) -> None:
        super().__init__(world.device)
        self.folder = tempfile.TemporaryDirectory()

    def run(self, num_steps: int, stopwatch: Stopwatch) -> float:
        gc.disable()
        try:
            return super().run(num_steps, stopwatch)
        finally:
            gc.enable()


def build(case: Case, world: World, *, tuned: bool = False) -> Contender:
    logging.getLogger().setLevel(logging.WARNING)
    task, loop = case.load_task(), _Loop(world)
    group = task.optimizer(task.model()).defaults

    class LossFromLog(MetricsProcessor):
        def log(self, step: int, global_avg_loss: float, *others: Any, **named: Any) -> None:
            super().log(step, global_avg_loss, *others, **named)
            if step % LOG_EVERY == 0:  # it logs the first step, too
                loop.after_steps(global_avg_loss)

    register_train_spec(
        "benchmark",
        TrainSpec(
            model_cls=_Model,
            model_args={"case": _Shape(case=case)},
            parallelize_fn=_compile_blocks,
            pipelining_fn=None,
            build_optimizers_fn=build_optimizers,
            build_lr_schedulers_fn=build_lr_schedulers,
            build_dataloader_fn=lambda **_: _Batches(shuffled_loader(case, task, world)),
            build_tokenizer_fn=None,
            build_loss_fn=build_cross_entropy_loss,
            build_metrics_processor_fn=lambda config, dims, shape: LossFromLog(config, dims),
        ),
    )
    config = JobConfig()
    config.job.dump_folder = loop.folder.name
    config.model.name, config.model.flavor = "benchmark", "case"
    config.metrics.log_freq = LOG_EVERY
    config.optimizer.lr, config.optimizer.weight_decay = group["lr"], group["weight_decay"]
    config.optimizer.beta1, config.optimizer.beta2 = group["betas"]
    config.training.local_batch_size, config.training.steps = case.rank_batch_size, 10**9
    config.training.max_norm = case.clip or float("inf")
    config.training.mixed_precision_param = "bfloat16" if case.precision == "bf16" else "float32"
    config.lr_scheduler.warmup_steps, config.lr_scheduler.decay_ratio = 0, 0.0
    config.activation_checkpoint.mode = "none"
    config.compile.enable = case.compile
    if not dist.is_initialized():  # it asks for a process group also where there is one process
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        backend = dist.get_default_backend_for_device(world.device)
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    trainer = Trainer(config)
    gc.enable()
    loop.start(trainer.train)
    return loop
