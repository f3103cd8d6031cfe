"""A job that does not come forward ends within its timeout, and the report says who waits for whom, and where."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.launcher import SCREEN, Outcome, WarmLauncher, statuses, wait_until_training
from tests.marks import slow

TIMEOUT = 4.0

TASK = """
import os, pathlib, time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

KIND, RANK = {kind!r}, {rank!r}
ME = int(os.environ.get("RANK", "-1"))
BATCH = 6
defaults = {{"batch_size": BATCH, "shuffle": False, "log_every": 1, "device": "cpu"}}
here = pathlib.Path(__file__).parent
forwards = []


def strikes(kind):
    if kind != KIND or ME != RANK:
        return False
    (here / "fault").touch()
    return True


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x):
        if self.training:
            forwards.append(0)
        if len(forwards) == 3 and strikes("sleep"):
            time.sleep(1000)  # in forward
        if len(forwards) == 3 and strikes("busy"):
            while True:  # in forward
                pass
        if KIND == "slow":
            time.sleep(0.1)
        return self.layers(x).sum(dim=1)


class Numbers(Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, index):
        if index // BATCH == 2 and strikes("data"):
            time.sleep(1000)  # in the data set
        return torch.full((4,), float(index)), torch.tensor(1.0)


def model():
    if strikes("model"):
        time.sleep(1000)  # in model
    return Net()


def train_data():
    return Numbers()


def loss(output, target):
    if len(forwards) == 3 and strikes("extra"):
        dist.all_reduce(torch.ones(1))  # of one rank
    if len(forwards) == 3 and KIND == "shapes":
        strikes("shapes")
        dist.all_reduce(torch.ones(1 + 1000 * ME))  # of all ranks
    return ((output - target) ** 2).mean()


