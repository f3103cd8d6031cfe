"""Whatever goes wrong in whichever process, the whole job ends soon, leaves nothing behind, and says what it was.

Most jobs here are run by a warm launcher (tests/launcher.py). What concerns the launcher's own beginning and end runs
as the command itself.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launcher import Command, WarmLauncher, assert_soon, environment, marked, wait_until_training
from tests.marks import slow, slow_if

TASK = """
import os, pathlib, resource, signal, sys, threading, time, warnings

import torch
from torch import nn
from torch.utils.data import Dataset

PLACE, FAULT, RANK, STEP = {place!r}, {fault!r}, {rank!r}, {step!r}
POOL = []
OTHERS = {others!r}  # what the other ranks do at the same place
BATCH = 4
defaults = {{"batch_size": BATCH, "shuffle": False, "log_every": 1, "device": "cpu"}}
here = pathlib.Path(__file__).parent
counts = {{"forward": 0, "backward": 0, "update": 0}}


def strike(place, step=STEP):
    if place != PLACE or step != STEP or "RANK" not in os.environ:
        return
    if int(os.environ["RANK"]) != RANK:
        if OTHERS == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(60)
        return
    if FAULT == "late kill":
        time.sleep(1)  # by now the others wait for this rank inside a collective
    (here / "fault").touch()
    if FAULT == "raise":
        raise ValueError("boom in the task")
    if FAULT == "raise with a broken message":
        class Broken(Exception):
            def __str__(self):
                raise RuntimeError("not even this")
        raise Broken()
    if FAULT == "raise a long line":
        raise ValueError("x" * 20_000)
    if FAULT == "recurse":
        strike_again(place)
    if FAULT == "sys.exit(0)":
        sys.exit(0)
    if FAULT == "sys.exit(3)":
        sys.exit(3)
    if FAULT == "os._exit(0)":
        os._exit(0)
    if FAULT == "os._exit(7)":
        os.write(2, b"a last word from C++\\n")
        os._exit(7)
    if FAULT in ("kill", "late kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    if FAULT == "terminate":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a rank takes it for a request to leave in good order
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    if FAULT == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if FAULT.startswith("out of memory"):
        run_out_of_memory()
    if FAULT == "hang":
        time.sleep(60)
    if FAULT == "hang and hold the interpreter":
        import re
        re.match("(a+)+$", "a" * 60 + "b")
    if FAULT == "leave processes":
        import subprocess
        subprocess.Popen(["sleep", "60"])
        raise ValueError("boom in the task")
    if FAULT == "leave a pool":
        from concurrent.futures import ThreadPoolExecutor
        POOL.append(ThreadPoolExecutor(1))
        POOL[-1].submit(int).result()
        return
    if FAULT == "leave a thread":
        threading.Thread(target=time.sleep, args=(60,), name="forgotten").start()


def strike_again(place):
    strike_again(place)


def run_out_of_memory():
    used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
    hoard, size = [], 1 << 20
    while FAULT.endswith("to the last byte") and size >= 64:
        try:
            hoard.append(bytearray(size))
        except MemoryError:
            size //= 2
    while True:
        hoard.append(torch.zeros(1 << 18))  # 1 MiB


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        counts["backward"] += 1
        strike("backward", counts["backward"])
        return gradient


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x):
        if self.training:
            counts["forward"] += 1
            strike("forward", counts["forward"])
        return Backward.apply(self.layers(x)).sum(dim=1)

    def state_dict(self, *args, **kwargs):
        strike("saving")
        return super().state_dict(*args, **kwargs)


