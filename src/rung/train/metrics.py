"""Records of a run, and the observers that write them: metrics.jsonl, TensorBoard, the file of `rung watch`.

Every step has a record, but figures are copied from the device only every few steps: `StepBuffer` holds those that are
still on the device and turns them into records together. The launcher draws the console from metrics.jsonl.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import resource
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from rung.checkpoint import SaveRecord
from rung.data.batch_shard import LocalBatch
from rung.distributed.collectives import start_gather
from rung.distributed.live_status import JobSnapshot, write_snapshot
from rung.distributed.world import World
from rung.runtime.base import LocalStep
from rung.system.disk import reason
from rung.system.units import human_size
from rung.train.records import EvalRecord, StepRecord

log = logging.getLogger("rung")

_RETRY_SECONDS = 10.0  # after TensorBoard's files could not be written
_BLOCK = 2**16  # bytes read at a time
_SHORT_STEP = 0.02  # seconds


class Observer(Protocol):
    def on_start(self, facts: dict[str, Any], step: int) -> None:
        """`step`: the last step of the checkpoint that the run resumes from; 0 for a new run."""

    def on_steps(self, records: list[StepRecord]) -> None: ...

    def on_evaluation(self, record: EvalRecord) -> None: ...

    def on_checkpoint(self, record: SaveRecord) -> None: ...

    def on_ranks(self, live: JobSnapshot) -> None:
        """The state of all ranks, about once a second."""

    def on_end(self, facts: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class PendingFetch:
    """Steps whose figures are on their way: from the device, and between the ranks."""

    steps: list[tuple[LocalBatch, LocalStep, Any, Any]]  # with the time marks of their start and end
    rows: Callable[[], list[list[float]]]  # of each rank: losses, waits for data, gradient norms, seconds, memory


class StepBuffer:
    """Steps whose figures are still on the device.

    `seal` starts the copy to the host and `records` waits for it. The caller launches the next step between the two, so
    that the device is not idle while figures are read and written, and no rank waits for a slower one. On the CPU this
    is so if steps are short; else a user would see the loss of a step when the next one has ended.
    """

    def __init__(self, world: World, samples: int = 0, *, is_patient: bool = True) -> None:
        """If not patient, steps on the CPU are reported at once, however short they are."""
        self._world, self._is_patient = world, is_patient
        self._clock = _StepClock(world)
        self._pending: list[tuple[LocalBatch, LocalStep, Any, Any]] = []
        self._samples = samples
        self._last_mark = self._clock.mark()
        self.reports_at_once = world.device.type == "cpu"  # the same on all ranks

    def add(self, window: LocalBatch, result: LocalStep) -> None:
        start, self._last_mark = self._last_mark, self._clock.mark()
        self._pending.append((window, result, start, self._last_mark))

    def skip(self) -> None:
        """Exclude the time since the last step (an evaluation) from the next step's time."""
        self._last_mark = self._clock.mark()

    def seal(self) -> PendingFetch:
        steps, self._pending = self._pending, []
        if not steps:
            return PendingFetch([], list)
        losses = self._world.tensors.fetch([result.loss_share for _, result, *_ in steps])
        norms = self._world.tensors.fetch([result.grad_norm for _, result, *_ in steps if result.grad_norm is not None])
        if self._world.device.type == "cpu":
            return PendingFetch(steps, start_gather(self._figures(steps, losses(), norms()), self._world.size))
        return PendingFetch(steps, lambda: self._world.gather(self._figures(steps, losses(), norms())))

    def _figures(self, steps: list[Any], losses: list[float], norms: list[float]) -> list[float]:
        waits = [window.wait_seconds for window, *_ in steps]
        seconds = self._clock.between(steps[0][2], steps[-1][3]) / len(steps)
        return [*losses, *waits, *norms, seconds, float(peak_memory_bytes(self._world))]

    def records(self, sealed: PendingFetch) -> list[StepRecord]:
        """The records of sealed steps. Collective: all ranks call it at the same steps."""
        count = len(sealed.steps)
        if not count:
            return []
        rows = sealed.rows()
        # Norms and seconds of the main rank: all ranks must decide alike whether to stop, and when to report.
        norms = iter(rows[0][2 * count : -2])
        if self._world.device.type == "cpu":
            self.reports_at_once = len(rows) == 1 or not self._is_patient or rows[0][-2] >= _SHORT_STEP
        records = []
        for index, (window, result, start, mark) in enumerate(sealed.steps):
            self._samples += window.num_global_samples
            seconds = self._clock.between(start, mark)
            slowest = max(range(len(rows)), key=lambda rank: rows[rank][count + index])
            records.append(
                StepRecord(
                    step=window.step,
                    epoch=window.epoch,
                    samples=self._samples,
                    loss=math.fsum(row[index] for row in rows),
                    grad_norm=next(norms) if result.grad_norm is not None else None,
                    lr=result.learning_rate,
                    step_seconds=seconds,
                    samples_per_second=window.num_global_samples / seconds if seconds > 0 else math.nan,
                    data_wait_seconds=rows[slowest][count + index],
                    slowest_reader=slowest,
                    peak_memory_bytes=int(max(row[-1] for row in rows)),
                    staleness=result.staleness,
                )
            )
        return records


