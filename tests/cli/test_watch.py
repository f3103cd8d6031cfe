"""What `rung watch` makes of the files of a run: its state, the time left, and who is slow."""

from __future__ import annotations

import io
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rung.cli.main import main
from rung.cli.watch_view import RunView, Watcher, draw
from rung.distributed.live_status import (
    JobSnapshot,
    RankFigures,
    StragglerStatus,
    read_snapshot,
    snapshot_path,
    write_snapshot,
)
from rung.distributed.status_board import StatusBoard, read_statuses
from rung.system.processes import machine_name
from rung.train.metrics import JsonLines, rank_figures
from rung.train.records import StepRecord

START = {"event": "start", "total_steps": 100, "task": "toy", "strategy": "ddp", "ranks": 2, "device": "cpu"}
SECONDS = {"data": 0.15, "forward": 0.01, "backward": 0.02, "update": 0.001}
SLOW = StragglerStatus(1, "data", 0.15, 0.0004, "rank 1 is slow: 150 ms in data, the others take 0.4 ms")
NOBODY = 2**22 + 1  # no process has this number


def step(number: int, **changes: Any) -> dict[str, Any]:
    row = {"step": number, "epoch": 0, "samples": 4 * number, "loss": 0.5, "grad_norm": None, "lr": 0.1}
    speed = {"step_seconds": 0.5, "samples_per_second": 8.0, "data_wait_seconds": 0.1, "slowest_reader": 1}
    return {**row, **speed, "peak_memory_bytes": 2**20, "event": "step", **changes}


def live(number: int, *ranks: RankFigures, slow: tuple[StragglerStatus, ...] = ()) -> JobSnapshot:
    return JobSnapshot(number, time.time(), 0.25, list(ranks), list(slow))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "toy-ddp"
    (folder / ".state").mkdir(parents=True)
    (folder / "config.toml").write_text("")
    return folder


def tell(run: Path, *rows: dict[str, Any]) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def launch(run: Path, pid: int, machine: str | None = None) -> None:
    told = {"pid": pid, "least": 2, "most": 2, "machine": machine or machine_name()}
    (run / ".state" / "launcher").write_text(json.dumps(told))


def seen(picture: RunView, num_rows: int = 24) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(draw(picture, num_rows))
    return console.export_text()


def test_a_run_before_its_first_step_is_starting(run: Path) -> None:
    launch(run, os.getpid())
    assert Watcher(run).poll().state == "starting"


def test_a_running_one_has_progress_and_time_left(run: Path) -> None:
    launch(run, os.getpid())
    tell(run, START, step(1), step(2, step_seconds=1.5))
    picture = Watcher(run).poll()
    assert (picture.state, picture.step, picture.seconds_left) == ("running", 2, 98.0)
    words = seen(picture)
    assert "step 2/100" in words and "about 1:38 left" in words
    assert "loss 0.5" in words and "1 s a step" in words and "8 samples/s" in words


def test_the_loads_of_experts_are_shown(run: Path) -> None:
    tell(run, START, step(1, expert_load_max=2.625, expert_rank_load_max=1.25))
    assert "rows of experts: 2.625 x an even share for the busiest, 1.25 x" in seen(Watcher(run).poll())


def test_the_rows_of_each_expert_are_bars(run: Path) -> None:
    """Of many experts some share a bar, and of many layers the most uneven are shown."""
    layers: dict[str, Any] = {f"{n}.experts": {"rows": [8, 8 - n], "choices": 20, "dropped": 5} for n in range(8)}
    layers["wide"] = {"rows": [0] * 100 + [50], "empty": 50, "rows_in": 100}
    tell(run, START, step(1), {"event": "experts", "step": 1, "layers": {"old": {"rows": [1, 1]}}})
    tell(run, {"event": "experts", "step": 2, "layers": layers}, step(3))
    words = seen(Watcher(run).poll())
    assert "rows of each expert in step 2" in words and "old" not in words
    assert "  7.experts  |█▁|  busiest 89 %, least 11 %, 25 % of choices dropped" in words
    assert "2.experts" not in words and "and 3 more layers, more even" in words
    assert "0.50 experts a row, 50 % of places empty (4 a bar)" in words


def test_the_file_of_this_second_is_ahead_of_the_metrics(run: Path) -> None:
    launch(run, os.getpid())
    tell(run, START, step(10))
    write_snapshot(snapshot_path(run), live(14))
    assert Watcher(run).poll().step == 14


