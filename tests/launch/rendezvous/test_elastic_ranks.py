"""Runs that lose ranks and machines, gain some, or are asked to leave, and go on: with the numbers of one that was not.

Most of it runs in one warm launcher, as the tests of failures do. Two machines are two launchers on this one.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rung.cli.main import main
from rung.distributed.status_board import RankStatus, StatusBoard
from tests.launcher import Command, Outcome, WarmLauncher, assert_soon
from tests.metrics_file import committed

TASK = """
import os, pathlib, signal, time

import torch
from torch import nn
from torch.utils.data import TensorDataset

defaults = {"batch_size": 12, "log_every": 1, "device": "cpu", "precision": "fp64", "eval_every": "never"}
here = pathlib.Path(__file__).parent


class Net(nn.Module):
    def __init__(self, nap, boom):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
        self.nap, self.boom, self.calls = nap, boom, 0

    def forward(self, x):
        self.calls += 1
        if self.boom and os.environ["RANK"] == "1" and self.calls == self.boom:
            raise ValueError("boom in the task")
        nap = here / "nap"
        time.sleep(float(nap.read_text() or 0) if nap.exists() else self.nap)
        return self.layers(x)


def model(nap=0.0, boom=0):
    return Net(nap, boom)


def train_data():
    g = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(103, 4, generator=g), torch.randn(103, 4, generator=g))


def loss(output, target):
    return ((output - target) ** 2).mean()


def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
"""
NAP = ("--set", "model.nap=0.05")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "task.py").write_text(TASK)
    return tmp_path


def statuses(out: Path) -> dict[int, RankStatus]:
    """What the ranks of a launcher do, those that are there."""
    for path in [out / ".state" / "status", *out.glob(".state/*/status")]:
        try:
            board = StatusBoard(path, 8)
        except (FileNotFoundError, ValueError):
            continue
        return {rank: status for rank in range(8) if (status := board.read(rank)).pid}
    return {}


def wait_for(
    out: Path, condition: Callable[[dict[int, RankStatus]], bool], seconds: float = 60
) -> dict[int, RankStatus]:
    found: dict[int, RankStatus] = {}

    def look() -> bool:
        nonlocal found
        found = statuses(out)
        return condition(found)

    assert_soon(look, f"the ranks of {out} are not where they should be", seconds=seconds)
    return found


def all_at(step: int, num_ranks: int) -> Callable[[dict[int, RankStatus]], bool]:
    return lambda found: len(found) == num_ranks and all(status.step >= step for status in found.values())


def weights(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()


def assert_every_step_once(steps: int, *runs: Path, killed: bool = False) -> None:
    """A run tells of each step once. Where a rank was killed, it may lack the line of the step that it went on from:
    the rank took its part of the loss, or the line, along, while another one had finished the update."""
    told: list[int] = []
    lost: set[int] = set()
    for out in runs:
        rows = committed(out / "metrics.jsonl")
        resumed = [row["step"] for row in rows if row["event"] == "resume"]
        told = [step for step in told if step <= min(resumed)] + [row["step"] for row in rows if row["event"] == "step"]
        lost.update(resumed if killed else ())
    assert told == sorted(set(told)) and set(range(1, steps + 1)) - lost <= set(told) <= set(range(1, steps + 1))


def reference(launcher: WarmLauncher, folder: Path, nproc: str = "2", steps: int = 40) -> bytes:
    """The weights of the run that nothing happened to."""
    outcome = launcher.run(folder, "--steps", str(steps), nproc=nproc)
    assert outcome.code == 0, outcome.output
    (folder / "out").rename(folder / "reference")
    return weights(folder / "reference")


# -- ranks that die --------------------------------------------------------------------------------------------------


def test_a_killed_rank_is_replaced_and_the_numbers_are_those_of_a_run_without_faults(
    launcher: WarmLauncher, folder: Path
) -> None:
    expected = reference(launcher, folder)

    def kill(_: Path) -> None:
        found = wait_for(folder / "out", all_at(7, 2))
        os.kill(found[1].pid, signal.SIGKILL)

    outcome = launcher.run(
        folder, "--steps", "40", "--checkpoint-every", "3", "--max-restarts", "1", *NAP, nproc="2", during=kill
    )
    assert outcome.code == 0, outcome.output
    assert re.search(r"^rank 1 was killed by SIGKILL in step \d+, phase \w+.*; going on with 2 ranks from step \d+$",
                     outcome.output, re.MULTILINE)  # fmt: skip
    report = (folder / "out" / "failures" / "001.txt").read_text()
    assert "rank 0: " in report and "logs: " in report
    assert "---- attempt 2" in (folder / "out" / "logs" / "rank-0.log").read_text()
    assert "---- attempt" not in outcome.output
    assert weights(folder / "out") == expected
    assert_every_step_once(40, folder / "out", killed=True)


def test_killed_ranks_leave_no_files_behind_while_the_run_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither sockets of their loader processes nor, once there is a later checkpoint, the state that was rescued."""
    with tempfile.TemporaryDirectory() as temporary:  # a short name: a socket's may have 107 characters
        monkeypatch.setenv("TMPDIR", temporary)
        flags = ("--set", "workers=1", "--checkpoint-every", "5", "--max-restarts", "3", "--steps", "60", *NAP)
        command = Command.start(folder, "--nproc", "2", "--out", "out", *flags)
        counts = []
        for step in (7, 17, 27):
            found = wait_for(folder / "out", all_at(step, 2))
            counts.append(len(list(Path(temporary).rglob("listener-*"))))
            os.kill(found[0].pid, signal.SIGKILL)
            assert_soon((folder / "out" / "rescue").exists, "rank 1 did not rescue its state")
        wait_for(folder / "out", all_at(47, 2))
        assert not (folder / "out" / "rescue").exists()
        assert command.end().code == 0
        assert counts[0] > 0 and counts == counts[:1] * 3


