"""The loop, and what one process does to take part in it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from rung.batches import Batches, Cut
from rung.checkpoint import save_weights
from rung.config import RunConfig, micro_batch_size
from rung.metrics import EvalRecord, JsonLines, Ledger, Observer, Sealed, StepRecord, TensorBoard
from rung.order import mix
from rung.runtime import Runtime, build_runtime
from rung.runtime.base import ModelFacts
from rung.status import StatusWriter
from rung.strategy import Layout, parse
from rung.task import Task, load_task
from rung.world import World, environment_local_size, environment_size, open_world

log = logging.getLogger("rung")


@dataclass(frozen=True)
class Job:
    """Everything a process needs to know to take part in a run. It is sent to the processes as it is."""

    task_path: str
    strategy: str
    config: RunConfig
    arguments: Mapping[str, Any] = field(default_factory=dict)
    run_dir: str | None = None
    plain_sgd: bool = False  # `verify` replaces the task's optimizer

    def load(self) -> Task:
        task = load_task(self.task_path).bind(self.arguments)
        return replace(task, optimizer=_sgd, schedule=None) if self.plain_sgd else task


@dataclass(frozen=True)
class Summary:
    steps: int
    last: StepRecord | None
    evaluation: EvalRecord | None


def run(
    runtime: Runtime,
    batches: Batches,
    *,
    world: World,
    config: RunConfig,
    observers: list[Observer] | None = None,
    evaluation: Callable[[], Batches] | None = None,
    facts: Mapping[str, Any] | None = None,
    status: StatusWriter | None = None,
) -> Summary:
    """Train to the end of `batches`. The same for every strategy, and for a pretend world."""
    status = status or StatusWriter()
    observers = observers or []
    ledger = Ledger(world)
    total = batches.total_steps
    step, epoch, measured = 0, 0, None
    last: StepRecord | None = None
    sealed: Sealed | None = None

    def tell() -> None:
        nonlocal sealed, last
        records = ledger.records(sealed) if sealed is not None else []
        sealed = None
        for observer in observers:
            if records:
                observer.on_steps(records)
        last = records[-1] if records else last

    for observer in observers:
        observer.on_start({"total_steps": total, **(facts or {})})
    started = time.perf_counter()
    status.phase("reading data")
    for window in runtime.place(batches):
        step, epoch = window.step, window.epoch
        status.step(step)
        is_last = step == total
        # The first step is shown at once; after that, figures are read every so many steps.
        logs = step == 1 or is_last or step % config.log_every == 0
        ledger.add(window, runtime.step(window, want_norm=logs))
        evaluates = evaluation is not None and _is_evaluation_due(config.eval_every, step, window.ends_epoch, is_last)
        tell()  # of the step before: the device has this one to work on meanwhile
        if logs or evaluates:
            status.phase("logging")
            sealed = ledger.seal()
            if evaluates or world.device.type == "cpu":
                tell()
        if evaluates and evaluation is not None:
            measured = _evaluate(runtime, evaluation(), step, epoch, observers, status)
            ledger.skip()
        status.phase("reading data")
    tell()
    sealed = ledger.seal()
    tell()
    if evaluation is not None and config.eval_every != "never" and (measured is None or measured.step != step):
        measured = _evaluate(runtime, evaluation(), step, epoch, observers, status)
    state = world.gather([float(count) for count in runtime.state_bytes().values()])
    kept = [dict(zip(runtime.state_bytes(), map(int, row), strict=True)) for row in state]
    for observer in observers:
        observer.on_end({"steps": step, "seconds": time.perf_counter() - started, "state_bytes": kept})
    return Summary(step, last, measured)


def worker(job: Job, status: StatusWriter | None = None) -> Summary:
    """World, runtime and loop for one process of a job."""
    status = status or StatusWriter()
    config = job.config
    status.phase("starting")
    task = job.load()
    layout = parse(job.strategy, environment_size(), environment_local_size(), config.schedule)
    with open_world(
        layout, device=config.device, backend=config.backend, timeout_seconds=config.timeout_seconds
    ) as world:
        status.phase("building")
        batches = make_batches(task, config, world)
        runtime = build_runtime(
            task,
            world,
            config,
            total_steps=batches.total_steps,
            status=status,
            dataset=None if batches.is_stream else batches.dataset,
        )
        torch.manual_seed(dropout_seed(config.seed, world))
        if world.is_main:
            describe(task, world, config, batches, runtime.facts)
        for note in runtime.notes:
            log.info("  %s", note)
        told = len(runtime.notes)
        folder = Path(job.run_dir) if job.run_dir is not None else None
        observers: list[Observer] = []
        if folder is not None and world.is_main:
            observers = [JsonLines(folder / "metrics.jsonl"), TensorBoard(folder / "tensorboard")]
        make_evaluation = (lambda: make_eval_batches(task, config, world)) if task.eval_data is not None else None
        summary = run(
            runtime,
            batches,
            world=world,
            config=config,
            observers=observers,
            evaluation=make_evaluation,
            facts={
                "task": task.name,
                "strategy": layout.name,
                "ranks": world.size,
                "device": world.device.type,
                "parameters": runtime.facts.num_trainable + runtime.facts.num_frozen,
                "buffers": runtime.facts.buffer_names,
            },
            status=status,
        )
        for note in runtime.notes[told:]:
            log.info("  %s", note)
        status.phase("saving")
        for observer in observers:
            observer.close()
        if folder is not None and config.save_weights:
            save_weights(runtime.named_weights(), folder / "model.safetensors", is_main=world.is_main)
        world.barrier()
    status.phase("finished")
    return summary


def dropout_seed(seed: int, world: World) -> int:
    """Dropout differs between ranks, not between runs. Tensor ranks share activations, so they drop alike."""
    return mix(seed, world.rank // world.layout.tp, 1)


def make_batches(task: Task, config: RunConfig, world: World, *, start_step: int = 0) -> Batches:
    """This rank's training windows."""
    return Batches(
        task.train_data(),
        _cut(config, world),
        seed=config.seed,
        shuffle=config.shuffle,
        num_steps=config.steps,
        num_epochs=config.epochs,
        start_step=start_step,
        collate=task.collate,
        num_workers=config.workers,
        pin_memory=world.device.type == "cuda" and not world.pretend,
    )


