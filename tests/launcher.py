"""`rung` in one warm process that calls the command line's `main` again and again, or as a command of its own."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from rung.distributed.status_board import RankStatus, StatusBoard

SCREEN = 40
MARK = "RUNG_TEST_MARK"


@dataclass
class Outcome:
    code: int
    output: str
    folder: Path
    num_ranks: int = 2

    @property
    def screen(self) -> str:
        return "\n".join(self.output.rstrip().splitlines()[-SCREEN:])

    def assert_failed(self) -> None:
        assert self.code == 1, self.output
        assert self.output.count("Traceback (most recent call last)") <= 1, self.output

    def assert_names(self, rank: int, step: int, phase: str) -> str:
        """The headline, after checks that the report is whole and there is one line for each other rank."""
        self.assert_failed()
        lines = self.screen.splitlines()
        where = f"in step {step}, phase {phase}" if step else f"before the first step, phase {phase}"
        headlines = [line for line in lines if re.match(rf"rank {rank} .*{where}", line)]
        assert len(headlines) == 1, f"no headline for rank {rank} {where} in:\n{self.screen}"
        others = [line for line in lines[lines.index(headlines[0]) + 1 :] if re.match(r"rank \d+: ", line)]
        named = sorted(int(line.split()[1].rstrip(":")) for line in others)
        assert named == [other for other in range(self.num_ranks) if other != rank], self.screen
        assert lines[-1].startswith("logs: ")
        return headlines[0]


WARM_UP = """
import torch
from torch.utils.data import TensorDataset

defaults = {"batch_size": 4, "steps": 2, "device": "cpu"}
def model(): return torch.nn.Linear(2, 2)
def train_data(): return TensorDataset(torch.zeros(8, 2), torch.zeros(8, 2))
def loss(output, target): return ((output - target) ** 2).mean()
def optimizer(model): return torch.optim.SGD(model.parameters(), lr=0.1)
"""

LOOP = """
import json, os, signal, sys
from rung.cli.main import main

reply = os.fdopen(int(sys.argv[1]), "w", buffering=1)
for line in sys.stdin:
    job = json.loads(line)
    os.chdir(job["folder"])
    for number, name in ((1, "output"), (2, "errors" if job["apart"] else "output")):
        file = os.open(name, os.O_CREAT | os.O_WRONLY | os.O_APPEND | (os.O_TRUNC if number == 1 else 0))
        os.dup2(file, number), os.close(file)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        exec(job["before"])
        code = main(job["arguments"])
    except BaseException as error:
        print("ESCAPED", repr(error))
        code = -1
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # one that comes after its job
    sys.stdout.flush(), sys.stderr.flush()
    reply.write(f"{code}\\n")
"""


class WarmLauncher:
    """A launcher that stays warm between jobs: starting one costs seconds (torch), and a job of it tenths."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        read, write = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-c", LOOP, str(write)],
            stdin=subprocess.PIPE,
            pass_fds=[write],
            env=environment(self.mark),
            start_new_session=True,
        )
        os.close(write)
        self._replies = read
        self._idle: set[int] | None = None
        self._ports: set[int] = set()

    @classmethod
    def start(cls, folder: Path) -> WarmLauncher:
        """One that has run a first job, so that what it keeps between jobs is known."""
        (folder / "task.py").write_text(WARM_UP)
        launcher = cls()
        outcome = launcher.run(folder)
        assert outcome.code == 0, outcome.output
        return launcher

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(
        self,
        folder: Path,
        *flags: str,
        command: str = "train",
        nproc: int = 2,
        before: str = "",
        during: Callable[[Path], None] | None = None,
        limit: float = 60,
        checks: bool = False,
    ) -> Outcome:
        """`rung COMMAND task.py` on two ranks, into the folder `out` in `folder`. Without `checks`, the model is not
        called before the first step, as tests expect that count its calls."""
        train = ["--out", "out", *([] if checks or "--check" in flags else ["--no-check"])]
        arguments = [command, "task.py", *(train if command == "train" else []), "--nproc", str(nproc), *flags]
        return self.call(folder, *arguments, before=before, during=during, limit=limit, nproc=nproc)

    def call(
        self,
        folder: Path,
        *arguments: str,
        before: str = "",
        during: Callable[[Path], None] | None = None,
        limit: float = 60,
        nproc: int = 2,
        apart: bool = False,
    ) -> Outcome:
        """`rung ARGUMENTS` in `folder`. With `apart`, errors are no part of the output but go to the file `errors`."""
        assert self._process.stdin is not None
        job = {"folder": str(folder), "arguments": arguments, "before": before, "apart": apart}
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        self._process.stdin.flush()
        if during is not None:
            during(folder)
        if not select.select([self._replies], [], [], limit)[0]:
            board = [(s.step, s.phase) for s in statuses(folder, nproc)]
            self.close()
            pytest.fail(f"the job did not end; its ranks are at {board}\n{(folder / 'output').read_text()}")
        code = int(os.read(self._replies, 100))
        outcome = Outcome(code, (folder / "output").read_text(), folder, nproc)
        if self._idle is None:
            self._idle, self._ports = marked(self.mark), listening(self.mark)
        assert_soon(lambda: marked(self.mark) == self._idle, "a process is left behind")
        assert_soon(lambda: listening(self.mark) <= self._ports, "a port is left behind")
        return outcome

    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        kill_all(self.mark)
        self._process.wait()
        os.close(self._replies)