def test_only_new_lines_are_read_and_half_a_line_waits_for_its_end(run: Path) -> None:
    launch(run, os.getpid())
    tell(run, START, step(1))
    watcher = Watcher(run)
    assert watcher.poll().step == 1
    text = json.dumps(step(2))
    with (run / "metrics.jsonl").open("a") as file:
        file.write(text[:20])
        file.flush()
        assert watcher.poll().step == 1
        file.write(text[20:] + "\n")
    assert watcher.poll().step == 2


def test_damaged_lines_are_passed_over(run: Path) -> None:
    launch(run, os.getpid())
    tell(run, START, step(1))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"event": "st\n[1, 2]\n{"step": 7\n')
    tell(run, step(2))
    picture = Watcher(run).poll()
    assert picture.step == 2 and len(picture.steps) == 2


def test_a_line_that_was_cut_off_and_taken_away_is_forgotten(run: Path) -> None:
    launch(run, os.getpid())
    tell(run, START, step(1))
    whole = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(whole + b'{"step": 2, "epo')
    watcher = Watcher(run)
    watcher.poll()
    (run / "metrics.jsonl").write_bytes(whole)
    tell(run, {**START, "event": "resume", "step": 1}, step(2))
    assert watcher.poll().step == 2


def test_a_world_formed_anew_begins_where_it_goes_on(run: Path) -> None:
    launch(run, os.getpid())
    tell(run, START, *(step(number) for number in range(1, 41)))
    watcher = Watcher(run)
    assert watcher.poll().step == 40
    tell(run, {**START, "event": "resume", "step": 30, "ranks": 4, "strategy": "ddp4"})
    write_snapshot(snapshot_path(run), live(30))
    picture = watcher.poll()
    assert (picture.step, picture.facts["ranks"], picture.steps) == (30, 4, ())
    assert "ddp4 on 4 cpu ranks" in seen(picture)


def test_the_end_is_told_from_a_stop(run: Path) -> None:
    tell(run, START, step(1), {"event": "eval", "step": 1, "epoch": 0, "seconds": 1.0, "accuracy": 0.25})
    launch(run, NOBODY)
    watcher = Watcher(run)
    assert watcher.poll().state == "stopped"
    tell(run, {"event": "checkpoint", "step": 1}, {"event": "end", "steps": 1, "seconds": 3661.0})
    picture = watcher.poll()
    assert picture.state == "finished"
    words = seen(picture)
    assert "finished in 1:01:01" in words and "accuracy 0.25" in words and "last checkpoint: step 1" in words


def test_a_run_of_another_machine_is_believed_as_long_as_it_writes(run: Path) -> None:
    launch(run, NOBODY, machine="elsewhere")
    tell(run, START, step(1))
    write_snapshot(snapshot_path(run), live(1))
    assert Watcher(run).poll().state == "running"
    write_snapshot(snapshot_path(run), replace(live(1), when=time.time() - 3600))
    assert Watcher(run).poll().state == "silent"


def test_the_slow_rank_is_named_with_its_phase(run: Path) -> None:
    launch(run, os.getpid())
    tell(run, START, step(1))
    fine = RankFigures({**SECONDS, "data": 0.0004}, 9.5, 3 * 2**30)
    write_snapshot(snapshot_path(run), live(1, fine, RankFigures(SECONDS, 8.5, 2**30), slow=(SLOW,)))
    board = StatusBoard(run / ".state" / "status", 2, create=True)
    board.writer(1).phase("reading data")
    words = seen(Watcher(run).poll())
    assert SLOW.text in words
    (row,) = [line.split() for line in words.splitlines() if line.split()[:1] == ["1"]]
    assert row[:4] == ["1", "8.5", "150", "ms"] and row[-2:] == ["reading", "data"]
    assert "69 ms" in words, "the rest of the step: it waits for others"
    assert "3 GiB" in words


def test_of_many_ranks_the_slow_and_the_busy_are_shown(run: Path) -> None:
    ranks = [RankFigures({**SECONDS, "forward": 0.01 + rank / 1000}, 1.0, 2**20) for rank in range(500)]
    picture = RunView("toy", "running", START, live=live(1, *ranks, slow=(replace(SLOW, rank=3),)))
    shown = [line.split()[0] for line in seen(picture, 5).splitlines() if line.strip()[:1].isdigit()]
    assert shown == ["3", "496", "497", "498", "499"]
    assert "and 495 more ranks" in seen(picture, 5)


def test_stillness_is_told_with_where_the_ranks_are(run: Path) -> None:
    launch(run, os.getpid())
    tell(run, START, step(1))
    board = StatusBoard(run / ".state" / "status", 2, create=True)
    board.writer(0).phase("backward")
    board.writer(1).phase("reading data")
    picture = Watcher(run).poll()
    assert "made progress" not in seen(picture)
    still = replace(picture, now=picture.now + 45)
    assert "no rank has made progress for 45 s: rank 0 in backward, rank 1 in reading data" in seen(still)