class Numbers(Dataset):
    def __init__(self, count, training):
        self.count, self.training = count, training

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if self.training:
            strike("data", index // BATCH + 1)
        return torch.full((4,), float(index % 12)), torch.tensor(1.0)  # small: it must not diverge in long runs


def model():
    strike("model")
    return Net()


def train_data(count=12):
    return Numbers(count, True)


def eval_data():
    return Numbers(6, False)


def loss(output, target):
    return ((output - target) ** 2).mean()


class SGD(torch.optim.SGD):
    def step(self, closure=None):
        counts["update"] += 1
        strike("update", counts["update"])
        return super().step(closure)


def optimizer(model):
    strike("optimizer")
    return SGD(model.parameters(), lr=1e-4)


def metrics(output, target):
    strike("metrics")
    return {{"error": (output - target).abs()}}


strike("load")
"""


def write_task(
    folder: Path,
    place: str = "nowhere",
    fault: str = "",
    rank: int = 0,
    step: int = 2,
    others: str = "",
    extra: str = "",
) -> Path:
    path = folder / "task.py"
    path.write_text(TASK.format(place=place, fault=fault, rank=rank, step=step, others=others) + extra)
    return path


def send(number: int, *, to: Callable[[], int], times: int = 1) -> Callable[[Path], None]:
    """Something to do during a job: wait until it trains, then send a signal, perhaps impatiently."""

    def act(folder: Path) -> None:
        wait_until_training(folder)
        for _ in range(times):
            os.kill(to(), number)
            time.sleep(0.02)

    return act


# -- errors in the task ----------------------------------------------------------------------------------------------

# place -> (step, phase, flags)
PLACES: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "model": (0, "building", ()),
    "optimizer": (0, "building", ()),
    "data": (2, "reading data", ()),
    "data in a worker": (2, "reading data", ("--set", "workers=2")),
    "forward": (2, "forward", ()),
    "backward": (2, "backward", ()),
    "update": (2, "update", ()),
    "metrics": (3, "evaluating", ()),
    "saving": (3, "saving", ()),
}

# What `make test` runs: every place on rank 1 under DDP, and what has code of its own on rank 0 or under FSDP.
USUAL_PLACES = {
    *((place, "ddp", 1) for place in PLACES),
    *((place, "ddp", 0) for place in ("data in a worker", "metrics", "saving")),
    *((place, "fsdp", 1) for place in ("forward", "update", "metrics")),
}


@pytest.mark.parametrize(
    ("place", "strategy", "rank"),
    [slow_if(row not in USUAL_PLACES, *row) for row in itertools.product(PLACES, ("ddp", "fsdp"), (0, 1))],
)
def test_an_exception_anywhere_ends_the_job_and_is_told_once(
    launcher: WarmLauncher, tmp_path: Path, place: str, strategy: str, rank: int
) -> None:
    step, phase, flags = PLACES[place]
    code_place = place.partition(" ")[0]
    write_task(tmp_path, code_place, "raise", rank)
    outcome = launcher.run(tmp_path, "--strategy", strategy, *flags)
    headline = outcome.assert_names(rank, step, phase)
    assert headline.endswith("ValueError: boom in the task" + (" (in data worker 1)" if "worker" in place else ""))
    assert 'raise ValueError("boom in the task")' in outcome.screen
    assert f'strike("{code_place}"' in outcome.screen
    assert outcome.output.count("Traceback (most recent call last)") == 1
    assert outcome.output.count("\n  ValueError: boom in the task") == 1
    assert "elastic" not in outcome.output
    log = (tmp_path / "out" / "logs" / f"rank-{rank}.log").read_text()
    assert "Traceback (most recent call last)" in log, "the whole traceback is in the rank's log"


def test_a_failure_of_all_ranks_is_told_once(launcher: WarmLauncher, tmp_path: Path) -> None:
    write_task(tmp_path, extra="\n\ndef loss(output, target):\n    return output.no_such_thing\n")
    outcome = launcher.run(tmp_path)
    outcome.assert_failed()
    assert outcome.output.count("no_such_thing\n") == 1, "the source line, once"
    assert re.search(r"^rank [01] failed in step 1, phase forward: AttributeError", outcome.screen, re.MULTILINE)
    assert re.search(r"^rank [01]: (failed|stopped|lost)", outcome.screen, re.MULTILINE)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("raise with a broken message", "Broken: (its message cannot be shown)"),
        ("raise a long line", "19,612 more characters"),
        ("recurse", "RecursionError"),
    ],
)
def test_an_awkward_exception_still_fits_a_screen(
    launcher: WarmLauncher, tmp_path: Path, fault: str, expected: str
) -> None:
    write_task(tmp_path, "forward", fault, rank=1)
    outcome = launcher.run(tmp_path)
    outcome.assert_names(1, 2, "forward")
    assert expected in outcome.screen
    assert len(outcome.output) < 6000


# -- ranks that leave, and ranks that are killed -----------------------------------------------------------------------


@pytest.mark.parametrize("rank", [slow(0), 1])
@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("sys.exit(0)", "sys.exit(0) was called"),
        ("sys.exit(3)", "sys.exit(3) was called"),
        ("os._exit(0)", "exit code 0 before training was finished"),
        ("os._exit(7)", "exit code 7"),
        ("terminate", "killed by SIGTERM"),
        ("crash", "killed by SIGSEGV"),
    ],
)
def test_a_rank_that_leaves_early_fails_the_job(
    launcher: WarmLauncher, tmp_path: Path, fault: str, expected: str, rank: int
) -> None:
    write_task(tmp_path, "forward", fault, rank)
    outcome = launcher.run(tmp_path)
    assert expected in outcome.assert_names(rank, 2, "forward")
    if fault.startswith("sys.exit"):
        assert 'strike("forward"' in outcome.screen
    if fault == "os._exit(7)":
        assert "a last word from C++" in outcome.screen
    if fault == "crash":
        assert outcome.output.count("Segmentation fault") == 1 and "task.py" in outcome.screen
        assert "Extension modules" not in outcome.output


@pytest.mark.parametrize("fault", ["sys.exit(0)", "os._exit(0)", "kill"])
def test_the_only_rank_leaving_early_fails_the_job(launcher: WarmLauncher, tmp_path: Path, fault: str) -> None:
    write_task(tmp_path, "forward", fault)
    launcher.run(tmp_path, nproc=1).assert_names(0, 2, "forward")


KILLS = [
    ("load", "ddp", 0, "starting"),
    ("model", "ddp", 0, "building"),
    ("data", "ddp", 2, "reading data"),
    ("forward", "ddp", 2, "forward"),
    ("forward", "fsdp", 2, "forward"),
    ("backward", "fsdp", 2, "backward"),
    ("metrics", "ddp", 3, "evaluating"),
    ("saving", "fsdp", 3, "saving"),
]


@pytest.mark.parametrize("rank", [slow(0), 1])
@pytest.mark.parametrize(("place", "strategy", "step", "phase"), KILLS)
def test_a_killed_rank_is_named_and_not_those_that_miss_it(
    launcher: WarmLauncher, tmp_path: Path, place: str, strategy: str, step: int, phase: str, rank: int
) -> None:
    write_task(tmp_path, place, "kill", rank)
    outcome = launcher.run(tmp_path, "--strategy", strategy)
    headline = outcome.assert_names(rank, step, phase)
    assert "killed by SIGKILL" in headline and "memory" in headline


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_rank_killed_while_others_wait_for_it_in_a_collective(
    launcher: WarmLauncher, tmp_path: Path, strategy: str
) -> None:
    write_task(tmp_path, "forward", "late kill", rank=1)
    outcome = launcher.run(tmp_path, "--strategy", strategy, "--set", "workers=2")
    assert "killed by SIGKILL" in outcome.assert_names(1, 2, "forward")
    assert re.search(r"^rank 0: (lost its connection|stopped) in step 2, ", outcome.screen, re.MULTILINE)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_stage_of_a_pipeline_over_rpc_is_named(launcher: WarmLauncher, tmp_path: Path, rank: int) -> None:
    """The others wait for it in calls, in distributed autograd, and in a collective. Stage 1 alone comes to `Backward`,
    which it does for each of a step's four micro-batches."""
    place, step, phase = ("backward", 6, "backward") if rank == 1 else ("update", 2, "update")
    write_task(tmp_path, place, "kill", rank, step=step)
    outcome = launcher.run(tmp_path, "--strategy", "rpc-pp2")
    assert "killed by SIGKILL" in outcome.assert_names(rank, 2, phase)
    assert f"rank {1 - rank}: lost its connection in step 2" in outcome.screen


def test_an_error_of_a_stage_s_optimizer_is_told_as_its_own(launcher: WarmLauncher, tmp_path: Path) -> None:
    write_task(tmp_path, "update", "raise", rank=1)
    outcome = launcher.run(tmp_path, "--strategy", "rpc-pp2")
    assert outcome.assert_names(1, 2, "update").endswith("ValueError: boom in the task")
    assert 'strike("update"' in outcome.screen


def test_ranks_that_die_before_they_have_said_a_word(launcher: WarmLauncher, tmp_path: Path) -> None:
    write_task(tmp_path)
    outcome = launcher.run(
        tmp_path,
        before="""
import rung.launch.launcher as local
class Poison:
    def __reduce__(self):
        return exec, ("import os; os.kill(os.getpid(), 9)",)
healthy = local._run_agent
def poisoned(job, *rest):
    local._run_agent = healthy
    object.__setattr__(job, "arguments", Poison())
    return healthy(job, *rest)
local._run_agent = poisoned
""",
    )
    first = int(re.findall(r"^rank (\d) was killed", outcome.screen, re.MULTILINE)[0])  # the kernel chose
    assert "killed by SIGKILL" in outcome.assert_names(first, 0, "not started")


@pytest.mark.parametrize("fault", ["out of memory", "out of memory to the last byte"])
def test_a_rank_out_of_memory_still_reports(launcher: WarmLauncher, tmp_path: Path, fault: str) -> None:
    write_task(tmp_path, "forward", fault, rank=1)
    outcome = launcher.run(tmp_path, "--set", "oom_retry=false")
    headline = outcome.assert_names(1, 2, "forward")
    # "[enforce fail at alloc_cpu.cpp ...": with the last byte gone, torch keeps the 15 letters that need no allocation.
    assert any(word in headline for word in ("allocate", "bad_alloc", "MemoryError", "[enforce fail a"))
    assert "hoard.append" in outcome.screen


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_data_worker_fails_its_rank(launcher: WarmLauncher, tmp_path: Path, rank: int) -> None:
    write_task(tmp_path, "data", "kill", rank, step=3)
    outcome = launcher.run(tmp_path, "--set", "workers=2")
    outcome.assert_failed()
    # The loss is noticed wherever the rank is at that moment.
    headline = rf"^rank {rank} failed in step \d, phase .*: RuntimeError: DataLoader worker .* killed by signal: Killed"
    assert re.search(headline, outcome.screen, re.MULTILINE)


def test_a_data_worker_that_leaves_with_code_0_fails_its_rank(launcher: WarmLauncher, tmp_path: Path) -> None:
    write_task(tmp_path, "data", "os._exit(0)", rank=1)
    outcome = launcher.run(tmp_path, "--set", "workers=2")
    assert "exited unexpectedly" in outcome.assert_names(1, 2, "reading data")


def test_a_rank_that_sleeps_and_ignores_sigterm_ends_with_the_others(launcher: WarmLauncher, tmp_path: Path) -> None:
    write_task(tmp_path, "forward", "raise", rank=1, others="stubborn")
    outcome = launcher.run(tmp_path)
    assert "boom in the task" in outcome.assert_names(1, 2, "forward")
    assert "rank 0: stopped in step 2, phase forward" in outcome.screen


def test_processes_started_by_the_task_end_with_it(launcher: WarmLauncher, tmp_path: Path) -> None:
    write_task(tmp_path, "forward", "leave processes", rank=1)
    launcher.run(tmp_path).assert_names(1, 2, "forward")


def test_a_thread_that_never_ends_does_not_keep_a_finished_job(launcher: WarmLauncher, tmp_path: Path) -> None:
    write_task(tmp_path, "forward", "leave a thread", rank=1)
    outcome = launcher.run(tmp_path)
    assert outcome.code == 0
    assert "rank 1: warning: training is over; threads still running are cut off: forgotten" in outcome.output


def test_idle_threads_of_a_pool_are_no_reason_for_a_warning(launcher: WarmLauncher, tmp_path: Path) -> None:
    write_task(tmp_path, "forward", "leave a pool", rank=1)
    outcome = launcher.run(tmp_path)
    assert outcome.code == 0
    assert "warning" not in outcome.output


def test_eight_ranks_each_have_their_line(launcher: WarmLauncher, tmp_path: Path) -> None:
    write_task(tmp_path, "forward", "kill", rank=5)
    outcome = launcher.run(tmp_path, "--batch-size", "8", nproc=8)
    assert "killed by SIGKILL" in outcome.assert_names(5, 2, "forward")


def test_a_process_whose_parent_was_gone_before_it_could_bind_itself_to_it_ends(tmp_path: Path) -> None:
    script = """
import multiprocessing, os, pathlib, sys, time
from rung.system.processes import die_with_parent

def child(parent):
    while os.getppid() == parent:
        time.sleep(0.01)
    die_with_parent()
    pathlib.Path(sys.argv[1]).touch()

multiprocessing.get_context("fork").Process(target=child, args=(os.getpid(),)).start()
os._exit(0)
"""
    mark = uuid.uuid4().hex
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "alive")], env=environment(mark), check=True)
    assert_soon(lambda: not marked(mark), "a process is left behind")
    assert not (tmp_path / "alive").exists()


