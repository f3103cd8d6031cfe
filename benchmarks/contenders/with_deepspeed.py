"""The job with DeepSpeed's engine, ZeRO off: what its loop costs beside plain data parallelism."""

from __future__ import annotations

import logging
import os
from statistics import fmean
from typing import Any

# Its default on a machine without a GPU, unless a variable says otherwise, is what it finds by trying.
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.cases import Case
from benchmarks.contenders.common import LOG_EVERY, Contender, Stopwatch, endless, seeded_module
from rung.distributed.world import World


class WithDeepSpeed:
    def __init__(self, case: Case, world: World, tuned: bool) -> None:
        task = case.load_task()
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        dataset: Any = task.train_data()
        settings = {
            "train_micro_batch_size_per_gpu": case.rank_batch_size,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": case.clip or 0.0,
            "bf16": {"enabled": case.precision == "bf16"},
            "zero_optimization": {"stage": 0},
            "steps_per_print": 10**9 if tuned else LOG_EVERY,
            "wall_clock_breakdown": False,
        }
        module: nn.Module = seeded_module(case, task) if tuned else seeded_module(case, task).model
        if not dist.is_initialized():  # it asks for a process group also where there is one process
            os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self._engine, *_ = deepspeed.initialize(
            model=module, optimizer=task.optimizer(module), config=settings, dist_init_required=False
        )
        if case.compile:
            self._engine.compile()
        sampler: DistributedSampler[Any] = DistributedSampler(dataset, world.size, world.rank, drop_last=True)
        self._batches = endless(DataLoader(dataset, batch_size=case.rank_batch_size, sampler=sampler, drop_last=True))
        self._device = world.device
        self._loss = None if tuned else task.loss

    def run(self, num_steps: int, stopwatch: Stopwatch) -> float:
        engine = self._engine
        engine.train()
        losses = []
        for step in range(1, num_steps + 1):
            inputs, targets = next(self._batches)
            inputs, targets = inputs.to(self._device), targets.to(self._device)
            loss = engine(inputs, targets) if self._loss is None else self._loss(engine(inputs), targets)
            engine.backward(loss)
            engine.step()
            if step % LOG_EVERY == 0:
                losses.append(loss.item())
                stopwatch.mark(step)
        return fmean(losses)


def build(case: Case, world: World, *, tuned: bool = False) -> Contender:
    return WithDeepSpeed(case, world, tuned)
