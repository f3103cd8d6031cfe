"""The observers that write the records of a run: metrics.jsonl, TensorBoard, the file of `rung watch`.

The launcher draws the console from metrics.jsonl.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from rung.checkpoint import SaveRecord
from rung.distributed.live_status import JobSnapshot, write_snapshot
from rung.system.disk import reason
from rung.system.units import human_size
from rung.train.records import EvalRecord, StepRecord

log = logging.getLogger("rung")

_RETRY_SECONDS = 10.0  # after TensorBoard's files could not be written
_BLOCK = 2**16  # bytes read at a time
# The rows of thousands of experts take a hundred kilobytes. They may take so many times the bytes of the steps' lines,
# and so many beside; of a long run some steps then have none.
_EXPERT_BYTES, _FREE_BYTES = 4, 2**22


class Observer(Protocol):
    def on_start(self, facts: dict[str, Any], step: int) -> None:
        """`step`: the last step of the checkpoint that the run resumes from; 0 for a new run."""

    def on_steps(self, records: list[StepRecord]) -> None: ...

    def on_evaluation(self, record: EvalRecord) -> None: ...

    def on_checkpoint(self, record: SaveRecord) -> None: ...

    def on_logged(self, figures: Mapping[str, float], step: int) -> None:
        """What the task's hooks log beside steps."""

    def on_ranks(self, live: JobSnapshot) -> None:
        """The state of all ranks, about once a second."""

    def on_end(self, facts: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


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
        self._num_bytes_left = _FREE_BYTES  # for the rows of experts

    def on_start(self, facts: dict[str, Any], step: int) -> None:
        event = {"event": "resume", "step": step} if step else {"event": "start"}
        self._put({**event, **facts})

    def on_checkpoint(self, record: SaveRecord) -> None:
        self._put({"event": "checkpoint", **asdict(record)})

    def on_logged(self, figures: Mapping[str, float], step: int) -> None:
        self._put({"event": "log", "step": step, **figures})

    def on_ranks(self, live: JobSnapshot) -> None:
        """Add a line when a rank becomes slow. `LiveFile` has the state of every second."""
        before, self._slow = self._slow, {(slow.rank, slow.phase) for slow in live.slow}
        new = [asdict(slow) for slow in live.slow if (slow.rank, slow.phase) not in before]
        self._put(*({"event": "slow", "step": live.step, **slow} for slow in new))

    def on_end(self, facts: dict[str, Any]) -> None:
        self._put({"event": "end", **facts})

    def on_steps(self, records: list[StepRecord]) -> None:
        self._put(*(row for record in records for row in self._rows_of(record)))

    def _rows_of(self, record: StepRecord) -> Iterator[dict[str, Any]]:
        row = _step_row(record)
        self._num_bytes_left += _EXPERT_BYTES * len(json.dumps(row))
        yield row
        if record.experts:  # a line of its own, as it may be long: who reads steps need not parse it
            line = {"event": "experts", "step": record.step, "layers": record.experts}
            size = len(json.dumps(line))
            if size <= self._num_bytes_left:
                self._num_bytes_left -= size
                yield line

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

    def on_logged(self, figures: Mapping[str, float], step: int) -> None:
        self._scalars(logged_figures(figures), step)

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
    def on_logged(self, figures: Mapping[str, float], step: int) -> None: ...
    def on_end(self, facts: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


# -- the names of figures, the same in TensorBoard and in trackers ---------------------------------------------------


def training_figures(record: StepRecord) -> dict[str, float]:
    figures = {"loss": record.loss, "lr": record.lr, "grad_norm": record.grad_norm, "staleness": record.staleness}
    figures |= {f"lr_{name}": rate for name, rate in (record.lrs or {}).items()}
    known = {f"train/{name}": float(value) for name, value in figures.items() if value is not None}
    return known | logged_figures(record.logged)


def logged_figures(figures: Mapping[str, float]) -> dict[str, float]:
    return {f"train/{name}": value for name, value in figures.items()}


def speed_figures(record: StepRecord) -> dict[str, float]:
    compiled = {"speed/compile_seconds": record.compile_seconds} if record.compile_seconds is not None else {}
    return compiled | {
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


def _step_row(record: StepRecord) -> dict[str, Any]:
    """The line of a step: its own figures, then those that the task logs."""
    row = asdict(record)
    del row["logged"], row["experts"]
    own = {
        key: value
        for key, value in row.items()
        if key not in ("lrs", "staleness", "compile_seconds", "graph_breaks") or value is not None
    }
    return {**own, **record.logged}


def _finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """Replace nan and infinity, which JSON lacks, by strings."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