def make_eval_batches(task: Task, config: RunConfig, world: World) -> Batches:
    """This rank's share of the evaluation set: each sample once, in the data set's own order."""
    assert task.eval_data is not None
    return Batches(
        task.eval_data(),
        _cut(config, world),
        seed=config.seed,
        shuffle=False,
        num_epochs=1,
        collate=task.collate,
        num_workers=config.workers,
        pin_memory=world.device.type == "cuda" and not world.pretend,
    )


def describe(task: Task, world: World, config: RunConfig, batches: Batches, model: ModelFacts) -> None:
    """Say what is about to run, in a few lines."""
    layout: Layout = world.layout
    trainable, frozen = model.num_trainable, model.num_frozen
    cut = batches.cut
    log.info(
        "%s, %s on %s%s",
        task.name,
        layout.describe(),
        world.device.type,
        f" ({world.backend})" if world.mesh is not None else "",
    )
    log.info(
        "  model: %s parameters%s, %s", f"{trainable:,}", f" ({frozen:,} frozen)" if frozen else "", config.precision
    )
    per_rank = -(-cut.global_micro_batch // cut.num_ranks)
    samples = f"{batches.num_samples:,} samples" if batches.num_samples is not None else "an iterable data set"
    readers = f"{'data ' if layout.is_composed else ''}rank{'s' if cut.num_ranks > 1 else ''}"
    log.info(
        "  data: %s; a step is %d = %d %s x %d sample%s x %d micro-batch%s",
        samples, config.batch_size, cut.num_ranks, readers, per_rank, "s"[: per_rank > 1],
        cut.num_micro_batches, "es" if cut.num_micro_batches > 1 else "",
    )  # fmt: skip


def _cut(config: RunConfig, world: World) -> Cut:
    return Cut(config.batch_size, world.layout.num_data_ranks, world.data_rank, micro_batch_size(config, world.layout))


def _is_evaluation_due(every: str, step: int, ends_epoch: bool, is_last: bool) -> bool:
    if every == "never":
        return False
    return is_last or (ends_epoch if every == "epoch" else step % int(every) == 0)


def _evaluate(
    runtime: Runtime, batches: Batches, step: int, epoch: int, observers: list[Observer], status: StatusWriter
) -> EvalRecord:
    status.phase("evaluating")
    started = time.perf_counter()
    metrics = runtime.evaluate(batches)
    record = EvalRecord(step, epoch, metrics, time.perf_counter() - started)
    for observer in observers:
        observer.on_evaluation(record)
    return record


def _sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
