"""The yardstick: the loop that an engineer who knows torch writes for this job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.cases import Case
from benchmarks.contenders.common import LOG_EVERY, Contender, Stopwatch, seeded_module, shuffled_loader
from rung.distributed.world import World


class HandWritten:
    def __init__(self, case: Case, world: World) -> None:
        task = case.load_task()
        device = world.device
        self._format = torch.channels_last if case.memory_format == "channels_last" else torch.preserve_format
        module = seeded_module(case, task).to(device)
        if case.memory_format == "channels_last":
            module = module.to(memory_format=torch.channels_last)
        self._optimizer = task.optimizer(module)
        if case.compile:
            module.compile()  # before DDP wraps it, as torch's documentation advises
        self._module: nn.Module = module
        if case.is_distributed:
            self._module = DistributedDataParallel(
                module, device_ids=[device.index] if device.type == "cuda" else None, gradient_as_bucket_view=True
            )
            dataset = task.train_data()
            sampler: DistributedSampler[Any] | None = DistributedSampler(
                dataset, world.size, world.rank, shuffle=True, seed=case.seed, drop_last=True
            )
            loader: DataLoader[Any] = DataLoader(
                dataset,
                batch_size=case.rank_batch_size,
                sampler=sampler,
                drop_last=True,
                pin_memory=device.type == "cuda",
                num_workers=case.workers,
                persistent_workers=case.workers > 0,
                multiprocessing_context="fork" if case.workers else None,  # as Rung starts its own
            )
        else:
            sampler = None
            loader = shuffled_loader(case, task, world)
        self._batches = _batches(loader, sampler)
        self._parameters = list(module.parameters())
        self._device, self._clip = device, case.clip
        self._half = torch.bfloat16 if case.precision == "bf16" else None

    def run(self, num_steps: int, stopwatch: Stopwatch) -> float:
        module, optimizer, device, half = self._module, self._optimizer, self._device, self._half
        module.train()
        losses = []
        for step in range(1, num_steps + 1):
            inputs, targets = next(self._batches)
            inputs = inputs.to(device, non_blocking=True, memory_format=self._format)
            targets = targets.to(device, non_blocking=True)
            with torch.autocast(device.type, dtype=half) if half is not None else nullcontext():
                loss: Tensor = module(inputs, targets)
            loss.backward()
            if self._clip is not None:
                torch.nn.utils.clip_grad_norm_(self._parameters, self._clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if step % LOG_EVERY == 0:
                losses.append(loss.item())
                stopwatch.mark(step)
        return fmean(losses)


def _batches(loader: DataLoader[Any], sampler: DistributedSampler[Any] | None) -> Iterator[Any]:
    epoch = 0
    while True:
        if sampler is not None:
            sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def build(case: Case, world: World, *, tuned: bool = False) -> Contender:
    return HandWritten(case, world)
