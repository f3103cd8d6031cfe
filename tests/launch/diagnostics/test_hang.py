"""What a stack means, and what the stacks of all ranks mean together."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import rung
from rung.distributed.status_board import RankStatus, StatusBoard
from rung.launch.diagnostics.crash_log import read_crash_summary
from rung.launch.diagnostics.hang import HangMonitor, make_report, name_ranks
from rung.launch.diagnostics.stack_analysis import describe, location_of, location_of_error
from rung.launch.diagnostics.stacks import SIGNAL, Frame, ThreadStack, parse_stack, take_stacks

TORCH = str(Path(torch.__file__).parent)
RUNG = str(Path(rung.__file__).parent)


def frames(*calls: str) -> tuple[Frame, ...]:
    """From 'file:line function', the innermost first; torch/ and rung/ stand for the packages."""
    found = []
    for call in calls:
        place, function = call.split()
        file, line = place.split(":")
        for name, folder in (("torch/", TORCH), ("rung/", RUNG)):
            if file.startswith(name):
                file = f"{folder}/{file.removeprefix(name)}"
        found.append(Frame(file, int(line), function))
    return tuple(found)


C10D, LOGGER = "torch/distributed/distributed_c10d.py:1", "torch/distributed/c10d_logger.py:1 wrapper"
TIMED, TASK = "rung/runtime/phases.py:1 timed_wait", "/home/u/task.py:31 loss"
MAIN = ("rung/train/worker.py:9 worker", "rung/launch/entrypoint.py:9 rank_main")


@pytest.mark.parametrize(
    ("stack", "operation", "where"),
    [
        ((f"{C10D} all_reduce", LOGGER, TASK), "all_reduce", "/home/u/task.py:31 in loss"),
        ((TIMED, f"{C10D} all_reduce", LOGGER, TASK), "all_reduce", "/home/u/task.py:31 in loss"),
        ((f"{C10D} all_gather", LOGGER, f"{C10D} all_gather_object", LOGGER, TASK), "all_gather_object", None),
        (
            (f"{C10D} all_gather_single", LOGGER, "rung/distributed/world.py:3 gather_flat"),
            "all_gather",
            "rung/distributed/world.py:3",
        ),
        ((f"{C10D} recv", LOGGER, "rung/runtime/pipeline.py:3 named_weights"), "recv", None),
        (("torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py:1 wait_for_unshard", TASK), "all_gather", None),
        (("torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py:1 foreach_reduce", TASK), "reduce_scatter", None),
        (("torch/distributed/pipelining/schedules.py:1 _wait_batch_p2p",), "send/recv", None),
        (
            ("torch/autograd/graph.py:1 _engine_run_backward", "rung/runtime/passes.py:2 _backward"),
            "all_reduce",
            "rung/",
        ),
        (("torch/nn/parallel/distributed.py:1 _pre_forward",), "broadcast", None),
        (("torch/distributed/_functional_collectives.py:1 wait_tensor", TASK), "wait_tensor", None),
        (
            ("torch/distributed/rendezvous.py:1 _create_c10d_store", f"{C10D} init_process_group"),
            "init_process_g",
            None,
        ),
        ((TIMED, TASK), "a collective", "/home/u/task.py:31 in loss"),
        (("torch/cuda/streams.py:1 synchronize", TASK), "a result of its GPU", None),
        (
            ("/home/u/task.py:7 forward", "torch/nn/modules/module.py:1 _call_impl"),
            None,
            "/home/u/task.py:7 in forward",
        ),
        (("/usr/lib/elsewhere.py:1 f", "torch/autograd/graph.py:1 _engine_run_backward"), None, None),
    ],
)
def test_the_operation_and_the_line(stack: tuple[str, ...], operation: str | None, where: str | None) -> None:
    place = location_of(frames(*stack, *MAIN))
    if operation is None:
        assert place.operation is None
    else:
        assert place.operation is not None and place.operation.startswith(operation)
    assert where is None or place.where.startswith(where)


def test_a_wait_that_the_task_calls_is_one_for_others(tmp_path: Path) -> None:
    """Also in steps in which waits are not measured."""
    (tmp_path / "task.py").write_text("work = start()\nwork.wait()\n")
    assert location_of((Frame(str(tmp_path / "task.py"), 2, "loss"),)).operation == "a collective"
    assert location_of((Frame(str(tmp_path / "task.py"), 1, "loss"),)).operation is None


def test_a_backward_that_computes_does_not_wait() -> None:
    stack = frames("torch/autograd/graph.py:1 _engine_run_backward", *MAIN)
    assert location_of(stack, is_busy=True).operation is None


def test_the_place_of_an_error() -> None:
    try:
        torch.nn.Linear(2, 2)(torch.ones(3))
    except RuntimeError as error:
        place = location_of_error(error)
    assert "test_hang.py" in place.where and place.operation is None
    assert place.source == "torch.nn.Linear(2, 2)(torch.ones(3))"


def test_the_main_thread_is_the_one_that_began_the_work() -> None:
    text = (
        "Thread 0x0001 (most recent call first):\n"
        '  File "a.py", line 1 in wait\n\n'
        "Thread 0x0002 [name] (most recent call first):\n"
        "  Garbage-collecting\n"
        '  File "with space.py", line 12 in <listcomp>\n'
        '  File "rank.py", line 3 in rank_main\n\n'
        "Current thread 0x0003 (most recent call first):\n"
        "  <no Python frame>\n"
    )
    assert parse_stack(text) == (Frame("with space.py", 12, "<listcomp>"), Frame("rank.py", 3, "rank_main"))
    assert parse_stack("") == ()
    assert parse_stack(text.replace("rank_main", "other")) == (Frame("a.py", 1, "wait"),)
    current = text.replace("rank_main", "other").replace("<no Python frame>", 'File "b.py", line 2 in f')
    assert parse_stack(current) == (Frame("b.py", 2, "f"),), "the thread that got the signal"
    one = 'Stack (most recent call first):\n  File "rank.py", line 3 in rank_main\n'
    assert parse_stack(one) == (Frame("rank.py", 3, "rank_main"),)


POLLING = """
import sys, threading, time
from pathlib import Path
from rung.launch.diagnostics.stacks import answer_with_stack

