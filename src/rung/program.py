"""`rung.train` and `rung.compare`: the commands, called by a program or from a cell of a notebook.

Each call runs the command in a new process. The caller may thus have threads, a GPU in use or no
`if __name__ == "__main__"`: nothing of it is forked or imported again. Imports no torch.
"""

from __future__ import annotations

import html
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from rung import errors
from rung.cli.machine_flags import refuse_external_rank
from rung.errors import RESUME_EXIT_CODE, ConfigError, JobFailed, RungError, TaskError
from rung.spec.task import Task
from rung.system.untrusted import lines_of, open_regular, parse_json, read_json

# The caller's sys.path comes first, as in processes of multiprocessing: it may be how the caller finds rung.
_START = (
    "import json, sys; request = json.loads(sys.argv[1]); sys.path[:] = request['sys_path']; "
    "from rung.cli.from_python import run; run(request, int(sys.argv[2]))"
)
_SCREEN = 40  # lines of output in the error of a process that did not report its end
_MAX_COMPARISON = 2**26  # bytes
_FRAME_HEIGHT = 640  # of the page in a notebook


@dataclass(frozen=True)
class TrainResult:
    """A finished run of `rung.train`. The figures are read from the run's `metrics.jsonl` when they are asked for."""

    folder: Path
    """The run's directory."""

    @property
    def weights(self) -> Path | None:
        """The file of the final weights; None with `save_weights=False`."""
        file = self.folder / "model.safetensors"
        return file if file.exists() else None

    @property
    def steps(self) -> int:
        """The number of the last step."""
        return int(self.records[-1]["step"]) if self.records else 0

    @property
    def loss(self) -> float | None:
        """The loss of the last step."""
        return self.records[-1]["loss"] if self.records else None

    @property
    def evaluation(self) -> dict[str, float]:
        """Loss and metrics of the last evaluation; empty without one."""
        found = [row for row in self._rows if row["event"] == "eval"][-1:]
        return {k: v for row in found for k, v in row.items() if k not in ("event", "step", "epoch", "seconds")}

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """The lines of all steps: step, epoch, loss, grad_norm, lr, step_seconds and others."""
        return [row for row in self._rows if row["event"] == "step"]

    @cached_property
    def _rows(self) -> list[dict[str, Any]]:
        """Steps and evaluations. Of those that a resumed run repeated, the last ones count."""
        rows: list[dict[str, Any]] = []
        file = self.folder / "metrics.jsonl"
        if not file.exists():  # it is on the machine of rank 0
            return rows
        with open_regular(file) as opened:
            for line in lines_of(opened):
                row = parse_json(line)
                if row["event"] in ("start", "resume"):
                    rows = [kept for kept in rows if kept["step"] <= row.get("step", 0)]
                elif row["event"] in ("step", "eval"):
                    rows.append(row)
        return rows

    def __repr__(self) -> str:
        figures = [f"{self.steps} steps"]
        figures += [f"loss {_number(self.loss)}"] if self.records else []
        figures += [f"eval {name} {_number(value)}" for name, value in self.evaluation.items()]
        return f"<TrainResult: {', '.join(figures)}, in {self.folder}>"


