"""The loop, and what one process does to take part in it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from rung.batches import Batches, Cut, Window
from rung.checkpoint import Checkpoint, Position, Sites, is_same_topology, restore, save_weights
from rung.config import RunConfig, micro_batch_size
from rung.keeper import Keeper, find_state
from rung.metrics import EvalRecord, JsonLines, Ledger, Observer, Sealed, StepRecord, TensorBoard
from rung.oom import is_out_of_memory, memory_lines
from rung.order import mix
from rung.pulse import Pulse
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
    resume: bool = False  # go on from the newest checkpoint of the run directory, if there is one
    plain_sgd: bool = False  # `verify` replaces the task's optimizer

    def load(self) -> Task:
        task = load_task(self.task_path).bind(self.arguments)
        return replace(task, optimizer=_sgd, schedule=None) if self.plain_sgd else task


@dataclass(frozen=True)
class Summary:
    steps: int
    last: StepRecord | None
    evaluation: EvalRecord | None
    stopped: bool = False  # asked to leave: state saved, not at the end


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
    keeper: Keeper | None = None,
    start: Position | None = None,
) -> Summary:
    """Train to the end of `batches`, or until asked to stop. The same for every strategy, and for a pretend world."""
    status = status or StatusWriter()
    loop = _Loop(runtime, batches, world, config, observers or [], evaluation, status, keeper, start)
    return loop.run({"total_steps": batches.total_steps, **(facts or {})})


class _Loop:
    """One run of `run`: what is known between two steps."""

    def __init__(
        self,
        runtime: Runtime,
        batches: Batches,
        world: World,
        config: RunConfig,
        observers: list[Observer],
        evaluation: Callable[[], Batches] | None,
        status: StatusWriter,
        keeper: Keeper | None,
        start: Position | None,
    ) -> None:
        self._runtime, self._batches, self._world, self._config = runtime, batches, world, config
        self._observers, self._evaluation, self._status, self._keeper = observers, evaluation, status, keeper
        self._start = start or Position(0, 0, 0, 0)
        self._position = self._start
        self._pulse = Pulse(world, status)
        self._ledger = Ledger(world, self._start.samples)
        self._sealed: Sealed | None = None
        self._last: StepRecord | None = None
        self._measured: EvalRecord | None = None

    def run(self, facts: dict[str, Any]) -> Summary:
        config, status, total = self._config, self._status, self._batches.total_steps
        for observer in self._observers:
            observer.on_start(facts, self._start.step)
        started = time.perf_counter()
        if self._is_stopped(self._pulse.check()) or (self._start.evaluation_due and not self._evaluate()):
            return self._stop()
        status.phase("reading data")
        for window in self._runtime.place(self._batches):
            step = window.step
            status.step(step)
            is_last = step == total
            # The first step is shown at once; after that, figures are read every so many steps.
            logs = step == self._start.step + 1 or is_last or step % config.log_every == 0
            if self._keeper is not None:
                self._keeper.before_step()
            self._ledger.add(window, self._runtime.step(window, want_norm=logs))
            self._position = self._after(window)
            if self._keeper is not None:
                self._keeper.after_step(self._position)
            evaluates = self._evaluation is not None and _is_due(config.eval_every, step, window.ends_epoch, is_last)
            self._tell()  # of the step before: the device has this one to work on meanwhile
            if logs or evaluates:
                status.phase("logging")
                self._sealed = self._ledger.seal()
                if evaluates or self._world.device.type == "cpu":
                    self._tell()
            if evaluates and not self._evaluate():
                return self._stop()
            self._save_if_due()
            if self._is_stopped(self._pulse.beat(step, self._runtime.phase_seconds())) and not is_last:
                return self._stop()
            for line in self._pulse.slow_lines():
                log.warning(line)
            status.phase("reading data")
        self._tell()
        self._sealed = self._ledger.seal()
        self._tell()
        wanted = self._evaluation is not None and config.eval_every != "never"
        if wanted and (self._measured is None or self._measured.step != self._position.step) and not self._evaluate():
            return self._stop()
        self._finish_saving()
        state = self._world.gather([float(count) for count in self._runtime.state_bytes().values()])
        kept = [dict(zip(self._runtime.state_bytes(), map(int, row), strict=True)) for row in state]
        for observer in self._observers:
            observer.on_end(
                {"steps": self._position.step, "seconds": time.perf_counter() - started, "state_bytes": kept}
            )
        return Summary(self._position.step, self._last, self._measured)

    def _tell(self) -> None:
        records = self._ledger.records(self._sealed) if self._sealed is not None else []
        self._sealed = None
        for observer in self._observers:
            if records:
                observer.on_steps(records)
        self._last = records[-1] if records else self._last

    def _after(self, window: Window) -> Position:
        before, count = self._position, window.num_global_samples
        same_epoch = window.epoch == before.epoch
        if window.ends_epoch:
            return Position(window.step, window.epoch + 1, before.samples + count, 0)
        return Position(window.step, window.epoch, before.samples + count, (before.sample if same_epoch else 0) + count)

    # -- evaluation ---------------------------------------------------------------------------------------------

    def _evaluate(self) -> bool:
        """Evaluate after the present step. False if asked to stop meanwhile: it is then still to be done."""
        assert self._evaluation is not None
        self._status.phase("evaluating")
        position = self._position
        epoch = position.epoch - 1 if position.sample == 0 and position.epoch > 0 else position.epoch
        started = time.perf_counter()
        try:
            metrics = self._runtime.evaluate(self._interruptible(self._evaluation()))
        except _AskedToStop:
            self._position = replace(position, evaluation_due=True)
            return False
        self._position = replace(position, evaluation_due=False)
        self._measured = EvalRecord(position.step, epoch, metrics, time.perf_counter() - started)
        for observer in self._observers:
            observer.on_evaluation(self._measured)
        self._ledger.skip()
        return True

    def _interruptible(self, windows: Batches) -> Iterator[Window]:
        for window in windows:
            if self._is_stopped(self._pulse.check()):
                raise _AskedToStop
            yield window

    # -- saving -------------------------------------------------------------------------------------------------

    def _is_stopped(self, asked: bool) -> bool:
        return asked and self._keeper is not None

    def _save_if_due(self) -> None:
        if self._keeper is None:
            return
        if self._keeper.is_due(self._position):
            self._status.phase("saving")
            self._keeper.save(self._position)
            self._ledger.skip()
        self._tell_of_saves()

    def _tell_of_saves(self) -> None:
        assert self._keeper is not None
        for record in self._keeper.finished():
            if record.error is not None and self._world.is_main:
                log.warning("%s Training goes on.", record.error)
            for observer in self._observers:
                observer.on_checkpoint(record)

    def _finish_saving(self) -> None:
        if self._keeper is None:
            return
        self._status.phase("saving")
        self._keeper.finish(self._position)
        self._tell_of_saves()

    def _stop(self) -> Summary:
        """Asked to leave: the state goes to the disk first."""
        assert self._keeper is not None
        self._status.phase("saving")
        self._tell()
        self._sealed = self._ledger.seal()
        self._tell()
        self._keeper.stop(self._position)
        self._tell_of_saves()
        return Summary(self._position.step, self._last, self._measured, stopped=True)


class _AskedToStop(Exception):
    """In the middle of an evaluation."""


def worker(job: Job, status: StatusWriter | None = None) -> Summary:
    """World, runtime and loop for one process of a job."""
    status = status or StatusWriter()
    config = job.config
    status.phase("starting")
    task = job.load()
    layout = parse(job.strategy, environment_size(), environment_local_size(), config.schedule)
    # The launcher sees a hang first, and knows more of it than a rank that waits in a collective.
    patience = 2 * config.timeout + 30
    with open_world(layout, device=config.device, backend=config.backend, timeout_seconds=patience) as world:
        status.phase("building")
        folder = Path(job.run_dir) if job.run_dir is not None else None
        sites = Sites(world, folder) if folder is not None else None
        checkpoint = None
        if folder is not None and sites is not None:
            checkpoint = find_state(folder, sites, resume=job.resume)
        start = position_of(checkpoint)
        batches = make_batches(task, config, world, start_step=start.step)
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
        if world.is_main:
            describe(task, world, config, batches, runtime.facts)
            if job.resume:
                say_where_from(checkpoint, world)
        for note in runtime.notes:
            log.info("  %s", note)
        told = len(runtime.notes)
        observers: list[Observer] = []
        keeper = None
        if folder is not None and sites is not None:
            settings = {"task": task.name, "config": asdict(config), "arguments": dict(job.arguments)}
            keeper = Keeper(folder, runtime, sites, config, settings, start)
            if world.is_main:
                observers = [
                    JsonLines(folder / "metrics.jsonl", resume=job.resume),
                    TensorBoard(folder / "tensorboard", start.step),
                ]
        make_evaluation = (lambda: make_eval_batches(task, config, world)) if task.eval_data is not None else None
        facts = {
            "task": task.name,
            "strategy": layout.name,
            "ranks": world.size,
            "device": world.device.type,
            "parameters": runtime.facts.num_trainable + runtime.facts.num_frozen,
            "buffers": runtime.facts.buffer_names,
        }
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
            )
        except Exception as error:
            _explain(error, runtime, world, keeper)
            raise
        for note in runtime.notes[told:]:
            log.info("  %s", note)
        status.phase("saving")
        for observer in observers:
            observer.close()
        if folder is not None and config.save_weights and not summary.stopped:
            save_weights(runtime, folder / "model.safetensors", step=summary.steps)
        if keeper is not None:
            keeper.close()
        world.barrier()
    status.phase("stopped" if summary.stopped else "finished")
    return summary


def _explain(error: Exception, runtime: Runtime, world: World, keeper: Keeper | None) -> None:
    """Leave with the error what the process around this needs: what filled the memory, and how to save the state."""
    lost: Any = error
    if is_out_of_memory(error):
        lost.rung_memory = memory_lines(runtime, world)
    if keeper is not None and keeper.rescues(is_oom=is_out_of_memory(error)):
        lost.rung_rescue = keeper.rescue


def position_of(checkpoint: Checkpoint | None) -> Position:
    """Where a run goes on."""
    if checkpoint is None:
        return Position(0, 0, 0, 0)
    told = checkpoint.manifest
    return Position(told["step"], told["epoch"], told["samples"], told["sample"], told["evaluation_due"])


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


def _is_due(every: str, step: int, ends_epoch: bool, is_last: bool) -> bool:
    if every == "never":
        return False
    return is_last or (ends_epoch if every == "epoch" else step % int(every) == 0)


def _sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