def follow():
    event, lock = threading.Event(), threading.Lock()
    def poll():
        with lock:
            return [number for number in [1] if time.monotonic() < 0]
    while True:
        poll()
        event.wait(2e-5)

def rank_main():
    for _ in range(2):
        threading.Thread(target=follow, daemon=True).start()
    print("ready", flush=True)
    time.sleep(600)

answer_with_stack(Path(sys.argv[1]), 0)
rank_main()
"""


def test_a_stack_is_taken_while_other_threads_change_theirs(tmp_path: Path) -> None:
    """The interpreter crashes within a hundred tries if their frames are read, too."""
    with subprocess.Popen([sys.executable, "-c", POLLING, tmp_path], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            for _ in range(1000):
                process.send_signal(SIGNAL)
                time.sleep(0.0005)
            assert process.poll() is None
            stack = take_stacks(tmp_path, {0: process.pid}, is_urgent=True)[0]
            assert [frame.function for frame in stack.frames] == ["rank_main", "<module>"]
        finally:
            process.kill()


# -- the report --------------------------------------------------------------------------------------------------------

ASLEEP = ThreadStack("S", False, frames("/home/u/task.py:7 forward", *MAIN))
IN_SUM = ThreadStack("S", False, frames(f"{C10D} all_reduce", LOGGER, TASK, *MAIN))
IN_GATHER = ThreadStack("S", False, frames(f"{C10D} all_gather", LOGGER, "/home/u/task.py:40 metrics", *MAIN))


def training(count: int, step: int = 3) -> dict[int, RankStatus]:
    return {rank: RankStatus(step, "forward", 100 + rank) for rank in range(count)}


@pytest.mark.parametrize(
    ("stands", "expected", "missing"),
    [
        ([IN_SUM, ASLEEP, IN_SUM, IN_SUM], "rank 1 has not reached all_reduce, in which ranks 0, 2, 3 wait", (1,)),
        ([ASLEEP, ASLEEP, IN_SUM], "ranks 0, 1 have not reached all_reduce, in which rank 2 waits", (0, 1)),
        ([ASLEEP], "rank 0 makes no progress", (0,)),
        ([ASLEEP, ASLEEP], "ranks 0, 1 make no progress", (0, 1)),
        ([IN_SUM, IN_GATHER, IN_SUM], "rank 1 waits in all_gather at /home/u/task.py:40 in metrics, ranks 0, 2 in", ()),
        ([IN_SUM, IN_SUM], "all ranks wait in all_reduce at the same place", ()),
        ([IN_SUM, ThreadStack("T")], "rank 1 has not reached all_reduce, in which rank 0 waits", (1,)),
        ([IN_SUM, ThreadStack("D")], "rank 1 has not reached", (1,)),
    ],
)
def test_what_all_stacks_mean_together(stands: list[ThreadStack], expected: str, missing: tuple[int, ...]) -> None:
    report = make_report(training(len(stands)), dict(enumerate(stands)), 3.0)
    first = report.text.splitlines()[0]
    assert first.startswith("the job hangs in step 3: ") and expected in first
    assert report.missing == missing


def test_ranks_of_other_machines_may_be_the_missing_ones() -> None:
    report = make_report(training(2), {0: IN_SUM, 1: IN_SUM}, 3.0, has_others=True)
    assert "ranks 0, 1 wait in all_reduce for ranks of other machines" in report.text


def test_a_rank_that_has_not_started_is_missing() -> None:
    statuses = {0: RankStatus(0, "starting", 100), 1: RankStatus(0, "not started", 0)}
    report = make_report(statuses, {0: IN_SUM}, 3.0)
    assert report.text.startswith("the job hangs before the first step: rank 1 has not reached")
    assert "rank 1, phase not started: not started" in report.text


def test_many_ranks_that_do_the_same_share_a_line(tmp_path: Path) -> None:
    stands = {rank: ASLEEP if rank == 17 else IN_SUM for rank in range(64)}
    report = make_report(training(64), stands, 600.0, tmp_path)
    assert "rank 17 has not reached all_reduce, in which ranks 0-16, 18-63 wait" in report.text
    assert len(report.text.splitlines()) == 7
    assert report.text.splitlines()[-1] == f"logs: {tmp_path}"


def test_a_report_of_ranks_that_all_differ_fits_a_screen() -> None:
    stands = {r: ThreadStack("S", False, frames(f"/home/u/task.py:{r} forward", *MAIN)) for r in range(100)}
    assert len(make_report(training(100), stands, 3.0).text.splitlines()) < 35


def test_workers_of_the_data_loader_are_told() -> None:
    waits = frames(
        "torch/utils/data/dataloader.py:1 _try_get_data", "torch/utils/data/dataloader.py:2 _get_data", *MAIN
    )
    loop, fetch = "torch/utils/data/_utils/worker.py:1 _worker_loop", "torch/utils/data/_utils/fetch.py:1 fetch"
    reads = ThreadStack("S", False, frames("/home/u/task.py:20 __getitem__", fetch, loop))
    idle = ThreadStack("S", False, frames("/usr/lib/python3/queues.py:1 get", loop))
    stand = ThreadStack(
        "S", False, waits, (("data worker 0", idle), ("data worker 1", reads), ("data worker 2", ThreadStack("T")))
    )
    told = describe(stand)
    assert told.operation is None
    assert told.text.startswith(
        "waits for its data loader: data worker 1 is asleep at /home/u/task.py:20 in __getitem__"
    )
    assert "data worker 2 is stopped by a signal" in told.text and "worker 0" not in told.text


def test_names_of_ranks() -> None:
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([2, 0]) == "ranks 0, 2"
    assert name_ranks([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7, 8"


# -- watching ----------------------------------------------------------------------------------------------------------

CHILD = """
import sys, time
from pathlib import Path
from rung.launch.diagnostics.stacks import answer_with_stack

