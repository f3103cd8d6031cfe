"""Figures that a task logs: the same under every strategy as in a plain loop, in metrics.jsonl and in trackers."""

from __future__ import annotations

import functools
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from rung.data.permutation import Permutation
from rung.distributed.world import open_world
from rung.errors import StrategyError, TaskError
from rung.runtime import build_runtime
from rung.spec.compatibility import refuse_task
from rung.spec.config import RunConfig
from rung.spec.logged import TAKEN
from rung.spec.strategy import parse
from rung.spec.task import Task
from rung.system.launcher_env import environment_size
from rung.train.loop import Outputs, run
from rung.train.metrics import training_figures
from rung.train.records import StepRecord
from rung.train.worker import make_batches
from tests.harness import on_ranks
from tests.marks import slow
from tests.tasks import gpt_task, text_task

# 103 samples: the fourth batch is of 25, which no number of ranks here divides.
CONFIG = RunConfig(batch_size=26, steps=5, precision="fp64", device="cpu", log_every=2, check=False)


def loss(output: Tensor, target: Tensor, log: Any) -> Tensor:
    found = F.cross_entropy(output.flatten(0, 1), target.flatten())
    log("perplexity", found)
    log("largest", output.detach().abs().max(), reduce="max")
    log("samples seen", len(target), reduce="sum")
    if int(target[0, 0]) % 2 == 0:
        log("even", 1.0, reduce="sum")
    return found


def forward(model: nn.Module, batch: Any, log: Any = None) -> Tensor:
    log("tokens", batch[0].double().mean())
    log("rows", len(batch[0]), reduce="sum")  # every stage of a pipeline runs this function
    return model(batch[0])


def make_task(**changes: Any) -> Task:
    task = gpt_task()
    parts: dict[str, Any] = {
        "remote": ["blocks.1"],
        "train_data": task.train_data,
        "optimizer": task.optimizer,
        "schedule": task.schedule,
    }
    return text_task(**{"model": task.model, "loss": loss, "forward": forward, **parts, **changes})


def by_hand(config: RunConfig) -> list[dict[str, float]]:
    """A plain loop over whole batches of 103 samples, of which the last is short."""
    torch.manual_seed(config.seed)
    task = make_task()
    model = task.model().double()
    optimizer, data = task.optimizer(model), task.train_data()
    schedule = task.schedule(optimizer, config.steps)
    order, found = Permutation(len(data), config.seed, shuffle=True), []
    per_epoch = -(-len(data) // config.batch_size)
    for step in range(config.steps):
        epoch, within = divmod(step, per_epoch)
        first = within * config.batch_size
        inputs, target = default_collate(
            [data[i] for i in order.samples(epoch, first, min(first + config.batch_size, len(data)))]
        )
        optimizer.zero_grad()
        output = model(inputs)
        value = F.cross_entropy(output.flatten(0, 1), target.flatten())
        value.backward()
        optimizer.step()
        schedule.step()
        found.append(
            {
                "perplexity": value.item(),
                "largest": output.abs().max().item(),
                "samples seen": float(len(target)),
                "tokens": inputs.double().mean().item(),
                "rows": float(len(inputs)),
            }
        )
    return found


class Collector:
    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def on_steps(self, records: list[StepRecord]) -> None:
        self.records += records

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def logged(make: Any, strategy: str, config: RunConfig) -> list[dict[str, float]]:
    """The figures of each step on this rank."""
    task, collector = make(), Collector()
    layout = parse(strategy, environment_size(), servers=config.servers)
    with open_world(layout, device="cpu", timeout_seconds=60) as world:
        batches = make_batches(task, config, world)
        runtime = build_runtime(task, world, config, total_steps=batches.total_steps)
        runtime.begin(0, batches)
        run(runtime, batches, world=world, config=config, outputs=Outputs([collector]))
        runtime.close(stopped=False)
    return [dict(record.logged) for record in collector.records]


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "changes"),
    [
        slow("single", 1, {"micro_batch": 4}),
        ("ddp2", 2, {}),
        ("zero3", 2, {"micro_batch": 4, "activation_checkpointing": "full"}),
        ("tp2", 2, {}),
        ("pp2", 2, {"activation_checkpointing": "selective"}),
        ("pp2,fsdp2", 4, {"micro_batch": 4}),
        slow("ps", 3, {}),
        slow("cp2", 2, {}),
        slow("zero1", 3, {}),
        slow("hsdp2x2", 4, {}),
        slow("pp2:interleaved", 2, {}),
        slow("fsdp2,tp2", 4, {"micro_batch": 4}),
        slow("ddp+ps", 3, {}),
        slow("rpc-pp2", 2, {}),
        slow("ddp", 4, {"batch_size": 3}),
    ],
)
def test_figures_are_those_of_a_plain_loop(strategy: str, num_ranks: int, changes: dict[str, Any]) -> None:
    config = RunConfig(**{**vars(CONFIG), **changes})
    expected = by_hand(config)
    for found in on_ranks(logged, num_ranks, make_task, strategy, config):
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.keys() - {"even"} == theirs.keys()
            for name, value in theirs.items():
                assert ours[name] == pytest.approx(value, abs=1e-9), name


