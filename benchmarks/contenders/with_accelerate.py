"""The job with Hugging Face Accelerate."""

from __future__ import annotations

from statistics import fmean

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs, TorchDynamoPlugin
from torch import nn

from benchmarks.cases import Case
from benchmarks.contenders.common import LOG_EVERY, Contender, Stopwatch, endless, seeded_module, shuffled_loader
from rung.distributed.world import World


class WithAccelerate:
    """The process group is there already; Accelerate finds it and uses it."""

    def __init__(self, case: Case, world: World, tuned: bool) -> None:
        task = case.load_task()
        self._accelerator = Accelerator(
            cpu=case.device == "cpu",
            mixed_precision="bf16" if case.precision == "bf16" else "no",
            # As the hand-written loop does it; Accelerate's own defaults are slower, if anything.
            dataloader_config=DataLoaderConfiguration(non_blocking=case.device == "cuda"),
            kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
            dynamo_plugin=TorchDynamoPlugin(backend="inductor" if case.compile else "no"),
        )
        module: nn.Module = seeded_module(case, task) if tuned else seeded_module(case, task).model
        self._module, self._optimizer, loader = self._accelerator.prepare(
            module, task.optimizer(module), shuffled_loader(case, task, world)
        )
        self._batches = endless(loader)
        self._clip = case.clip
        self._loss = None if tuned else task.loss

    def run(self, num_steps: int, stopwatch: Stopwatch) -> float:
        accelerator, module, optimizer = self._accelerator, self._module, self._optimizer
        module.train()
        losses = []
        for step in range(1, num_steps + 1):
            inputs, targets = next(self._batches)
            # As its documentation writes it, the loss is taken of the model's output, which it has turned to fp32.
            loss = module(inputs, targets) if self._loss is None else self._loss(module(inputs), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(module.parameters(), self._clip)
            optimizer.step()
            optimizer.zero_grad()
            if step % LOG_EVERY == 0:
                losses.append(loss.item())
                stopwatch.mark(step)
        return fmean(losses)


def build(case: Case, world: World, *, tuned: bool = False) -> Contender:
    return WithAccelerate(case, world, tuned)
