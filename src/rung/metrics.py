"""Records of a run and who is told of them: a JSON-lines file, TensorBoard, and whoever watches.

A record is made for every step, but read from the device only every so many: `Ledger` keeps what is still on the device
and turns it into records in one go. The console is not here; the launcher draws it from the same file.
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
from rung.disk import reason
from rung.live import Live, write_live
from rung.runtime.base import LocalStep
from rung.sizes import human_size
from rung.windows import Window
from rung.world import World

log = logging.getLogger("rung")

_AGAIN_SECONDS = 10.0  # after TensorBoard's files could not be written
_BLOCK = 2**16  # bytes read at a time


@dataclass(frozen=True)
class StepRecord:
    """One step, as the whole job saw it."""

    step: int
    epoch: int
    samples: int
    loss: float
    grad_norm: float | None
    lr: float
    step_seconds: float
    samples_per_second: float
    data_wait_seconds: float  # of the rank that waited longest
    slowest_reader: int  # that rank
    peak_memory_bytes: int  # of the rank with the highest
    event: str = "step"
    staleness: int | None = None  # updates that the gradient was late by, under ps-async


@dataclass(frozen=True)
class EvalRecord:
    step: int
    epoch: int
    metrics: dict[str, float]
    seconds: float


class Observer(Protocol):
    def on_start(self, facts: dict[str, Any], step: int) -> None:
        """`step` is the one after which the run goes on; 0 for a new one."""

    def on_steps(self, records: list[StepRecord]) -> None: ...

    def on_evaluation(self, record: EvalRecord) -> None: ...

    def on_checkpoint(self, record: SaveRecord) -> None: ...

    def on_ranks(self, live: Live) -> None:
        """What all ranks do, about once a second."""

    def on_end(self, facts: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Sealed:
    """Steps whose figures are on their way to the host."""

    steps: list[tuple[Window, LocalStep, Any, Any]]  # with the marks of their beginning and end
    losses: Callable[[], list[float]]
    norms: Callable[[], list[float]]


class Ledger:
    """Steps whose figures are still on the device.

    `seal` starts to fetch them and `records` waits for them. Between the two the next step can be given to the device,
    so that it does not stand idle while figures are read and told.
    """

    def __init__(self, world: World, samples: int = 0) -> None:
        self._world = world
        self._clock = _Clock(world)
        self._pending: list[tuple[Window, LocalStep, Any, Any]] = []
        self._samples = samples
        self._last_mark = self._clock.mark()

    def add(self, window: Window, result: LocalStep) -> None:
        start, self._last_mark = self._last_mark, self._clock.mark()
        self._pending.append((window, result, start, self._last_mark))

    def skip(self) -> None:
        """Leave out of the next step's time what happened since the last one (an evaluation)."""
        self._last_mark = self._clock.mark()

    def seal(self) -> Sealed:
        steps, self._pending = self._pending, []
        losses = self._world.fetch([result.loss_share for _, result, *_ in steps])
        norms = self._world.fetch([result.grad_norm for _, result, *_ in steps if result.grad_norm is not None])
        return Sealed(steps, losses, norms)

    def records(self, sealed: Sealed) -> list[StepRecord]:
        """The records of sealed steps. All ranks call it at the same steps: it communicates."""
        count = len(sealed.steps)
        if not count:
            return []
        waits = [window.wait_seconds for window, *_ in sealed.steps]
        rows = self._world.gather([*sealed.losses(), *waits, *sealed.norms(), float(peak_memory_bytes(self._world))])
        norms = iter(rows[0][2 * count : -1])  # the main rank's for all: they decide by it whether to go on
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