# -- the console -----------------------------------------------------------------------------------------------------


def test_the_console_is_one_stream_with_warnings_of_other_ranks(launcher: WarmLauncher, tmp_path: Path) -> None:
    talk = """

import traceback


def metrics(output, target):
    rank = os.environ["RANK"]
    print(f"printed by rank {rank}: " + "long " * 40 + "end")
    warnings.warn(f"careful, says rank {rank}")
    warnings.warn("everyone sees this")
    try:
        1 / 0
    except ZeroDivisionError:
        traceback.print_exc()
    print(f"rank {rank} goes on")
    return {"error": (output - target).abs()}
"""
    write_task(tmp_path, extra=talk)
    outcome = launcher.run(tmp_path, "--batch-size", "6")
    assert outcome.code == 0
    shown = outcome.output.splitlines()
    assert "printed by rank 0: " + "long " * 40 + "end" in shown, "in one line, however long"
    assert "rank 0 goes on" in shown, "a traceback that the task prints is only text"
    assert outcome.output.count("ZeroDivisionError: division by zero") == 1
    assert "by rank 1: " not in outcome.output and "rank 1 goes on" not in outcome.output
    for rank in (0, 1):
        told = [line for line in shown if f"careful, says rank {rank}" in line]
        assert len(told) == 1 and told[0].startswith(f"rank {rank}: warning: UserWarning: ")
        assert f"rank {rank} goes on" in (tmp_path / "out" / "logs" / f"rank-{rank}.log").read_text()
    assert outcome.output.count("everyone sees this") == 1
    assert shown[-2].startswith("done: ") and shown[-1].startswith("results: ")


