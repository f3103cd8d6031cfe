"""The report of a failed job: who is named, and what fits the screen. No processes but the test's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from rung.distributed.status_board import RankStatus, StatusBoard
from rung.errors import DataError, ModelError
from rung.launch.diagnostics.failure import (
    FailureRecord,
    first_to_fail,
    format_error,
    read_failures,
    record_failure,
    report,
)


def record(rank: int, seconds: float, **changes: Any) -> FailureRecord:
    fields: dict[str, Any] = {
        "rank": rank,
        "step": 3,
        "phase": "forward",
        "summary": "ValueError: boom",
        "traceback": "Traceback (most recent call last):\n  File ...\nValueError: boom",
        "seconds": seconds,
        "lost_peer": False,
        "after": [],
    }
    return FailureRecord(**{**fields, **changes})


def by_rank(*records: FailureRecord) -> dict[int, FailureRecord]:
    return {r.rank: r for r in records}


def training(count: int) -> list[RankStatus]:
    return [RankStatus(3, "forward", 100 + rank) for rank in range(count)]


# -- who was first -----------------------------------------------------------------------------------------------------


def test_of_several_errors_the_earliest_is_first() -> None:
    failures = by_rank(record(0, 12.0), record(1, 11.0), record(2, 13.0))
    assert first_to_fail(failures, training(3), {0: 14.0, 1: 14.0, 2: 14.0}) == 1


def test_an_error_comes_before_the_connections_that_it_broke_even_if_written_later() -> None:
    failures = by_rank(record(0, 11.0, lost_peer=True), record(1, 11.5))
    assert first_to_fail(failures, training(2), {0: 12.0, 1: 12.0}) == 1


def test_a_silent_death_comes_before_the_connections_that_it_broke() -> None:
    failures = by_rank(record(0, 11.0, lost_peer=True, after=[1]))
    assert first_to_fail(failures, training(2), {0: 12.0, 1: 12.0}) == 1


def test_a_rank_that_failed_in_its_own_words_after_a_death_is_not_first() -> None:
    # The task caught the broken connection and raised an error of its own.
    failures = by_rank(record(0, 11.0, after=[1]))
    assert first_to_fail(failures, training(2), {0: 12.0, 1: 12.0}) == 1


def test_an_error_that_saw_all_others_alive_comes_before_a_silent_death() -> None:
    failures = by_rank(record(0, 11.0))
    assert first_to_fail(failures, training(2), {0: 11.1, 1: 11.1}) == 0


def test_a_death_seen_before_an_error_was_written_is_first() -> None:
    # That rank was too young for the others to know its process.
    statuses = [RankStatus(0, "starting", 100), RankStatus(0, "not started", 0)]
    assert first_to_fail(by_rank(record(0, 11.0)), statuses, {1: 10.0, 0: 11.1}) == 1


def test_of_several_silent_deaths_the_earliest_is_first() -> None:
    assert first_to_fail({}, training(3), {0: 12.0, 2: 11.0}) == 2


def test_a_finished_rank_that_ended_is_not_a_failure() -> None:
    statuses = [RankStatus(5, "finished", 100), RankStatus(5, "saving", 101)]
    assert first_to_fail({}, statuses, {0: 10.0, 1: 12.0}) == 1


def test_broken_connections_alone_name_the_earliest() -> None:
    failures = by_rank(record(0, 12.0, lost_peer=True), record(1, 11.0, lost_peer=True))
    assert first_to_fail(failures, training(3), {0: 13.0, 1: 13.0}) == 1


def test_without_any_trace_an_unfinished_rank_is_named() -> None:
    assert first_to_fail({}, [RankStatus(5, "finished", 100), RankStatus(5, "saving", 101)], {}) == 1


def test_nobody_is_named_when_all_have_finished() -> None:
    assert first_to_fail({}, [RankStatus(5, "finished", 100)], {0: 10.0}) is None


# -- the report --------------------------------------------------------------------------------------------------------


def test_the_report_of_an_error(tmp_path: Path) -> None:
    failures = by_rank(record(1, 11.0), record(0, 11.5, lost_peer=True, after=[1]))
    statuses = [RankStatus(3, "backward", 100), RankStatus(3, "forward", 101), RankStatus(2, "reading data", 102)]
    text = report(failures, statuses, {0: 1, 1: 1}, {0: 12.0, 1: 12.0}, tmp_path)
    assert text.splitlines() == [
        "rank 1 failed in step 3, phase forward: ValueError: boom",
        "",
        "  Traceback (most recent call last):",
        "    File ...",
        "  ValueError: boom",
        "",
        "rank 0: lost its connection in step 3, phase backward",
        "rank 2: stopped in step 3, phase reading data",
        f"logs: {tmp_path}",
    ]


@pytest.mark.parametrize(
    ("status", "where"),
    [
        (RankStatus(0, "building", 1), "before the first step, phase building"),
        (RankStatus(0, "reading data", 1), "in step 1, phase reading data"),
        (RankStatus(4, "reading data", 1), "in step 5, phase reading data"),
        (RankStatus(4, "evaluating", 1), "in step 4, phase evaluating"),
    ],
)
def test_the_place_is_the_step_that_was_being_worked_on(tmp_path: Path, status: RankStatus, where: str) -> None:
    text = report({}, [status], {0: -signal.SIGKILL}, {0: 10.0}, tmp_path)
    assert text.splitlines()[0].startswith(f"rank 0 was killed by SIGKILL {where}.")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (-signal.SIGKILL, "was killed by SIGKILL in step 3, phase forward. The kernel does this when memory runs out"),
        (-signal.SIGTERM, "was killed by SIGTERM in step 3, phase forward."),
        (-99, "was killed by signal 99"),
        (0, "left in step 3, phase forward: it ended with exit code 0 before training was finished."),
        (7, "ended in step 3, phase forward without a traceback (exit code 7)."),
        (None, "is gone in step 3, phase forward: it was killed, or ended without a report."),
    ],
)
def test_a_silent_rank_is_told_by_its_exit_code(tmp_path: Path, code: int | None, expected: str) -> None:
    assert expected in report({}, training(1), {0: code}, {0: 10.0}, tmp_path).splitlines()[0]


def test_each_other_rank_has_one_line_with_its_fate(tmp_path: Path) -> None:
    statuses = [*training(5), RankStatus(9, "finished", 105)]
    failures = by_rank(record(0, 11.0), record(1, 12.0, summary="KeyError: 'x'"))
    text = report(failures, statuses, {0: 1, 1: 1, 2: -9, 3: 4}, {0: 12.5, 1: 12.5, 2: 12.5, 3: 12.5}, tmp_path)
    assert text.splitlines()[-6:-1] == [
        "rank 1: failed in step 3, phase forward: KeyError: 'x'",
        "rank 2: killed by SIGKILL in step 3, phase forward",
        "rank 3: ended in step 3, phase forward (exit code 4)",
        "rank 4: stopped in step 3, phase forward",
        "rank 5: finished",
    ]


def test_a_silent_rank_that_crashed_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    words = "hello\nterminate called after throwing an instance of 'std::runtime_error'\n"
    for rank in (0, 1):
        (tmp_path / f"rank-{rank}.log").write_text(words)
        text = report({}, training(2), {rank: -signal.SIGABRT}, {rank: 10.0}, tmp_path)
        assert "    terminate called after throwing" in text and "hello" not in text
    (tmp_path / "rank-0.log").write_text("the console has shown this\n")
    assert "console" not in report({}, training(2), {0: -signal.SIGABRT}, {0: 10.0}, tmp_path)
    (tmp_path / "rank-0.log").write_text(
        "hello\nFatal Python error: Segmentation fault\n\nThread 0x1 (most recent call first):\n  File other\n\n"
        "Current thread 0x2 (most recent call first):\n  File mine\n\nExtension modules: " + "m, " * 5000
    )
    text = report({}, training(1), {0: -signal.SIGSEGV}, {0: 10.0}, tmp_path)
    assert "Fatal Python error: Segmentation fault" in text and "File mine" in text
    assert "File other" not in text and len(text) < 1500


def test_an_error_of_one_line_is_told_once(tmp_path: Path) -> None:
    own = record(0, 11.0, summary="DataError: the data set is empty.", traceback="DataError: the data set is empty.")
    assert report(by_rank(own), training(1), {0: 1}, {0: 11.5}, tmp_path).count("the data set is empty.") == 1


# -- records -----------------------------------------------------------------------------------------------------------


def a_board(folder: Path, num_ranks: int = 2) -> StatusBoard:
    board = StatusBoard(folder / "status", num_ranks, create=True)
    writer = board.writer(0)
    writer.step(4)
    writer.phase("backward")
    return board


def someone_dead() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def put(board: StatusBoard, rank: int, phase: str, pid: int) -> None:
    writer = board.writer(rank)
    writer._pid = pid
    writer.phase(phase)


def test_a_record_survives_the_way_through_its_file(tmp_path: Path) -> None:
    before = time.time()
    record_failure(tmp_path, 0, a_board(tmp_path), ValueError("boom"))
    (found,) = read_failures(tmp_path).values()
    assert (found.rank, found.step, found.phase, found.summary) == (0, 4, "backward", "ValueError: boom")
    assert before <= found.seconds <= time.time()
    assert not found.lost_peer and found.after == []


def test_a_broken_connection_to_a_dead_rank_is_known_as_such(tmp_path: Path) -> None:
    board = a_board(tmp_path)
    put(board, 1, "forward", someone_dead())
    record_failure(tmp_path, 0, board, RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:1234"))
    (found,) = read_failures(tmp_path).values()
    assert found.lost_peer and found.after == [1]


def test_a_broken_connection_with_everyone_alive_is_an_error_of_its_own(tmp_path: Path) -> None:
    board = a_board(tmp_path)
    put(board, 1, "forward", os.getpid())
    record_failure(tmp_path, 0, board, RuntimeError("Timed out waiting 1000ms for recv operation to complete"))
    (found,) = read_failures(tmp_path).values()
    assert not found.lost_peer and found.after == []


def test_a_broken_connection_after_the_error_of_another_rank_is_known_as_such(tmp_path: Path) -> None:
    board = a_board(tmp_path)
    put(board, 1, "forward", os.getpid())
    record_failure(tmp_path, 1, board, ValueError("boom"))
    record_failure(tmp_path, 0, board, RuntimeError("Connection reset by peer"))
    failures = read_failures(tmp_path)
    assert failures[0].lost_peer
    assert first_to_fail(failures, [board.read(0), board.read(1)], {}) == 1


def test_a_finished_rank_that_has_left_is_not_missed(tmp_path: Path) -> None:
    board = a_board(tmp_path)
    put(board, 1, "finished", someone_dead())
    record_failure(tmp_path, 0, board, ValueError("boom"))
    (found,) = read_failures(tmp_path).values()
    assert found.after == []


def test_an_error_whose_message_fails_is_recorded_all_the_same(tmp_path: Path) -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError("not even this")

    record_failure(tmp_path, 0, a_board(tmp_path), Broken())
    (found,) = read_failures(tmp_path).values()
    assert "Broken" in found.summary


# -- tracebacks --------------------------------------------------------------------------------------------------------


def caught(function: Any, *args: Any) -> BaseException:
    try:
        function(*args)
    except BaseException as error:
        return error
    raise AssertionError("no error")


def test_library_frames_between_the_users_own_are_left_out() -> None:
    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("in the model")

    lines = format_error(caught(torch.nn.Sequential(Net()), torch.ones(1))).splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "ValueError: in the model"
    assert '    raise ValueError("in the model")' in lines
    assert any(line.startswith("  ... ") and line.endswith("inside torch and rung ...") for line in lines)
    assert "torch/nn" not in "\n".join(lines)
    assert not any(set(line) <= set(" ^~") for line in lines), "no lines of carets"


def test_the_place_inside_torch_where_it_happened_is_shown_last() -> None:
    lines = format_error(caught(torch.nn.Linear(2, 2), torch.ones(1, 3))).splitlines()
    files = [line for line in lines if line.startswith("  File ")]
    assert "test_failure.py" in files[0]
    assert "torch/nn/modules/linear.py" in files[-1]
    assert "mat1 and mat2 shapes cannot be multiplied" in lines[-1]


def test_a_recursion_is_cut() -> None:
    def again() -> None:
        again()

    lines = format_error(caught(again)).splitlines()
    assert len(lines) < 25
    assert any("frames left out" in line for line in lines)
    assert lines[-1].startswith("RecursionError")


def test_notes_of_an_error_are_shown() -> None:
    for error in (ModelError("no"), ValueError("no")):
        error.add_note("the way out")
        assert format_error(error).splitlines()[-1] == "the way out"


def test_long_messages_are_cut_in_both_directions() -> None:
    text = format_error(ValueError("\n".join(f"{number} " + "x" * 1000 for number in range(500))))
    assert len(text.splitlines()) < 20
    assert max(map(len, text.splitlines())) < 500
    assert "lines left out" in text and "more characters" in text
    assert "\n499 xxx" in text, "the end of a message is often its point"


def test_a_message_cannot_confuse_the_terminal() -> None:
    text = format_error(ValueError("\x1b[31mred\x1b[0m\rover\x07"))
    assert text == "ValueError: red\nover"


def test_an_error_of_rungs_own_needs_no_traceback() -> None:
    assert format_error(caught(_refuse)) == "DataError: the data set is empty."


def _refuse() -> None:
    raise DataError("the data set is empty.")


@pytest.mark.parametrize("is_watched", [False, True])
def test_sys_exit_is_told_with_the_place_of_the_call(is_watched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_watched:  # as wandb does it for the rest of the process
        scope: dict[str, Any] = {"leave": sys.exit}
        code = "def leave_and_tell(code):\n    leave(code)\n"
        exec(compile(code, sysconfig.get_path("purelib") + "/tracker/hooks.py", "exec"), scope)
        monkeypatch.setattr(sys, "exit", scope["leave_and_tell"])
    lines = format_error(caught(_leave)).splitlines()
    assert lines[-2].strip() == "sys.exit(3)"
    assert lines[-1] == "sys.exit(3) was called"


def _leave() -> None:
    sys.exit(3)


def test_causes_are_told_in_a_line_each() -> None:
    def fail() -> None:
        try:
            {}["key"]
        except KeyError as error:
            raise ValueError("no such setting") from error

    lines = format_error(caught(fail)).splitlines()
    assert lines[-2] == "ValueError: no such setting"
    assert lines[-1].startswith("caused by KeyError: 'key' (") and "test_failure.py:" in lines[-1]


class Unreadable(Dataset[int]):
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        raise self.error


@pytest.mark.parametrize("error", [ValueError("file 7 is torn"), KeyError("file 7 is torn")])
def test_an_error_in_a_data_worker_is_told_like_any_other(tmp_path: Path, error: Exception) -> None:
    loader = DataLoader(Unreadable(error), num_workers=1, multiprocessing_context="fork")
    failure = caught(lambda: list(loader))
    lines = format_error(failure).splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "    raise self.error" in lines
    assert "torch/utils/data" not in "\n".join(lines)
    kind = type(error).__name__
    assert lines[-2].startswith(f"{kind}: ") and "file 7 is torn" in lines[-2]
    assert lines[-1] == "(in data worker 0 of this rank)"
    record_failure(tmp_path, 0, a_board(tmp_path), failure)
    (found,) = read_failures(tmp_path).values()
    assert found.summary.startswith(f"{kind}: ")
    assert found.summary.replace("'", "").endswith("file 7 is torn (in data worker 0)")


def test_a_file_of_the_user_in_a_folder_named_torch_is_the_users(tmp_path: Path) -> None:
    folder = tmp_path / "torch" / "rung"
    folder.mkdir(parents=True)
    file = folder / "task.py"
    file.write_text("def fail():\n    raise ValueError('boom')\n")
    scope: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), scope)
    assert "    raise ValueError('boom')" in format_error(caught(scope["fail"])).splitlines()
