"""The recommendation against a decision table that many know: "Which strategy to use when", of Hugging Face's page
"Efficient training on multiple GPUs" (transformers, perf_train_gpu_many).

Each test says a row of the table in words, and asserts what is recommended, and what is left out for which reason. The
devices are an H100 whose memory is as small as the models here, and whose host takes no time, so that few blocks behave
like many. The table's own words are about what is usually quickest, so the times are asserted where it names an order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from rung.hardware.cluster import Cluster, parse_cluster
from rung.planner import plan as planning
from rung.planner.candidates import layouts_for
from rung.planner.plan import Plan, make_plan
from rung.spec.config import RunConfig
from rung.spec.strategy import Layout
from rung.spec.task import Task
from tests.tasks import TinyGPT, text_task

LENGTH = 512
STATE_ALONE = "parameters, gradients and optimizer state alone"


def gpt(layers: int, length: int = LENGTH) -> Task:
    """Blocks of 9.4 million parameters: 144 MiB of state each, with AdamW."""
    tokens = torch.zeros(64, length, dtype=torch.long)
    return text_task(
        model=lambda: TinyGPT(64, 1024, layers, length),
        train_data=lambda: TensorDataset(tokens, tokens),
        optimizer=lambda model: torch.optim.AdamW(model.parameters()),
    )


class Advisor:
    """Plans for devices of some memory, among some layouts alone: all of them would take minutes."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._file, self._monkeypatch = folder / "small.toml", monkeypatch

    def plan(self, task: Task, cluster: str, gib: float, names: list[str], **settings: Any) -> Plan:
        self._file.write_text(
            f'[devices.small]\nlike = "H100"\nsource = "a test"\nmemory = {int(gib * 2**30)}\n'
            "context = 0\ncommunicator = 0\nlaunch = 0.0\nissue = 0.0\nsend = 0.0\ngather = 0.0\nworkspaces = {}\n"
        )
        return self.among(names, task, parse_cluster(cluster, self._file), **settings)

    def among(self, names: list[str], task: Task, cluster: Cluster, *, advises: bool = False, **settings: Any) -> Plan:
        def some(cluster: Cluster, num_blocks: int, batch_size: int, num_experts: int) -> list[Layout]:
            found = {one.name: one for one in layouts_for(cluster, num_blocks, batch_size, num_experts)}
            return [found[name] for name in names]

        self._monkeypatch.setattr(planning, "layouts_for", some)
        config = RunConfig(**{"device": "cpu", "activation_checkpointing": "full", **settings})
        # What else could be changed is test_advice.py's matter, but for a row that is about it.
        return make_plan(task, config, cluster, advises=advises)


@pytest.fixture
def advisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Advisor:
    return Advisor(tmp_path, monkeypatch)


def chosen(plan: Plan) -> str:
    return plan.chosen.layout.name if plan.chosen is not None else "nothing"


def seconds(plan: Plan) -> dict[str, float]:
    return {row.layout.name: row.time.seconds for row in plan.rows}


def reasons(plan: Plan) -> dict[str, str]:
    return {one.layout.name: one.reason for one in plan.rejected}


def test_one_device_and_the_model_fits_it(advisor: Advisor) -> None:
    """Table: normal use."""
    plan = advisor.plan(gpt(2), "1xsmall", 80, ["single"], batch_size=2)
    assert chosen(plan) == "single"
    assert plan.words[0].startswith("one device is enough")
    assert not plan.rejected


def test_one_device_and_the_model_does_not_fit_it(advisor: Advisor) -> None:
    """Table: ZeRO with parameters and optimizer state in the host's memory."""
    plan = advisor.plan(gpt(2), "1xsmall", 0.25, ["single"], batch_size=2, advises=True)
    assert chosen(plan) == "nothing"
    assert STATE_ALONE in reasons(plan)["single"]
    assert any("fits with --strategy zero3 --offload cpu" in line for line in plan.words)


def test_one_machine_and_the_model_fits_a_device(advisor: Advisor) -> None:
    """Table: DDP; ZeRO, which may or may not be faster."""
    names = ["single", "ddp", "zero2", "tp2", "pp2"]
    plan = advisor.plan(gpt(2), "2xsmall", 80, names, batch_size=4, micro_batch=2)
    assert chosen(plan) in ("ddp", "zero2")
    times = seconds(plan)
    assert times["ddp"] == pytest.approx(times["zero2"], rel=0.1)
    assert times["ddp"] < 0.9 * min(seconds for name, seconds in times.items() if name not in ("ddp", "zero2"))
    assert not any(one.needs for one in plan.rejected)  # everything fits


NAMES = ["single", "ddp", "zero3", "tp4", "pp4"]


