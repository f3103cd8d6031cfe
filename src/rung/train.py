"""What one process does to take part in a run: its world, its runtime, the state to go on from, and the loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from rung.agreement import half_micro_batch, micro_batch_size
from rung.batches import Batches
from rung.best import Goal, parse_best, read_best, refuse_unknown_metric
from rung.checkpoint import Checkpoint, Position, Sites, is_same_topology, restore, save_weights
from rung.config import RunConfig
from rung.environment import environment_local_size, environment_size
from rung.errors import CheckpointError, NonFiniteError
from rung.keeper import Keeper, find_state
from rung.live import live_path
from rung.looking import profiled_steps, tracker_names
from rung.loop import Summary, run
from rung.metrics import JsonLines, LiveFile, Observer, TensorBoard
from rung.oom import is_out_of_memory, memory_lines
from rung.order import mix
from rung.profiling import Profiler
from rung.runtime import Runtime, build_runtime
from rung.runtime.base import ModelFacts
from rung.runtime.measure import metric_names
from rung.status import StatusWriter
from rung.strategy import Layout, parse
from rung.task import Task, load_task
from rung.trackers import open_trackers
from rung.windows import Cut
from rung.world import World, open_world

log = logging.getLogger("rung")


@dataclass(frozen=True)
class Job:
    """Everything a process needs to know to take part in a run. It is sent to the processes as it is."""

    task_path: str
    strategy: str
    config: RunConfig
    arguments: Mapping[str, Any] = field(default_factory=dict)
    run_dir: str | None = None
    resume: bool = False  # go on from the newest checkpoint of the run directory, if there is one
    restarted: bool = False  # by the launcher, which has said so
    plain_sgd: bool = False  # `verify` replaces the task's optimizer

    def load(self) -> Task:
        task = load_task(self.task_path).bind(self.arguments)
        return replace(task, optimizer=_sgd, schedule=None) if self.plain_sgd else task


def worker(job: Job, status: StatusWriter | None = None) -> Summary:
    """World, runtime and loop for one process of a job."""
    status = status or StatusWriter()
    config = job.config
    status.phase("starting")
    task = job.load()
    layout = parse(job.strategy, environment_size(), environment_local_size(), config.schedule, config.servers)
    # The launcher sees a hang first, and knows more of it than a rank that waits in a collective.
    patience = 2 * config.timeout + 30
    with open_world(
        layout, device=config.device, backend=config.backend, timeout_seconds=patience, rpc_host=config.rpc_host
    ) as world:
        status.phase("building")
        if layout.kind == "ps-async" and not world.is_server:
            return work_for_servers(task, world, config, status)
        folder = Path(job.run_dir) if job.run_dir is not None else None
        sites = Sites(world, folder) if folder is not None else None
        checkpoint = None
        if folder is not None and sites is not None:
            checkpoint = find_state(folder, sites, resume=job.resume)
        start = position_of(checkpoint, parse_best(config.keep_best))
        if world.is_main:
            check_best(task, config)
        batches = make_batches(task, config, world, start_step=start.step)
        if checkpoint is not None and checkpoint.manifest.get("num_samples") != batches.num_samples:
            raise CheckpointError(
                f"the training data had {checkpoint.manifest.get('num_samples')} samples when the state was saved and "
                f"has {batches.num_samples} now: which of them this epoch has seen is not known any more."
            )
        runtime = build_runtime(
            task,
            world,
            config,
            total_steps=batches.total_steps,
            status=status,
            dataset=None if batches.is_stream else batches.dataset,
            seeded=checkpoint is None,
        )
        torch.manual_seed(dropout_seed(config.seed, world))
        if checkpoint is not None:
            restore(runtime, checkpoint, seed=config.seed)
        is_known = job.restarted and checkpoint is not None and is_same_topology(checkpoint.manifest, world)
        if world.is_main:
            if not is_known:
                describe(task, world, config, batches, runtime.facts)
            if job.resume:
                say_where_from(checkpoint, world)
        for note in runtime.notes if not is_known else []:
            log.info("  %s", note)
        told = len(runtime.notes)
        observers: list[Observer] = []
        keeper, profiler = None, None
        if folder is not None and sites is not None:
            settings = {
                "task": task.name,
                "config": asdict(config),
                "arguments": dict(job.arguments),
                "num_samples": batches.num_samples,
            }
            keeper = Keeper(folder, runtime, sites, config, settings, start, checkpoint, status.touch)
            if world.is_main:
                observers = [
                    JsonLines(folder / "metrics.jsonl", resume=job.resume),
                    TensorBoard(folder / "tensorboard", start.step),
                    LiveFile(live_path(folder)),
                ]
                names = tracker_names(config.log) if config.log is not None else ()
                observers += open_trackers(names, folder, settings, must_open=checkpoint is None)
            if config.profile is not None:
                profiler = Profiler(folder / "profile", profiled_steps(config.profile), world, status)
        make_evaluation = _evaluation(task, config, world)
        facts = {
            "task": task.name,
            "strategy": layout.name,
            "ranks": world.size,
            "device": world.device.type,
            "parameters": runtime.facts.num_trainable + runtime.facts.num_frozen,
            "buffers": runtime.facts.buffer_names,
            "length": {"steps": config.steps, "epochs": config.epochs},
        }

        def leave_result(step: int) -> None:
            """A run that ends well has left something behind: whole weights, or else the last checkpoint."""
            if folder is None or keeper is None:
                return
            if not config.save_weights:
                keeper.refuse_lost_end()
                return
            status.phase("saving")
            try:
                save_weights(runtime, folder / "model.safetensors", step=step)
            except CheckpointError as error:
                raise CheckpointError(f"{error} {keeper.way_out}") from None

        runtime.begin(start.step, batches)
        try:
            summary = run(
                runtime,
                batches,
                world=world,
                config=config,
                observers=observers,
                evaluation=make_evaluation,
                facts=facts,
                status=status,
                keeper=keeper,
                start=start,
                at_end=leave_result,
                profiler=profiler,
            )
        except Exception as error:
            _explain(error, runtime, world, config, keeper)
            raise
        for note in runtime.notes[told:] + [t.saving() for t in runtime.traffic().values() if t.plain_bytes]:
            log.info("  %s", note)
        status.phase("saving")
        for observer in observers:
            observer.close()
        if keeper is not None:
            keeper.close()
        runtime.dismiss(stopped=summary.stopped)
        world.barrier()
    status.phase("stopped" if summary.stopped else "finished")
    return summary


def work_for_servers(task: Task, world: World, config: RunConfig, status: StatusWriter) -> Summary:
    """A trainer of ps-async: it computes what it is asked to, and the run is the servers' affair."""
    from rung.runtime.async_trainer import AsyncTrainer

    batches = make_batches(task, config, world)
    runtime = build_runtime(task, world, config, total_steps=batches.total_steps, status=status)
    assert isinstance(runtime, AsyncTrainer)
    torch.manual_seed(dropout_seed(config.seed, world))
    word = runtime.work(batches, _evaluation(task, config, world))
    status.phase(word)
    return Summary(runtime.num_updates, None, None, stopped=word == "stopped")


