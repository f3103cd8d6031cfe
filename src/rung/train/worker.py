"""One rank of a run: open the world, build the runtime, restore the checkpoint, run the loop."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping, Sized
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rung.checkpoint import Checkpoint, Position, StorageTopology, is_same_topology, restore, save_weights
from rung.checkpoint.stored import StoredCheckpoints
from rung.checkpoint.stream_place import place_of
from rung.checkpoint.survey import AVERAGE_WEIGHTS
from rung.data.batch_shard import BatchPartition
from rung.data.batches import Batches
from rung.data.permutation import mix
from rung.data.shard_windows import StreamPlace
from rung.data.token_batches import TokenBatches
from rung.data.worker_choice import WorkerChoice
from rung.distributed.live_status import snapshot_path
from rung.distributed.status_board import StatusWriter
from rung.distributed.world import World, open_world
from rung.errors import CheckpointError, DataError, NonFiniteError, ReplicaError, ResumeError
from rung.runtime import Runtime, build_runtime
from rung.runtime.base import AVERAGE, ModelFacts
from rung.runtime.measure import metric_names
from rung.spec.abilities import describe_layout, works_at_own_pace
from rung.spec.best_metric import Goal, parse_best, read_best, refuse_unknown_metric
from rung.spec.compatibility import batch_units, half_micro_batch, micro_batch_size
from rung.spec.config import RunConfig
from rung.spec.observability import profiled_steps, tracker_names
from rung.spec.strategy import Layout, parse
from rung.spec.task import Task
from rung.system.launcher_env import environment_local_size, environment_size
from rung.system.processes import num_cores
from rung.system.store import Store
from rung.train.checkpointing import Checkpointing, find_state, is_protected
from rung.train.first_step import check_first_step
from rung.train.job import RankJob
from rung.train.loop import Outputs, Persistence, run
from rung.train.lost_figures import lost_records
from rung.train.metrics import JsonLines, LiveFile, Observer, TensorBoard
from rung.train.oom import is_out_of_memory, memory_lines
from rung.train.profiler import Profiler
from rung.train.records import StepRecord, Summary
from rung.train.resume_check import ResumeCheck
from rung.train.same_windows import bad_samples_of, count_exchange
from rung.train.sample_order import order_of, refuse_other_data, token_batches_of
from rung.train.trackers import open_trackers

log = logging.getLogger("rung")


@dataclass
class FailureContext:
    """Filled by `worker` when the loop raises, for the process around it to report the failure and save the state."""

    memory: list[str] = field(default_factory=list)  # after out-of-memory: the contents of the memory
    smaller: int | None = None  # after out-of-memory: the micro-batch size to retry with
    rescue: Callable[[], bool] | None = None  # saves the state as it was before the failing step
    is_protected: bool = False  # save that state after any kind of error


def worker(job: RankJob, status: StatusWriter | None = None, failure: FailureContext | None = None) -> Summary:
    """Run one rank of a job to its end."""
    status = status or StatusWriter()
    config = job.config
    status.phase("starting")
    task = job.load()
    layout = parse(job.strategy, environment_size(), environment_local_size(), config.schedule, config.servers)
    # Longer than the launcher's timeout: it detects a hang first, and reports more than a rank inside a collective can.
    patience = 2 * config.timeout + 30
    with open_world(
        layout, device=config.device, backend=config.backend, timeout_seconds=patience, rpc_host=config.rpc_host
    ) as world:
        status.phase("building")
        if works_at_own_pace(layout, world.rank):
            return work_for_servers(task, world, config, status)
        summary = _train(job, task, world, status, failure or FailureContext())
        world.barrier()
    status.phase("stopped" if summary.stopped else "finished")
    return summary


def _train(job: RankJob, task: Task, world: World, status: StatusWriter, failure: FailureContext) -> Summary:
    config, folder = job.config, _open_folder(job, world, status)
    checkpoint = folder.checkpoint if folder is not None else None
    start = position_of(checkpoint, parse_best(config.keep_best))
    if world.is_main:
        check_best(task, config)
    batches = make_batches(
        task, config, world, start_step=start.step, start_place=place_of(checkpoint), skipped=start.skipped
    )
    refuse_other_data(checkpoint, batches)
    runtime = build_runtime(
        task,
        world,
        config,
        total_steps=batches.total_steps,
        status=status,
        dataset=None if batches.is_stream else batches.dataset,
        seeded=checkpoint is None,
    )
    evaluation = _evaluation(task, config, world)
    if config.batch_tokens is not None and evaluation is not None and config.eval_every != "never":
        evaluation()  # sample_lengths() may not know the evaluation data, which should not show after an epoch
    torch.manual_seed(dropout_seed(config.seed, world))
    if checkpoint is not None:
        restore(runtime, checkpoint, seed=config.seed)
    num_notes = _announce(job, task, world, batches, runtime, checkpoint)
    facts = {**run_facts(task, world, runtime.facts), "length": {"steps": config.steps, "epochs": config.epochs}}
    outputs, persistence = Outputs(facts=facts, status=status), Persistence(start)
    if folder is not None:
        settings = {
            "task": task.name,
            "config": asdict(config),
            "arguments": dict(job.arguments),
            "num_samples": batches.num_samples,
            "order": batches.order_digest,
        }
        checkpointing = Checkpointing(
            folder.path, runtime, folder.sites, config, settings, start, checkpoint, status.touch, folder.stored
        )
        at_end = partial(_save_result, folder.path, runtime, checkpointing, config, status)
        resumed = None
        if config.check:
            metrics = folder.path / "metrics.jsonl"
            resumed = ResumeCheck.after(metrics, checkpoint, world, config, restarted=job.restarted)
        lost: list[StepRecord] = []
        if checkpoint is not None and world.is_main:
            lost = lost_records(checkpoint.manifest, folder.path / "metrics.jsonl")
        persistence = Persistence(start, checkpointing, at_end, resumed, lost)
        outputs = _open_outputs(outputs, folder, job, world, start, settings)
    runtime.begin(start.step, batches)
    try:
        if checkpoint is None or not is_same_topology(checkpoint.manifest, world):
            check_first_step(runtime, task, config, batches)
        summary = run(
            runtime,
            batches,
            world=world,
            config=config,
            evaluation=evaluation,
            outputs=outputs,
            persistence=persistence,
            task=task,
        )
    except Exception as error:
        fill = partial(_fill_failure, failure, error, runtime, world, config, persistence.checkpointing)
        try:
            fill()
        except MemoryError:  # the failing frames still hold what filled the memory
            traceback.clear_frames(error.__traceback__)
            fill()
        raise
    # Of all ranks: those that notice something need not be the main one, which under ps is a server.
    found = world.gather_objects(runtime.notes[num_notes:])
    for note in dict.fromkeys(note for notes in found for note in notes):
        log.info("  %s", note)
    for saving in [traffic.saving() for traffic in runtime.traffic().values() if traffic.plain_bytes]:
        log.info("  %s", saving)
    status.phase("saving")
    for observer in outputs.observers:
        observer.close()
    if persistence.checkpointing is not None:
        persistence.checkpointing.close()
    runtime.close(stopped=summary.stopped)
    return summary


@dataclass(frozen=True)
class _RunFolder:
    """A run's directory, the disks it lies on, and the checkpoint to resume from."""

    path: Path
    sites: StorageTopology
    checkpoint: Checkpoint | None
    stored: StoredCheckpoints | None