def rank_main():
    answer_with_stack(Path(sys.argv[1]), 0)
    print("ready", flush=True)
    {action}

rank_main()
"""


def start(folder: Path, action: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", CHILD.format(action=action), str(folder)], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    return process


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("time.sleep(60)", "asleep"),
        ("sum(range(10**12))", "busy"),  # holds the interpreter all the while
        ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", "stopped by a signal"),
    ],
)
def test_a_process_is_looked_at_whatever_it_does(tmp_path: Path, action: str, expected: str) -> None:
    process = start(tmp_path, action)
    try:
        time.sleep(0.1)
        told = describe(take_stacks(tmp_path, {0: process.pid})[0]).text
        assert told.startswith(expected) or (expected == "busy" and told.startswith("running")), told
    finally:
        process.kill()
        process.wait()


def test_a_process_that_does_not_listen_is_left_alone(tmp_path: Path) -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        assert describe(take_stacks(tmp_path, {0: process.pid})[0]).text == "does not respond"
        assert process.poll() is None, "the signal would have ended it"
    finally:
        process.kill()
        process.wait()


class Clock:
    def __init__(self) -> None:
        self.now = time.monotonic()

    def __call__(self) -> float:
        return self.now


def test_a_job_hangs_when_no_rank_comes_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("rung.launch.diagnostics.hang.time.monotonic", clock)
    monkeypatch.setattr("rung.launch.diagnostics.hang.take_stacks", lambda *_: {})
    board = StatusBoard(tmp_path / "status", 4, create=True)
    writers: list[Any] = [board.writer(rank) for rank in range(4)]
    watch = HangMonitor(board, range(4), tmp_path, 10.0, tmp_path)
    assert watch.check() is None
    writers[2].phase("spare")
    writers[3].phase("finished")
    for _ in range(5):  # one of them comes forward
        clock.now += 8
        writers[0].phase("forward")
        assert watch.check() is None
    clock.now += 8.9
    writers[2].touch()
    writers[3].touch()
    assert watch.check() is None
    clock.now += 0.2
    found = watch.check()
    assert found is not None and found.missing == (0, 1), "those that have left, and spares, are not waited for"
    writers[0].phase("stopped")
    writers[1].phase("stopped")
    assert watch.check() is None, "nobody is there to hang"


# -- last words --------------------------------------------------------------------------------------------------------


def test_a_crash_tells_its_message_and_where_python_stood(tmp_path: Path) -> None:
    log = tmp_path / "rank-1.log"
    log.write_text(
        "Fatal Python error: of an attempt before\n---- attempt 2\nhello\n"
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
        "  what():  [enforce fail at /x/pair.cc:456] op.preamble.length <= op.nbytes. 668 vs 4. No match.\n"
        "Fatal Python error: Aborted\n\n"
        "Thread 0x0000ffff (most recent call first):\n"
        '  File "/usr/lib/python3/threading.py", line 331 in wait\n\n'
        "Thread 0x0000fff1 (most recent call first):\n"
        f'  File "{TORCH}/distributed/distributed_c10d.py", line 3252 in all_reduce\n'
        '  File "/home/u/task.py", line 37 in loss\n'
        f'  File "{RUNG}/launch/entrypoint.py", line 3 in rank_main\n\n'
        "Extension modules: numpy\n"
    )
    words = read_crash_summary(log, 1, -signal.SIGABRT)
    assert words.is_mismatch
    assert words.place == "in all_reduce at /home/u/task.py:37 in loss"
    assert words.lines == [
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'",
        "  what():  op.preamble.length <= op.nbytes. 668 vs 4. No match.",
        "Fatal Python error: Aborted",
        "Python stack (most recent call first):",
        '  File "/home/u/task.py", line 37 in loss',
    ]
    assert read_crash_summary(log, 1, -signal.SIGKILL).lines == []
    assert read_crash_summary(tmp_path / "none.log", 1, 1).lines == []


def test_the_real_format_of_a_crash_is_understood(tmp_path: Path) -> None:
    code = "import faulthandler, os\nfaulthandler.enable()\ndef rank_main():\n    os.abort()\nrank_main()\n"
    script = tmp_path / "crashes.py"
    script.write_text(code)
    with (tmp_path / "rank-0.log").open("wb") as log:
        process = subprocess.run([sys.executable, str(script)], stderr=log)
    words = read_crash_summary(tmp_path / "rank-0.log", 0, process.returncode)
    assert words.place.endswith("crashes.py:4 in rank_main")
    assert not words.is_mismatch
