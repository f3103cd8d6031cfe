"""Which run goes on, with which settings, and what may not differ."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rung.errors import ConfigError, StrategyError
from rung.launch.prepare import PreparedJob, prepare
from rung.launch.resume import (
    claim,
    find_run,
    is_finished,
    machines_left_out,
    new_length,
    refuse_differences,
    run_if_there,
    settings_of,
    write_settings,
)
from rung.launch.train_command import _join_machines
from rung.spec.config import RunConfig, resolve, write_toml
from rung.spec.task import Task, load_task

TASK = """
import torch
from torch.utils.data import TensorDataset

defaults = {"batch_size": 8, "device": "cpu", "model.width": 4}


def model(width=3, depth=2):
    return torch.nn.Linear(width, 1)


def train_data():
    return TensorDataset(torch.randn(10, 4), torch.randn(10))


def loss(output, target):
    return (output - target).mean()


def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)
"""


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Task:
    monkeypatch.chdir(tmp_path)
    Path("small.py").write_text(TASK)
    return load_task("small.py")


def write_run(task: Task, folder: str, **flags: Any) -> Path:
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    write_toml(resolve(task, flags=flags), path / "config.toml", f"rung 1.0: {task.name}, ddp: 2 replicas")
    return path


def go_on(run: Path, *, sets: dict[str, str] | None = None, **flags: Any) -> PreparedJob:
    return prepare("small.py", flags=flags, assignments=sets, run=run)


def test_the_newest_run_of_the_task_is_found(task: Task) -> None:
    old, new, other = (write_run(task, f"runs/{name}") for name in ("b", "a", "c"))
    (other / "config.toml").write_text("# rung 1.0: another, ddp\n")
    for age, folder in enumerate((other, new, old)):
        os.utime(folder / "config.toml", (1e9 - age, 1e9 - age))
    assert find_run(task, True, None) == new
    assert find_run(task, str(old), None) == old
    assert find_run(task, True, str(old)) == old
    with pytest.raises(ConfigError, match="'another', not of 'small'"):
        find_run(task, str(other), None)


def test_where_there_is_no_run_the_places_looked_at_are_named(task: Task) -> None:
    with pytest.raises(ConfigError, match="/runs has no run of 'small' to resume"):
        find_run(task, True, None)
    with pytest.raises(ConfigError, match="no run in nowhere"):
        find_run(task, "nowhere", None)
    with pytest.raises(ConfigError, match="two directories"):
        find_run(task, "a", "b")


def test_settings_come_from_the_run_and_flags_win(task: Task) -> None:
    run = write_run(task, "runs/a", batch_size=6, seed=5, log_every=3, nproc="2", steps=9)
    plan = go_on(run, log_every=1)
    config = plan.config
    assert (config.batch_size, config.seed, config.log_every, config.steps, config.nproc) == (6, 5, 1, 9, "2")
    assert plan.resolved.origins["seed"] == "run" and plan.resolved.origins["log_every"] == "flag"
    assert plan.resolved.arguments == {"model.width": 4}
    assert plan.layout.num_ranks == 2


@pytest.mark.parametrize(
    ("flags", "sets", "words"),
    [
        ({"batch_size": 7}, {}, "batch_size = 8, and 7"),
        ({"seed": 1}, {}, "seed = 0, and 1"),
        ({"shuffle": False}, {}, "shuffle = not set, and False"),
        ({"precision": "fp64"}, {}, "precision = 'fp32', and 'fp64'"),
        ({}, {"model.width": "5"}, "model.width = 4, and 5"),
        ({}, {"model.depth": "3"}, "model.depth = 2, and 3"),
    ],
)
def test_what_would_change_the_numbers_may_not_differ(
    task: Task, flags: dict[str, Any], sets: dict[str, str], words: str
) -> None:
    run = write_run(task, "runs/a")
    with pytest.raises(ConfigError, match=words):
        go_on(run, sets=sets, **flags)


def test_what_does_not_change_the_numbers_may_differ(task: Task) -> None:
    run = write_run(task, "runs/a", strategy="fsdp", nproc="2", offload="cpu")
    plan = go_on(run, sets={"workers": "2", "model.width": "4"}, strategy="ddp", nproc="3", precision="bf16")
    assert plan.layout.name == "ddp" and plan.layout.num_ranks == 3
    assert plan.config.offload == "none", "which belongs to the old strategy"


def test_a_new_strategy_brings_its_own_number_of_processes(task: Task) -> None:
    run = write_run(task, "runs/a", strategy="pp2", nproc="2", schedule="zb", split="layers.1")
    assert go_on(run, strategy="single").layout.num_ranks == 1
    assert go_on(run, strategy="ddp4").layout.num_ranks == 4
    assert go_on(run, strategy="ddp").layout.num_ranks == 2
    with pytest.raises(StrategyError, match="a layout of 2 processes, but the job has 3"):
        go_on(run, nproc="3")


def test_a_run_does_not_say_which_machines_meet(task: Task) -> None:
    """It may have come from somebody else, who would have this machine meet theirs."""
    foreign = {"nnodes": "1:2", "rdzv": "foreign:1", "rdzv_key": "/etc/hostname", "rpc_host": "0.0.0.0"}
    run = write_run(task, "runs/a", nproc="2", **foreign)
    plan = go_on(run)
    assert plan.policy.nodes == (1, 1) and plan.policy.rdzv is None
    assert (plan.config.rdzv_key, plan.config.rpc_host) == (None, None)
    told = machines_left_out(run, plan.config)
    assert told is not None and "nnodes=1:2, rdzv=foreign:1" in told and "give them again" in told
    again = go_on(run, nnodes="1:2", rdzv="localhost:1")
    assert (again.policy.nodes, again.policy.rdzv) == ((1, 2), "localhost:1")


def test_arguments_of_hooks_may_change(task: Task) -> None:
    """They read, and may stop the run earlier or later."""
    with Path("small.py").open("a") as file:
        file.write("\n\ndef on_step(state, stop_at=5):\n    pass\n")
    task = load_task("small.py")
    run = write_run(task, "runs/a")
    assert go_on(run, sets={"on_step.stop_at": "9"}).resolved.arguments["on_step.stop_at"] == 9
    with pytest.raises(ConfigError, match=r"model\.depth.*would change its numbers"):
        go_on(run, sets={"model.depth": "9"})


def test_a_new_length_replaces_the_old_one_and_is_told(task: Task) -> None:
    run = write_run(task, "runs/a", epochs=2)
    base = settings_of(run, set())
    assert new_length(base, go_on(run).config) is None
    longer = go_on(run, steps=100).config
    assert (longer.steps, longer.epochs) == (100, None)
    told = new_length(base, longer)
    assert told is not None and "after 100 steps, not 2 epochs" in told and "schedule" in told


def test_a_run_is_finished_when_its_metrics_say_so(task: Task) -> None:
    run, config = write_run(task, "runs/a"), RunConfig(batch_size=8, epochs=1)
    assert not is_finished(run, config)
    rows = [{"event": "start", "length": {"steps": None, "epochs": 1}}, {"event": "step", "step": 1}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert not is_finished(run, config)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"event": "end", "steps": 1}) + "\n")
    assert is_finished(run, config)
    assert not is_finished(run, replace(config, epochs=2))  # to which it was extended, and no rank came to start
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"event": "resume", "step": 1}) + "\n" + '{"event": "end", "st')
    assert not is_finished(run, config)


def test_old_settings_are_kept(task: Task) -> None:
    run = write_run(task, "runs/a", seed=1)
    write_settings(resolve(task, flags={"seed": 1}), run, "the same")
    assert not (run / "config.1.toml").exists()
    for seed in (2, 3):
        write_settings(resolve(task, flags={"seed": seed}), run, "others")
    assert "seed = 1" in (run / "config.1.toml").read_text() and "seed = 2" in (run / "config.2.toml").read_text()
    assert "seed = 3" in (run / "config.toml").read_text()


def test_a_directory_belongs_to_one_run(task: Task) -> None:
    run, shared = write_run(task, "runs/a"), Path("shared")
    shared.mkdir()
    claim(run, lambda own: own, is_new=True)
    (run / "metrics.jsonl").touch()
    mark = (run / ".state" / "run").read_text()
    with pytest.raises(ConfigError, match="holds a run already"):
        claim(run, lambda own: own, is_new=True)
    claim(run, lambda own: own, is_new=False)
    assert (run / ".state" / "run").read_text() == mark
    claim(run, lambda own: mark, is_new=True)  # another machine that shares the directory came first
    with pytest.raises(ConfigError, match="not the run that the other machines"):
        claim(run, lambda own: "another", is_new=False)
    claim(shared, lambda own: mark, is_new=True)  # a machine that joins, with a disk of its own
    assert (shared / ".state" / "run").read_text() == mark


def test_equal_settings_are_no_difference(task: Task) -> None:
    run = write_run(task, "runs/a", batch_size=6)
    base = settings_of(run, set())
    refuse_differences(task, resolve(task, base=base), base, run)


def test_a_run_that_is_there_is_gone_on_with_and_another_begins(task: Task) -> None:
    assert run_if_there(task, None, "mine") is None
    assert run_if_there(task, None, str(write_run(task, "mine"))) == Path("mine")
    with pytest.raises(ConfigError, match="--out DIR"):
        run_if_there(task, None, None)
    with pytest.raises(ConfigError, match="Keep one of them"):
        run_if_there(task, True, "mine")


def test_a_run_whose_settings_are_lost_is_resumed_if_there(task: Task) -> None:
    """Its directory was removed while it ran, and ranks wrote to it again before its launcher was killed."""
    assert run_if_there(task, None, "lost") is None
    Path("lost/checkpoints/step-00000005").mkdir(parents=True)
    run = run_if_there(task, None, "lost")
    assert run == Path("lost")
    assert settings_of(run, set()) is None
    assert prepare("small.py", flags={"out": "lost", "seed": 7}, run=run).config.seed == 7
    with pytest.raises(ConfigError, match="no run in lost"):
        find_run(task, "lost", None)


class _Table:
    """What machines agree upon, without machines."""

    def __init__(self) -> None:
        self._said: dict[str, str] = {}

    def agree(self, key: str, value: str) -> str:
        return self._said.setdefault(key, value)


def test_machines_with_one_directory_agree_whether_the_run_begins(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one finds what the first has just written there, and must not take it for an older run."""
    flags = {"out": "shared", "nnodes": "2", "nproc": "1", "rdzv": "127.0.0.1:1", "strategy": "ddp"}

    def start(table: _Table) -> bool:
        monkeypatch.setattr("rung.launch.rendezvous.rendezvous.open_rendezvous", lambda *_: table)
        run = run_if_there(task, None, "shared")
        plan = prepare("small.py", flags=flags, run=run)
        return _join_machines(plan, "small.py", run, Console(quiet=True), may_begin=True)[2]

    first, again = _Table(), _Table()
    assert [start(first), start(first)] == [True, True]
    Path("shared/metrics.jsonl").write_text('{"event": "start"}\n')
    assert [start(again), start(again)] == [False, False]
