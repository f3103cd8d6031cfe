"""Runs jobs by the command line, as a user starts them, so that they can be hit, and examines what they leave behind.

Which faults there are is told in `kinds.py`, which jobs suffer which of them in `plans.py`; `play.py` plays one job.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rung.checkpoint.places import state_folders
from rung.checkpoint.survey import CheckpointLocation, survey
from rung.data.permutation import Permutation
from rung.distributed.status_board import RankStatus, read_statuses
from rung.errors import RESUME_EXIT_CODE
from tests.launcher import WarmLauncher
from tests.metrics_file import committed

TASK = Path(__file__).parent / "task.py"
NUM_SAMPLES, BATCH, EPOCHS = 103, 10, 4
STEPS_PER_EPOCH = -(-NUM_SAMPLES // BATCH)
_LIMIT = 120.0


class Launched:
    """A `rung train` in a process of its own. A scheduler's part is played, too: the same command is given again when
    the job asks to be resumed, and as often as `may_fail` allows when it has failed."""

    def __init__(
        self,
        folder: Path,
        arguments: list[str],
        *,
        num_ranks: int,
        prefix: list[str] | None = None,
        resumes: bool = True,
        task: Path = TASK,
        run_dir: Path | None = None,
        shim: Path | None = None,
    ) -> None:
        self.run_dir, self.num_ranks, self._task = run_dir or folder / "run", num_ranks, task
        self._arguments, self._prefix, self._resumes = arguments, prefix or [], resumes
        self.may_fail = 0  # how often the job may still end with an error and be started again
        self.is_held_back = False  # a scheduler would not start it now: its machine or its disk is not back yet
        self.orders = folder / "orders"
        self.orders.mkdir(parents=True, exist_ok=True)
        self.temporary, self.memory, self._control = folder / "tmp", folder / "shm", folder / "control"
        for path in (self.temporary, self.memory):
            path.mkdir(exist_ok=True)
        self._control.write_bytes(struct.pack("dd", 0.0, 0.0))
        self._mark = uuid.uuid4().hex
        self.environment = {
            **os.environ,
            "FAULTS": str(self.orders),
            "FAULT_MARK": self._mark,
            "FAULT_CONTROL": str(self._control),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.temporary),
            **({"LD_PRELOAD": str(shim)} if shim is not None else {}),
        }
        self._output = folder / "output.txt"
        self._file = self._output.open("ab")
        self._start()

    def _start(self) -> None:
        command = [*self._prefix, sys.executable, "-m", "rung", "train", str(self._task), *self._arguments]
        self.process = subprocess.Popen(
            [*command, "--out", str(self.run_dir), "--resume-if-there"],
            stdout=self._file,
            stderr=subprocess.STDOUT,
            env=self.environment,
            start_new_session=True,
        )

    def over(self) -> bool:
        """Whether the job has ended and nobody starts it again."""
        code = self.process.poll()
        if code is None:
            return False
        asks = code == RESUME_EXIT_CODE and self._resumes
        if not asks and (code == 0 or self.may_fail == 0):
            return True
        if not self.is_held_back:
            self.may_fail -= 0 if asks else 1
            self._start()
        return False

    def order(self, rank: int, kind: str, phase: str = "any", number: int = 0) -> None:
        """Let the task fail on a rank, the next time that it comes to this phase."""
        partial = self.orders / f".order-{rank}"
        partial.write_text(json.dumps({"kind": kind, "phase": phase, "number": number}))
        partial.rename(self.orders / f"rank-{rank}")

    def hold(self, is_held: bool) -> None:
        """Keep the ranks in their step, or let them go."""
        path = self.orders / "hold"
        path.touch() if is_held else path.unlink(missing_ok=True)

    def disturb(self, *, clock: float = 0.0, write: float = 0.0) -> None:
        """Move the wall clock of the job's processes, or let each write take longer, by seconds. Needs the shim."""
        with self._control.open("r+b") as file:
            file.write(struct.pack("dd", clock, write))

    def statuses(self) -> dict[int, RankStatus]:
        """What the living ranks of this launcher do now."""
        state = self.run_dir / ".state"
        own = [state / "status", *state.glob(f"*-{self.process.pid}/status")]
        found = {rank: status for path in own for rank, status in read_statuses(path).items()}
        return {rank: status for rank, status in found.items() if not status.left and _is_alive(status.pid)}

    def pid(self, rank: int) -> int | None:
        status = self.statuses().get(rank)
        return status.pid if status is not None else None

    def kill(self, rank: int) -> None:
        """SIGKILL to a rank that must be there: a pid of 0 would mean whoever runs the tests."""
        pid = self.pid(rank)
        assert pid, f"there is no rank {rank} to kill:\n{self.output()[-3000:]}"
        os.kill(pid, signal.SIGKILL)

    def rows(self) -> list[dict[str, Any]]:
        found = []
        with contextlib.suppress(OSError):
            for line in (self.run_dir / "metrics.jsonl").read_text().splitlines():
                with contextlib.suppress(ValueError):  # half a line, while it is written
                    found.append(json.loads(line))
        return found

    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def left(self) -> list[int]:
        """Processes of this job that are still there."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if f"FAULT_MARK={self._mark}".encode() in (entry / "environ").read_bytes():
                        found += [int(entry.name)] if _is_alive(int(entry.name)) else []
        return found

    def left_after(self, seconds: float) -> list[int]:
        """The same, when they have had some time to go."""
        deadline = time.monotonic() + seconds
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def close(self) -> None:
        for pid in self.left():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        self._file.close()


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def compile_shim(folder: Path) -> Path | None:
    """The library of `shim.c`, which clocks and slow disks need; None without a compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return None
    source, target = Path(__file__).parent / "shim.c", folder / "shim.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", target, source, "-ldl", "-lpthread"], check=True)
    return target


