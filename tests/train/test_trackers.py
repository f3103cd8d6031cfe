"""Figures arrive in the trackers, each in its offline mode; a run that goes on is the same one there.

Packages that are not installed are left out: wandb comes with the tools of developers, and mlflow (a minute and 850 MB)
and trackio (which wants an older pillow) are for `pip install 'rung[mlflow,trackio]'`.
"""

from __future__ import annotations

import json
import sqlite3
import struct
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rung.distributed.live_status import JobSnapshot, RankFigures
from rung.errors import EnvironmentProblem
from rung.train import trackers
from rung.train.metrics import training_figures
from rung.train.records import EvalRecord, StepRecord
from rung.train.trackers import open_trackers

SETTINGS = {"task": "toy", "config": {"strategy": "ddp", "clip": None}, "arguments": {"model.width": 12}}
LOSSES = [4.0, 3.0, 2.0]


def record(step: int, loss: float) -> StepRecord:
    return StepRecord(step, 0, 4 * step, loss, None, 0.1, 0.5, 8.0, 0.1, 1, 2**20)


def test_the_rate_of_each_of_several_optimizers_is_a_figure() -> None:
    figures = training_figures(replace(record(1, 2.0), lrs={"matrices": 0.1, "rest": 0.3}))
    assert figures == {"train/loss": 2.0, "train/lr": 0.1, "train/lr_matrices": 0.1, "train/lr_rest": 0.3}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "toy-ddp"
    (folder / ".state").mkdir(parents=True)
    (folder / ".state" / "run").write_text("0123456789abcdef")
    return folder


def train(name: str, run: Path, first: int = 1, *, must_open: bool = True) -> None:
    """Some steps of a run, an evaluation and its end."""
    (post,) = open_trackers((name,), run, SETTINGS, must_open=must_open)
    post.on_start({}, first - 1)
    post.on_steps([record(first + index, loss) for index, loss in enumerate(LOSSES)])
    post.on_ranks(JobSnapshot(first, 0.0, 0.1, [RankFigures({"data": 0.01, "forward": 0.02}, 8.0, 100)]))
    post.on_evaluation(EvalRecord(first + 2, 0, {"accuracy": 0.25}, 1.0))
    post.on_end({})
    post.close()


class Kept:
    """A tracker of the tests'. It fails from a step on."""

    def __init__(self, fails_from: int = 100) -> None:
        self.name, self.fails_from = "kept", fails_from
        self.figures: list[tuple[int, Mapping[str, float]]] = []
        self.ended: bool | None = None
        self.threads: set[int] = set()

    def put(self, figures: Mapping[str, float], step: int) -> None:
        if step >= self.fails_from:
            raise ConnectionError("the server is gone\nand more")
        self.figures.append((step, figures))
        self.threads.add(threading.get_ident())

    def finish(self, *, is_complete: bool) -> None:
        self.ended = is_complete


def test_figures_are_handed_over_beside_the_training(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept()
    monkeypatch.setitem(trackers._OPENERS, "wandb", lambda *_: kept)
    monkeypatch.setattr("rung.train.trackers.refuse_missing_trackers", lambda names: None)
    train("wandb", run)
    assert kept.threads and threading.get_ident() not in kept.threads
    assert [(step, told["train/loss"]) for step, told in kept.figures if "train/loss" in told] == [
        (1, 4.0),
        (2, 3.0),
        (3, 2.0),
    ]
    (evaluation,) = [told for _, told in kept.figures if "eval/accuracy" in told]
    assert evaluation == {"eval/accuracy": 0.25}
    assert any("ranks/data_wait_seconds_most" in told for _, told in kept.figures)
    assert kept.ended is True


def test_a_tracker_that_fails_is_told_of_and_the_run_goes_on(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken, sound = Kept(fails_from=2), Kept()
    for name, kept in {"wandb": broken, "mlflow": sound}.items():
        monkeypatch.setitem(trackers._OPENERS, name, lambda *_, kept=kept: kept)
    monkeypatch.setattr("rung.train.trackers.refuse_missing_trackers", lambda names: None)
    (post,) = open_trackers(("wandb", "mlflow"), run, SETTINGS, must_open=True)
    post.on_steps([record(1, 4.0), record(2, 3.0), record(3, 2.0)])
    post.close()
    assert [step for step, _ in broken.figures] == [1] and broken.ended is None
    assert [step for step, _ in sound.figures] == [1, 2, 3]
    assert sound.ended is False, "the run did not come to its end"
    assert [entry.getMessage() for entry in caplog.records] == [
        "kept takes no more figures: the server is gone. The run goes on; metrics.jsonl has them."
    ]


def test_a_tracker_that_cannot_begin_ends_a_new_run_and_not_one_that_goes_on(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("no key")

    monkeypatch.setitem(trackers._OPENERS, "wandb", refuse)
    monkeypatch.setattr("rung.train.trackers.refuse_missing_trackers", lambda names: None)
    with pytest.raises(EnvironmentProblem, match=r"--log wandb cannot begin: no key\. Set wandb up"):
        open_trackers(("wandb",), run, SETTINGS, must_open=True)
    assert open_trackers(("wandb",), run, SETTINGS, must_open=False) == []
    assert "The run goes on without it" in caplog.text


def test_nothing_is_opened_where_nothing_was_asked_for(run: Path) -> None:
    assert open_trackers((), run, SETTINGS, must_open=True) == []


def test_wandb_offline(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: pip install 'rung[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    train("wandb", run)
    (path,) = run.glob("wandb/offline-run-*/run-0123456789abcdef.wandb")
    assert read_wandb(path) == [(1, 4.0), (2, 3.0), (3, 2.0)]


def read_wandb(path: Path) -> list[tuple[int, float]]:
    """Steps and losses of the file that `wandb sync` would send: a log as LevelDB writes it, of small records."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, found = path.read_bytes(), 7, []
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:  # no room for a head: the next block begins
            place += 32768 - place % 32768
            continue
        length, kind = struct.unpack_from("<HB", content, place + 4)
        assert kind == 1, "a record that is whole"
        told = Record.FromString(content[place + 7 : place + 7 + length])
        row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in told.history.item}
        if "train/loss" in row:
            found.append((row["step"], row["train/loss"]))
        place += 7 + length
    return found


def test_mlflow_in_a_database_of_this_machine(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed: pip install 'rung[mlflow]'")
    pytest.importorskip("sqlalchemy", reason="mlflow-skinny keeps no database")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    train("mlflow", run)
    train("mlflow", run, first=3, must_open=False)  # it goes on after step 2
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("toy")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED" and found.info.run_name == "toy-ddp"
    assert found.data.params["model.width"] == "12" and "clip" not in found.data.params
    history = client.get_metric_history(found.info.run_id, "train/loss")
    assert [(one.step, one.value) for one in history] == [(1, 4.0), (2, 3.0), (3, 2.0), (3, 4.0), (4, 3.0), (5, 2.0)]


def test_trackio_on_this_machine(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio", reason="trackio is not installed: pip install 'rung[trackio]'")
    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path / "trackio")
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")
    train("trackio", run)
    train("trackio", run, first=4, must_open=False)
    (path,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(path) as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    told = [
        (step, json.loads(figures)["train/loss"]) for _, step, figures in rows if "train/loss" in json.loads(figures)
    ]
    assert told == [(1, 4.0), (2, 3.0), (3, 2.0), (4, 4.0), (5, 3.0), (6, 2.0)]
    assert {name for name, _, _ in rows} == {"toy-ddp-012345"}, "one run, which went on"
