"""Plans with `--offload cpu`: what lies on the host, what crosses its link, and what the host takes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rung.hardware.cluster import parse_cluster
from rung.planner.command import command_line
from rung.planner.cost import step_time
from rung.planner.dryrun import DryRun, dry_run
from rung.planner.memory import find_peak
from rung.planner.plan import make_plan
from rung.planner.trace import Work
from rung.spec.config import RunConfig
from rung.spec.strategy import parse
from rung.spec.task import Task
from tests.tasks import TinyGPT, text_task


def gpt() -> Task:
    return text_task(
        model=lambda: TinyGPT(64, 128, 2, 16), optimizer=lambda model: torch.optim.AdamW(model.parameters())
    )


def run_of(strategy: str, ranks: int, *, offload: str = "cpu", micro_batch: int = 2, device: str = "cuda") -> DryRun:
    config = RunConfig(batch_size=8, micro_batch=micro_batch, offload=offload, device="cpu")
    return dry_run(gpt(), parse(strategy, ranks), config, device=device)


def copied(run: DryRun, *, to_host: bool) -> int:
    works = [
        event for event in run.trace.events[run.second_step :] if isinstance(event, Work) and event.place == "link"
    ]
    return sum(work.num_bytes for work in works if run.trace.allocations[work.writes[0]].on_host == to_host)


@pytest.mark.parametrize(("strategy", "ranks"), [("zero2", 4), ("zero3", 4), ("hsdp2x2", 4), ("zero3", 1)])
def test_shards_cross_the_link_once_for_each_message(strategy: str, ranks: int) -> None:
    run = run_of(strategy, ranks, micro_batch=2)
    shards = run.layout.dp_shard
    sent: Counter[str] = Counter()
    for message in run.trace.messages(run.second_step):
        sent[message.operation] += message.num_bytes
    if ranks > 1:
        assert copied(run, to_host=False) == sent["all-gather"] // shards
        assert copied(run, to_host=True) == sent["reduce-scatter"] // shards
    assert copied(run, to_host=True) == run.state_bytes["parameters"] * (8 // ranks // 2)


def test_the_state_lies_on_the_host_and_the_rest_on_the_device() -> None:
    kept, moved = run_of("zero3", 4, offload="none", micro_batch=1), run_of("zero3", 4, micro_batch=1)
    state = kept.state_bytes
    on_host, on_device = find_peak(moved.trace, on_host=True).by_kind, find_peak(moved.trace).by_kind
    assert state["parameters"] <= on_host["parameters"] <= 2 * state["parameters"]  # in powers of two
    assert state["parameters"] <= on_host["gradients"] <= 2 * state["parameters"]
    assert on_host["optimizer"] == pytest.approx(state["optimizer"], rel=0.01)
    assert "parameters" not in on_device and "gradients" not in on_device
    before = find_peak(kept.trace).by_kind
    assert on_device["activations"] == before["activations"]
    assert find_peak(kept.trace, on_host=True).num_bytes == 0


def test_a_cpu_has_no_other_host() -> None:
    run = run_of("zero3", 4, device="cpu")
    assert not any(allocation.on_host for allocation in run.trace.allocations)


def test_time_follows_the_link_and_the_host() -> None:
    cluster = parse_cluster("4xH200")
    runs = [run_of("zero3", 4)]
    usual = step_time(runs, cluster)
    slow_link = step_time(runs, replace(cluster, device=replace(cluster.device, host_link=1e8)))
    slow_host = step_time(runs, replace(cluster, device=replace(cluster.device, host_bandwidth=1e8)))
    assert slow_link.seconds > usual.seconds and slow_host.seconds > usual.seconds
    updated = [e for e in runs[0].trace.events[runs[0].second_step :] if isinstance(e, Work) and e.place == "host"]
    expected = sum(work.num_bytes for work in updated) * (1 / 1e8 - 1 / cluster.device.host_bandwidth)
    assert slow_host.seconds - usual.seconds == pytest.approx(expected, rel=0.05)
    assert {work.phase for work in updated} <= {"backward", "update"}


def test_a_plan_leaves_out_layouts_that_cannot_offload_and_names_the_flag() -> None:
    config = RunConfig(batch_size=8, offload="cpu", device="cpu")
    plan = make_plan(gpt(), config, parse_cluster("2xH200"), advises=False)
    assert {row.layout.name for row in plan.rows} <= {"zero2", "zero3"} and plan.rows
    assert "shards no parameters" in next(one.reason for one in plan.rejected if one.layout.name == "ddp")
    assert command_line(plan).endswith("--offload cpu")
    assert any("GB/s" in line and "rung calibrate" in line for line in plan.words)


def test_offloading_is_tried_for_a_model_that_does_not_fit(tmp_path: Path) -> None:
    record = tmp_path / "small.toml"
    record.write_text(
        '[devices.small]\nlike = "H100"\nsource = "a test"\nmemory = 125829120\ncontext = 0\ncommunicator = 0\n'
        "workspaces = {}\n"
    )
    task = text_task(
        model=lambda: TinyGPT(64, 512, 6, 16), optimizer=lambda model: torch.optim.AdamW(model.parameters())
    )
    plan = make_plan(task, RunConfig(batch_size=2, device="cpu"), parse_cluster("1xsmall", record))
    assert plan.chosen is None
    change = next(one for one in plan.changes if one.seconds is not None)
    assert change.what.startswith("--strategy zero3 --offload cpu") and change.needs < 125829120
