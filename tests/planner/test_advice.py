"""What a plan advises: changes that make a job fit, or a job that fits quicker."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.utils.data import TensorDataset

from rung.hardware.cluster import Cluster, parse_cluster
from rung.planner.command import command_line
from rung.planner.plan import Plan, make_plan
from rung.spec.config import CP_FORMS, RunConfig
from rung.spec.task import Task

MIB, WIDTH = 2**20, 2048


def wide_task() -> Task:
    """Few operations, and much memory: that of an allocator's pieces does not count beside it."""
    return Task(
        model=lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))),
        train_data=lambda: TensorDataset(torch.zeros(4096, WIDTH), torch.zeros(4096, dtype=torch.long)),
        loss=nn.functional.cross_entropy,
        optimizer=lambda model: torch.optim.AdamW(model.parameters()),
        name="wide",
    )


def plan(cluster: Cluster, only: str | None = None, **settings: object) -> Plan:
    config = RunConfig(**{"batch_size": 4096, "device": "cpu", **settings})  # type: ignore[arg-type]
    return make_plan(wide_task(), config, cluster, only=only)


def with_memory(text: str, num_bytes: int) -> Cluster:
    cluster = parse_cluster(text)
    return replace(cluster, device=replace(cluster.device, memory=num_bytes, context=0, communicator=0, workspaces={}))


def test_a_named_strategy_that_does_not_fit_gets_the_first_change_that_does() -> None:
    needs = plan(with_memory("4xH100", 2**40), "ddp", micro_batch=1).rows[0].memory.process
    found = plan(with_memory("4xH100", round(0.9 * needs)), "ddp")
    assert found.chosen is None
    *others, last = found.changes
    assert last.what.startswith("--strategy zero") and last.seconds is not None and last.needs < needs
    assert [one.seconds for one in others] == [None] * len(others)
    assert any(line.startswith(f"It fits with {last.what}: ") for line in found.words)
    for one in others:
        assert any(line.startswith(f"{one.what} is not enough: ") for line in found.words)
    assert found.as_json()["changes"][-1]["what"] == last.what


def test_a_micro_batch_that_is_too_large_comes_first() -> None:
    small, large = (plan(with_memory("1xH100", 2**40), "single", micro_batch=size).rows[0] for size in (512, 4096))
    between = (small.memory.process + large.memory.process) // 2
    found = plan(with_memory("1xH100", between), "single", micro_batch=4096)
    (change,) = found.changes
    assert change.what.startswith("--micro-batch ") and change.seconds is not None
    assert change.needs <= between


def test_where_nothing_fits_more_devices_are_tried() -> None:
    smallest = {"micro_batch": 1, "activation_checkpointing": "full"}
    least = plan(with_memory("1xH100", 2**40), "single", **smallest).rows[0]
    found = plan(with_memory("1xH100", round(0.8 * least.memory.process)), **smallest)
    assert found.chosen is None and found.changes[-1].seconds is not None
    assert "--strategy zero3 on " in found.changes[-1].what and "x H100" in found.changes[-1].what
    hopeless = plan(with_memory("1xH100", 2 * MIB), **smallest)
    assert all(one.seconds is None for one in hopeless.changes)
    assert any("or more of them and a larger batch" in line for line in hopeless.words)


def test_the_quickest_form_of_context_parallelism_is_chosen() -> None:
    """Eight heads of queries on one of keys: exchanging heads sends queries, too, and copies of the keys."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.out = nn.Linear(1024, 1024), nn.Linear(1024, 1024)
            self.both = nn.Linear(1024, 256)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            shape = (*x.shape[:2], -1, 128)
            query, both = self.query(x).view(shape).transpose(1, 2), self.both(x).view(shape).transpose(1, 2)
            key, value = both.chunk(2, dim=1)
            mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            return x + self.out(mixed.transpose(1, 2).flatten(2))

    task = Task(
        model=lambda: nn.Sequential(*(Block() for _ in range(4))),
        train_data=lambda: TensorDataset(
            torch.zeros(1, 1).expand(64, 4096 * 1024).view(64, 4096, 1024), torch.zeros(64)
        ),
        loss=lambda output, target: output.mean() + 0 * target.sum(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1),
        blocks="*",
        name="one key",
    )
    config = RunConfig(batch_size=2, device="cpu", precision="bf16")
    found = make_plan(task, config, parse_cluster("4 nodes x 1 H100, 10Gb/s"), only="cp4")
    each = {
        form: make_plan(task, replace(config, cp_form=form), parse_cluster("4 nodes x 1 H100, 10Gb/s"), only="cp4")
        for form in CP_FORMS
    }
    seconds = {form: one.chosen.time.seconds for form, one in each.items() if one.chosen is not None}
    assert found.chosen is not None and found.chosen.cp_form == min(seconds, key=lambda form: seconds[form])
    assert max(seconds, key=lambda form: seconds[form]) == "ulysses"
    assert f"--cp-form {found.chosen.cp_form}" in command_line(found)


def test_what_would_be_quicker_is_tried_and_said() -> None:
    cluster = with_memory("1xH100", 2**40)
    found = plan(cluster, "single", micro_batch=1024)
    assert found.chosen is not None
    gains = {one.what: one.times_quicker or 0 for one in found.changes}
    assert set(gains) == {
        "--precision bf16", 'torch.set_float32_matmul_precision("high") in the task', "--micro-batch 4096",
    }  # fmt: skip
    assert list(gains.values()) == sorted(gains.values(), reverse=True) and min(gains.values()) >= 1.05
    assert any(line.startswith("Quicker, with other rounding or memory: ") for line in found.words)
    halved = plan(cluster, "single", precision="bf16")
    assert halved.changes == []


def test_what_is_not_modelled_is_said() -> None:
    found = plan(with_memory("1xH100", 2**40), "single", compile=True)
    assert "--compile is not modelled: what was not measured is said as without it." in found.words
    assert command_line(found).endswith("--compile")