def _open_folder(job: RankJob, world: World, status: StatusWriter) -> _RunFolder | None:
    if job.run_dir is None:
        return None
    path, stored = Path(job.run_dir), None
    sites = StorageTopology(world, path)
    if job.store is not None:
        stored = StoredCheckpoints(Store(job.store, patience=job.config.store_timeout, touch=status.touch))
    found = find_state(path, sites, resume=job.resume, stored=stored, restarted=job.restarted)
    return _RunFolder(path, sites, found, stored)


def _announce(
    job: RankJob, task: Task, world: World, batches: Batches, runtime: Runtime, checkpoint: Checkpoint | None
) -> int:
    """Log a summary of the run, unless the launcher restarted the same world. Returns the number of notes so far."""
    is_known = job.restarted and checkpoint is not None and is_same_topology(checkpoint.manifest, world)
    if world.is_main:
        if not is_known:
            describe(task, world, job.config, batches, runtime.facts)
        if job.resume:
            _log_resume(checkpoint, world)
    for note in runtime.notes if not is_known else []:
        log.info("  %s", note)
    return len(runtime.notes)


def _open_outputs(
    outputs: Outputs, folder: _RunFolder, job: RankJob, world: World, start: Position, settings: Mapping[str, Any]
) -> Outputs:
    """Open the main rank's files and trackers, and each rank's profiler."""
    config, profiler = job.config, None
    observers: list[Observer] = []
    if world.is_main:
        observers = [
            JsonLines(folder.path / "metrics.jsonl", resume=job.resume),
            TensorBoard(folder.path / "tensorboard", start.step),
            LiveFile(snapshot_path(folder.path)),
        ]
        names = tracker_names(config.log) if config.log is not None else ()
        observers += open_trackers(names, folder.path, settings, must_open=folder.checkpoint is None)
    if config.profile is not None:
        profiler = Profiler(folder.path / "profile", profiled_steps(config.profile), world, outputs.status)
    return replace(outputs, observers=observers, profiler=profiler)