def weighted_loss(output: Tensor, target: Tensor, log: Any) -> Tensor:
    found = F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-100)
    log("again", found)
    return found


def padded_task() -> Task:
    return text_task(padded=True, loss=weighted_loss)


def batch_loss(output: Tensor, target: Tensor, log: Any) -> Tensor:
    log("rows of the loss", len(output), reduce="sum")
    log("mean of the loss", output.mean())
    return output.mean().square()


def batch_forward(model: nn.Module, batch: Any, log: Any) -> Tensor:
    log("rows of forward", len(batch[0]), reduce="sum")
    log("mean of forward", batch[0].double().mean())
    return model(batch[0])


def batch_task() -> Task:
    return text_task(loss=batch_loss, forward=batch_forward, loss_scope="batch")


@pytest.mark.parametrize("make", [padded_task, batch_task])
def test_figures_are_weighted_as_the_loss_is(make: Any) -> None:
    config = RunConfig(**{**vars(CONFIG), "batch_size": 5, "steps": 4})
    (alone,) = on_ranks(logged, 1, make, "single", config)
    for found in on_ranks(logged, 2, make, "ddp", config):
        assert [ours == pytest.approx(theirs, abs=1e-12) for ours, theirs in zip(found, alone, strict=True)] == [
            True
        ] * 4


def compiled(strategy: str, config: RunConfig) -> list[dict[str, float]]:
    """All of torch.compile but the generated code, which takes half a minute."""
    torch.compile = functools.partial(torch.compile, backend="aot_eager")
    return logged(make_task, strategy, config)


@pytest.mark.parametrize(("strategy", "num_ranks"), [("single", 1), slow("ddp", 2), slow("zero3", 2)])
def test_a_compiled_loss_logs(strategy: str, num_ranks: int) -> None:
    config = RunConfig(**{**vars(CONFIG), "steps": 3, "compile": True})
    expected = by_hand(config)
    for found in on_ranks(compiled, num_ranks, strategy, config):
        for ours, theirs in zip(found, expected, strict=True):
            assert {name: ours[name] for name in theirs} == pytest.approx(theirs, abs=1e-9)


def chunked_task() -> Task:
    return make_task(loss=plain_loss)


def plain_loss(output: Tensor, target: Tensor, log: Any) -> Tensor:
    found = F.cross_entropy(output.flatten(0, 1), target.flatten())
    log("again", found)
    return found


def test_a_loss_in_chunks_logs() -> None:
    config = RunConfig(**{**vars(CONFIG), "steps": 3, "chunked_loss": "4"})
    (found,) = on_ranks(logged, 1, chunked_task, "single", config)
    assert [row["again"] for row in found] == pytest.approx([row["perplexity"] for row in by_hand(config)], abs=1e-9)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda log: log("loss", 1.0), "every step has a figure of this name"),
        (lambda log: log(3, 1.0), "takes the name of a figure first"),
        (lambda log: log("x", 1.0, reduce="men"), "no such reduction. Did you mean 'mean'"),
        (lambda log: log("x", torch.ones(3)), r"takes one number, and got a tensor of shape \(3,\)"),
        (lambda log: log("x", "y"), "takes one number, and got a str"),
    ],
)
def test_what_is_no_figure_is_refused(call: Any, words: str) -> None:
    def wrong(output: Tensor, target: Tensor, log: Any) -> Tensor:
        call(log)
        return plain_loss(output, target, log)

    with pytest.raises(TaskError, match=words):
        logged(lambda: make_task(loss=wrong), "single", CONFIG)


def test_a_name_has_one_reduction() -> None:
    def wrong(output: Tensor, target: Tensor, log: Any) -> Tensor:
        log("x", 1.0), log("x", 2.0, reduce="max")
        return plain_loss(output, target, log)

    with pytest.raises(TaskError, match="two ways in one step, by max and mean"):
        logged(lambda: make_task(loss=wrong), "single", CONFIG)


def test_strategies_that_cannot_say_why() -> None:
    with pytest.raises(StrategyError, match=r"log in forward\(\): dp2 runs forward in threads.*Use log in loss"):
        refuse_task(make_task(), parse("dp2", 1))
    refuse_task(make_task(forward=None), parse("dp2", 1))
    with pytest.raises(StrategyError, match=r"log in loss\(\): under ps-async"):
        refuse_task(make_task(), parse("ps-async", 3))


def test_the_names_of_a_step_are_taken() -> None:
    assert set(TAKEN) == {field.name for field in fields(StepRecord)}


def test_trackers_get_what_is_logged() -> None:
    record = StepRecord(1, 0, 4, 2.0, None, 0.1, 1.0, 4.0, 0.0, 0, 0, logged={"mine": 3.0})
    assert training_figures(record) == {"train/loss": 2.0, "train/lr": 0.1, "train/mine": 3.0}
