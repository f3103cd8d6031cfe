"""Measure one rank of a layout on the device that is here: real tensors, and a process group that moves nothing.

Memory and the time of kernels are then those of training, whatever kernels the libraries choose. Only messages are left
to the model of `cost.py`.
"""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import astuple, dataclass, replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rung.data.batch_shard import LocalBatch
from rung.distributed.world import open_fake_world
from rung.parallel.materialize import is_absent
from rung.runtime import Runtime, build_runtime
from rung.spec.config import RunConfig
from rung.spec.strategy import Layout
from rung.spec.task import Task
from rung.train.worker import make_batches

_WARM_UP = 3  # steps: the first creates optimizer state, the second reuses memory, cuDNN chooses kernels
_SECONDS = 0.5  # of timed steps, about
_BLOCKS = 3  # of steps, of which the median counts


@dataclass(frozen=True)
class MeasuredRank:
    """Peak bytes of a rank, and the seconds of a step whose messages take no time."""

    seconds: float
    allocated: int
    reserved: int

    def with_other(self, other: MeasuredRank) -> MeasuredRank:
        """The larger of each figure."""
        return MeasuredRank(*(max(pair) for pair in zip(astuple(self), astuple(other), strict=True)))


def measure_rank(task: Task, layout: Layout, config: RunConfig, *, rank: int = 0, device: str = "cuda") -> MeasuredRank:
    """Build the rank and let it take steps on its first batch. On a CPU the bytes are 0: nothing counts them there."""
    config = replace(config, steps=1, epochs=None, eval_every="never", workers=0)
    if device == "cuda":
        _empty_allocator()
    with open_fake_world(layout, rank=rank, device=device, fake=False) as world:
        runtime = build_runtime(task, world, config, total_steps=1000, seeded=False)
        _fill(runtime.model)
        (batch,) = runtime.place(make_batches(task, config, world))
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = _seconds_of_a_step(runtime, batch, device)
        del runtime, batch
    if device != "cuda":
        return MeasuredRank(seconds, 0, 0)
    return MeasuredRank(seconds, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())


def _fill(model: nn.Module) -> None:
    """Small numbers in place of the task's weights: drawing those on the host would take longer than the steps."""
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if not is_absent(parameter) and local.is_floating_point():
                local.normal_(std=0.02)


def _seconds_of_a_step(runtime: Runtime, batch: LocalBatch, device: str) -> float:
    def take(steps: int) -> float:
        started = time.perf_counter()
        for _ in range(steps):
            runtime.step(batch, want_norm=True)
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - started) / steps

    take(_WARM_UP)
    steps = max(1, min(20, int(_SECONDS / _BLOCKS / take(1))))
    return statistics.median(take(steps) for _ in range(_BLOCKS))


def _empty_allocator() -> None:
    """Without the memory of the rank before. cuBLAS keeps its workspaces, which count for this one, too."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
