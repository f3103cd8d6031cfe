"""Strategies with servers: ps and ddp+ps give the numbers of one process, ps-async holds its bound."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from rung.errors import ConfigError, StrategyError
from rung.spec.config import RunConfig
from rung.spec.strategy import parse
from rung.spec.task import Task, load_task
from rung.train.job import RankJob
from rung.train.worker import worker
from tests.checkpoints import legs
from tests.harness import RankFailed, on_ranks
from tests.launcher import WarmLauncher
from tests.marks import slow
from tests.parity import by_hand, largest_difference, with_rung
from tests.tasks import EXAMPLES, TASKS, image_data, image_task, text_data, text_task

CONFIG = RunConfig(batch_size=16, steps=9, precision="fp64", dropout=False)


def compare(make_task: Any, strategy: str, num_ranks: int, config: RunConfig = CONFIG, *, trainers: int) -> list[Any]:
    micro = None if config.micro_batch is None else config.micro_batch * trainers
    reference = by_hand(make_task(), config, micro)
    results = on_ranks(with_rung, num_ranks, make_task, strategy, config)
    assert largest_difference(reference, results[0]) < 1e-9
    return results


# -- ps --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [slow("text"), "images", "padded"])
def test_ps_equals_one_process(name: str) -> None:
    """Tied and frozen weights, groups, batch norm, a schedule, ragged shares and a loss weighted by tokens."""
    results = compare(TASKS[name], "ps", 4, trainers=3)
    assert results[0].bytes["optimizer"] > 0
    assert [r.bytes["optimizer"] for r in results[1:]] == [0, 0, 0], "trainers keep no state"
    assert any("for the ranks of this job only" in note for note in results[0].notes)


def test_ps_with_two_servers_clipping_and_accumulation() -> None:
    config = replace(CONFIG, servers=2, clip=0.05, micro_batch=3)
    results = compare(TASKS["images"], "ps", 4, config, trainers=2)
    shares, frozen = [r.bytes["parameters"] for r in results[:2]], (7 + 1) * 7 * 8
    assert sum(shares) == results[2].bytes["parameters"] - frozen
    assert max(shares) < 0.8 * sum(shares), "spread by size"


def thawing() -> Task:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.requires_grad_(True).parameters(), lr=0.1)

    return image_task(optimizer=optimizer)


def test_what_optimizer_unfreezes_has_no_server() -> None:
    with pytest.raises(RankFailed, match=r"frozen\.weight is frozen in model\(\) and trained after optimizer\(\)"):
        on_ranks(with_rung, 2, thawing, "ps", CONFIG)


def few_samples() -> Task:
    return text_task(train_data=lambda: text_data(3))


def test_ps_with_fewer_samples_than_trainers() -> None:
    compare(few_samples, "ps", 5, replace(CONFIG, steps=3), trainers=4)


class Branched(nn.Module):
    """One branch is used for positive inputs only, so that trainers differ in what they use."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.rare, self.never = nn.Linear(36, 5), nn.Linear(36, 5), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        return self.main(x) + (self.rare(x) if x[0, 0] > 0 else 0)


def branched_task() -> Task:
    return image_task(model=Branched, schedule=None)


def test_unused_parameters_are_refused_by_name_or_skipped() -> None:
    with pytest.raises(RankFailed, match=r"never\.weight"):
        on_ranks(with_rung, 3, branched_task, "ps", CONFIG)
    results = on_ranks(with_rung, 3, branched_task, "ps", replace(CONFIG, unused_parameters="allow"))
    torch.manual_seed(CONFIG.seed)
    untouched = branched_task().model().double().state_dict()["never.weight"]
    assert torch.equal(torch.as_tensor(results[0].state["never.weight"]), untouched)


# -- ddp+ps ----------------------------------------------------------------------------------------------------------


def recommender() -> Task:
    sizes = {"train_data.people": 103, "eval_data.people": 37, "train_data.num_items": 50, "eval_data.num_items": 50}
    return load_task(EXAMPLES / "recommender").bind({**sizes, "model.num_items": 50})


def alone(make_task: Any, config: RunConfig) -> Any:
    return on_ranks(with_rung, 1, make_task, "single", config)[0]


@pytest.mark.parametrize(("num_ranks", "changes"), [(3, {"clip": 0.01}), (4, {"servers": 2, "micro_batch": 3})])
def test_ddp_with_remote_embeddings_equals_one_process(num_ranks: int, changes: dict[str, Any]) -> None:
    config = replace(CONFIG, **changes)
    trainers = num_ranks - (config.servers or 1)
    one = replace(config, servers=None, micro_batch=config.micro_batch and config.micro_batch * trainers)
    results = on_ranks(with_rung, num_ranks, recommender, "ddp+ps", config)
    assert largest_difference(alone(recommender, one), results[0]) < 1e-9
    tables = sum(r.bytes["parameters"] for r in results[: config.servers or 1])
    assert tables == 2 * 50 * 16 * 8, "the tables are on the servers, and nowhere else"


