"""The job with Rung: its own loop, `rung.train.worker.run`, as `rung train` calls it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean
from typing import Any

from benchmarks.cases import Case
from benchmarks.contenders.common import LOG_EVERY, Contender, Stopwatch
from rung.checkpoint import SaveRecord
from rung.data.batch_shard import LocalBatch
from rung.distributed.live_status import JobSnapshot
from rung.distributed.world import World
from rung.runtime import build_runtime
from rung.spec.config import resolve
from rung.train.loop import Outputs, run
from rung.train.records import EvalRecord, StepRecord
from rung.train.worker import make_batches


class WithRung:
    def __init__(self, case: Case, world: World) -> None:
        self._task, self._world = case.load_task(), world
        settings = {
            "batch_size": case.batch_size,
            "seed": case.seed,
            "device": case.device,
            "precision": case.precision,
            "clip": case.clip,
            "compile": case.compile,
            "memory_format": case.memory_format,
            "batch_norm": case.batch_norm,
            "workers": case.workers,
            "log_every": LOG_EVERY,
        }
        self._config = resolve(self._task, flags=settings).config
        self._runtime = build_runtime(self._task, world, self._config)
        self._num_steps = 0  # taken so far
        # One loader for all blocks, as the others have: its processes read ahead while another contender has its turn.
        endless = replace(self._config, steps=None, epochs=None)
        self._windows = iter(make_batches(self._task, endless, world))

    def run(self, num_steps: int, stopwatch: Stopwatch) -> float:
        first, self._num_steps = self._num_steps, self._num_steps + num_steps
        config = replace(self._config, steps=self._num_steps, epochs=None)
        observer = _Marker(stopwatch, first)
        part: Any = _Part(self._windows, num_steps, self._num_steps, stopwatch)
        run(self._runtime, part, world=self._world, config=config, outputs=Outputs([observer]))
        return fmean(observer.losses)


class _Part:
    """The next windows of batches that have no end."""

    is_stream = False

    def __init__(self, windows: Iterator[LocalBatch], num_steps: int, total_steps: int, stopwatch: Stopwatch) -> None:
        self._windows, self._num_steps, self.total_steps = windows, num_steps, total_steps
        self._stopwatch = stopwatch

    def __iter__(self) -> Iterator[LocalBatch]:
        yield from itertools.islice(self._windows, LOG_EVERY)
        # Figures of quick steps are read less often than the others read their losses.
        self._stopwatch.mark(LOG_EVERY)
        yield from itertools.islice(self._windows, self._num_steps - LOG_EVERY)


class _Marker:
    """Told of the steps when their figures have been read from the device: the end of the last of them."""

    def __init__(self, stopwatch: Stopwatch, first_step: int) -> None:
        self._stopwatch, self._first_step = stopwatch, first_step
        self.losses: list[float] = []

    def on_steps(self, records: list[StepRecord]) -> None:
        self.losses += [one.loss for one in records if (one.step - self._first_step) % LOG_EVERY == 0]
        self._stopwatch.mark(records[-1].step - self._first_step, wait=False)

    def on_start(self, facts: dict[str, Any], step: int) -> None: ...

    def on_evaluation(self, record: EvalRecord) -> None: ...

    def on_checkpoint(self, record: SaveRecord) -> None: ...

    def on_ranks(self, live: JobSnapshot) -> None: ...

    def on_end(self, facts: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


def build(case: Case, world: World, *, tuned: bool = False) -> Contender:
    return WithRung(case, world)