# -- signals to the launcher -----------------------------------------------------------------------------------------

LONG = ("--set", "train_data.count=4000000")


@pytest.mark.parametrize(
    ("number", "times", "code"), [(signal.SIGINT, 1, 130), (signal.SIGINT, 4, 130), (signal.SIGHUP, 1, 129)]
)
def test_a_signal_to_the_launcher_ends_the_job_cleanly(
    launcher: WarmLauncher, tmp_path: Path, number: int, times: int, code: int
) -> None:
    write_task(tmp_path)
    during = send(number, to=lambda: launcher.pid, times=times)
    outcome = launcher.run(tmp_path, "--set", "workers=1", *LONG, during=during)
    assert outcome.code == code
    assert "Traceback" not in outcome.output and "Interrupt" not in outcome.output
    assert re.fullmatch(r"interrupted in step \d+; what was written lies in out", outcome.output.splitlines()[-1])


def test_ctrl_c_during_verify_ends_it_with_one_line(launcher: WarmLauncher, tmp_path: Path) -> None:
    write_task(tmp_path, "forward", "hang", rank=0)

    def interrupt(folder: Path) -> None:
        assert_soon((folder / "fault").exists, "verify did not come to its second step", seconds=60)
        os.kill(launcher.pid, signal.SIGINT)

    outcome = launcher.run(tmp_path, "--strategies", "ddp", command="verify", during=interrupt)
    assert outcome.code == 130
    assert outcome.output.splitlines()[-1] == "interrupted" and "Traceback" not in outcome.output