def test_one_machine_with_quick_links_and_the_model_does_not_fit_a_device(advisor: Advisor) -> None:
    """Table: PP, ZeRO or TP, on a par with NVLink. Here ZeRO, since nothing of the model has to be known for it."""
    plan = advisor.plan(gpt(4), "4xsmall, nvlink4", 0.55, NAMES, batch_size=8, micro_batch=2)
    assert set(seconds(plan)) == {"zero3", "tp4"}
    assert chosen(plan) == "zero3"
    assert max(seconds(plan).values()) < 3 * min(seconds(plan).values())
    assert set(reasons(plan)) == {"single", "ddp", "pp4"}
    assert "the filling of its stages alone" in reasons(plan)["pp4"]  # of four micro-batches, three must pass first
    assert all(STATE_ALONE in reasons(plan)[name] for name in ("single", "ddp"))


def test_one_machine_with_slow_links_and_the_model_does_not_fit_a_device(advisor: Advisor) -> None:
    """Table: without NVLink PP is faster than ZeRO or TP."""
    plan = advisor.plan(gpt(4), "4xsmall, pcie3", 0.55, NAMES, batch_size=8, micro_batch=2)
    assert chosen(plan) == "pp4"
    times = seconds(plan)
    assert times["pp4"] * 1.2 < times["zero3"] < times["tp4"]
    assert set(reasons(plan)) == {"single", "ddp"}


def test_the_largest_layer_does_not_fit_a_device(advisor: Advisor) -> None:
    """Table: without ZeRO it must be TP, as PP alone cannot; and ZeRO gathers the layer, so it needs more than that."""
    names = ["ddp", "zero3", "pp2,ddp2", "tp4"]
    plan = advisor.plan(gpt(2, length=64), "4xsmall", 0.125, names, batch_size=4, micro_batch=1)
    assert chosen(plan) == "tp4"
    found = reasons(plan)
    assert set(found) == {"ddp", "zero3", "pp2,ddp2"}
    assert STATE_ALONE in found["ddp"]
    assert STATE_ALONE in found["pp2,ddp2"]  # a stage has one block at least
    assert found["zero3"].startswith("needs 0.")


def test_machines_with_quick_links(advisor: Advisor) -> None:
    """Table: ZeRO, since it needs next to no change of the model; PP, TP and DP together."""
    names = ["ddp", "zero3", "pp2,tp2"]
    plan = advisor.plan(gpt(4), "2 nodes x 2 small, infiniband", 0.55, names, batch_size=8, micro_batch=2)
    assert chosen(plan) == "zero3"
    assert set(seconds(plan)) == {"zero3", "pp2,tp2"}
    assert STATE_ALONE in reasons(plan)["ddp"]


def test_machines_with_slow_links_and_little_memory(advisor: Advisor) -> None:
    """Table: DP, PP, TP and ZeRO-1 together. What goes between machines is then a stage's activations alone."""
    names = ["ddp", "zero3", "pp2,zero1x2,tp2", "pp2,ddp4"]
    plan = advisor.plan(gpt(4), "2 nodes x 4 small, 10Gb/s", 0.5, names, batch_size=16, micro_batch=2)
    assert chosen(plan) == "pp2,zero1x2,tp2"
    assert seconds(plan)["pp2,zero1x2,tp2"] * 1.5 < seconds(plan)["zero3"]
    assert STATE_ALONE in reasons(plan)["ddp"]
    assert reasons(plan)["pp2,ddp4"].startswith("needs ")


def test_a_model_of_fifty_thousand_parameters_on_four_ranks_of_a_small_machine(
    advisor: Advisor, tmp_path: Path
) -> None:
    """Not in the table, but the first question of all. The record is like one that `rung calibrate` writes."""
    record = ""
    for name, issue, rate in (("here", 3e-5, 7e10), ("here-1", 3e-5, 7e10), ("here-4", 7e-5, 1.8e10)):
        record += (
            f'[devices."{name}"]\nsource = "a test"\nkind = "cpu"\nmemory = 6_000_000_000\nlink = "here"\n'
            f"bandwidth = 3e10\noverlaps = false\nissue = {issue}\nlaunch = 0.0\ncontext = 314_572_800\n"
            f"communicator = 0\nmatrix = {{fp32 = {rate}}}\nrates = {{fp32 = [[8192, 1.5e9], [4e6, {rate}]]}}\n"
        )
    curve = "[[1024, 4e-4], [1_048_576, 3e-3]]"
    record += '[links.here]\nsource = "a test"\nbandwidth = 1e9\nlatency = 1e-4\nbesides = {4 = 2e-3}\n'
    record += f'[links.here.times]\n"all_reduce:4" = {curve}\n"all_gather:4" = {curve}\n"reduce_scatter:4" = {curve}\n'
    file = tmp_path / "here.toml"
    file.write_text(record)
    task = text_task(model=lambda: TinyGPT(64, 48, 2), optimizer=lambda model: torch.optim.AdamW(model.parameters()))
    assert 40_000 < sum(p.numel() for p in task.model().parameters()) < 60_000
    names = ["single", "ddp", "zero1", "zero3"]
    plan = advisor.among(names, task, parse_cluster("4xhere", file), batch_size=32, activation_checkpointing="none")
    assert chosen(plan) == "single"
    assert plan.words[0].startswith("one device is enough")
    assert "the messages would take longer" in plan.words[1]
    assert not plan.rejected
