"""The status board: what a rank wrote last is there for others to read, whatever became of the rank."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from rung.distributed.status_board import PHASES, RankStatus, StatusBoard, StatusWriter


def test_a_new_board_says_that_nobody_has_started(tmp_path: Path) -> None:
    board = StatusBoard(tmp_path / "status", 3, create=True)
    assert [board.read(rank) for rank in range(3)] == [RankStatus(0, "not started", 0)] * 3


def test_each_rank_writes_its_own_slot(tmp_path: Path) -> None:
    board = StatusBoard(tmp_path / "status", 3, create=True)
    for rank in (0, 2):
        writer = StatusBoard(tmp_path / "status", 3).writer(rank)
        writer.step(10 + rank)
        writer.phase("forward")
    assert board.read(0) == RankStatus(10, "forward", os.getpid())
    assert board.read(1) == RankStatus(0, "not started", 0)
    assert board.read(2) == RankStatus(12, "forward", os.getpid())


def test_a_step_shows_with_the_phase_that_follows_it(tmp_path: Path) -> None:
    board = StatusBoard(tmp_path / "status", 1, create=True)
    writer = board.writer(0)
    writer.phase("reading data")
    writer.step(1)
    assert board.read(0).step == 0, "reading for step 1 is over only when its forward begins"
    writer.phase("forward")
    assert board.read(0).step == 1
    assert writer.current() == board.read(0)


def test_every_phase_survives_the_way_through_the_file(tmp_path: Path) -> None:
    board = StatusBoard(tmp_path / "status", 1, create=True)
    writer = board.writer(0)
    for phase in PHASES:
        writer.phase(phase)
        assert board.read(0).phase == phase
        assert board.read(0).finished == (phase == "finished")


def test_an_unknown_phase_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        StatusWriter().phase("thinking")


def test_a_long_run_fits(tmp_path: Path) -> None:
    board = StatusBoard(tmp_path / "status", 1, create=True)
    writer = board.writer(0)
    writer.step(2**40)
    writer.phase("forward")
    assert board.read(0).step == 2**40


def test_a_board_of_more_ranks_than_a_page_holds(tmp_path: Path) -> None:
    board = StatusBoard(tmp_path / "status", 200, create=True)
    board.writer(199).phase("building")
    assert board.read(199).phase == "building"
    assert board.read(198).phase == "not started"


def test_creating_a_board_clears_an_old_one(tmp_path: Path) -> None:
    StatusBoard(tmp_path / "status", 2, create=True).writer(1).phase("finished")
    assert not StatusBoard(tmp_path / "status", 2, create=True).read(1).finished


def test_what_a_killed_process_wrote_last_is_readable(tmp_path: Path) -> None:
    board = StatusBoard(tmp_path / "status", 2, create=True)
    pid = os.fork()
    if pid == 0:
        try:
            writer = StatusBoard(tmp_path / "status", 2).writer(1)
            writer.step(7)
            writer.phase("backward")
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert board.read(1) == RankStatus(7, "backward", pid)


def test_a_writer_without_a_board_remembers_for_itself() -> None:
    writer = StatusWriter(rank=3)
    writer.step(2)
    writer.phase("update")
    assert writer.current() == RankStatus(2, "update", os.getpid())


def test_a_slot_tells_when_it_last_changed(tmp_path: Path) -> None:
    board = StatusBoard(tmp_path / "status", 2, create=True)
    writer = board.writer(1)
    before = time.monotonic()
    writer.phase("forward")
    first = board.read(1).changed
    assert before <= first <= time.monotonic()
    writer.step(9)
    assert board.read(1).changed == first, "a step shows with the phase that follows it"
    writer.phase("forward")
    second = board.read(1).changed
    assert second > first, "the same phase again is a change: another micro-batch"
    writer.touch()
    assert board.read(1).changed > second and board.read(1) == RankStatus(9, "forward", os.getpid())
    assert board.read(0).changed == 0.0


def test_a_rank_that_left_in_good_order_is_known(tmp_path: Path) -> None:
    board = StatusBoard(tmp_path / "status", 1, create=True)
    left = []
    for phase in PHASES:
        board.writer(0).phase(phase)
        left += [phase] * board.read(0).left
    assert left == ["finished", "stopped"]


def test_a_request_reaches_every_rank_until_it_is_cleared(tmp_path: Path) -> None:
    board = StatusBoard(tmp_path / "status", 2, create=True)
    writers = [StatusBoard(tmp_path / "status", 2).writer(rank) for rank in range(2)]
    assert not any(writer.stop_requested() for writer in writers)
    board.request("stop")
    writers.append(StatusBoard(tmp_path / "status", 2).writer(0))  # of a rank that starts later
    assert all(writer.stop_requested() for writer in writers)
    assert board.read(0) == RankStatus(0, "not started", 0)
    board.request("")
    assert not any(writer.stop_requested() for writer in writers)


def test_an_unknown_request_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        StatusBoard(tmp_path / "status", 1, create=True).request("dance")


def test_a_rank_can_be_asked_alone(tmp_path: Path) -> None:
    board = StatusBoard(tmp_path / "status", 2, create=True)
    writers = [board.writer(0), board.writer(1), StatusWriter()]
    for number in (1, 2):
        writers[number].ask_to_stop()
    assert [writer.stop_requested() for writer in writers] == [False, True, True]


def test_a_board_is_never_too_short_for_who_opens_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that start at the same time open it as soon as it is there."""
    path = tmp_path / "status"
    made = Path.write_bytes

    def written(target: Path, data: bytes) -> int:
        assert target != path, "it would be empty for a moment"
        return made(target, data)

    monkeypatch.setattr(Path, "write_bytes", written)
    first = StatusBoard(path, 2, create=True)
    first.writer(1).phase("forward")
    StatusBoard(path, 2, create=True)
    assert first.read(1).phase != "forward", "who has it open sees that it was cleared"
    assert [entry.name for entry in tmp_path.iterdir()] == ["status"]