_commands: list[str] = []  # their marks


@dataclass
class Command:
    """`rung train` as a command of its own, in a session of its own; with `terminal`, on a terminal of its own."""

    process: subprocess.Popen[bytes]
    mark: str
    folder: Path
    terminal: int | None
    output: str

    @classmethod
    def start(
        cls, folder: Path, *flags: str, terminal: bool = False, output: str = "output", shell: str | None = None
    ) -> Command:
        """`shell` is run before, in the same process."""
        mark = uuid.uuid4().hex
        _commands.append(mark)
        arguments = [sys.executable, "-m", "rung", "train", "task.py", "--no-check", *flags]
        if shell is not None:
            arguments = ["sh", "-c", f'{shell} && exec "$@"', "sh", *arguments]
        if not terminal:
            with (folder / output).open("wb") as file:
                process = subprocess.Popen(
                    arguments,
                    cwd=folder,
                    stdout=file,
                    stderr=file,
                    stdin=subprocess.DEVNULL,
                    env=environment(mark),
                    start_new_session=True,
                )
            return cls(process, mark, folder, None, output)
        ours, theirs = pty.openpty()
        # A terminal of its own: what is typed there reaches the whole foreground group, as it does for a user.
        take_terminal = (
            "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", take_terminal, *arguments],
            cwd=folder,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**environment(mark), "TERM": "xterm", "COLUMNS": "100", "LINES": "40"},
            start_new_session=True,
        )
        os.close(theirs)
        return cls(process, mark, folder, ours, output)

    def end(self, limit: float = 60) -> Outcome:
        """Wait for the end, and for the end of everything that it started."""
        output = b""
        try:
            if self.terminal is not None:
                deadline = time.monotonic() + limit
                while time.monotonic() < deadline and select.select([self.terminal], [], [], limit)[0]:
                    try:
                        output += os.read(self.terminal, 65536)
                    except OSError:  # the other side is closed
                        break
                os.close(self.terminal)
            code = self.process.wait(limit)
            if self.terminal is None:
                output = (self.folder / self.output).read_bytes()
            text = output.decode().replace("\r\n", "\n")
            assert_soon(lambda: not marked(self.mark), "a process is left behind")
            return Outcome(code, text, self.folder)
        finally:
            kill_all(self.mark)


def end_commands() -> None:
    """Of a test that failed before it came to their end."""
    while _commands:
        kill_all(_commands.pop())


def kill_all(mark: str) -> None:
    for pid in marked(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def environment(mark: str) -> dict[str, str]:
    return {**os.environ, MARK: mark, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def marked(mark: str) -> set[int]:
    """Every process that descends from one, whoever its parent is by now."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                    found.add(int(entry.name))
    return found


def listening(mark: str) -> set[int]:
    """The ports that these processes listen at."""
    ports = {}
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for line in Path("/proc/net", name).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A":
                    ports[fields[9]] = int(fields[1].rpartition(":")[2], 16)
    found = set()
    for pid in marked(mark):
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inode = re.match(r"socket:\[(\d+)\]", os.readlink(descriptor))
                    if inode and inode.group(1) in ports:
                        found.add(ports[inode.group(1)])
    return found


def statuses(folder: Path, num_ranks: int) -> list[RankStatus]:
    try:
        board = StatusBoard(folder / "out" / ".state" / "status", num_ranks)
    except (FileNotFoundError, ValueError):
        return []
    return [board.read(rank) for rank in range(num_ranks)]


def wait_until_training(folder: Path, num_ranks: int = 2) -> None:
    assert_soon(
        lambda: len(found := statuses(folder, num_ranks)) == num_ranks and all(s.step >= 2 for s in found),
        "training did not begin",
        seconds=60,
    )


def assert_soon(condition: Callable[[], bool], complaint: str, seconds: float = 5) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, complaint
        time.sleep(0.02)