def test_a_rank_that_stands_still_costs_no_step(launcher: WarmLauncher, folder: Path) -> None:
    """The others wait for it in a collective. They are made to give up, and save what they have."""

    def stop(_: Path) -> None:
        os.kill(wait_for(folder / "out", all_at(5, 2))[1].pid, signal.SIGSTOP)

    outcome = launcher.run(
        folder, "--steps", "30", "--max-restarts", "1", "--timeout", "3", *NAP, nproc="2", during=stop
    )
    assert outcome.code == 0, outcome.output
    hung, reached = re.findall(r"^the job hangs in step (\d+): .*; going on with 2 ranks from step (\d+)$",
                               outcome.output, re.MULTILINE)[0]  # fmt: skip
    assert int(reached) >= int(hung) - 1
    assert_every_step_once(30, folder / "out", killed=True)


def test_failures_without_progress_end_the_job_with_the_report(launcher: WarmLauncher, folder: Path) -> None:
    outcome = launcher.run(folder, "--steps", "9", "--max-restarts", "2", "--set", "model.boom=1", nproc=2)
    before, going_on, outcome.output = outcome.output.rpartition("; going on with 2 ranks from the first step")
    assert before.count("; going on with 2 ranks from the first step") == 1 and going_on
    outcome.assert_names(1, 1, "forward")
    assert len(list((folder / "out" / "failures").iterdir())) == 2


def test_a_mistake_that_stays_is_not_tried_again(launcher: WarmLauncher, folder: Path) -> None:
    (folder / "task.py").write_text(TASK + "\n\ndef train_data():\n    return TensorDataset(torch.empty(0, 4))\n")
    outcome = launcher.run(folder, "--max-restarts", "3", nproc="2")
    assert outcome.code == 2
    assert "going on" not in outcome.output


# -- a number of processes that changes ------------------------------------------------------------------------------


def test_a_run_shrinks_and_grows_and_loses_no_step(launcher: WarmLauncher, folder: Path) -> None:
    out = folder / "out"

    def act(_: Path) -> None:
        found = wait_for(out, all_at(3, 3))
        os.kill(found[2].pid, signal.SIGKILL)
        found = wait_for(out, lambda now: all_at(1, 2)(now) and now[0].pid != found[0].pid)
        assert main(["scale", str(out), "1"]) == 0
        found = wait_for(out, lambda now: all_at(1, 1)(now) and now[0].pid != found[0].pid)
        assert main(["scale", str(out), "2"]) == 0
        found = wait_for(out, lambda now: all_at(1, 2)(now) and now[0].pid != found[0].pid)
        os.kill(found[1].pid, signal.SIGUSR1)

    outcome = launcher.run(folder, "--steps", "60", "--checkpoint-every", "1", *NAP, nproc="1:3", during=act)
    assert outcome.code == 0, outcome.output
    told = re.findall(r"; going on with (\d) rank", outcome.output)
    assert told == ["2", "1", "2", "2"]
    assert "scaled from 2 to 1 processes" in outcome.output and "a rank was asked to stop" in outcome.output
    assert_every_step_once(60, out, killed=True)
    rows = [row for row in committed(out / "metrics.jsonl") if row["event"] in ("start", "resume")]
    assert [row["ranks"] for row in rows] == [3, 2, 1, 2, 2]