def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=1e-4)
"""


def write_task(folder: Path, kind: str, rank: int = 1) -> None:
    (folder / "task.py").write_text(TASK.format(kind=kind, rank=rank))


def line_of(comment: str) -> str:
    """The place of a line of the task, by its comment."""
    return f"task.py:{next(n for n, text in enumerate(TASK.splitlines(), start=1) if text.endswith(comment))}"


def run(launcher: WarmLauncher, folder: Path, *flags: str, **options: object) -> Outcome:
    outcome = launcher.run(folder, "--timeout", f"{TIMEOUT:g}", "--steps", "8", *flags, **options)  # type: ignore[arg-type]
    assert outcome.code == 1, outcome.output
    assert len(outcome.output.splitlines()) < SCREEN, "all of it fits a screen"
    assert "Traceback" not in outcome.output
    return outcome


def headline(outcome: Outcome) -> str:
    found = [line for line in outcome.output.splitlines() if line.startswith("the job hangs")]
    assert len(found) == 1, outcome.output
    return found[0]


def detail(outcome: Outcome, rank: int) -> str:
    found = [line for line in outcome.output.splitlines() if re.match(rf"  ranks? ([\d, -]*\b)?{rank}\b", line)]
    assert len(found) == 1, outcome.output
    return found[0]


WAITS = {
    "ddp": "waits in all_reduce (backward: gradients being reduced by DDP) at rung/runtime/passes.py:",
    "fsdp": "waits in all_gather at task.py:",
    "pp": "waits in send/recv (between stages) at rung/parallel/pipeline/schedule.py:",
}


@pytest.mark.parametrize(
    ("strategy", "rank", "flags"), [("ddp", 1, ()), slow("fsdp", 0, ()), ("pp", 1, ("--micro-batch", "6"))]
)
def test_a_rank_that_sleeps_for_ever(
    launcher: WarmLauncher,
    tmp_path: Path,
    strategy: str,
    rank: int,
    flags: tuple[str, ...],
) -> None:
    write_task(tmp_path, "sleep", rank)
    outcome = run(launcher, tmp_path, "--strategy", strategy, *flags)
    other, operation = 1 - rank, WAITS[strategy].split()[2]
    expected = rf"the job hangs in step \d: rank {rank} has not reached {operation}, in which rank {other} waits"
    assert re.fullmatch(expected, headline(outcome)), outcome.output
    asleep = detail(outcome, rank)
    assert f", phase forward: asleep at {line_of('# in forward')} in forward: time.sleep(1000)" in asleep
    assert WAITS[strategy] in detail(outcome, other)


def test_a_rank_that_computes_for_ever(launcher: WarmLauncher, tmp_path: Path) -> None:
    write_task(tmp_path, "busy")
    outcome = run(launcher, tmp_path, nproc=3)
    assert headline(outcome).endswith("step 3: rank 1 has not reached all_reduce, in which ranks 0, 2 wait")
    assert re.search(r"(busy|running|asleep) at task\.py:\d+ in forward", detail(outcome, 1))
    assert detail(outcome, 0) == detail(outcome, 2)


@pytest.mark.parametrize("workers", [slow(0), 1])
def test_a_loader_that_stalls(launcher: WarmLauncher, tmp_path: Path, workers: int) -> None:
    write_task(tmp_path, "data")
    outcome = run(launcher, tmp_path, "--set", f"workers={workers}")
    assert headline(outcome).endswith("rank 1 has not reached all_reduce, in which rank 0 waits")
    who = "waits for its data loader: data worker 0 is asleep" if workers else "asleep"
    place = f"{line_of('# in the data set')} in __getitem__: time.sleep(1000)"
    assert f"step 3, phase reading data: {who} at {place}" in detail(outcome, 1)


def test_a_rank_that_never_comes_to_the_start(launcher: WarmLauncher, tmp_path: Path) -> None:
    write_task(tmp_path, "model")
    outcome = run(launcher, tmp_path)
    assert headline(outcome).startswith("the job hangs before the first step: rank 1 has not reached")
    assert f"phase building: asleep at {line_of('# in model')} in model" in detail(outcome, 1)


def test_a_rank_that_was_stopped(launcher: WarmLauncher, tmp_path: Path) -> None:
    write_task(tmp_path, "slow")

    def stop(folder: Path) -> None:
        wait_until_training(folder)
        os.kill(statuses(folder, 2)[1].pid, signal.SIGSTOP)

    outcome = run(launcher, tmp_path, "--steps", "1000", during=stop)
    assert "rank 1 has not reached" in headline(outcome)
    assert "stopped by a signal (SIGSTOP)" in detail(outcome, 1)


def test_a_rank_that_is_stopped_for_a_while_goes_on(launcher: WarmLauncher, tmp_path: Path) -> None:
    write_task(tmp_path, "slow")

    def stop(folder: Path) -> None:
        wait_until_training(folder)
        pid = statuses(folder, 2)[1].pid
        os.kill(pid, signal.SIGSTOP)
        time.sleep(1)
        os.kill(pid, signal.SIGCONT)

    outcome = launcher.run(tmp_path, "--timeout", "6", "--steps", "12", during=stop)
    assert outcome.code == 0, outcome.output


# -- collectives that do not fit each other ----------------------------------------------------------------------------


def test_one_rank_calls_one_more_than_the_others_and_all_wait(launcher: WarmLauncher, tmp_path: Path) -> None:
    write_task(tmp_path, "extra")
    outcome = run(launcher, tmp_path, "--strategy", "fsdp", nproc=3)
    place = line_of("# of one rank")
    assert f"step 3: rank 1 waits in all_reduce at {place} in loss, ranks 0, 2 in all_gather" in headline(outcome)
    assert "all must call the same operations in the same order" in headline(outcome)
    assert f"waits in all_reduce at {place} in loss: dist.all_reduce(torch.ones(1))" in detail(outcome, 1)


MISMATCH = "Ranks called different operations, or with different sizes"


def test_one_rank_calls_one_more_and_meets_a_message_of_another_size(
    launcher: WarmLauncher,
    tmp_path: Path,
) -> None:
    write_task(tmp_path, "extra")
    outcome = run(launcher, tmp_path, nproc=3)
    place = line_of("# of one rank")
    lines = outcome.screen.splitlines()
    crashed = [line for line in lines if line.startswith("rank 1 was killed by SIGABRT in step 3, phase forward")]
    assert len(crashed) == 1, outcome.output
    assert f"in all_reduce at {place} in loss. {MISMATCH}" in crashed[0]
    for other in (0, 2):
        found = [line for line in lines if line.startswith(f"rank {other}: ")]
        assert len(found) == 1 and "all_reduce (backward: gradients being reduced by DDP)" in found[0], outcome.output
    assert outcome.output.count("terminate called") == 1


def test_sizes_differ(launcher: WarmLauncher, tmp_path: Path) -> None:
    write_task(tmp_path, "shapes")
    outcome = run(launcher, tmp_path, nproc=3)
    place = line_of("# of all ranks")
    lines = outcome.screen.splitlines()
    crashed = [line for line in lines if re.match(r"rank [01] was killed by SIGABRT in step 3, phase forward", line)]
    assert len(crashed) == 1, outcome.output
    assert f"in all_reduce at {place} in loss. {MISMATCH}" in crashed[0]
    others = [line for line in lines if re.match(r"rank \d: ", line)]
    assert len(others) == 2 and all(f"in all_reduce at {place} in loss" in line for line in others), outcome.output
