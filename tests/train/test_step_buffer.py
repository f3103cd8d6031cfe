"""The time of compiling is shown as such, and is no part of the step in which it happens."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

from rung.data.batch_shard import LocalBatch
from rung.distributed.torch_private import compile_seconds
from rung.distributed.world import open_world
from rung.runtime.base import LocalStep
from rung.spec.strategy import parse
from rung.train import step_buffer
from rung.train.metrics import _step_row, speed_figures
from rung.train.step_buffer import StepBuffer


def test_what_torch_takes_to_compile_is_counted() -> None:
    before = compile_seconds()
    function = torch.compile(lambda x: (x * 2).sin(), backend="eager")
    function(torch.ones(3))
    first = compile_seconds()
    function(torch.ones(3))
    assert first > before
    assert compile_seconds() == first, "compiled once"


def test_a_step_that_compiles_is_no_slow_step(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = iter([0.0, 0.5, 0.5])  # by compiling: before the first step, after it and after the second
    monkeypatch.setattr(step_buffer, "compile_seconds", lambda: next(taken))
    with open_world(parse("single", 1), device="cpu") as world:
        buffer = StepBuffer(world, compiles=True)
        for step, seconds in ((1, 0.6), (2, 0.05)):
            time.sleep(seconds)
            result = LocalStep(torch.tensor(1.0), None, learning_rate=0.1)
            buffer.add(LocalBatch(step, 0, [], ends_epoch=False), result)
        first, second = buffer.records(buffer.seal())
    assert first.compile_seconds == 0.5 and second.compile_seconds is None
    assert first.step_seconds + 0.5 >= 0.6 and first.step_seconds < second.step_seconds + 0.5
    assert _step_row(first)["compile_seconds"] == 0.5 and "compile_seconds" not in _step_row(second)
    assert speed_figures(first)["speed/compile_seconds"] == 0.5
    assert "speed/compile_seconds" not in speed_figures(second)


def test_code_that_is_left_uncompiled_is_told_once() -> None:
    def breaks(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum().item() > 0 else x

    torch._dynamo.reset()  # other tests compile in this process
    torch._dynamo.utils.counters.clear()
    with open_world(parse("single", 1), device="cpu") as world:
        buffer = StepBuffer(world, compiles=True)
        for step, size in ((1, 3), (2, 3), (3, 4)):
            torch.compile(breaks, backend="eager", dynamic=False)(torch.ones(size))
            buffer.add(LocalBatch(step, 0, [], ends_epoch=False), LocalStep(torch.tensor(1.0), None, learning_rate=0.1))
        first, second, third = (_step_row(one) for one in buffer.records(buffer.seal()))
    assert len(first["graph_breaks"]) == 1 and "Tensor.item()" in first["graph_breaks"][0]
    assert "graph_breaks" not in second and "graph_breaks" not in third
    assert "compile_seconds" in third, "it compiled again, for the same reason"


def test_code_that_is_compiled_too_often_is_told() -> None:
    def changing(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with open_world(parse("single", 1), device="cpu") as world:
        buffer = StepBuffer(world, compiles=True)
        compiled = torch.compile(changing, backend="eager", dynamic=False)
        for step in range(1, torch._dynamo.config.recompile_limit + 2):
            compiled(torch.ones(step + 1))
            buffer.add(LocalBatch(step, 0, [], ends_epoch=False), LocalStep(torch.tensor(1.0), None, learning_rate=0.1))
        *before, last = (_step_row(one) for one in buffer.records(buffer.seal()))
    assert not any("graph_breaks" in row for row in before)
    assert last["graph_breaks"] == ["Dynamo recompile limit exceeded"]


@pytest.mark.parametrize(
    ("seconds", "is_patient", "enough"), [(0.002, True, 50), (0.00001, True, 100), (0.2, True, 1), (0.002, False, 1)]
)
def test_quick_steps_are_read_less_often(
    monkeypatch: pytest.MonkeyPatch, seconds: float, is_patient: bool, enough: int
) -> None:
    now = itertools.count()
    monkeypatch.setattr(step_buffer._StepClock, "mark", lambda clock: next(now) * seconds)
    with open_world(parse("single", 1), device="cpu") as world:
        buffer = StepBuffer(world, is_patient=is_patient)
        steps, reads = itertools.count(1), []
        for _ in range(3):
            waiting = 0
            while not waiting or not buffer.is_worth_reading:
                window = LocalBatch(next(steps), 0, [], ends_epoch=False)
                buffer.add(window, LocalStep(torch.tensor(1.0), None, learning_rate=0.1))
                waiting += 1
            reads.append([record.step for record in buffer.records(buffer.seal())])
    assert [len(read) for read in reads] == [1, enough, enough]
    assert [step for read in reads for step in read] == list(range(1, next(steps)))