def test_after_a_signal_the_launcher_can_launch_again(launcher: WarmLauncher, tmp_path: Path) -> None:
    write_task(tmp_path)
    assert launcher.run(tmp_path, *LONG, during=send(signal.SIGINT, to=lambda: launcher.pid)).code == 130
    shutil.rmtree(tmp_path / "out")
    assert launcher.run(tmp_path).code == 0


def test_ctrl_c_at_a_terminal_ends_the_job_with_one_line(tmp_path: Path) -> None:
    write_task(tmp_path)
    command = Command.start(tmp_path, "--nproc", "2", "--out", "out", "--set", "workers=1", *LONG, terminal=True)
    wait_until_training(tmp_path)
    assert command.terminal is not None
    os.write(command.terminal, b"\x03")
    outcome = command.end()
    assert outcome.code == 130
    assert "Traceback" not in outcome.output and "KeyboardInterrupt" not in outcome.output
    lines = plain(outcome.output).rstrip().splitlines()
    assert re.search(r"interrupted in step \d+; what was written lies in out$", lines[-1])
    assert cursor_is_shown(outcome.output)


def test_an_impatient_ctrl_c_while_the_command_exits_changes_nothing(tmp_path: Path) -> None:
    write_task(tmp_path)
    command = Command.start(tmp_path, "--nproc", "2", "--out", "out", *LONG)
    wait_until_training(tmp_path)
    while command.process.poll() is None:
        os.kill(command.process.pid, signal.SIGINT)
        time.sleep(0.01)
    outcome = command.end()
    assert outcome.code == 130
    assert "Traceback" not in outcome.output and "Interrupt" not in outcome.output
    assert re.fullmatch(r"interrupted in step \d+; what was written lies in out", outcome.output.splitlines()[-1])