def arguments_for(strategy: str, num_ranks: int, *more: str) -> list[str]:
    return [
        "--strategy", strategy, "--nproc", str(num_ranks), "--checkpoint-every", "5", "--max-restarts", "8",
        "--timeout", "20", "--set", "log_every=1", "--set", "workers=1", *more,
    ]  # fmt: skip


# What does not depend on the number of ranks, so that runs of different worlds can be compared.
COMPARABLE = ["--precision", "fp64", "--set", "dropout=false"]


def reference(
    folder: Path, strategy: str, num_ranks: int, *more: str, launcher: WarmLauncher | None = None
) -> dict[str, torch.Tensor]:
    """The weights of the run without faults."""
    path = reference_run(folder, strategy, num_ranks, *more, launcher=launcher)
    return dict(load_file(path / "model.safetensors"))


def reference_run(
    folder: Path, strategy: str, num_ranks: int, *more: str, launcher: WarmLauncher | None = None
) -> Path:
    """The directory of the run without faults, which a warm launcher makes sooner: nothing happens to it."""
    words = "-".join([strategy, str(num_ranks), *more])
    path = folder / f"reference-{hashlib.sha256(words.encode()).hexdigest()[:8]}"
    if not (path / "run" / "model.safetensors").exists():
        path.mkdir(parents=True)
        arguments = [*arguments_for(strategy, num_ranks, *more), "--set", "model.pause=0"]
        if launcher is not None:
            outcome = launcher.call(path, "train", str(TASK), *arguments, "--out", "run", limit=_LIMIT, nproc=num_ranks)
            assert outcome.code == 0, outcome.output
            return path / "run"
        job = Launched(path, arguments, num_ranks=num_ranks)
        try:
            job.process.wait(_LIMIT)
            assert job.process.returncode == 0, job.output()
        finally:
            job.close()
    return path / "run"


def expected_seen(num_epochs: int = EPOCHS, seed: int = 0) -> torch.Tensor:
    """What `seen` must be when every sample was trained on once an epoch."""
    order, seen = Permutation(NUM_SAMPLES, seed, shuffle=True), torch.zeros(NUM_SAMPLES, dtype=torch.float64)
    for epoch in range(num_epochs):
        for start in range(0, NUM_SAMPLES, BATCH):
            window = order.samples(epoch, start, min(start + BATCH, NUM_SAMPLES))
            seen[window] -= 1.0 / len(window)
    return seen


def done(rows: list[dict[str, Any]]) -> int:
    """The last step that counts: after a new start, those before it may have to be done again."""
    starts = [i for i, row in enumerate(rows) if row["event"] in ("start", "resume")]
    own = rows[starts[-1] :] if starts else rows
    return max((int(row.get("step", 0)) for row in own if row["event"] in ("step", "resume")), default=0)


def examine(
    job: Launched,
    known: dict[str, torch.Tensor],
    tolerance: float | None,
    num_epochs: int = EPOCHS,
    *,
    has_all_files: bool = True,
    has_all_lines: bool = True,
) -> list[str]:
    """What is wrong with a job that is over. Without a tolerance, only that every sample was trained on is checked of
    the weights. A machine with a disk of its own may not have all files of a checkpoint, nor all lines of metrics."""
    if job.process.poll() != 0:
        return [f"exit code {job.process.poll()}: {job.output()[-1500:]}"]
    checks: list[Callable[[], list[str]]] = [
        lambda: _processes_left(job),
        lambda: steps_missing(job, num_epochs) if has_all_lines else [],
        lambda: weights_differ(job.run_dir, known, tolerance, num_epochs),
        lambda: checkpoints_damaged(job.run_dir) if has_all_files else [],
    ]
    return [problem for check in checks for problem in check()]


def _processes_left(job: Launched) -> list[str]:
    left = job.left_after(2)
    return [f"processes left: {left}"] if left else []


def steps_missing(job: Launched, num_epochs: int) -> list[str]:
    """Each step has one line. The one that a run went on from may have none: a rank that failed in it may have taken
    its part of the loss along, while another one had finished the update."""
    rows = committed(job.run_dir / "metrics.jsonl")
    steps = [row["step"] for row in rows if row["event"] == "step"]
    resumed = {row["step"] for row in rows if row["event"] == "resume"}
    missing = set(range(1, num_epochs * STEPS_PER_EPOCH + 1)) - set(steps) - resumed
    return [f"steps done: {steps}"] if missing or steps != sorted(set(steps)) else []


def weights_differ(
    run_dir: Path, known: dict[str, torch.Tensor], tolerance: float | None, num_epochs: int
) -> list[str]:
    problems = []
    weights = load_file(run_dir / "model.safetensors")
    for name, value in known.items() if tolerance is not None else ():
        gap = float((weights[name].double() - value.double()).abs().max())
        if not gap <= tolerance or (tolerance == 0.0 and not torch.equal(weights[name], value)):
            problems.append(f"{name} differs by {gap:.2e}")
    seen = weights["seen.weight"]
    gap = float((seen.double().flatten() - expected_seen(num_epochs)).abs().max())
    if not gap <= (1e-9 if seen.dtype == torch.float64 else 1e-5):
        problems.append(f"samples were not trained on once an epoch: off by {gap:.2e}")
    return problems


def checkpoints_damaged(run_dir: Path) -> list[str]:
    """What `rung checkpoints` says of a run that is over: all that lies there must be whole, every byte of it."""
    found = survey(CheckpointLocation(run_dir, state_folders(run_dir)))
    return [f"checkpoint: {one.problem}" for one in found if one.state != "whole"]
