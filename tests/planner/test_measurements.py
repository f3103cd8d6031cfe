"""Layouts measured on the device that is here, with a CPU in its place: it has no bytes to count, but time passes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rung.hardware.cluster import parse_cluster
from rung.planner.at_hand import MeasuredRank
from rung.planner.estimate import Estimator
from rung.planner.measurements import Measurements, NotMeasured, OutOfTime, Slowdowns, device_at_hand, refine
from rung.planner.parallel_search import TaskSource
from rung.spec.config import RunConfig
from rung.spec.strategy import Layout, parse
from tests.tasks import text_task

TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

defaults = {"batch_size": 8}


def model():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def train_data():
    return TensorDataset(torch.zeros(64, 8), torch.zeros(64, dtype=torch.long))


def loss(output, target):
    return nn.functional.cross_entropy(output, target)


def optimizer(model):
    return torch.optim.AdamW(model.parameters())
"""
CONFIG = RunConfig(batch_size=8, device="cpu")


def test_a_measurement_is_made_in_another_process_and_kept(tmp_path: Path) -> None:
    file, kept = tmp_path / "task.py", tmp_path / "runs" / "measured.json"
    file.write_text(TASK)
    source = TaskSource(file, {})
    measurements = Measurements(source, "cpu", kept=kept)
    found = [measurements.measure(parse(name, ranks), CONFIG, (0,)) for name, ranks in (("single", 1), ("zero3", 4))]
    assert all(one is not None and one.seconds > 0 for one in found)
    again = Measurements(source, "cpu", kept=kept, seconds=0)
    assert again.measure(parse("zero3", 4), CONFIG, (0,)) == found[1]
    with pytest.raises(OutOfTime, match="time for measurements was over"):
        again.measure(parse("zero3", 8), CONFIG, (0,))
    file.write_text(TASK.replace("16", "32"))
    with pytest.raises(OutOfTime):
        again.measure(parse("zero3", 4), CONFIG, (0,))


def test_what_cannot_be_measured_says_why(tmp_path: Path) -> None:
    file = tmp_path / "task.py"
    file.write_text(TASK.replace("return nn.functional", "raise ValueError('never')\n    return nn.functional"))
    measurements = Measurements(TaskSource(file, {}), "cpu", kept=tmp_path / "measured.json")
    with pytest.raises(NotMeasured, match=r"ddp could not be measured: ValueError: never"):
        measurements.measure(parse("ddp", 2), CONFIG, (0,))
    file.write_text(TASK.replace("return nn.functional", "import os; os.abort()\n    return nn.functional"))
    with pytest.raises(NotMeasured, match=r"ddp could not be measured: its process was ended by SIGABRT"):
        measurements.measure(parse("ddp", 2), CONFIG, (0,))


def test_measured_operations_take_as_long_as_they_did_and_messages_as_long_as_is_said() -> None:
    config, cluster = RunConfig(batch_size=8, device="cpu"), parse_cluster("2xH100, ethernet")
    estimator = Estimator(text_task(), config, cluster, 0)
    layout = parse("ddp", 2)
    modelled = estimator.estimate(layout, "none", 2)
    assert modelled.num_micro_batches == 2
    slow = MeasuredRank(1.5 * modelled.time.own, 1000, 3000)  # much slower, the host would hide all messages
    found = estimator.estimate_form(layout, "none", 2, "auto", slow)
    assert found.is_measured
    assert found.time.own == pytest.approx(slow.seconds, rel=0.05)
    assert found.time.messages > 0
    assert found.time.seconds > slow.seconds
    assert (found.memory.allocated, found.memory.reserved) == (1000, 3000)
    assert found.memory.process - 3000 == modelled.memory.process - modelled.memory.reserved
    assert found.most_bytes / found.memory.process < modelled.most_bytes / modelled.memory.process


class Told(Measurements):
    """Answers in the place of a device."""

    def __init__(self, answers: dict[str, list[MeasuredRank | NotMeasured | None]]) -> None:
        self.answers = answers
        self.asked: list[tuple[str, int, tuple[int, ...]]] = []

    def measure(self, layout: Layout, config: RunConfig, ranks: tuple[int, ...]) -> MeasuredRank | None:
        self.asked.append((layout.name, config.micro_batch or 0, ranks))
        answers = self.answers.get(layout.name)
        if not answers:
            raise OutOfTime("it is late")
        answer = answers.pop(0)
        if isinstance(answer, NotMeasured):
            raise answer
        return answer