def test_statuses_are_those_of_ranks_that_have_started(tmp_path: Path) -> None:
    assert read_statuses(tmp_path / "nothing") == {}
    board = StatusBoard(tmp_path / "status", 3, create=True)
    board.writer(2).phase("forward")
    assert {rank: status.phase for rank, status in read_statuses(tmp_path / "status").items()} == {2: "forward"}


def test_the_file_of_the_moment_is_read_as_it_was_written(tmp_path: Path) -> None:
    told = live(7, RankFigures(SECONDS, 8.5, 2**30), slow=(SLOW,))
    write_snapshot(tmp_path / "live.json", told)
    assert read_snapshot(tmp_path / "live.json") == told
    (tmp_path / "live.json").write_text('{"step": 1, "something": "else"}')
    assert read_snapshot(tmp_path / "live.json") is None
    assert read_snapshot(tmp_path / "nothing") is None


def test_the_rows_of_experts_are_a_line_after_their_step(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "metrics.jsonl")
    record = StepRecord(3, 0, 12, 0.5, None, 0.1, 0.5, 8.0, 0.1, 1, 2**20, experts={"experts": {"rows": [1, 2]}})
    lines.on_steps([record, replace(record, step=4, experts={})])
    lines.close()
    found = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["event"], row["step"]) for row in found] == [("step", 3), ("experts", 3), ("step", 4)]
    assert found[1]["layers"] == {"experts": {"rows": [1, 2]}} and "experts" not in found[0]


def test_the_rows_of_very_many_experts_do_not_fill_the_disk(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "metrics.jsonl")
    layers = {f"layers.{number}.experts": {"rows": [1000] * 10_000} for number in range(20)}
    for step in range(1, 11):
        lines.on_steps([StepRecord(step, 0, 12, 0.5, None, 0.1, 0.5, 8.0, 0.1, 1, 2**20, experts=layers)])
    lines.close()
    found = [json.loads(line)["event"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert found.count("step") == 10 and 1 <= found.count("experts") <= 4


def test_a_slow_rank_is_a_line_of_the_metrics_when_it_begins(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "metrics.jsonl")
    rank = RankFigures(SECONDS, 8.5, 2**30)
    for moment in (live(1, rank), live(2, rank, slow=(SLOW,)), live(3, rank, slow=(SLOW,)), live(4, rank)):
        lines.on_ranks(moment)
    lines.close()
    (row,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert (row["event"], row["step"], row["rank"], row["phase"]) == ("slow", 2, 1, "data")


def test_figures_of_ranks_say_who_is_busiest() -> None:
    idle = RankFigures({"data": 0.001, "forward": 0.01}, 9.5, 100)
    busy = RankFigures({"data": 0.15, "forward": 0.01}, 8.5, 300)
    figures = rank_figures(live(1, idle, busy, idle, slow=(SLOW,)))
    assert figures["ranks/slow"] == 1 and figures["ranks/busiest"] == 1
    assert figures["ranks/own_seconds_most"] == pytest.approx(0.16)
    assert figures["ranks/own_seconds_median"] == pytest.approx(0.011)
    assert figures["ranks/data_wait_seconds_most"] == 0.15
    assert (figures["ranks/memory_bytes_most"], figures["ranks/memory_bytes_least"]) == (300, 100)


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path / "nothing")]) == 2
    assert "there is no directory" in capsys.readouterr().err
    assert main(["watch", str(tmp_path)]) == 2
    assert "is not the directory of a run: it has no config.toml" in capsys.readouterr().err


def test_without_a_name_the_newest_run_is_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["watch"]) == 2
    assert "Name its directory" in capsys.readouterr().err
    for age, name in ((100, "old"), (0, "new")):
        path = tmp_path / "runs" / name / "config.toml"
        path.parent.mkdir(parents=True)
        path.write_text("")
        os.utime(path, (time.time() - age,) * 2)
    assert main(["watch"]) == 0
    assert capsys.readouterr().out.startswith("new  stopped before its end")


@pytest.mark.parametrize("rest", [b"", b'{"step": 3, "lo', b"x" * 200_000])
@pytest.mark.parametrize("whole", [b"", b'{"event": "start"}\n', b'{"event": "start"}\n' * 10_000])
def test_half_a_line_is_removed_without_reading_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bytes, rest: bytes
) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(whole + rest)
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail("the whole file is read"))
    JsonLines(file, resume=True).close()
    with file.open("rb") as left:
        assert left.read() == whole