def run_facts(task: Task, world: World, model: ModelFacts) -> dict[str, Any]:
    """The facts that observers get at the start of a run."""
    return {
        "task": task.name,
        "strategy": world.layout.name,
        "ranks": world.size,
        "device": world.device.type,
        "parameters": model.num_trainable + model.num_frozen,
        "buffers": model.buffer_names,
    }


def _save_result(
    folder: Path, runtime: Runtime, checkpointing: Checkpointing, config: RunConfig, status: StatusWriter, step: int
) -> None:
    """At the end of a run: save the full weights, or make sure that the last checkpoint was written."""
    if not config.save_weights:
        checkpointing.refuse_lost_end()  # without weights, the last checkpoint is the only result
        return
    status.phase("saving")
    try:
        save_weights(runtime, folder / "model.safetensors", step=step)
        if runtime.averaged is not None and _has_average(runtime):
            with runtime.averaged():
                save_weights(runtime, folder / AVERAGE_WEIGHTS, step=step)
    except CheckpointError as error:
        raise CheckpointError(f"{error} {checkpointing.way_out}") from None
    if checkpointing.is_stored:  # a later machine has nothing but the store
        checkpointing.refuse_lost_end()


def _has_average(runtime: Runtime) -> bool:
    """Whether there is one by now. A rank of a pipeline may have nothing that is trained."""
    own = any(AVERAGE in state for state in runtime.optimizer.state.values())
    return any(runtime.world.gather_objects(own))


def work_for_servers(task: Task, world: World, config: RunConfig, status: StatusWriter) -> Summary:
    """A trainer of ps-async: it computes gradients for the servers, which own steps, checkpoints and records."""
    batches = make_batches(task, config, world)
    runtime = build_runtime(task, world, config, total_steps=batches.total_steps, status=status)
    assert runtime.work is not None
    torch.manual_seed(dropout_seed(config.seed, world))
    outcome = runtime.work(batches, _evaluation(task, config, world))
    status.phase(outcome)
    return Summary(runtime.updates.count, None, None, stopped=outcome == "stopped")


def _evaluation(task: Task, config: RunConfig, world: World) -> Callable[[], Batches] | None:
    return (lambda: make_eval_batches(task, config, world)) if task.eval_data is not None else None


