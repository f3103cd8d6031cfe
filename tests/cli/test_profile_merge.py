"""What --profile and --log take, and how the traces of ranks become one."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from rung.cli.main import main
from rung.cli.profile_merge import merge
from rung.errors import ConfigError, EnvironmentProblem
from rung.spec.compatibility import validate_config
from rung.spec.config import RunConfig, check
from rung.spec.observability import profiled_steps, refuse_missing_trackers, tracker_names
from rung.spec.strategy import parse

SECOND = 1_000_000_000


def trace(folder: Path, rank: int, machine: str, clock: int, base: int, start: float, steps: str = "5-6") -> Path:
    """A trace of one range of 10 us that begins `start` us after `base`, on a machine whose clock says `clock`."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 4000 + rank, "tid": 0, "args": {"name": "python"}},
        {"ph": "M", "name": "thread_name", "pid": 4000 + rank, "tid": 9, "args": {"name": "thread 9"}},
        {"ph": "X", "cat": "user_annotation", "name": "step 5", "pid": 4000 + rank, "tid": 9, "ts": start, "dur": 10.0},
        {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": start + 2, "dur": 1.0},
        {"ph": "s", "id": 3, "name": "fwdbwd", "pid": 4000 + rank, "tid": 9, "ts": start},
        {"ph": "f", "id": 3, "name": "fwdbwd", "pid": 4000 + rank, "tid": 9, "ts": start + 5},
        {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "all", "ts": 0, "dur": 1},
    ]
    facts = {"rank": rank, "ranks": 4, "strategy": "ddp", "machine": machine, "clocks_ns": [clock, clock + SECOND]}
    path = folder / f"rank-{rank}-steps-{steps}.json.gz"
    content = {"rung": facts, "baseTimeNanoseconds": base, "traceEvents": events}
    path.write_bytes(gzip.compress(json.dumps(content).encode()))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    opened = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return json.loads(opened)["traceEvents"]


def test_traces_of_machines_with_different_clocks_are_put_right(tmp_path: Path) -> None:
    now = 1_794_770_000 * SECOND
    ranks = {
        0: trace(tmp_path, 0, "one", now, now - SECOND, 1_000_000.0),
        1: trace(tmp_path, 1, "one", now + 700, now - 2 * SECOND, 2_000_030.0),  # 30 us after rank 0, by their clock
        2: trace(tmp_path, 2, "two", now + 60 * SECOND, now + 59 * SECOND, 1_000_050.0),  # a minute fast, 50 us after
    }
    assert merge(ranks, tmp_path / "all.json") == [3], "of four ranks one is missing"
    steps = {event["pid"]: event["ts"] for event in read(tmp_path / "all.json") if event["name"] == "step 5"}
    assert steps[1] - steps[0] == pytest.approx(30)
    assert steps[2] - steps[0] == pytest.approx(50)


def test_a_merged_trace_has_one_process_for_each_rank(tmp_path: Path) -> None:
    ranks = {rank: trace(tmp_path, rank, "one", 0, 0, 5.0) for rank in (0, 1)}
    merge(ranks, tmp_path / "all.json.gz")
    events = read(tmp_path / "all.json.gz")
    assert {event["pid"] for event in events} == {0, 1}, "kernels and what the profiler says of itself, too"
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["rank 0", "rank 1"]
    flows = {event["id"]: set() for event in events if "id" in event}
    for event in events:
        if "id" in event:
            flows[event["id"]].add((event["pid"], event["ph"]))
    assert sorted(map(sorted, flows.values())) == [[(0, "f"), (0, "s")], [(1, "f"), (1, "s")]], "no flow between ranks"


def test_merging_says_what_it_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "profile"
    folder.mkdir()
    assert main(["profile", "merge", str(tmp_path)]) == 2
    assert "`rung train --profile STEPS` writes them" in capsys.readouterr().err
    for steps in ("5-6", "9-9"):
        trace(folder, 0, "one", 0, 0, 5.0, steps)
    assert main(["profile", "merge", str(tmp_path)]) == 2
    assert "traces of steps 5:6, 9. Choose with --steps 9" in capsys.readouterr().err
    assert main(["profile", "merge", str(tmp_path), "--steps", "7"]) == 2
    assert "there are: 5:6, 9" in capsys.readouterr().err
    assert main(["profile", "merge", str(tmp_path), "--steps", "5:6"]) == 0
    told = capsys.readouterr().out
    assert str(folder / "steps-5-6.json.gz") in told and "not here: ranks 1, 2, 3" in told
    for out, words in (("x.txt", "must end with .json or .json.gz"), ("nowhere/x.json", "cannot be written")):
        assert main(["profile", "merge", str(tmp_path), "--steps", "9", "--out", str(tmp_path / out)]) == 2
        assert words in capsys.readouterr().err


def test_a_damaged_or_foreign_trace_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "profile").mkdir()
    path = tmp_path / "profile" / "rank-0-steps-1-1.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": []}'))
    assert main(["profile", "merge", str(tmp_path)]) == 2
    assert "is not a trace of `rung train --profile`" in capsys.readouterr().err
    path.write_bytes(path.read_bytes()[:15])
    assert main(["profile", "merge", str(tmp_path)]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_steps_to_profile() -> None:
    assert list(profiled_steps("10")) == [10]
    assert list(profiled_steps("10:13")) == [10, 11, 12, 13]
    assert check("profile", 4) == "4", "a number in a TOML file"
    for wrong in ("", "a", "3:", ":3", "-1", "1:2:3"):
        with pytest.raises(ConfigError, match="profile is a step, or FIRST:LAST"):
            check("profile", wrong)
    for wrong in ("0", "5:3"):
        with pytest.raises(ConfigError, match="profile needs 1 <= FIRST <= LAST"):
            check("profile", wrong)


def test_a_profile_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="begins after the last step, 5"):
        validate_config(RunConfig(profile="6:9", steps=5), parse("ddp", 2))
    with pytest.raises(ConfigError, match="under ps-async"):
        validate_config(RunConfig(profile="2"), parse("ps-async", 3))


def test_trackers_by_name() -> None:
    assert tracker_names("wandb, mlflow") == ("wandb", "mlflow")
    with pytest.raises(ConfigError, match=r"log cannot be 'wandbb'\. Did you mean 'wandb'"):
        check("log", "wandbb")
    with pytest.raises(ConfigError, match="twice"):
        check("log", "mlflow,mlflow")


def test_a_tracker_that_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblem, match=r"pip install 'rung\[trackio\]'"):
        refuse_missing_trackers(("trackio",))
    refuse_missing_trackers(())
