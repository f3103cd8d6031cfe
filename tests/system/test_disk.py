"""What the system refuses to write is one line with the reason, before any work where that can be known."""

from __future__ import annotations

import errno
import logging
import os
import resource
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rung.cli.main import main
from rung.distributed.status_board import RankStatus, StatusBoard
from rung.errors import ConfigError, EnvironmentProblem
from rung.launch.diagnostics.failure import read_failures, record_failure, report, reserve_room
from rung.launch.entrypoint import _open_stream
from rung.launch.launcher import _clean_up
from rung.launch.rendezvous.elastic import retire
from rung.system import disk, processes
from rung.train import metrics
from rung.train.metrics import JsonLines, TensorBoard
from rung.train.records import EvalRecord
from tests.metrics_file import committed


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    return tmp_path


COMMANDS = {
    "train": ["train", "TASK", "--out", "WHERE"],
    "explain": ["explain", "TASK", "--strategy", "ddp2", "--out", "WHERE.svg"],
    "compare": ["compare", "TASK", "--out", "WHERE.html"],
    "bench": ["bench", "collectives", "--nproc", "2", "--out", "WHERE"],
    "calibrate": ["calibrate", "--out", "WHERE"],
    "new": ["new", "WHERE"],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("where", ["file/below", "n" * 300])
def test_a_result_that_cannot_be_written_is_refused_in_one_line(
    here: Path, capsys: pytest.CaptureFixture[str], command: str, where: str
) -> None:
    assert main(["new", "task"]) == 0
    capsys.readouterr()
    words = [word.replace("TASK", "task/task.py").replace("WHERE", where) for word in COMMANDS[command]]
    assert main(words) == 2
    told = capsys.readouterr().err
    assert told.startswith("rung: ") and told.count("\n") == 1, told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["train", "task/task.py", "--out", ""], "--out has no value"),
        (["train", "task/task.py", "--out", "file"], "--out file is a file, but must be a directory"),
        (["train", "task/task.py", "--resume", ""], "--resume has an empty value"),
        (["calibrate", "--out", "folder"], "--out folder is a directory, but must be a file"),
        (["calibrate", "--out", ""], "--out has no value"),
        (["bench", "collectives", "--out", ""], "--out has no value"),
        (["new", ""], "is empty"),
        (["new", "file"], "file exists already"),
    ],
)
def test_paths_that_are_empty_or_of_the_wrong_kind(
    here: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    assert main(["new", "task"]) == 0
    assert main(words) == 2
    assert told in capsys.readouterr().err


def test_a_directory_is_checked_and_not_made(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert disk.check_folder("not/yet", "--out") == Path("not/yet") and not Path("not").exists()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match=r"--out not/yet cannot be written: .* is not writable for this user"):
        disk.check_folder("not/yet", "--out")
    fixed = SimpleNamespace(f_flag=os.ST_RDONLY)
    monkeypatch.setattr(os, "statvfs", lambda path: fixed)
    with pytest.raises(ConfigError, match=r"--out not/yet cannot be written: .* is on a read-only file system"):
        disk.check_file("not/yet", "--out")


def test_other_errors_of_the_system_keep_their_traceback(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(number: int) -> Any:
        def write(path: Path) -> Path:
            raise OSError(number, os.strerror(number), "some/file")

        return write

    monkeypatch.setattr("rung.cli.new.write_template", fail(errno.ENOSPC))
    assert main(["new", "task"]) == 2
    assert capsys.readouterr().err == "rung: the system refuses it: no space left on device (some/file).\n"
    monkeypatch.setattr("rung.cli.new.write_template", fail(errno.ECONNRESET))
    with pytest.raises(ConnectionResetError):
        main(["new", "task"])


# -- records of a run ------------------------------------------------------------------------------------------------


def _put(observer: Any, step: int) -> None:
    observer.on_evaluation(EvalRecord(step, 0, {"loss": 1.0}, 0.1))


def test_metrics_survive_a_full_disk_and_the_loss_of_their_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, folder = tmp_path / "run" / "metrics.jsonl", tmp_path / "run"
    folder.mkdir()
    path.symlink_to("/dev/full")
    lines = JsonLines(path)
    with caplog.at_level(logging.WARNING, "rung"):
        _put(lines, 1)
        _put(lines, 2)
        assert [record.getMessage() for record in caplog.records] == [
            "metrics.jsonl cannot be written: no space left on device. It is tried again."
        ]
        caplog.clear()
        lines.close()
        assert "metrics.jsonl lacks the last" in caplog.text
        path.unlink()
        lines = JsonLines(path)
        _put(lines, 1)
        shutil.rmtree(folder)
        _put(lines, 2)
        assert "metrics.jsonl cannot be written: no such file or directory" in caplog.text
        folder.mkdir()
        _put(lines, 3)
        lines.close()
    assert "metrics.jsonl was removed; it begins again at this step." in caplog.text
    assert [row["step"] for row in committed(path)] == [2, 3]


def test_an_error_of_tensorboard_s_thread_is_told_once_and_a_new_writer_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metrics, "_RETRY_SECONDS", 0.0)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    folder = tmp_path / "tensorboard"
    board = TensorBoard(folder)
    _put(board, 1)
    board._writer.flush()
    shutil.rmtree(folder)
    folder.touch()
    with caplog.at_level(logging.WARNING, "rung"):
        for step in range(2, 200):
            _put(board, step)
    assert len(caplog.records) == 1 and "TensorBoard's files cannot be written" in caplog.text
    folder.unlink()
    _put(board, 200)
    board.close()
    assert len(list(folder.iterdir())) == 1
    assert "Traceback" not in capfd.readouterr().err


def test_only_the_first_writer_of_a_resumed_run_hides_what_came_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "_RETRY_SECONDS", 0.0)
    board = TensorBoard(tmp_path / "tensorboard", start_step=5)
    made, hides = board._make, []

    def make(*args: Any, purge_step: int | None, **more: Any) -> Any:
        hides.append(purge_step)
        return made(*args, purge_step=purge_step, **more)

    board._make = make
    _put(board, 6)
    board._write(lambda writer: 1 / 0)
    _put(board, 7)
    board.close()
    assert hides == [6, None]


