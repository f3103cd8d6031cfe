"""For user-written training loops: one call, `session.step(batch)`, under any strategy.

    with rung.open_session(task, strategy="fsdp") as session:
        for batch in my_batches():
            stats = session.step(batch)

Start the script with torchrun or mpirun for several processes. Every rank passes the same global batch; Rung selects
the rank's rows.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rung.checkpoint import Position, Saver, StorageTopology, choose, restore, save_weights
from rung.data.batch_shard import BatchPartition, LocalBatch, MicroBatch
from rung.data.batches import Batches
from rung.data.pytree import map_tensors, tensors_in
from rung.distributed.world import open_world
from rung.errors import DataError, StrategyError
from rung.runtime import build_runtime
from rung.spec.abilities import why_not
from rung.spec.compatibility import micro_batch_size
from rung.spec.config import resolve
from rung.spec.strategy import default_name, parse
from rung.spec.task import Task, load_task
from rung.system.launcher_env import environment_local_size, environment_size
from rung.train.worker import dropout_seed, make_batches, make_eval_batches

log = logging.getLogger("rung")


@dataclass(frozen=True)
class StepStats:
    """A finished step. The tensors are global and on the device; reading them (`float(stats.loss)`) synchronises."""

    step: int
    """The number of the step; the first is 1."""
    loss: Tensor
    """The mean over all samples of the global batch, or over the units that the task's `loss_weight` counts."""
    grad_norm: Tensor | None
    """The norm of the whole gradient before clipping; None where there is none to measure."""
    learning_rate: float
    """The learning rate of the first parameter group in this step."""
    num_samples: int
    """Samples of the global batch."""


