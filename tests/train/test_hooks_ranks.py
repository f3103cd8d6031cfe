"""The task's hooks: called on every rank, with whole parameters, the global loss, and a stop that all ranks obey."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.launcher import WarmLauncher
from tests.marks import slow

TASK = """
import os
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

defaults = {"batch_size": 10, "steps": 6, "device": "cpu", "precision": "fp64", "log_every": 4, "checkpoint_every": 4}
remote = ["2"]
RANK = int(os.environ.get("RANK", "0"))


def model():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def train_data():
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(103, 4, generator=draw), torch.randint(3, (103,), generator=draw))


eval_data = train_data


def loss(output, target, log):
    log("mean output", output.mean())
    return F.cross_entropy(output, target)


def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def say(name, state, **more):
    with open(f"hooks-{RANK}", "a") as file:
        print(name, state.step, *more.values(), file=file)


def on_start(state):
    say("start", state, resumed=state.resumed)


def on_step(state):
    loss = state.loss if RANK == 0 else None  # one rank alone may read it
    state.log("lr of mine", state.learning_rate)
    state.log("ranks", 1, reduce="sum")
    state.log("last rank", RANK, reduce="max")
    say("step", state, loss=repr(loss))


def on_evaluation(state):
    say("evaluation", state, loss=repr(state.metrics["loss"]))
    norm = state.parameter("2.weight").norm()
    state.log("norm", norm)


def on_checkpoint(state):
    say("checkpoint", state)


def on_end(state):
    torch.save({name: state.parameter(name) for name, _ in state.model.named_parameters()}, f"whole-{RANK}.pt")
    state.log("end", state.step, reduce="max")
    say("end", state, stopped=state.stopped)
"""


def rows_of(folder: Path, event: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["event"] == event]


def lines_of(folder: Path, rank: int) -> list[list[str]]:
    return [line.split() for line in (folder / f"hooks-{rank}").read_text().splitlines()]


@pytest.mark.parametrize(
    ("strategy", "num_ranks"),
    [
        ("zero3", 2),
        ("pp2", 2),
        slow("single", 1),
        slow("ddp", 2),
        slow("tp2", 2),
        slow("pp2,fsdp2", 4),
        slow("ps", 3),
        slow("ddp+ps", 3),
        slow("rpc-pp2", 2),
        slow("dp2", 1),
    ],
)
def test_every_rank_calls_hooks_with_the_same_state(
    launcher: WarmLauncher, tmp_path: Path, strategy: str, num_ranks: int
) -> None:
    (tmp_path / "task.py").write_text(TASK)
    outcome = launcher.run(tmp_path, "--strategy", strategy, nproc=num_ranks)
    assert outcome.code == 0, outcome.output
    steps = rows_of(tmp_path, "step")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert [row["lr of mine"] for row in steps] == pytest.approx([row["lr"] for row in steps], abs=1e-12)
    assert len(steps) == 6 and all(isinstance(row["mean output"], float) for row in steps)
    assert {row["ranks"] for row in steps} == {num_ranks} and {row["last rank"] for row in steps} == {num_ranks - 1}
    found = {row["step"]: row for row in rows_of(tmp_path, "log")}
    assert found[6]["end"] == 6
    (evaluated,) = [row["norm"] for row in rows_of(tmp_path, "log") if "norm" in row]
    assert evaluated == pytest.approx(float(weights["2.weight"].norm()), abs=1e-12)
    for rank in range(num_ranks):
        lines = lines_of(tmp_path, rank)
        called = [(name, int(step)) for name, step, *_ in lines]
        begun, ended = [("start", 0)], [("step", 5), ("step", 6), ("evaluation", 6), ("checkpoint", 6), ("end", 6)]
        assert called == [*begun, *(("step", n) for n in range(1, 5)), ("checkpoint", 4), *ended]
        if rank == 0:
            losses = [float(rest[0]) for name, _, *rest in lines if name == "step"]
            assert losses == pytest.approx([row["loss"] for row in steps], abs=1e-12)
        whole = torch.load(tmp_path / f"whole-{rank}.pt")
        assert whole.keys() == weights.keys()
        assert all(torch.equal(whole[name], weights[name]) for name in weights)


PLAIN = TASK[: TASK.index("def say(")]

STOP = """
def on_step(state):
    if RANK == 1 and state.step == 3:
        state.stop("rank 1 has seen enough")