class _Clock:
    """Marks in time: of the device where there is one, so that no step has to wait to be measured."""

    def __init__(self, world: World) -> None:
        self._on_device = world.device.type == "cuda" and not world.pretend

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
    """The most memory so far: allocated on the GPU, or resident for a process on the CPU."""
    if world.device.type == "cuda":
        return torch.cuda.max_memory_allocated(world.device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class JsonLines:
    """metrics.jsonl: one object a line, for steps, evaluations and checkpoints.

    Lines are only ever added. After a `resume`, steps that come later in the file and again are the ones that count:
    `committed` reads a file that way.
    """

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        if resume:
            _end_line(path)
        self._path = path
        self._file = path.open("ab" if resume else "wb", buffering=0)
        self._waiting = b""  # what a full disk did not take
        self._is_told = False  # that it does not
        self._slow: set[tuple[int, str]] = set()

    def on_start(self, facts: dict[str, Any], step: int) -> None:
        event = {"event": "resume", "step": step} if step else {"event": "start"}
        self._put({**event, **facts})

    def on_checkpoint(self, record: SaveRecord) -> None:
        self._put({"event": "checkpoint", **asdict(record)})

    def on_ranks(self, live: Live) -> None:
        """A line when a rank begins to be slow. What ranks do every second is in another file."""
        before, self._slow = self._slow, {(slow.rank, slow.phase) for slow in live.slow}
        told = [asdict(slow) for slow in live.slow if (slow.rank, slow.phase) not in before]
        self._put(*({"event": "slow", "step": live.step, **slow} for slow in told))

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
        if self._waiting:
            log.warning("metrics.jsonl lacks the last %s of its records.", human_size(len(self._waiting)))
        self._file.close()

    def _put(self, *rows: Mapping[str, Any]) -> None:
        self._waiting += "".join(json.dumps(_finite(row)) + "\n" for row in rows).encode()
        try:
            if self._waiting and os.fstat(self._file.fileno()).st_nlink == 0:
                # The system would take all lines, and nobody could read them.
                again = self._path.open("ab", buffering=0)
                self._file.close()
                self._file = again
                log.warning("%s was removed; it begins again at this step.", self._path)
            while self._waiting:
                written = self._file.write(self._waiting) or 0
                self._waiting = self._waiting[written:]
            self._is_told = False
        except OSError as error:
            if not self._is_told:
                log.warning("metrics.jsonl cannot be written: %s. It is tried again.", reason(error))
            self._is_told = True


def committed(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file that count: what a resumed run did again stands there once, as it was done last."""
    rows: list[dict[str, Any]] = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if row["event"] in ("start", "resume"):
            reached = row.get("step", 0)
            rows = [kept for kept in rows if kept["event"] in ("start", "resume") or kept.get("step", 0) <= reached]
        if row["event"] == "eval":  # one that was cut short or not told in time is done again
            rows = [kept for kept in rows if kept["event"] != "eval" or kept["step"] != row["step"]]
        rows.append(row)
    return rows


def _end_line(path: Path) -> None:
    """A run that was killed may have left half a line."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:  # from the end on: the file of a long run has gigabytes
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

    Its writer puts them on the disk in a thread, whose error comes up in whatever is asked of it next, and it is of no
    use after that. No error of it ends a run: it is told of once, and a new writer goes on when the disk takes it.
    """

    def __init__(self, folder: Path, start_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = start_step + 1 if start_step else None
        make: Any = SummaryWriter
        self._open: Callable[[], Any] = lambda: make(str(folder), flush_secs=10, purge_step=purge)
        _silence_writer_threads()
        self._slow: set[tuple[int, str]] = set()
        self._writer: Any = None
        self._open_at = 0.0  # when to try it (again)

    def on_checkpoint(self, record: SaveRecord) -> None:
        told = {"stall_seconds": record.stall_seconds, "write_seconds": record.write_seconds}
        self._scalars({f"checkpoint/{name}": value for name, value in told.items()}, record.step)

    def on_start(self, facts: dict[str, Any], step: int) -> None:
        self._write(lambda writer: writer.add_text("run", ", ".join(f"{key}: {value}" for key, value in facts.items())))

    def on_end(self, facts: dict[str, Any]) -> None: ...

    def on_steps(self, records: list[StepRecord]) -> None:
        for record in records:
            self._scalars(training_figures(record), record.step)
        self._scalars(speed_figures(records[-1]), records[-1].step)

    def on_evaluation(self, record: EvalRecord) -> None:
        self._scalars({f"eval/{name}": value for name, value in record.metrics.items()}, record.step)

    def on_ranks(self, live: Live) -> None:
        self._scalars(rank_figures(live), live.step)
        before, self._slow = self._slow, {(slow.rank, slow.phase) for slow in live.slow}
        told = [slow.text for slow in live.slow if (slow.rank, slow.phase) not in before]
        if told:
            self._write(lambda writer: [writer.add_text("slow ranks", text, live.step) for text in told])

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
                self._writer = self._open()
            act(self._writer)
        except Exception as error:
            is_first, self._open_at = self._open_at == 0.0, time.monotonic() + _AGAIN_SECONDS
            broken, self._writer = self._writer, None
            with contextlib.suppress(Exception):  # it would flush again, and fail again
                if broken is not None:
                    broken.close()
            if is_first:
                why = reason(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
                log.warning("TensorBoard's files cannot be written: %s. metrics.jsonl has all figures.", why)


def _silence_writer_threads() -> None:
    """A thread of TensorBoard's that fails hands its error over, and prints its traceback besides."""
    usual = threading.excepthook

    def show(failure: threading.ExceptHookArgs) -> None:
        if type(failure.thread).__name__ != "_AsyncWriterThread":
            usual(failure)

    threading.excepthook = show


class LiveFile:
    """What `rung watch` reads. A disk that does not take it is no reason to stop training."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path

    def on_start(self, facts: dict[str, Any], step: int) -> None:
        self.on_ranks(Live(step, time.time()))  # those of the world before are gone

    def on_ranks(self, live: Live) -> None:
        with contextlib.suppress(OSError):
            write_live(self._path, live)

    def on_steps(self, records: list[StepRecord]) -> None: ...
    def on_evaluation(self, record: EvalRecord) -> None: ...
    def on_checkpoint(self, record: SaveRecord) -> None: ...
    def on_end(self, facts: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


# -- the same figures under the same names, wherever they are shown --------------------------------------------------


def training_figures(record: StepRecord) -> dict[str, float]:
    told = {"loss": record.loss, "lr": record.lr, "grad_norm": record.grad_norm, "staleness": record.staleness}
    return {f"train/{name}": float(value) for name, value in told.items() if value is not None}


def speed_figures(record: StepRecord) -> dict[str, float]:
    return {
        "speed/samples_per_second": record.samples_per_second,
        "speed/step_seconds": record.step_seconds,
        "speed/data_wait_seconds": record.data_wait_seconds,
        "memory/peak_bytes": float(record.peak_memory_bytes),
    }


def rank_figures(live: Live) -> dict[str, float]:
    """A few numbers of all ranks, however many there are: how many are slow, and how far the busiest is from others."""
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
    """JSON has no nan and no infinity; they become strings that say so."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
