"""The console of a running job: the only writer to the terminal. It reads the files that the ranks write.

Shows rank 0's lines, a progress bar from the metrics, and warnings of other ranks, prefixed and once each.
"""

from __future__ import annotations

import contextlib
import math
import re
import textwrap
import threading
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from rung.distributed.status_board import StatusBoard
from rung.system.disk import trouble_with
from rung.system.untrusted import parse_json, printable

WARNING_MARK = "WARNING: "
ATTEMPT_MARK = "---- attempt "
FAILURE_MARK = "FAILURE: "  # in a rank's log: the traceback of its failure follows
CRASH_MARKS = ("Fatal Python error", "terminate called after throwing")  # how the output of a crash in C++ begins
_WARNING_CHARACTERS = 400
_POLL_SECONDS = 0.05
_DISK_SECONDS = 2.0  # between checks of the run's disk
_PLAIN_SECONDS = 5.0  # between progress lines without a terminal
# The console does not show log lines of torch's C++ code and profiler.
_CPP_LOG = re.compile(r"^\[[IW]\d{4} |^\[rank\d+\]:\[[IW]\d{4} |^[A-Z]+:\d{4}-\d\d-\d\d [\d: ]+ \w+\.cpp:")


class _Tail:
    """Reads new lines of a growing file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0  # an earlier job has shown the lines before
        self._rest = b""

    def lines(self) -> list[str]:
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, 2)
                if size < self._offset:  # a resumed run has truncated the half line that a killed one left
                    self._offset, self._rest = size, b""
                file.seek(self._offset)
                content = file.read()
        except OSError:
            return []
        self._offset += len(content)
        *whole, self._rest = (self._rest + content).split(b"\n")
        return [_as_displayed(line) for line in whole]

    def rest(self) -> list[str]:
        """The new lines and the incomplete last one, when the file will not grow any more."""
        whole, self._rest = [*self.lines(), _as_displayed(self._rest)], b""
        return whole


class JobConsole:
    """Shows a job from a thread of the launcher. Use as a context manager."""

    def __init__(self, run_dir: Path, console: Console, *, quiet: bool = False) -> None:
        self.last_step: dict[str, Any] = {}
        self.last_evaluation: dict[str, Any] = {}
        self._folder = run_dir / "logs"
        self._logs: dict[int, _Tail] = {}
        self._metrics = _Tail(run_dir / "metrics.jsonl")
        self._board: StatusBoard | None = None
        self._leader = 0  # the rank of this machine whose progress is shown
        self._console = console
        self._quiet = quiet
        self._failed: set[int] = set()
        self._total: int | None = None
        self._warnings: set[str] = set()  # shown already
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rung-console", daemon=True)
        self._progress: Progress | None = None
        self._last_plain = self._disk_checked = time.monotonic()
        self._last_plain_step = 0
        self._first: tuple[float, int] | None = None  # time and number of this attempt's first step
        self._recent: deque[tuple[float, float]] = deque(maxlen=20)

    def __enter__(self) -> JobConsole:
        if not self._quiet and self._console.is_terminal:
            # markup=False: a metric's name that looks like a closing tag would raise in this thread and end it.
            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}", style="progress.description", markup=False),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}", markup=False),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
            )
            self._task = self._progress.add_task("starting", total=None, figures="")
            self._progress.start()
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stop.set()
        self._thread.join()
        if self._progress is not None:
            self._progress.stop()
        self._poll(is_last=True)

    def follow(self, board: StatusBoard, ranks: Iterable[int]) -> None:
        """Show this machine's ranks of a world that is about to start."""
        ranks = list(ranks)
        for rank in ranks:
            if rank not in self._logs:
                self._logs[rank] = _Tail(self._folder / f"rank-{rank}.log")
        self._board, self._leader = board, ranks[0]

    def say(self, text: str) -> None:
        """Print a message of the launcher itself."""
        if not self._quiet:
            self._console.print(Text(printable(text, keep="\n")), highlight=False, soft_wrap=True)

    def _run(self) -> None:
        while not self._stop.wait(_POLL_SECONDS):
            self._poll()
            if time.monotonic() > self._disk_checked + _DISK_SECONDS:
                self._check_disk()

    def _poll(self, is_last: bool = False) -> None:
        try:
            for rank, tail in list(self._logs.items()):
                for line in tail.rest() if is_last else tail.lines():
                    self._show_line(rank, line)
            for line in self._metrics.lines():
                # A malformed row must not end this thread, which is the only one that writes.
                with contextlib.suppress(ValueError, TypeError, KeyError):
                    self._read_row(parse_json(line.encode()))
            if not is_last:
                self._draw()
        except BrokenPipeError:
            self._quiet = True  # the reader of the output has gone; training continues

    def _check_disk(self) -> None:
        """Warn of a full disk here: the ranks warn in their logs, which may be on that disk."""
        self._disk_checked = time.monotonic()
        trouble = trouble_with(self._folder.parent)
        if trouble and trouble not in self._warnings:
            self._warnings.add(trouble)
            self.say(f"warning: {trouble}: logs, metrics and checkpoints of this run may be lost")

    def _show_line(self, rank: int, line: str) -> None:
        if line.startswith((FAILURE_MARK, *CRASH_MARKS)):
            self._failed.add(rank)
        # The final report shows a rank's failure; do not show it twice.
        if self._quiet or rank in self._failed or not line.strip() or line.startswith(ATTEMPT_MARK):
            return
        if line.startswith(WARNING_MARK):
            text = textwrap.shorten(
                line.removeprefix(WARNING_MARK), _WARNING_CHARACTERS, placeholder=" ... (see the log)"
            )
            if text not in self._warnings:
                self._warnings.add(text)
                shown = Text(f"rank {rank}: warning: {text}", style="yellow")
                self._console.print(shown, highlight=False, soft_wrap=True)
        elif rank == 0 and not _CPP_LOG.match(line):
            self._console.print(Text(line), highlight=False, soft_wrap=True)

    def _read_row(self, row: dict[str, Any]) -> None:
        if row["event"] in ("start", "resume"):
            self._total = row["total_steps"]
            self._first = None
        elif row["event"] == "step":
            recent = float(row["samples_per_second"]), float(row["step_seconds"])
            self.last_step = {**row, "step": int(row["step"]), "epoch": int(row["epoch"]), "loss": row["loss"]}
            self._recent.append(recent)
            if row.get("compile_seconds"):
                self.say(f"  compiled for {_number(row['compile_seconds'])} s in step {row['step']}, not counted in it")
            for reason in row.get("graph_breaks") or ():
                self.say(f"  torch.compile leaves a part uncompiled: {reason} (TORCH_LOGS=graph_breaks shows where)")
            self._first = self._first or (time.monotonic(), self.last_step["step"])
        elif row["event"] == "eval":
            self.last_evaluation = row
            if not self._quiet:
                shown = {k: v for k, v in row.items() if k not in ("event", "step", "epoch", "seconds")}
                figures = "  ".join(f"{name} {_number(value)}" for name, value in shown.items())
                self.say(f"  evaluation after step {row['step']} (epoch {row['epoch'] + 1}): {figures}")

    def _draw(self) -> None:
        if self._board is None:
            return
        status = self._board.read(self._leader)
        step = self.last_step
        if self._progress is not None:
            figures = self._figures() if step else ""
            description = f"epoch {step['epoch'] + 1}" if step else status.phase
            if status.phase in ("evaluating", "saving"):
                description = status.phase
            self._progress.update(
                self._task, completed=status.step, total=self._total, description=description, figures=figures
            )
        elif self._wants_plain_line():
            self._last_plain, self._last_plain_step = time.monotonic(), step["step"]
            total = f"/{self._total}" if self._total else ""
            left = ""
            if self._total and self._first is not None and step["step"] > self._first[1]:
                each = (time.monotonic() - self._first[0]) / (step["step"] - self._first[1])
                left = f"  {each * (self._total - step['step']):.0f} s left"
            self._console.print(Text(f"  step {step['step']}{total}  {self._figures()}{left}"), highlight=False)

    def _wants_plain_line(self) -> bool:
        if self._quiet or not self.last_step or self.last_step["step"] == self._last_plain_step:
            return False
        return time.monotonic() - self._last_plain > _PLAIN_SECONDS

    def _figures(self) -> str:
        seconds = sum(seconds for _, seconds in self._recent)
        samples = sum(rate * seconds for rate, seconds in self._recent)
        norm = self.last_step.get("grad_norm")
        shown = f"  grad norm {_number(norm)}" if norm is not None else ""
        speed = _number(samples / seconds if seconds else 0.0)
        return f"loss {_number(self.last_step['loss'])}{shown}  {speed} samples/s"


def _as_displayed(line: bytes) -> str:
    """A line as a terminal displays it: after a carriage return, a progress bar has overwritten itself."""
    return line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]


def _number(value: Any) -> str:
    if not isinstance(value, int | float) or not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