class Middle(nn.Module):
    """A remote part in the middle, used twice: its input needs a gradient, and so does its output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(36, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.flatten(1))
        return self.head(self.second(torch.relu(self.second(x))))


def middle_task() -> Task:
    return image_task(model=Middle, remote=["second"])


def test_a_remote_part_may_stand_anywhere() -> None:
    compare(middle_task, "ddp+ps", 3, trainers=2)


def sparse_task() -> Task:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(23, 8, sparse=True)
            self.head = nn.Linear(8, 23)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.table(tokens))

    return text_task(model=Sparse, remote=["table"], optimizer=lambda m: torch.optim.SGD(m.parameters(), 0.1))


def test_sparse_gradients_on_servers() -> None:
    config = replace(CONFIG, clip=0.1, fused=False)
    found = on_ranks(with_rung, 3, sparse_task, "ddp+ps", config)[0]
    assert largest_difference(alone(sparse_task, config), found) < 1e-9


@pytest.mark.parametrize(
    ("remote", "words"),
    [
        (None, "needs the modules to place on the servers"),
        (["token", "tokn"], "remote names 'tokn', no module of the model. Did you mean 'token'"),
        (["token"], "is also a parameter of a remote module"),
        (["blocks.0", "blocks.0.up"], "which is a part of it"),
    ],
)
def test_what_cannot_be_remote_is_refused(remote: list[str] | None, words: str) -> None:
    with pytest.raises(RankFailed, match=words):
        on_ranks(with_rung, 2, partial(text_task, remote=remote), "ddp+ps", CONFIG)


# -- checkpoints -----------------------------------------------------------------------------------------------------


def test_checkpoints_go_from_servers_to_any_strategy_and_back(tmp_path: Path) -> None:
    config = replace(CONFIG, steps=12, eval_every="never")
    reference = by_hand(image_task(), config)
    plan = [("ps", 3, 3), ("single", 1, 5), ("ps", 4, 8), ("ddp", 2, 10), ("zero3", 2, 12)]
    losses, state = legs(image_task, config, tmp_path, plan)
    assert max(abs(a - b) for a, b in zip(losses, reference.losses, strict=True)) < 1e-9
    assert max((state[n].double() - v.double()).abs().max() for n, v in reference.state.items()) < 1e-9


def test_checkpoints_of_remote_tables(tmp_path: Path) -> None:
    config = replace(CONFIG, steps=8, eval_every="never")
    plan = [("ddp+ps", 3, 3), ("ps", 2, 5), ("ddp+ps", 2, 7), ("single", 1, 8)]
    losses, state = legs(recommender, config, tmp_path / "chain", plan)
    whole, expected = legs(recommender, config, tmp_path / "one", [("single", 1, 8)])
    assert max(abs(a - b) for a, b in zip(losses, whole, strict=True)) < 1e-9
    assert max((state[n] - v).abs().max() for n, v in expected.items()) < 1e-9


# -- ps-async --------------------------------------------------------------------------------------------------------

ASYNC_TASK = """
import os, time
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.head.bias.requires_grad_(False)

    def forward(self, x):
        if self.training and os.environ.get("RANK") == os.environ.get("SLOW_RANK"):
            time.sleep(0.05)
        return self.head(torch.relu(self.norm(self.first(x))))

def model(): return Model()
def data(count, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=g)
    return TensorDataset(x, (x[:, :3] * 3 + x[:, 3:]).argmax(1))
def train_data(): return data(103, 1)
def eval_data(): return data(37, 2)
def loss(output, target): return F.cross_entropy(output, target)
def metrics(output, target): return {"accuracy": (output.argmax(1) == target).float()}
def optimizer(model, lr=0.05):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=0.9)
def schedule(optimizer, total_steps): return torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
"""


@pytest.fixture
def task_file(tmp_path: Path) -> Path:
    (tmp_path / "task.py").write_text(ASYNC_TASK)
    return tmp_path / "task.py"


def run_job(job: RankJob, slow_rank: int | None = None) -> None:
    import os

    os.environ["SLOW_RANK"] = str(slow_rank)
    worker(job)


def finished(
    task_file: Path, strategy: str, num_ranks: int, name: str, slow: int | None = None, **settings: Any
) -> Path:
    folder = task_file.parent / name
    folder.mkdir(exist_ok=True)
    config = RunConfig(batch_size=16, precision="fp64", log_every=1, **settings)
    on_ranks(run_job, num_ranks, RankJob(str(task_file), strategy, config, {}, str(folder)), slow)
    return folder


def rows(folder: Path, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in lines if row["event"] == event]


@pytest.mark.parametrize("servers", [slow(1), 2])
def test_without_staleness_ps_async_is_one_process(task_file: Path, servers: int) -> None:
    """Batch norm's statistics, the schedule, the norm and the evaluation included."""
    settings: dict[str, Any] = {"epochs": 3, "clip": 0.5, "ema": 0.8, "lora": "r=2,targets=first"}
    one = finished(task_file, "single", 1, "one", **settings)
    many = finished(task_file, "ps-async", 2 + servers, "many", staleness=0, servers=servers, **settings)
    for name in ("model.safetensors", "average.safetensors"):
        expected, found = load_file(one / name), load_file(many / name)
        assert list(expected) == list(found)
        assert max((found[n].double() - v.double()).abs().max() for n, v in expected.items()) < 1e-9
    for event, keys in (("step", ("loss", "grad_norm", "lr", "samples")), ("eval", ("loss", "accuracy", "step"))):
        pairs = list(zip(rows(one, event), rows(many, event), strict=True))
        assert max(abs(a[key] - b[key]) for a, b in pairs for key in keys) < 1e-9