class Session:
    """A task parallelized over the processes of this job. Made by `open_session`; use it as a context manager.

    `session.task` is the task with its arguments fixed, `session.config` holds the settings, `session.num_steps` the
    steps done so far. `session.world` describes this process: `world.rank`, `world.size`, `world.device`, and
    `world.is_main` for work that one rank does, such as printing. All ranks must call every method.
    """

    def __init__(self, task: Task, strategy: str | None, total_steps: int | None, settings: Mapping[str, Any]) -> None:
        arguments = {key: value for key, value in settings.items() if "." in key}
        flags = {key: value for key, value in settings.items() if "." not in key}
        self.config = resolve(task, flags=flags, assignments=arguments).config
        self.task = task.bind(arguments)
        name = strategy or self.config.strategy or default_name(environment_size())
        layout = parse(name, environment_size(), environment_local_size(), self.config.schedule, self.config.servers)
        reason = why_not(layout, "session")
        if reason is not None:
            raise StrategyError(reason)
        self._stack = ExitStack()
        self.world = self._stack.enter_context(
            open_world(
                layout,
                device=self.config.device,
                backend=self.config.backend,
                timeout_seconds=self.config.timeout,
                rpc_host=self.config.rpc_host,
            )
        )
        steps = total_steps if total_steps is not None else self.config.steps
        if self.world.is_main and (self.task.hooks() or self.task.logging_functions()):
            log.warning(
                "a session calls no hooks of the task, and what its functions log goes nowhere: the loop is yours."
            )
        self.runtime = build_runtime(self.task, self.world, self.config, total_steps=steps)
        torch.manual_seed(dropout_seed(self.config.seed, self.world))
        self.num_steps = 0
        self._num_samples = 0
        self._skipped: tuple[str, ...] = ()  # samples that were left out
        self._last: StepStats | None = None
        self._saver: Saver | None = None
        self._saver_folder: Path | None = None

    @property
    def model(self) -> torch.nn.Module:
        """The parallelized module. Sharded parameters are DTensors with their full shapes."""
        return self.runtime.model

    def batches(self) -> Batches:
        """The task's training data for this rank, starting after the last step done.

        Iterating gives one window per step, over all epochs of the settings. A window holds only this rank's samples;
        pass it to `step`.
        """
        return make_batches(self.task, self.config, self.world, start_step=self.num_steps, skipped=self._skipped)

    def step(self, batch: Any) -> StepStats:
        """One optimizer step on a global batch (the same on every rank), or on a window of `batches()`.

        The batch has the form that the task's model and loss take: a pair, a dict, or the input of its `forward`.
        Tensors are moved to the device. Gradients are accumulated over micro-batches, clipped and applied, and the
        schedule is advanced.
        """
        window = batch if isinstance(batch, LocalBatch) else self._window(batch)
        self.num_steps += 1
        self._num_samples += window.num_global_samples
        self._skipped = window.skipped or self._skipped
        (placed,) = self.runtime.place([window])
        result = self.runtime.step(placed, want_norm=True)
        loss = result.loss_share.clone()
        if self.world.size > 1:
            # In every step: a reduction on demand would hang if one rank alone reads the loss.
            dist.all_reduce(loss)
        self._last = StepStats(self.num_steps, loss, result.grad_norm, result.learning_rate, placed.num_global_samples)
        return self._last

    def evaluate(self) -> dict[str, float]:
        """Loss and metrics over the task's evaluation data, each sample once: `{"loss": ..., "accuracy": ...}`."""
        return self.runtime.evaluate(make_eval_batches(self.task, self.config, self.world))

    def save(self, path: str | Path) -> None:
        """Write the full weights under the module's own names. All ranks call it."""
        save_weights(self.runtime, Path(path), step=self.num_steps)

    def save_checkpoint(self, folder: str | Path) -> None:
        """Write the training state after the last step into `folder`. Any strategy can load it. All ranks call it.

        Returns when it is on the disk. The settings `keep` and `keep_every` decide which older checkpoints stay; the
        newest one with a finite loss always does.
        """
        if self._saver is None or self._saver_folder != Path(folder):
            config = self.config
            self._saver_folder = Path(folder)
            self._saver_folder.mkdir(parents=True, exist_ok=True)
            self._saver = Saver(self._saver_folder, self.runtime, keep=config.keep, keep_every=config.keep_every)
        position = Position(self.num_steps, 0, self._num_samples, self._num_samples, finite=self._is_finite())
        position = replace(position, skipped=self._skipped)
        self._saver.save(position, wait=True)

    def _is_finite(self) -> bool | None:
        """Whether loss and gradient norm of the last step were finite. In fp16 the scaler skips steps with overflow."""
        if self._last is None:
            return None
        figures = [self._last.loss, None if self.config.precision == "fp16" else self._last.grad_norm]
        return all(bool(figure.isfinite().all()) for figure in figures if figure is not None)

    def load_checkpoint(self, folder: str | Path) -> int:
        """Restore the newest whole checkpoint in `folder`. Returns its number of steps, or 0 if there is none."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        found = choose({"checkpoints": Path(folder)}, self.world, StorageTopology(self.world, Path(folder)))
        if found is None:
            return 0
        restore(self.runtime, found, seed=self.config.seed)
        self.num_steps, self._num_samples = found.step, int(found.manifest["samples"])
        self._skipped = tuple(found.manifest.get("skipped", ()))
        return self.num_steps

    def close(self) -> None:
        """Leave the process group; the end of a `with` block calls it."""
        self._stack.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._stack.__exit__(kind, error, trace)

    def _window(self, batch: Any) -> LocalBatch:
        if self.config.batch_tokens is not None:
            raise DataError(
                "batch_tokens is for the windows of batches(); a batch that is passed to step() has its own."
            )
        num_rows = _num_rows(batch)
        layout = self.world.layout
        micro = micro_batch_size(replace(self.config, batch_size=num_rows), layout)
        cut = BatchPartition(num_rows, layout.num_data_ranks, self.world.role.data_rank, micro)
        pieces = []
        base = 0
        for size in cut.micro_sizes(num_rows):
            start, stop = cut.piece(size)
            # A rank without rows takes one with weight 0: it must take part in the collectives.
            rows = slice(base + start, base + stop) if start < stop else slice(base, base + 1)
            pieces.append(MicroBatch(map_tensors(batch, operator.itemgetter(rows)), stop - start, size))
            base += size
        return LocalBatch(self.num_steps + 1, 0, pieces, ends_epoch=False)


def open_session(
    task: Task | str | Path, *, strategy: str | None = None, total_steps: int | None = None, **settings: Any
) -> Session:
    """Parallelize a task over the processes that torchrun or mpirun started, or run it in this one process.

    `task` is a `rung.Task` or the path of a task file, `strategy` a name as `--strategy` takes it. Settings are those
    of `rung train`, as keywords: `precision="bf16"`, `clip=1.0`. `batch_size` is that of `batches()`; a batch that is
    passed to `step` has its own. Arguments of the task's functions are `**{"model.depth": 8}`. `total_steps` is passed
    to the task's `schedule`. Every rank raises a `rung.RungError` for settings that cannot work.
    """
    loaded = task if isinstance(task, Task) else load_task(task)
    return Session(loaded, strategy, total_steps, settings)


def _num_rows(batch: Any) -> int:
    sizes = {int(tensor.shape[0]) for tensor in tensors_in(batch) if tensor.dim() > 0}
    if len(sizes) != 1:
        raise DataError(f"the tensors of a batch must have one length in their first dimension; found {sorted(sizes)}.")
    return sizes.pop()