def _fill_failure(
    failure: FailureContext,
    error: Exception,
    runtime: Runtime,
    world: World,
    config: RunConfig,
    checkpointing: Checkpointing | None,
) -> None:
    if is_out_of_memory(error):
        failure.memory = memory_lines(runtime, world)
        if config.oom_retry and checkpointing is not None:
            failure.smaller = half_micro_batch(config, world.layout)
    is_useless = isinstance(error, NonFiniteError | ReplicaError | ResumeError)
    if checkpointing is not None and not is_useless:
        failure.rescue, failure.is_protected = checkpointing.rescue, is_protected(config)


def position_of(checkpoint: Checkpoint | None, goal: Goal | None = None) -> Position:
    """The position of a checkpoint. Its best evaluation is kept only if it was measured by the same `goal`."""
    if checkpoint is None:
        return Position(0, 0, 0, 0)
    saved = checkpoint.manifest
    best = goal.owns(read_best(saved)) if goal is not None else None
    step, epoch, samples, sample = (int(saved[key]) for key in ("step", "epoch", "samples", "sample"))
    return Position(
        step, epoch, samples, sample, saved["evaluation_due"], best=best, skipped=tuple(saved.get("skipped", ()))
    )


def check_best(task: Task, config: RunConfig) -> None:
    """Refuse a metric that the task does not have, before the first epoch instead of after it."""
    goal = parse_best(config.keep_best)
    names = metric_names(task) if goal is not None and goal.metric != "loss" else None
    if goal is not None and names is not None:
        refuse_unknown_metric(goal, names)


def _log_resume(checkpoint: Checkpoint | None, world: World) -> None:
    if checkpoint is None:
        log.info("  there is no checkpoint yet: from the first step")
        return
    saved = checkpoint.manifest
    other = "" if is_same_topology(saved, world) else f", saved under {saved['strategy']} on {saved['ranks']} processes"
    log.info("  going on after step %d (%s%s)", checkpoint.step, checkpoint.path.name, other)