def test_the_bound_holds_under_a_slow_trainer_and_the_loss_is_reached(task_file: Path) -> None:
    folder = finished(task_file, "ps-async", 4, "slow", slow=3, staleness=4, epochs=20, checkpoint_every=30)
    steps = rows(folder, "step")
    late = [row["staleness"] for row in steps]
    assert max(late) <= 4
    assert len(set(late)) > 1, "trainers do not wait for each other in every step"
    assert [row["step"] for row in steps] == list(range(1, len(steps) + 1))
    assert rows(folder, "eval")[-1]["accuracy"] > 0.7
    assert rows(folder, "eval")[-1]["loss"] < 0.6


def test_checkpoints_of_ps_async_are_those_of_whole_steps(task_file: Path) -> None:
    """Saved in the middle of asynchronous training, loaded by one process and by others."""
    from rung.checkpoint import checkpoints_folder
    from rung.checkpoint.manifest import read_checkpoint, steps_in

    folder = finished(task_file, "ps-async", 4, "run", servers=2, staleness=3, steps=10, checkpoint_every=4)
    found = steps_in(checkpoints_folder(folder))
    assert sorted(found) == [4, 8, 10]
    manifest = read_checkpoint(found[8]).manifest
    assert (manifest["samples"], manifest["epoch"], manifest["sample"]) == (8 * 16 - 9, 1, 16)
    config = RunConfig(batch_size=16, precision="fp64", log_every=1, steps=14, checkpoint_every=7)
    on_ranks(run_job, 1, RankJob(str(task_file), "single", config, {}, str(folder), resume=True))
    asynchronous = replace(config, steps=20, servers=1, staleness=0)
    on_ranks(run_job, 2, RankJob(str(task_file), "ps-async", asynchronous, {}, str(folder), resume=True))
    assert [row["step"] for row in rows(folder, "step")] == list(range(1, 21))
    assert [row["step"] for row in rows(folder, "resume")] == [10, 14]
    # Ten steps with two servers, each of which tells what it received and gave.
    sent = rows(folder, "end")[0]["traffic"]
    assert [one["push"]["messages"] for one in sent] == [10, 10]
    assert all(one["pull"]["messages"] >= 10 and one["pull"]["num_bytes"] > 0 for one in sent)


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(image_data(8))


# -- refusals --------------------------------------------------------------------------------------------------------


def test_settings_of_servers_belong_to_strategies_with_servers() -> None:
    from rung.spec.compatibility import validate_config

    with pytest.raises(ConfigError, match="ddp has no servers"):
        validate_config(RunConfig(servers=2), parse("ddp", 2))
    with pytest.raises(ConfigError, match="under ps no gradient is late"):
        validate_config(RunConfig(staleness=2), parse("ps", 2))
    with pytest.raises(ConfigError, match="steps overlap"):
        validate_config(RunConfig(replicate_state=True), parse("ps-async", 2))
    with pytest.raises(ConfigError, match="bf16 or fp32"):
        validate_config(RunConfig(precision="fp16"), parse("ps", 2))
    with pytest.raises(StrategyError, match="needs a trainer beside its 2 servers"):
        parse("ps", 2, servers=2)
    with pytest.raises(StrategyError, match="has a runtime of its own and cannot be composed"):
        parse("ps,tp2", 4)
    with pytest.raises(StrategyError, match="takes no size"):
        parse("ps4", 4)


AVERAGES = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

defaults = {"batch_size": 8, "steps": 2, "device": "cpu"}


class Averages(nn.Linear):
    def __init__(self):
        super().__init__(4, 2)
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x):
        y = super().forward(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return y - self.mean


def model(): return Averages()
def train_data(): return TensorDataset(torch.arange(64.0).reshape(16, 4) / 64, torch.zeros(16, 2))
def loss(output, target): return ((output - target) ** 2).mean()
def optimizer(model): return torch.optim.SGD(model.parameters(), lr=0.1)
"""


def test_what_a_trainer_notices_is_told(launcher: WarmLauncher, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(AVERAGES)
    outcome = launcher.run(tmp_path, "--strategy", "ps", nproc=3)
    assert outcome.code == 0 and outcome.output.count("forward changes mean: each rank") == 1, outcome.output
