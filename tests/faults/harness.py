"""Hits running jobs and looks at how they come through.

A job runs by the command line, as a user would start it; faults strike at random moments. Afterwards the job must have
ended by itself with every step done, its weights those of the run without faults, every sample seen once an epoch, and
no process left.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rung.errors import RESUME_EXIT_CODE
from rung.metrics import committed
from rung.order import Order
from rung.status import StatusBoard

TASK = Path(__file__).parent / "task.py"
KINDS = ("exception", "kill", "term", "stop", "exit", "disk", "corrupt", "preempt")
STRATEGIES = {"single": 1, "ddp": 2, "zero1": 2, "zero3": 2, "pp2": 2, "tp2": 2, "hsdp": 2}
NUM_STEPS, BATCH, EPOCHS = 44, 10, 4  # of 103 samples: 11 steps an epoch
_LIMIT = 120.0


@dataclass
class Suffered:
    """One fault and what it cost."""

    kind: str
    rank: int
    step: int  # that was the last one done when it struck
    seconds: float = 0.0  # to the next step
    lost: int = 0  # steps done again
    recovered: bool = False


@dataclass
class Story:
    """One job with its faults."""

    strategy: str
    seed: int
    faults: list[Suffered] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    folder: Path = Path()


class Launched:
    """A `rung train` in a process of its own, started again with --resume when it asks for it."""

    def __init__(
        self,
        folder: Path,
        arguments: list[str],
        *,
        num_ranks: int,
        prefix: list[str] | None = None,
        resumes: bool = True,
        task: Path = TASK,
    ) -> None:
        self.run_dir, self.num_ranks, self._task = folder / "run", num_ranks, task
        self._arguments, self._prefix, self._resumes = arguments, prefix or [], resumes
        self._orders = folder / "orders"
        self._orders.mkdir(parents=True, exist_ok=True)
        self._mark = uuid.uuid4().hex
        self._output = folder / "output.txt"
        self._file = self._output.open("ab")
        self._start([])

    def _start(self, more: list[str]) -> None:
        command = [*self._prefix, sys.executable, "-m", "rung.cli", "train", str(self._task), *self._arguments]
        where = ["--resume", str(self.run_dir)] if more else ["--out", str(self.run_dir)]
        environment = {**os.environ, "FAULTS": str(self._orders), "FAULT_MARK": self._mark, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [*command, *where], stdout=self._file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )

    def over(self) -> bool:
        """Whether the job has ended; one that asks to be resumed is, as a scheduler would."""
        code = self.process.poll()
        if code == RESUME_EXIT_CODE and self._resumes:
            self._start(["resume"])
            return False
        return code is not None

    def order(self, rank: int, kind: str) -> None:
        (self._orders / f"rank-{rank}").write_text(kind)

    def hold(self, is_held: bool) -> None:
        """Keep the ranks in their step, or let them go."""
        path = self._orders / "hold"
        path.touch() if is_held else path.unlink(missing_ok=True)

    def pid(self, rank: int) -> int | None:
        with contextlib.suppress(OSError, ValueError):
            status = StatusBoard(self.run_dir / ".state" / "status", self.num_ranks).read(rank)
            if status.pid and status.phase not in ("finished", "stopped", "not started"):
                return status.pid
        return None

    def rows(self) -> list[dict[str, Any]]:
        path = self.run_dir / "metrics.jsonl"
        if not path.exists():
            return []
        found = []
        for line in path.read_text().splitlines():
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
                        state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                        found += [int(entry.name)] if state not in "ZX" else []
        return found

    def close(self) -> None:
        for pid in self.left():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        self._file.close()


def arguments_for(strategy: str, num_ranks: int, *more: str) -> list[str]:
    return [
        "--strategy", strategy, "--nproc", str(num_ranks), "--checkpoint-every", "5", "--max-restarts", "5",
        "--timeout", "20", "--set", "log_every=1", "--set", "workers=1", *more,
    ]  # fmt: skip


# What does not depend on the number of ranks, so that runs of different worlds can be compared.
COMPARABLE = ["--precision", "fp64", "--set", "dropout=false"]


def reference(folder: Path, strategy: str, num_ranks: int, *more: str) -> dict[str, torch.Tensor]:
    """The weights of the run without faults."""
    words = "-".join([strategy, str(num_ranks), *more]).replace(",", "-").replace("/", "-")
    path = folder / f"reference-{words}"
    if not (path / "run" / "model.safetensors").exists():
        path.mkdir(parents=True)
        job = Launched(
            path, [*arguments_for(strategy, num_ranks, *more), "--set", "model.pause=0"], num_ranks=num_ranks
        )
        try:
            job.process.wait(_LIMIT)
            assert job.process.returncode == 0, job.output()
        finally:
            job.close()
    return dict(load_file(path / "run" / "model.safetensors"))


def expected_seen(seed: int = 0) -> torch.Tensor:
    """What `seen` must be when every sample was trained on once an epoch."""
    order, seen = Order(103, seed, shuffle=True), torch.zeros(103, dtype=torch.float64)
    for epoch in range(EPOCHS):
        for start in range(0, 103, BATCH):
            window = order.samples(epoch, start, min(start + BATCH, 103))
            seen[window] -= 1.0 / len(window)
    return seen


def suffer(
    folder: Path, strategy: str, num_ranks: int, kinds: list[str], seed: int, known: dict[str, torch.Tensor]
) -> Story:
    """Run a job, strike it with faults of these kinds at random moments, and look at what is left."""
    chance = random.Random(seed)
    story = Story(strategy, seed, folder=folder)
    folder.mkdir(parents=True, exist_ok=True)
    job = Launched(folder, arguments_for(strategy, num_ranks), num_ranks=num_ranks)
    # At least one fault comes before the first step, now and then.
    moments = sorted(chance.randrange(0, NUM_STEPS - 4) for _ in kinds)
    deadline = time.monotonic() + _LIMIT
    try:
        while not (job.run_dir / "config.toml").exists() and not job.over() and time.monotonic() < deadline:
            time.sleep(0.01)
        with small_disk(job.run_dir / "checkpoints", wanted="disk" in kinds) as disk:
            for kind, moment in zip(kinds, moments, strict=True):
                if not _reach(job, moment, deadline):
                    break
                time.sleep(chance.random() * 0.05)
                struck = _strike(job, kind, chance, disk, deadline)
                story.faults += [struck] if struck is not None else []
            while not job.over() and time.monotonic() < deadline:
                time.sleep(0.02)
        story.problems += examine(job, known, tolerance=0.0)
    finally:
        job.close()
    return story


def _reach(job: Launched, step: int, deadline: float) -> bool:
    while time.monotonic() < deadline and not job.over():
        if step == 0 or done(job.rows()) >= step:
            return True
        time.sleep(0.01)
    return False


def done(rows: list[dict[str, Any]]) -> int:
    """The last step that counts: after a new start, those before it may have to be done again."""
    starts = [i for i, row in enumerate(rows) if row["event"] in ("start", "resume")]
    own = rows[starts[-1] :] if starts else rows
    return max((int(row.get("step", 0)) for row in own if row["event"] in ("step", "resume")), default=0)


def _strike(job: Launched, kind: str, chance: random.Random, disk: Path | None, deadline: float) -> Suffered | None:
    """Hit the job. None if it was over before."""
    rank = chance.randrange(job.num_ranks)
    before = job.rows()
    fault = Suffered(kind, rank, done(before))
    started = time.monotonic()
    if kind in ("exception", "exit"):
        job.order(rank, kind)
    elif kind == "preempt":
        os.kill(job.process.pid, chance.choice([signal.SIGTERM, signal.SIGUSR1]))
    elif kind == "disk":
        _fill_for_a_while(disk, chance)
    else:
        pid = job.pid(rank)
        while pid is None and time.monotonic() < deadline and not job.over():
            time.sleep(0.01)
            pid = job.pid(rank)
        if pid is None:
            return None
        if kind == "corrupt":
            _flip_a_byte(job.run_dir / "checkpoints", chance)
        signals = {"kill": signal.SIGKILL, "corrupt": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signals[kind])
            if kind == "stop":
                time.sleep(chance.uniform(0.3, 1.5))
                os.kill(pid, signal.SIGCONT)
    _await_recovery(job, fault, before, started, deadline)
    return fault


def _await_recovery(job: Launched, fault: Suffered, before: list[Any], started: float, deadline: float) -> None:
    """The next step after the fault took effect: after a new start, or simply the next one where there is none."""
    restarts = fault.kind not in ("stop", "disk")
    while time.monotonic() < deadline:
        is_over = job.over()
        rows = job.rows()[len(before) :]
        starts = [i for i, row in enumerate(rows) if row["event"] in ("start", "resume")]
        after = rows[starts[-1] + 1 :] if starts else ([] if restarts else rows)
        if any(row["event"] == "step" for row in after) or (is_over and after):
            if starts:
                reached = max([fault.step, *(r["step"] for r in rows[: starts[-1]] if r["event"] == "step")])
                fault.lost = max(0, reached - rows[starts[-1]].get("step", 0))
            fault.seconds, fault.recovered = time.monotonic() - started, True
            return
        if is_over:
            fault.recovered = job.process.returncode == 0  # it was about to end anyway
            return
        time.sleep(0.01)


def examine(job: Launched, known: dict[str, torch.Tensor], tolerance: float) -> list[str]:
    """What is wrong with a job that is over."""
    problems = []
    if job.process.poll() != 0:
        problems.append(f"exit code {job.process.poll()}: {job.output()[-1500:]}")
    left = job.left()
    deadline = time.monotonic() + 2
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = job.left()
    if left:
        problems.append(f"processes left: {left}")
    if problems:
        return problems
    steps = [row["step"] for row in committed(job.run_dir / "metrics.jsonl") if row["event"] == "step"]
    if steps != list(range(1, NUM_STEPS + 1)):
        problems.append(f"steps done: {steps}")
    weights = load_file(job.run_dir / "model.safetensors")
    for name, value in known.items():
        gap = float((weights[name].double() - value.double()).abs().max())
        if gap > tolerance or (tolerance == 0.0 and not torch.equal(weights[name], value)):
            problems.append(f"{name} differs by {gap:.2e}")
    gap = float((weights["seen.weight"].double().flatten() - expected_seen()).abs().max())
    if gap > 1e-5:
        problems.append(f"samples were not seen once an epoch: off by {gap:.2e}")
    return problems


def _flip_a_byte(checkpoints: Path, chance: random.Random) -> None:
    """In a file of the newest checkpoint, so that the one before it must do."""
    whole = sorted(path for path in checkpoints.glob("step-*") if (path / "manifest.json").exists())
    if len(whole) < 2:
        return
    with contextlib.suppress(OSError):
        victim = chance.choice(sorted(whole[-1].iterdir()))
        content = bytearray(victim.read_bytes())
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        victim.write_bytes(bytes(content))


@contextlib.contextmanager
def small_disk(folder: Path, *, wanted: bool) -> Iterator[Path | None]:
    """A disk of a few megabytes under a folder. Needs root; without, the folder is as it is."""
    if not wanted or os.geteuid() != 0:
        yield None
        return
    folder.mkdir(parents=True, exist_ok=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)], capture_output=True)
    try:
        yield folder if mounted.returncode == 0 else None
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "-l", str(folder)], capture_output=True)


def _fill_for_a_while(disk: Path | None, chance: random.Random) -> None:
    if disk is None:
        return
    filler = disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb") as file:
        while True:
            file.write(b"\0" * 65536)
    time.sleep(chance.uniform(0.3, 1.0))
    with contextlib.suppress(OSError):
        filler.unlink()