def dropout_seed(seed: int, world: World) -> int:
    """Differs between ranks, not between runs. Ranks of one tensor group share activations, so they share the seed."""
    return mix(seed, world.rank // (world.layout.tp * world.layout.cp), 1)


def make_batches(
    task: Task,
    config: RunConfig,
    world: World,
    *,
    start_step: int = 0,
    start_place: StreamPlace | None = None,
    skipped: tuple[str, ...] = (),
) -> Batches:
    """This rank's training windows. `start_place` is where a data set in shards is read on; without it, such a one is
    read again from its start. `skipped` are the samples that the run has left out before."""
    dataset = task.train_data()
    by_tokens = token_batches_of(task, config, dataset)
    is_shown = world.is_main and not world.is_dry_run
    batches = Batches(
        dataset,
        _partition(config, world, by_tokens),
        seed=config.seed,
        shuffle=config.shuffle,
        order=order_of(task, config, dataset),
        by_tokens=by_tokens,
        num_steps=config.steps,
        num_epochs=config.epochs,
        start_step=start_step,
        start_place=start_place,
        exchange=count_exchange(world),
        collate=task.collate,
        **_workers(config, log.info if world.is_main else None),
        pin_memory=world.trains_on_gpu,
        reads=not world.role.is_server,
        bad_samples=bad_samples_of(config, world, skipped, log.warning if is_shown else None),
    )
    if config.skip_bad_samples and task.loss_scope == "batch" and world.layout.num_data_ranks > 1:
        raise DataError(
            f'{task.name}: loss_scope = "batch" needs the same share of every micro-batch on all ranks, and a rank '
            "whose samples cannot be read has fewer. Leave --skip-bad-samples out, or use one rank."
        )
    if batches.num_shards is not None and task.loss_scope == "batch" and world.layout.num_data_ranks > 1:
        raise DataError(
            f'{task.name}: loss_scope = "batch" needs the same share of every micro-batch on all ranks, and at the end '
            "of an epoch in shards ranks have what their shards still give. Use a map-style data set, or one rank."
        )
    return batches


def _workers(config: RunConfig, log_line: Callable[[str, str], None] | None = None) -> dict[str, Any]:
    """The number of data-loading processes, or what chooses it."""
    if isinstance(config.workers, int):
        return {"num_workers": config.workers}
    # The rank itself needs a core.
    most = max(0, num_cores() // environment_local_size() - 1)
    return {"choice": WorkerChoice(most, lambda line: log_line("  %s", line) if log_line is not None else None)}


def make_eval_batches(task: Task, config: RunConfig, world: World) -> Batches:
    """This rank's share of the evaluation set: each sample once, in the data set's own order."""
    assert task.eval_data is not None
    dataset, by_tokens = task.eval_data(), None
    if isinstance(dataset, Sized) and hasattr(dataset, "__getitem__"):
        by_tokens = token_batches_of(task, config, dataset, is_evaluation=True)
    return Batches(
        dataset,
        _partition(config, world, by_tokens),
        seed=config.seed,
        shuffle=False,
        num_epochs=1,
        exchange=count_exchange(world),
        collate=task.eval_collate or task.collate,
        **_workers(config),
        pin_memory=world.trains_on_gpu,
        reads=not world.role.is_server,
        by_tokens=by_tokens,
    )


def describe(task: Task, world: World, config: RunConfig, batches: Batches, model: ModelFacts) -> None:
    """Log the task, strategy, model and batch in a few lines."""
    layout: Layout = world.layout
    trainable, frozen = model.num_trainable, model.num_frozen
    cut = batches.cut
    log.info(
        "%s, %s on %s%s",
        task.name,
        describe_layout(layout),
        world.device.type,
        f" ({world.backend})" if layout.is_distributed else "",
    )
    size = f"{trainable + frozen:,} parameters" + (f" ({frozen:,} frozen)" if frozen else "")
    log.info("  model: %s, %s", size, config.precision)
    per_rank = -(-cut.global_micro_batch // cut.num_ranks)
    samples = f"{batches.num_samples:,} samples" if batches.num_samples is not None else "an iterable data set"
    if batches.num_shards is not None:
        number, own = batches.num_shards
        samples += f" of {number:,} shard{'s' if number > 1 else ''}"
        samples += f", of which a rank reads {own:,}" if own < number else ""
    readers = f"{'data ' if layout.is_composed else ''}rank{'s' if cut.num_ranks > 1 else ''}"
    if config.batch_tokens is not None and batches.by_tokens is not None:
        sizes = batches.by_tokens.sizes
        log.info(
            "  data: %s in %s batches; a step is up to %s tokens: %d to %d samples, %d %s x up to %d micro-batch%s",
            samples, f"{len(sizes):,}", f"{config.batch_tokens:,}", sizes.min(), sizes.max(), cut.num_ranks, readers,
            cut.num_micro_batches, "es" if cut.num_micro_batches > 1 else "",
        )  # fmt: skip
        return
    is_even = config.batch_size == cut.num_ranks * per_rank * cut.num_micro_batches
    log.info(
        "  data: %s; a step is %d%s %d %s x %s%d sample%s x %d micro-batch%s",
        samples, config.batch_size, " =" if is_even else ":", cut.num_ranks, readers, "" if is_even else "up to ",
        per_rank, "s"[: per_rank > 1],
        cut.num_micro_batches, "es" if cut.num_micro_batches > 1 else "",
    )  # fmt: skip


def _partition(config: RunConfig, world: World, by_tokens: TokenBatches | None = None) -> BatchPartition:
    num_ranks, rank = world.layout.num_data_ranks, world.role.data_rank
    if by_tokens is None and config.batch_tokens is not None:  # evaluation data that are iterable
        config = replace(config, batch_tokens=None, micro_batch=None)
    micro = micro_batch_size(config, world.layout)
    if by_tokens is None:
        return BatchPartition(config.batch_size, num_ranks, rank, micro)
    parts = -(-batch_units(config) // (micro * num_ranks)) if micro is not None else None
    return BatchPartition(int(by_tokens.sizes.max()), num_ranks, rank, num_parts=parts)