def _evaluation(task: Task, config: RunConfig, world: World) -> Callable[[], Batches] | None:
    return (lambda: make_eval_batches(task, config, world)) if task.eval_data is not None else None


def _explain(error: Exception, runtime: Runtime, world: World, config: RunConfig, keeper: Keeper | None) -> None:
    """Leave with the error what the process around this needs: what filled the memory, and how to save the state."""
    lost: Any = error
    if is_out_of_memory(error):
        lost.rung_memory = memory_lines(runtime, world)
        if config.oom_retry and keeper is not None:
            lost.rung_smaller = half_micro_batch(config, world.layout)
    if keeper is not None and not isinstance(error, NonFiniteError):  # whose state is of no use to anyone
        lost.rung_rescue, lost.rung_protected = keeper.rescue, keeper.is_protected


def position_of(checkpoint: Checkpoint | None, goal: Goal | None = None) -> Position:
    """Where a run goes on. What was best by another goal than `goal` is not carried on."""
    if checkpoint is None:
        return Position(0, 0, 0, 0)
    told = checkpoint.manifest
    best = goal.owns(read_best(told)) if goal is not None else None
    return Position(told["step"], told["epoch"], told["samples"], told["sample"], told["evaluation_due"], best=best)


def check_best(task: Task, config: RunConfig) -> None:
    """Refuse a metric that the task does not have now, not after the first epoch."""
    goal = parse_best(config.keep_best)
    names = metric_names(task) if goal is not None and goal.metric != "loss" else None
    if goal is not None and names is not None:
        refuse_unknown_metric(goal, names)


def say_where_from(checkpoint: Checkpoint | None, world: World) -> None:
    if checkpoint is None:
        log.info("  there is no checkpoint yet: from the first step")
        return
    told = checkpoint.manifest
    other = "" if is_same_topology(told, world) else f", saved under {told['strategy']} on {told['ranks']} processes"
    log.info("  going on after step %d (%s%s)", checkpoint.step, checkpoint.path.name, other)


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
        reads=not world.is_server,
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
        reads=not world.is_server,
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
        f" ({world.backend})" if layout.is_distributed else "",
    )
    told = f"{trainable + frozen:,} parameters" + (f" ({frozen:,} frozen)" if frozen else "")
    log.info("  model: %s, %s", told, config.precision)
    per_rank = -(-cut.global_micro_batch // cut.num_ranks)
    samples = f"{batches.num_samples:,} samples" if batches.num_samples is not None else "an iterable data set"
    readers = f"{'data ' if layout.is_composed else ''}rank{'s' if cut.num_ranks > 1 else ''}"
    is_even = config.batch_size == cut.num_ranks * per_rank * cut.num_micro_batches
    log.info(
        "  data: %s; a step is %d%s %d %s x %s%d sample%s x %d micro-batch%s",
        samples, config.batch_size, " =" if is_even else ":", cut.num_ranks, readers, "" if is_even else "up to ",
        per_rank, "s"[: per_rank > 1],
        cut.num_micro_batches, "es" if cut.num_micro_batches > 1 else "",
    )  # fmt: skip


def _cut(config: RunConfig, world: World) -> Cut:
    return Cut(config.batch_size, world.layout.num_data_ranks, world.data_rank, micro_batch_size(config, world.layout))


def _sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