def on_end(state):
    print("ENDS", RANK, state.step, state.stopped, state.metrics.keys())
"""


@pytest.mark.parametrize(("strategy", "num_ranks"), [("ddp", 2), slow("pp2,fsdp2", 4), slow("ps", 3)])
def test_a_stop_of_one_rank_ends_all_after_the_same_step(
    launcher: WarmLauncher, tmp_path: Path, strategy: str, num_ranks: int
) -> None:
    (tmp_path / "task.py").write_text(PLAIN + STOP)
    outcome = launcher.run(tmp_path, "--strategy", strategy, nproc=num_ranks)
    assert outcome.code == 0, outcome.output
    assert "ends after step 3: rank 1 has seen enough (state.stop in on_step)" in outcome.output
    assert [row["step"] for row in rows_of(tmp_path, "step")] == [1, 2, 3]
    for rank in range(num_ranks):
        text = (tmp_path / "out" / "logs" / f"rank-{rank}.log").read_text()
        assert f"ENDS {rank} 3 False dict_keys(['loss'])" in text  # evaluated at the end
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_hooks_of_a_resumed_run_know_where_it_is(launcher: WarmLauncher, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK)
    assert launcher.run(tmp_path, "--strategy", "ddp", "--steps", "4").code == 0
    resumed = ("--resume", "out", "--strategy", "zero3", "--nproc", "2", "--steps", "5", "--no-check")
    outcome = launcher.call(tmp_path, "train", "task.py", *resumed)
    assert outcome.code == 0, outcome.output
    starts = [line for line in lines_of(tmp_path, 1) if line[0] == "start"]
    assert starts == [["start", "0", "False"], ["start", "4", "True"]]


FAIL = """
def on_step(state):
    if RANK == 1 and state.step == 2:
        raise ValueError("of my own")
"""
READ_ALONE = """
def on_evaluation(state):
    if state.is_main:
        state.parameter("0.weight")
"""
UNKNOWN = """
def on_start(state):
    state.parameter("0.wieght")
"""
TWICE = """
def loss(output, target, log):
    log("mine", 1.0)
    return F.cross_entropy(output, target)


def on_step(state):
    state.log("mine", 2.0)
"""


def test_a_hook_that_fails_is_named_with_its_rank(launcher: WarmLauncher, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(PLAIN + FAIL)
    outcome = launcher.run(tmp_path, "--strategy", "ddp")
    assert "ValueError" in outcome.assert_names(1, step=2, phase="on_step")
    assert "of my own" in outcome.screen and "in on_step" in outcome.screen


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        (READ_ALONE, "rank 0 reads '0.weight' while rank 1 does not"),
        (UNKNOWN, "on_start(): the model has no parameter '0.wieght'. Did you mean '0.weight'"),
        (TWICE, "log('mine') is called in loss() and in on_step()"),
    ],
)
def test_a_hook_that_cannot_be_obeyed_is_an_error(
    launcher: WarmLauncher, tmp_path: Path, hook: str, words: str
) -> None:
    (tmp_path / "task.py").write_text(PLAIN + hook)
    outcome = launcher.run(tmp_path, "--strategy", "zero3")
    assert outcome.code in (1, 2) and words in " ".join(outcome.output.split()), outcome.output


@pytest.mark.parametrize("command", ["verify", slow("compare"), "explain"])
def test_commands_that_try_strategies_call_no_hooks(launcher: WarmLauncher, tmp_path: Path, command: str) -> None:
    (tmp_path / "task.py").write_text(TASK)
    chosen = ("--strategy", "pp2") if command == "explain" else ("--strategies", "ddp", "--steps", "2")
    outcome = launcher.call(tmp_path, command, "task.py", "--nproc", "2", *chosen, limit=120)
    assert outcome.code == 0, outcome.output
    assert not list(tmp_path.glob("hooks-*"))