class _StepClock:
    """Time marks: CUDA events on a GPU, so that timing a step does not synchronize."""

    def __init__(self, world: World) -> None:
        self._on_device = world.trains_on_gpu

    def mark(self) -> Any:
        if not self._on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between(self, start: Any, stop: Any) -> float:
        if not self._on_device:
            return float(stop - start)
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1000


def peak_memory_bytes(world: World) -> int:
    """Peak memory so far: allocated by torch on a GPU, resident set size of the process on the CPU."""
    if world.device.type == "cuda":
        return torch.cuda.max_memory_allocated(world.device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


class JsonLines:
    """metrics.jsonl: one object a line, for steps, evaluations and checkpoints.

    The file is append-only. A resumed run repeats the steps after its checkpoint, so the same step may appear again
    later in the file; readers keep the last one.
    """

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        if resume:
            _end_line(path)
        self._path = path
        self._file = path.open("ab" if resume else "wb", buffering=0)
        self._unwritten = b""  # bytes that a full disk refused; retried with the next record
        self._has_warned = False
        self._slow: set[tuple[int, str]] = set()

    def on_start(self, facts: dict[str, Any], step: int) -> None:
        event = {"event": "resume", "step": step} if step else {"event": "start"}
        self._put({**event, **facts})

    def on_checkpoint(self, record: SaveRecord) -> None:
        self._put({"event": "checkpoint", **asdict(record)})

    def on_ranks(self, live: JobSnapshot) -> None:
        """Add a line when a rank becomes slow. `LiveFile` has the state of every second."""
        before, self._slow = self._slow, {(slow.rank, slow.phase) for slow in live.slow}
        new = [asdict(slow) for slow in live.slow if (slow.rank, slow.phase) not in before]
        self._put(*({"event": "slow", "step": live.step, **slow} for slow in new))

    def on_end(self, facts: dict[str, Any]) -> None:
        self._put({"event": "end", **facts})

    def on_steps(self, records: list[StepRecord]) -> None:
        rows = map(asdict, records)
        self._put(*({k: v for k, v in row.items() if k != "staleness" or v is not None} for row in rows))

    def on_evaluation(self, record: EvalRecord) -> None:
        row = {"event": "eval", "step": record.step, "epoch": record.epoch, "seconds": record.seconds, **record.metrics}
        self._put(row)

    def close(self) -> None:
        self._put()
        if self._unwritten:
            log.warning("metrics.jsonl lacks the last %s of its records.", human_size(len(self._unwritten)))
        self._file.close()

    def _put(self, *rows: Mapping[str, Any]) -> None:
        self._unwritten += "".join(json.dumps(_finite(row)) + "\n" for row in rows).encode()
        try:
            if self._unwritten and os.fstat(self._file.fileno()).st_nlink == 0:
                # The file was deleted: writes to the open descriptor would succeed and be lost.
                reopened = self._path.open("ab", buffering=0)
                self._file.close()
                self._file = reopened
                log.warning("%s was removed; it begins again at this step.", self._path)
            while self._unwritten:
                written = self._file.write(self._unwritten) or 0
                self._unwritten = self._unwritten[written:]
            self._has_warned = False
        except OSError as error:
            if not self._has_warned:
                log.warning("metrics.jsonl cannot be written: %s. It is tried again.", reason(error))
            self._has_warned = True


def _end_line(path: Path) -> None:
    """Cut off the partial last line that a killed run may have left."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:  # backwards: the file of a long run has gigabytes
            start = max(0, end - _BLOCK)
            file.seek(start)
            last = file.read(end - start).rfind(b"\n")
            if last >= 0:
                file.truncate(start + last + 1)
                return
            end = start
        file.truncate(0)


class TensorBoard:
    """The same figures as TensorBoard events.

    `SummaryWriter` writes in a thread; an error there is raised by the next call, and the writer stays broken. Such an
    error does not end a run: it is logged once, and a new writer is opened every few seconds until one works.
    """

    def __init__(self, folder: Path, start_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to load, and tensorboard can be turned off

        self._make: Any = SummaryWriter
        self._folder = str(folder)
        # The first writer hides what an earlier run wrote after this step; a later one would hide this run's own.
        self._purge_step = start_step + 1 if start_step else None
        _silence_writer_threads()
        self._slow: set[tuple[int, str]] = set()
        self._writer: Any = None
        self._open_at = 0.0  # do not open a writer before this time

    def on_checkpoint(self, record: SaveRecord) -> None:
        self._scalars(checkpoint_figures(record), record.step)

    def on_start(self, facts: dict[str, Any], step: int) -> None:
        self._write(lambda writer: writer.add_text("run", ", ".join(f"{key}: {value}" for key, value in facts.items())))

    def on_end(self, facts: dict[str, Any]) -> None: ...

    def on_steps(self, records: list[StepRecord]) -> None:
        for record in records:
            self._scalars(training_figures(record), record.step)
        self._scalars(speed_figures(records[-1]), records[-1].step)

    def on_evaluation(self, record: EvalRecord) -> None:
        self._scalars({f"eval/{name}": value for name, value in record.metrics.items()}, record.step)

    def on_ranks(self, live: JobSnapshot) -> None:
        self._scalars(rank_figures(live), live.step)
        before, self._slow = self._slow, {(slow.rank, slow.phase) for slow in live.slow}
        new = [slow.text for slow in live.slow if (slow.rank, slow.phase) not in before]
        if new:
            self._write(lambda writer: [writer.add_text("slow ranks", text, live.step) for text in new])

    def close(self) -> None:
        if self._writer is not None:
            self._write(lambda writer: writer.close())

    def _scalars(self, figures: Mapping[str, float], step: int) -> None:
        def put(writer: Any) -> None:
            for name, value in figures.items():
                writer.add_scalar(name, value, step)

        self._write(put)

    def _write(self, act: Callable[[Any], object]) -> None:
        if self._writer is None and time.monotonic() < self._open_at:
            return
        try:
            if self._writer is None:
                self._writer = self._make(self._folder, flush_secs=10, purge_step=self._purge_step)
            act(self._writer)
            self._purge_step = None
        except Exception as error:
            is_first, self._open_at = self._open_at == 0.0, time.monotonic() + _RETRY_SECONDS
            broken, self._writer = self._writer, None
            with contextlib.suppress(Exception):  # close() flushes, which fails again
                if broken is not None:
                    broken.close()
            if is_first:
                why = reason(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
                log.warning("TensorBoard's files cannot be written: %s. metrics.jsonl has all figures.", why)


def _silence_writer_threads() -> None:
    """Do not print tracebacks of TensorBoard's writer threads: the next call on the writer raises the same error."""
    usual = threading.excepthook

    def show(failure: threading.ExceptHookArgs) -> None:
        if type(failure.thread).__name__ != "_AsyncWriterThread":
            usual(failure)

    threading.excepthook = show


class LiveFile:
    """Writes the file that `rung watch` reads. A write error is ignored: it must not stop training."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path

    def on_start(self, facts: dict[str, Any], step: int) -> None:
        self.on_ranks(JobSnapshot(step, time.time()))  # forget the ranks of the world before a restart

    def on_ranks(self, live: JobSnapshot) -> None:
        with contextlib.suppress(OSError):
            write_snapshot(self._path, live)

    def on_steps(self, records: list[StepRecord]) -> None: ...
    def on_evaluation(self, record: EvalRecord) -> None: ...
    def on_checkpoint(self, record: SaveRecord) -> None: ...
    def on_end(self, facts: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


# -- the names of figures, the same in TensorBoard and in trackers ---------------------------------------------------


def training_figures(record: StepRecord) -> dict[str, float]:
    figures = {"loss": record.loss, "lr": record.lr, "grad_norm": record.grad_norm, "staleness": record.staleness}
    return {f"train/{name}": float(value) for name, value in figures.items() if value is not None}


def speed_figures(record: StepRecord) -> dict[str, float]:
    return {
        "speed/samples_per_second": record.samples_per_second,
        "speed/step_seconds": record.step_seconds,
        "speed/data_wait_seconds": record.data_wait_seconds,
        "memory/peak_bytes": float(record.peak_memory_bytes),
    }


def checkpoint_figures(record: SaveRecord) -> dict[str, float]:
    return {"checkpoint/stall_seconds": record.stall_seconds, "checkpoint/write_seconds": record.write_seconds}


def rank_figures(live: JobSnapshot) -> dict[str, float]:
    """A fixed number of figures for any number of ranks: how many are slow, and the busiest against the median."""
    own = [sum(rank.seconds.values()) for rank in live.ranks]
    return {
        "ranks/slow": float(len({slow.rank for slow in live.slow})),
        "ranks/busiest": float(max(range(len(own)), key=own.__getitem__)),
        "ranks/own_seconds_most": max(own),
        "ranks/own_seconds_median": statistics.median(own),
        "ranks/data_wait_seconds_most": max(rank.seconds.get("data", 0.0) for rank in live.ranks),
        "ranks/memory_bytes_most": float(max(rank.memory_bytes for rank in live.ranks)),
        "ranks/memory_bytes_least": float(min(rank.memory_bytes for rank in live.ranks)),
    }


def _finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """Replace nan and infinity, which JSON lacks, by strings."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