def test_a_word_that_the_log_does_not_take_is_written_later(tmp_path: Path) -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    stream = _open_stream(descriptor)
    try:
        print("first", file=stream)  # an OSError here would be one of the task
        with (tmp_path / "log").open("wb") as file:
            os.dup2(file.fileno(), descriptor)
        print("second", file=stream)
    finally:
        os.close(descriptor)
    assert (tmp_path / "log").read_text() == "first\nsecond\n"


# -- the launcher's end and beginning --------------------------------------------------------------------------------


def test_what_cleans_up_does_not_hide_how_the_job_ended(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    retire(tmp_path / "file")  # where no directory is any more
    done: list[str] = []

    def fail() -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    _clean_up([fail, lambda: done.append("the next one")], done.append)
    assert done == ["after the job's end: OSError: [Errno 30] Read-only file system", "the next one"]


def test_a_rank_whose_words_found_no_place_is_told_with_the_reason(tmp_path: Path) -> None:
    status = RankStatus(6, "forward", 1)
    told = report({}, [status], {0: 1}, {0: 1.0}, tmp_path / "run" / "logs")
    assert f"Its report could not be written: {tmp_path / 'run'} is gone." in told
    (tmp_path / "run").mkdir()
    assert "could not be written" not in report({}, [status], {0: 1}, {0: 1.0}, tmp_path / "run" / "logs")


def test_the_record_of_a_failure_finds_the_room_that_was_kept_for_it(tmp_path: Path) -> None:
    state = tmp_path / "run" / ".state"
    state.mkdir(parents=True)
    board = StatusBoard(state / "status", 1, create=True)
    reserve_room(state, 0)
    assert (state / ".room-0").stat().st_size == 16 * 1024
    record_failure(state, 0, board, ValueError("boom"))
    assert not (state / ".room-0").exists() and read_failures(state)[0].summary == "ValueError: boom"
    shutil.rmtree(tmp_path / "run")
    record_failure(state, 0, board, ValueError("boom"))
    assert read_failures(state)[0].summary == "ValueError: boom"


def test_a_used_up_quota_counts_as_a_full_disk() -> None:
    """The free bytes of the disk are then no answer to why nothing can be written."""
    used_up = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
    assert disk.is_full(used_up) and not disk.is_full(OSError(errno.EIO, "no disk"))
    assert disk.room(2**20, 2**40, quota=True) == "1.05 MB are needed"
    assert disk.room(2**20, 2**19) == "1.05 MB are needed, 524 KB were free"


def test_too_few_open_files_are_refused_with_the_number_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"now": (64, 4096)}
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda which, new: limits.update(now=new))
    processes.refuse_few_files(8, 8, 2)
    assert limits["now"] == (4096, 4096)  # which ranks inherit
    limits["now"] = (64, 64)
    with pytest.raises(EnvironmentProblem, match=r"2 ranks need up to 152 open files .* hard limit here is 64"):
        processes.refuse_few_files(2, 2)