def test_the_best_are_measured_and_what_does_not_fit_is_tried_in_smaller_pieces() -> None:
    config, cluster = RunConfig(batch_size=8, device="cpu"), parse_cluster("2xH100")
    # A host so quick that ddp is worth it for a tiny model.
    cluster = replace(cluster, device=replace(cluster.device, send=0.0, gather=0.0))
    estimator = Estimator(text_task(), config, cluster, 0)
    rows = [
        estimator.estimate(parse(name, ranks), "none", 4) for name, ranks in (("single", 1), ("ddp", 2), ("pp2", 2))
    ]
    quick, slow = MeasuredRank(1e-3, 1, 1), MeasuredRank(1.0, 1, 1)
    told = Told({"ddp": [None, quick], "single": [slow], "pp2": [slow]})
    found, rejected, said = refine(rows, estimator, told, lambda text: None)
    best = next(row for row in found if row.is_measured)
    assert (best.layout.name, best.micro_batch) == ("ddp", 2)
    assert ("ddp", 4, (0,)) in told.asked and ("ddp", 2, (0,)) in told.asked
    assert {ranks for name, _, ranks in told.asked if name == "pp2"} <= {(0, 1), (1,)}
    assert rejected == [] and said == []
    smallest = estimator.estimate(parse("ddp", 2), "none", 1)
    found, rejected, _ = refine([smallest], estimator, Told({"ddp": [None]}), lambda text: None)
    assert found == [] and [one.layout.name for one in rejected] == ["ddp"]
    told = Told({"ddp": [MeasuredRank(3 * rows[1].time.own, 1, 1)]})
    found, _, said = refine(rows, estimator, told, lambda text: None)
    before = {row.layout.name: row.time.own for row in rows}
    assert {row.layout.name: round(row.time.own / before[row.layout.name], 1) for row in found} == {
        "single": 3.0, "ddp": 3.0, "pp2": 3.0,
    }, "what was not measured is as much slower"  # fmt: skip
    assert said == ["it is late: figures of the other layouts are modelled."]


def test_a_layout_without_a_measurement_is_as_much_slower_as_those_that_are_like_it() -> None:
    """On a slow host, FSDP's hooks make a step many times longer than one process needs: a sharded layout that nobody
    measured must not win because of that one process."""
    config, cluster = RunConfig(batch_size=8, device="cpu"), parse_cluster("4xH100")
    estimator = Estimator(text_task(), config, cluster, 0)
    names = ("zero2", "zero3", "fsdp2,tp2", "ddp", "zero1")
    rows = {name: estimator.estimate(parse(name, 4), "none", 2) for name in names}
    slowdowns = Slowdowns()
    assert slowdowns.of(rows["zero3"].layout) == 1
    slowdowns.add(parse("single", 1), 1.5)
    assert slowdowns.of(rows["zero3"].layout) == 1.5
    slowdowns.add(rows["zero2"].layout, 5.0)
    slowdowns.add(rows["ddp"].layout, 2.0)
    found = {name: slowdowns.of(row.layout) for name, row in rows.items()}
    assert found == {"zero2": 5.0, "zero3": 5.0, "fsdp2,tp2": 5.0, "ddp": 2.0, "zero1": 2.0}


def test_a_layout_that_cannot_be_measured_keeps_none_of_the_others_from_it() -> None:
    config, cluster = RunConfig(batch_size=8, device="cpu"), parse_cluster("2xH100")
    estimator = Estimator(text_task(), config, cluster, 0)
    rows = [estimator.estimate(parse(name, ranks), "none", 4) for name, ranks in (("single", 1), ("ddp", 2))]
    broken = NotMeasured("ddp could not be measured: it broke")
    told = Told({"ddp": [broken], "single": [MeasuredRank(1.0, 1, 1)]})
    found, _, said = refine(rows, estimator, told, lambda text: None)
    assert said == [f"{broken}. Its figures are modelled."]
    assert {row.layout.name for row in found if row.is_measured} == {"single"}


def test_only_the_planned_device_is_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert device_at_hand(parse_cluster("2xH100")) is None
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    assert device_at_hand(parse_cluster("2xH100")) == "cuda"
    assert device_at_hand(parse_cluster("2xH200")) is None