@dataclass(frozen=True)
class CompareResult:
    """A finished comparison of `rung.compare`. A notebook shows its page."""

    folder: Path
    """The directory of the runs."""
    page: Path
    """The page with tables and charts."""

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A row for each strategy, as `rung compare --json` writes them. `row["status"]` is "ok" or "failed"."""
        return list(self._document["rows"])

    @property
    def verdict(self) -> dict[str, Any]:
        """What the measurements say: `sentence`, `recommendation` and the recommended `strategy`."""
        return dict(self._document["verdict"])

    @cached_property
    def _document(self) -> dict[str, Any]:
        found: dict[str, Any] = read_json(self.folder / "comparison.json", _MAX_COMPARISON)
        return found

    def __repr__(self) -> str:
        lines = [
            f"  {row['strategy']}: {1000 * row['step_seconds']['median']:.3g} ms a step"
            if row["status"] == "ok"
            else f"  {row['strategy']}: failed: {row['reason']}"
            for row in self.rows
        ]
        return "\n".join([f"<CompareResult: {self.verdict['sentence']}", *lines, f"  page: {self.page}>"])

    def _repr_html_(self) -> str:
        page = html.escape(self.page.read_text(encoding="utf-8"), quote=True)
        # In a frame of its own, because the page has styles and scripts for a whole document.
        return f'<iframe srcdoc="{page}" width="100%" height="{_FRAME_HEIGHT}" style="border:0"></iframe>'


def train(
    task: str | Path,
    *,
    strategy: str | None = None,
    nproc: int | str | None = None,
    set: Mapping[str, Any] | None = None,
    config: str | Path | None = None,
    resume: str | Path | bool | None = None,
    **settings: Any,
) -> TrainResult:
    """Train a task as `rung train` does, and return when the run is finished.

    `task` is the path of a task file, or of a folder with a `task.py`. Settings are keywords, those with a flag and
    those without: `batch_size=64, precision="bf16", log_every=1`. `set` has the arguments of the task's functions:
    `set={"model.depth": 8}`. `config` is a settings file, `resume` the directory of a run to continue, or True for the
    newest one. Raises a `rung.RungError` for what cannot work, `rung.errors.JobFailed` with the report of a run that
    failed, and KeyboardInterrupt after Ctrl-C has ended the run.
    """
    options = {"config_file": config, "resume": resume}
    end = _run("train", task, {"strategy": strategy, "nproc": nproc, **settings}, set, options)
    return TrainResult(Path(end["folder"]))


def compare(
    task: str | Path,
    *,
    strategies: Sequence[str] | None = None,
    nproc: int | None = None,
    repeats: int | None = None,
    warmup: int | None = None,
    out: str | Path = "compare.html",
    set: Mapping[str, Any] | None = None,
    config: str | Path | None = None,
    **settings: Any,
) -> CompareResult:
    """Measure a task under several strategies as `rung compare` does; `out` is the page that it writes.

    `task`, `set`, `config` and the settings are those of `rung.train`. A strategy that fails is a row of the result;
    raises `rung.errors.JobFailed` if all of them fail.
    """
    if "strategy" in settings:
        raise ConfigError("there is no setting 'strategy' of a comparison. Did you mean 'strategies'? It is a list.")
    names = [strategies] if isinstance(strategies, str) else strategies
    options = {"strategies": names and list(names), "repeats": repeats, "warmup": warmup, "out": out}
    end = _run("compare", task, {"nproc": nproc, **settings}, set, {**options, "config_file": config})
    return CompareResult(Path(end["folder"]), Path(end["page"]))


def _run(
    command: str,
    task: str | Path,
    settings: Mapping[str, Any],
    assignments: Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Run a command in a new process, show its output, and return its report. Raises what the command raised."""
    refuse_external_rank(command)
    given = {key: value for key, value in settings.items() if value is not None}
    for key in given.keys() & (assignments or {}).keys():
        raise ConfigError(f"{key} is given twice: as a keyword and in `set`.")
    request = {
        "command": command,
        "task": _path(task, command),
        "settings": {**given, **(assignments or {})},
        "options": {key: value for key, value in options.items() if value is not None},
        "sys_path": sys.path,
        "caller": os.getpid(),
    }
    code, report, screen, is_interrupted = _call(json.dumps(request, default=_as_json))
    if is_interrupted:
        raise KeyboardInterrupt
    if not report:
        last = "\n".join(["", *screen])
        raise JobFailed(f"the process of `rung {command}` ended with exit code {code} and without a result.{last}")
    end: dict[str, Any] = json.loads(report)
    if "error" in end:
        raise _error(end)
    if end["exit_code"] == RESUME_EXIT_CODE:
        raise JobFailed(
            f"the run was asked to stop before its end. Go on with it: rung.train({str(task)!r}, "
            f"resume={end['folder']!r})"
        )
    if end["exit_code"]:
        raise JobFailed(f"a signal ended the run (exit code {end['exit_code']}).")
    return end


def _call(request: str) -> tuple[int, str, list[str], bool]:
    """Start the process and wait for its end. Returns its exit code, its report, the last lines of its output, and
    whether Ctrl-C came meanwhile, which it is told as if it had been typed to it alone."""
    on_terminal = sys.stdout.isatty()  # the process then draws its progress bar there
    read, write = os.pipe()
    try:
        child = subprocess.Popen(
            [sys.executable, "-c", _START, request, str(write)],
            stdin=subprocess.DEVNULL,
            stdout=None if on_terminal else subprocess.PIPE,
            stderr=None if on_terminal else subprocess.STDOUT,
            pass_fds=[write],
            process_group=0,  # else a Ctrl-C would reach it twice
            text=True,
            errors="replace",
        )
    except BaseException:
        os.close(read)
        raise
    finally:
        os.close(write)
    screen: deque[str] = deque(maxlen=_SCREEN)
    num_interrupts = 0
    with os.fdopen(read) as reports:
        try:
            lines = _lines_of(child.stdout) if child.stdout is not None else None
            while True:
                try:
                    while lines is not None and (line := lines.get()) is not None:
                        screen.append(line.rstrip("\n"))
                        sys.stdout.write(line)  # which may be a notebook's, and no file
                        sys.stdout.flush()
                    lines = None
                    return child.wait(), reports.read(), list(screen), num_interrupts > 0
                except KeyboardInterrupt:
                    num_interrupts += 1
                    if num_interrupts > 1:  # it does not end by itself
                        raise
                    child.send_signal(signal.SIGINT)
        finally:
            if child.poll() is None:
                child.kill()  # its ranks end with it
                child.wait()


def _lines_of(output: IO[str]) -> queue.Queue[str | None]:
    """The lines of a process, read by a thread: a Ctrl-C in the middle of a line would lose it. The last is None."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        with output:
            for line in output:
                lines.put(line)
        lines.put(None)

    threading.Thread(target=read, name="rung-output", daemon=True).start()
    return lines


def _path(task: object, command: str) -> str:
    if isinstance(task, str | os.PathLike):
        return os.fspath(task)
    file = task.__file__ if isinstance(task, ModuleType) else None
    if file is not None:
        raise TaskError(f"rung.{command} takes the path of a task: {str(file)!r}, not the module.")
    what = f"a task of functions ({task.name})" if isinstance(task, Task) else f"{task!r}"
    raise TaskError(
        f"rung.{command} takes the path of a task, not {what}: it starts other processes, to which functions of this "
        "program cannot be sent. Write them to a file (in a notebook: a cell that begins with %%writefile task.py) and "
        'pass "task.py", or write the loop yourself with rung.open_session, which runs in this process.'
    )


def _as_json(value: object) -> str:
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))
    raise ConfigError(f"{value!r} cannot be a setting: it is a {type(value).__name__}, no number, text, list or dict.")


def _error(end: Mapping[str, Any]) -> RungError:
    kind = getattr(errors, end["error"], RungError)
    return JobFailed(end["message"], is_mistake=end["is_mistake"]) if kind is JobFailed else kind(end["message"])


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)
