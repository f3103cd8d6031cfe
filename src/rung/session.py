"""For people with a loop of their own: one call, `session.step(batch)`, under any strategy.

    with rung.open_session(task, strategy="fsdp") as session:
        for batch in my_batches():
            stats = session.step(batch)

Start the script with torchrun or mpirun for several processes. Every rank passes the same global batch; Rung takes the
rank's own rows of it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rung.agreement import micro_batch_size
from rung.batches import Batches
from rung.checkpoint import Position, Saver, Sites, choose, restore, save_weights
from rung.config import resolve
from rung.environment import environment_local_size, environment_size
from rung.errors import DataError, StrategyError
from rung.nested import map_tensors, tensors_in
from rung.runtime import build_runtime
from rung.strategy import default_name, parse
from rung.task import Task, load_task
from rung.train import dropout_seed, make_batches, make_eval_batches
from rung.windows import Cut, MicroBatch, Window
from rung.world import open_world


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
    """A task spread over the processes of this job. Made by `open_session`; use it as a context manager.

    `session.task` is the task with its arguments fixed, `session.config` holds the settings, `session.num_steps` the
    steps done so far. `session.world` says where this process stands: `world.rank`, `world.size`, `world.device`, and
    `world.is_main` for what only one of them should do, such as printing. Every method is called by all ranks.
    """

    def __init__(self, task: Task, strategy: str | None, total_steps: int | None, settings: Mapping[str, Any]) -> None:
        arguments = {key: value for key, value in settings.items() if "." in key}
        flags = {key: value for key, value in settings.items() if "." not in key}
        self.config = resolve(task, flags=flags, assignments=arguments).config
        self.task = task.bind(arguments)
        name = strategy or self.config.strategy or default_name(environment_size())
        layout = parse(name, environment_size(), environment_local_size(), self.config.schedule, self.config.servers)
        if layout.kind == "ps-async":
            raise StrategyError("ps-async has no steps that all processes take together. Use `rung train`, or ps.")
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
        self.runtime = build_runtime(self.task, self.world, self.config, total_steps=steps)
        torch.manual_seed(dropout_seed(self.config.seed, self.world))
        self.num_steps = 0
        self._num_samples = 0
        self._last: StepStats | None = None
        self._saver: Saver | None = None
        self._saver_folder: Path | None = None

    @property
    def model(self) -> torch.nn.Module:
        """The module as it is spread: under sharding its parameters are DTensors with the shapes of the whole."""
        return self.runtime.model

    def batches(self) -> Batches:
        """The task's own training data, cut for this rank, from the step after the last one done on.

        Iterating gives windows, one for each step, over all epochs that the settings ask for. A window holds only what
        this rank needs; give it to `step`.
        """
        return make_batches(self.task, self.config, self.world, start_step=self.num_steps)

    def step(self, batch: Any) -> StepStats:
        """One optimizer step on a global batch (the same on every rank), or on a window of `batches()`.

        The batch has the form that the task's model and loss take: a pair, a dict, or what its `forward` knows. Tensors
        are moved to the device. Gradients are accumulated over micro-batches, clipped and applied, and the schedule
        is advanced.
        """
        window = batch if isinstance(batch, Window) else self._window(batch)
        self.num_steps += 1
        self._num_samples += window.num_global_samples
        (placed,) = self.runtime.place([window])
        result = self.runtime.step(placed, want_norm=True)
        loss = result.loss_share.clone()
        if self.world.size > 1:
            # Every rank reduces in every step: a figure that is fetched on demand would hang when one rank asks.
            dist.all_reduce(loss)
        self._last = StepStats(self.num_steps, loss, result.grad_norm, result.learning_rate, placed.num_global_samples)
        return self._last

    def evaluate(self) -> dict[str, float]:
        """Loss and metrics over the task's evaluation data, each sample once: `{"loss": ..., "accuracy": ...}`."""
        return self.runtime.evaluate(make_eval_batches(self.task, self.config, self.world))

    def save(self, path: str | Path) -> None:
        """Write the whole weights under the module's own names. All ranks call it."""
        save_weights(self.runtime, Path(path), step=self.num_steps)

    def save_checkpoint(self, folder: str | Path) -> None:
        """Write the whole state after the last step into `folder`, under any strategy for any other. All ranks call it.

        Returns when it is on the disk. Older checkpoints in the folder are kept as the settings `keep` and `keep_every`
        say, and the newest after a step whose loss was finite.
        """
        if self._saver is None or self._saver_folder != Path(folder):
            config = self.config
            self._saver_folder = Path(folder)
            self._saver_folder.mkdir(parents=True, exist_ok=True)
            self._saver = Saver(self._saver_folder, self.runtime, keep=config.keep, keep_every=config.keep_every)
        position = Position(self.num_steps, 0, self._num_samples, self._num_samples, finite=self._is_finite())
        self._saver.save(position, wait=True)

    def _is_finite(self) -> bool | None:
        """Whether the state is: by the figures of the last step. fp16 leaves out a step whose gradients overflow."""
        if self._last is None:
            return None
        seen = [self._last.loss, None if self.config.precision == "fp16" else self._last.grad_norm]
        return all(bool(figure.isfinite().all()) for figure in seen if figure is not None)

    def load_checkpoint(self, folder: str | Path) -> int:
        """Go on from the newest whole checkpoint in `folder`: the number of steps done then, or 0 if there is none."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        found = choose({"checkpoints": Path(folder)}, self.world, Sites(self.world, Path(folder)))
        if found is None:
            return 0
        restore(self.runtime, found, seed=self.config.seed)
        self.num_steps, self._num_samples = found.step, int(found.manifest["samples"])
        return self.num_steps

    def close(self) -> None:
        """Leave the process group. The end of a `with` block does it."""
        self._stack.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._stack.__exit__(kind, error, trace)

    def _window(self, batch: Any) -> Window:
        num_rows = _num_rows(batch)
        layout = self.world.layout
        micro = micro_batch_size(replace(self.config, batch_size=num_rows), layout)
        cut = Cut(num_rows, layout.num_data_ranks, self.world.data_rank, micro)
        pieces = []
        base = 0
        for size in cut.micro_sizes(num_rows):
            start, stop = cut.piece(size)
            rows = slice(base + start, base + stop) if start < stop else slice(base, base + 1)
            pieces.append(MicroBatch(map_tensors(batch, operator.itemgetter(rows)), stop - start, size))
            base += size
        return Window(self.num_steps + 1, 0, pieces, ends_epoch=False)


def open_session(
    task: Task | str | Path, *, strategy: str | None = None, total_steps: int | None = None, **settings: Any
) -> Session:
    """Spread a task over the processes of this job, which torchrun or mpirun has started; alone, it is one process.

    `task` is a `rung.Task` or the path of a task file, `strategy` a name as `--strategy` takes it. Settings are those
    of `rung train`, as keywords: `precision="bf16"`, `clip=1.0`. `batch_size` is that of `batches()`; a batch that is
    passed to `step` has its own. Arguments of the task's functions are `**{"model.depth": 8}`. `total_steps` is the
    number that the task's `schedule` is told. Raises a `rung.RungError` for what cannot be, on every rank.
    """
    loaded = task if isinstance(task, Task) else load_task(task)
    return Session(loaded, strategy, total_steps, settings)


def _num_rows(batch: Any) -> int:
    sizes = {int(tensor.shape[0]) for tensor in tensors_in(batch) if tensor.dim() > 0}
    if len(sizes) != 1:
        raise DataError(f"the tensors of a batch must have one length in their first dimension; found {sorted(sizes)}.")
    return sizes.pop()