def test_ranks_that_do_not_fit_wait_as_spares(launcher: WarmLauncher, folder: Path) -> None:
    out = folder / "out"

    def act(_: Path) -> None:
        found = wait_for(out, lambda now: len(now) == 3 and now[0].step >= 3)
        assert [status.phase for status in found.values()].count("spare") == 1
        os.kill(found[1].pid, signal.SIGKILL)

    outcome = launcher.run(
        folder, "--strategy", "fsdp2", "--steps", "30", "--checkpoint-every", "1", *NAP, nproc="2:3", during=act
    )
    assert outcome.code == 0, outcome.output
    assert "3 processes: fsdp2 uses 2, rank 2 waits as a spare" in outcome.output
    assert "rank 2: waited as a spare" in (out / "failures" / "001.txt").read_text()
    assert_every_step_once(30, out, killed=True)


SEQUENCES = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

defaults = {"batch_size": 6, "log_every": 1, "device": "cpu", "precision": "fp64", "eval_every": "never"}
blocks = "layers.*"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(11, 8)
        layers = [nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)]
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens):
        x = self.token(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def model():
    return Net()


def train_data():
    tokens = torch.randint(11, (31, 8), generator=torch.Generator().manual_seed(1))
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)
"""


def test_a_run_that_shares_sequences_loses_a_rank_and_no_number(launcher: WarmLauncher, folder: Path) -> None:
    """Seven positions on two ranks each; of the three ranks that are left, one waits."""
    (folder / "task.py").write_text(SEQUENCES)
    out = folder / "out"
    assert launcher.run(folder, "--steps", "60", nproc="1").code == 0
    out.rename(folder / "reference")
    outcome = launcher.run(
        folder, "--strategy", "ddp,cp2", "--steps", "60", "--checkpoint-every", "1", nproc="2:4",
        during=lambda _: os.kill(wait_for(out, all_at(3, 4))[3].pid, signal.SIGKILL),
    )  # fmt: skip
    assert outcome.code == 0, outcome.output
    rows = [row for row in committed(out / "metrics.jsonl") if row["event"] in ("start", "resume")]
    assert [row["ranks"] for row in rows] == [4, 2], outcome.output
    assert_every_step_once(60, out, killed=True)
    expected, found = load_file(folder / "reference/model.safetensors"), load_file(out / "model.safetensors")
    assert max((found[name] - value).abs().max().item() for name, value in expected.items()) < 1e-9


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--nproc", "1:3", "--strategy", "tp2"), ["'tp2' needs at least 2"]),
        (("--nproc", "2", "--nnodes", "1:2"), ["--rdzv HOST:PORT"]),
        (("--nproc", "2", "--rdzv", "localhost:1"), ["--nnodes"]),
        (("--nproc", "3", "--strategy", "fsdp2"), ["a layout of 2 processes, but the job has 3"]),
    ],
)
def test_terms_that_cannot_be_are_refused(
    folder: Path, flags: tuple[str, ...], words: list[str], capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("rung.launch.train_command.start_fork_server", lambda: None)
    assert main(["train", str(folder / "task.py"), *flags]) == 2
    told = capfd.readouterr().err
    for word in words:
        assert word in told


# -- asked to leave --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("who", "number"), [("launcher", signal.SIGTERM), ("rank", signal.SIGUSR1)])
def test_who_is_asked_to_leave_can_be_resumed(
    launcher: WarmLauncher,
    folder: Path,
    number: int,
    who: str,
) -> None:
    expected = reference(launcher, folder, steps=25)

    def ask(_: Path) -> None:
        found = wait_for(folder / "out", all_at(4, 2))
        os.kill(launcher.pid if who == "launcher" else found[1].pid, number)

    outcome = launcher.run(folder, "--steps", "25", *NAP, nproc="2", during=ask)
    assert outcome.code == 75, outcome.output
    last = outcome.output.splitlines()[-1]
    assert re.fullmatch(r"stopped in step \d+ after a checkpoint; go on with: rung train task.py --resume out", last)
    assert not (folder / "out" / "model.safetensors").exists()
    outcome = resume(launcher, folder)
    assert outcome.code == 0, outcome.output
    assert weights(folder / "out") == expected
    assert_every_step_once(25, folder / "out")
    outcome = resume(launcher, folder)
    assert outcome.code == 0 and "out is finished" in outcome.output.splitlines()[-1]


def resume(launcher: WarmLauncher, folder: Path, *flags: str) -> Outcome:
    # --resume alone, with --out, which `run` gives: the run in that directory goes on.
    return launcher.run(folder, "--resume", *flags, nproc="2")


def test_a_stop_before_the_first_step_is_resumed_from_there(launcher: WarmLauncher, folder: Path) -> None:
    def ask(_: Path) -> None:
        wait_for(folder / "out", lambda found: len(found) == 2)
        os.kill(launcher.pid, signal.SIGTERM)

    outcome = launcher.run(folder, "--steps", "5", *NAP, nproc="2", during=ask)
    assert outcome.code == 75, outcome.output
    outcome = resume(launcher, folder)
    assert outcome.code == 0, outcome.output
    assert_every_step_once(5, folder / "out")


def test_ranks_that_cannot_stop_are_ended_after_the_grace_time(launcher: WarmLauncher, folder: Path) -> None:
    def ask(_: Path) -> None:
        wait_for(folder / "out", lambda found: len(found) == 2 and found[0].step == 1)
        os.kill(launcher.pid, signal.SIGTERM)

    outcome = launcher.run(folder, "--set", "model.nap=60", "--set", "grace_seconds=1", nproc="2", during=ask)
    assert outcome.code == 75
    assert "without a checkpoint of it" in outcome.output.splitlines()[-1]


def test_a_second_sigterm_does_not_wait(launcher: WarmLauncher, folder: Path) -> None:
    def ask(_: Path) -> None:
        wait_for(folder / "out", lambda found: len(found) == 2 and found[0].step == 1)
        os.kill(launcher.pid, signal.SIGTERM)
        time.sleep(1.2)
        os.kill(launcher.pid, signal.SIGTERM)

    outcome = launcher.run(folder, "--set", "model.nap=60", nproc="2", during=ask)
    assert outcome.code == 143
    assert outcome.output.splitlines()[-1] == "interrupted in step 1; what was written lies in out"


def test_asked_while_starting_nothing_was_done(folder: Path) -> None:
    command = Command.start(folder, "--nproc", "2", "--out", "out")
    wait_until_it_listens(command)
    os.kill(command.process.pid, signal.SIGUSR1)
    outcome = command.end()
    assert outcome.code == 75
    assert "nothing was done yet" in outcome.output or "go on with" in outcome.output


def wait_until_it_listens(command: Command) -> None:
    """Python itself starts without handlers."""
    status = Path(f"/proc/{command.process.pid}/status")

    def has_handler() -> bool:
        caught = int(re.findall(r"^SigCgt:\s*(\w+)", status.read_text(), re.MULTILINE)[0], 16)
        return bool(caught & 1 << signal.SIGUSR1 - 1)

    assert_soon(has_handler, "the launcher does not start", seconds=60)


# -- several machines ------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_machines_join_leave_and_are_lost(folder: Path) -> None:
    """Three launchers of a job for two machines. It takes steps until all has happened that is to happen."""
    (folder / "nap").write_text("0.2")
    port = free_port()
    place = subprocess.Popen([sys.executable, "-m", "rung", "rdzv", str(port)], stdout=subprocess.PIPE)
    try:
        assert place.stdout is not None
        assert b"machines can meet" in place.stdout.readline()
        _act_with_machines(folder, f"127.0.0.1:{port}")
    finally:
        place.terminate()
        assert place.wait(10) == 0


def _act_with_machines(folder: Path, endpoint: str) -> None:
    flags = ("--nproc", "1", "--nnodes", "1:2", "--rdzv", endpoint, "--steps", "400", "--checkpoint-every", "50")

    def start(name: str) -> Command:
        return Command.start(folder, *flags, "--out", name, output=f"{name}.txt")

    def joined(names: list[str]) -> str:
        assert_soon(lambda: any(map(trains, names)), f"none of {names} joined", seconds=60)
        return next(name for name in names if trains(name))

    def trains(name: str) -> bool:
        found = statuses(folder / name)
        return bool(found) and all(status.step >= 1 for status in found.values())

    first = start("a")
    wait_for(folder / "a", all_at(2, 1))  # or it might be the one that there is no room for
    others = {name: start(name) for name in ("b", "c")}
    name = joined(["b", "c"])  # there is no room for the other
    os.kill(others[name].process.pid, signal.SIGTERM)
    assert others.pop(name).end().code == 75
    name = joined(list(others))
    os.kill(first.process.pid, signal.SIGKILL)  # the machine of rank 0
    first.end()
    assert_soon(lambda: "a machine was lost" in (folder / f"{name}.txt").read_text(), "nobody missed it", seconds=30)
    (folder / "nap").write_text("0")
    outcome = others[name].end(limit=60)
    assert outcome.code == 0, outcome.output
    assert "left; going on with" in (folder / "a.txt").read_text()
    assert_every_step_once(400, folder / "a", folder / name, killed=True)  # on the disks of two machines
