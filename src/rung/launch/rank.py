"""What one rank's process does around the training loop: its log file, its signals, its last words."""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any, TextIO

import torch

from rung.launch.console import WARNING_MARK
from rung.launch.failure import record_failure
from rung.processes import die_with_parent, num_cores
from rung.status import StatusBoard
from rung.train import Job, Summary, worker
from rung.world import environment_local_size, environment_rank


def rank_main(job: Job, run_dir: str, num_ranks: int) -> Summary:
    """The entry point that the elastic agent starts in each process."""
    folder, rank = Path(run_dir), environment_rank()
    status = StatusBoard(folder / ".state" / "status", num_ranks).writer(rank)
    status.phase("starting")
    die_with_parent()
    # Ctrl-C reaches the whole terminal group; the launcher decides what becomes of the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _speak_into(folder / "logs" / f"rank-{rank}.log")
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, num_cores() // environment_local_size()))
    try:
        summary = worker(job, status)
    except BaseException as error:
        traceback.print_exc()
        record_failure(folder / ".state", rank, status.current(), error)
        _flush()
        # Not a normal exit: threads of a broken process group may never end.
        os._exit(1)
    _flush()
    return summary


def _speak_into(path: Path) -> None:
    """Everything this process and its C++ libraries print goes to its own file; the launcher shows what matters."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    _flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_Formatter())
    root = logging.getLogger("rung")
    root.handlers, root.propagate = [handler], False
    root.setLevel(logging.INFO)
    warnings.showwarning = _show_warning


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        mark = WARNING_MARK if record.levelno >= logging.WARNING else ""
        return mark + record.getMessage()


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: Any = None,
) -> None:
    text = " ".join(str(message).split())
    sys.stderr.write(f"{WARNING_MARK}{category.__name__}: {text} ({filename}:{lineno})\n")


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (ValueError, OSError):
            pass