@pytest.mark.parametrize("moment", ["while torch is imported", "with a fork server"])
def test_ctrl_c_while_starting_ends_with_one_line(tmp_path: Path, moment: str) -> None:
    write_task(tmp_path)
    command = Command.start(tmp_path, "--nproc", "2", "--out", "out")
    maps = Path(f"/proc/{command.process.pid}/maps")
    if moment == "while torch is imported":
        assert_soon(lambda: "libtorch_cpu" in maps.read_text(), "torch is not imported", seconds=30)
    else:
        assert_soon(lambda: len(marked(command.mark)) >= 3, "no server starts", seconds=30)
    os.killpg(command.process.pid, signal.SIGINT)
    outcome = command.end()
    assert outcome.code == 130
    assert re.fullmatch("interrupted( before the first step; what was written lies in out)?", outcome.output.strip())


@pytest.mark.parametrize("limit", ["ulimit -n 64", slow("ulimit -S -n 64")])
def test_with_few_open_files_a_job_is_refused_or_raises_the_limit_and_ctrl_c_ends_it(
    tmp_path: Path, limit: str
) -> None:
    """Without a file left, neither a rank nor a thread that would end it can start."""
    write_task(tmp_path)
    command = Command.start(tmp_path, "--nproc", "2", "--out", "out", *LONG, shell=limit)
    if "-S" in limit:
        wait_until_training(tmp_path)
        os.killpg(command.process.pid, signal.SIGINT)
        outcome = command.end()
        assert outcome.code == 130
        assert re.search(r"interrupted in step \d+; what was written lies in out$", plain(outcome.output).rstrip())
        return
    outcome = command.end()
    assert outcome.code == 2 and "2 ranks need up to 152 open files in a process, but the hard limit" in outcome.output
    command = Command.start(tmp_path, "--nproc", "2", "--out", "again", *LONG, shell=limit)
    assert_soon(lambda: len(marked(command.mark)) >= 3, "nothing starts", seconds=30)
    os.killpg(command.process.pid, signal.SIGINT)
    outcome = command.end()
    assert outcome.code == 130 and outcome.output.strip() == "interrupted"


def test_killing_the_launcher_leaves_no_rank_and_no_data_worker(tmp_path: Path) -> None:
    # One rank is inside a regular expression that ends in years and lets no other thread run; the other waits for it.
    write_task(tmp_path, "forward", "hang and hold the interpreter", rank=1)
    command = Command.start(tmp_path, "--nproc", "2", "--out", "out", "--set", "workers=1", *LONG)
    assert_soon((tmp_path / "fault").exists, "the fault did not happen", seconds=60)
    time.sleep(0.5)
    assert len(marked(command.mark)) >= 7, "launcher, tracker, server, two ranks, two data workers"
    os.kill(command.process.pid, signal.SIGKILL)
    assert_soon(lambda: not marked(command.mark), "processes outlive the launcher", seconds=15)
    command.end()


def test_a_failure_at_a_terminal_ends_with_the_report(tmp_path: Path) -> None:
    write_task(tmp_path, "forward", "raise", rank=1, step=40)
    command = Command.start(tmp_path, "--nproc", "2", "--out", "out", *LONG, terminal=True)
    outcome = command.end()
    assert "━" in outcome.output, "there was a progress bar"
    assert cursor_is_shown(outcome.output)
    outcome.output = plain(outcome.output)
    outcome.assert_names(1, 40, "forward")
    report = outcome.output[outcome.output.rindex("rank 1 failed") :]
    assert "━" not in report and "samples/s" not in report


def test_two_jobs_at_once_both_finish(tmp_path: Path) -> None:
    write_task(tmp_path)
    commands = [Command.start(tmp_path, "--nproc", "2", output=f"output-{number}") for number in (1, 2)]
    for command in commands:
        outcome = command.end()
        assert outcome.code == 0, outcome.output
        assert "done: 3 steps" in outcome.output
    assert len(list((tmp_path / "runs").iterdir())) == 2


ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def plain(output: str) -> str:
    """What is left on a terminal, near enough: without escapes, and of lines written over, the last state."""
    lines = ANSI.sub("", output).splitlines()
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)


def cursor_is_shown(output: str) -> bool:
    return output.rfind("\x1b[?25h") >= output.rfind("\x1b[?25l")
