"""Where a pipeline is cut, and what finding it out costs: in calls of functions, which no busy machine changes."""

from __future__ import annotations

import functools
import itertools
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rung.parallel import _plain_values
from rung.parallel.forward_trace import ForwardTrace
from rung.parallel.forward_tracer import ForwardTracer
from rung.parallel.pipeline.partition import balance, cut, lies_in, parts_of


def _largest(costs: list[float], starts: list[int]) -> float:
    bounds = [0, *starts, len(costs)]
    return max(sum(costs[start:stop]) for start, stop in itertools.pairwise(bounds))


def test_balance_finds_the_best_cut_and_of_equal_ones_the_first() -> None:
    chance = random.Random(0)
    for _ in range(300):
        count = chance.randrange(1, 9)
        costs = [float(chance.choice([0, 0, 1, 1, 2, 5, 9])) for _ in range(count)]
        parts = chance.randrange(1, count + 1)
        tried = [list(starts) for starts in itertools.combinations(range(1, count), parts - 1)]
        found = balance(costs, parts)
        assert found in tried
        best = min(_largest(costs, starts) for starts in tried)
        assert _largest(costs, found) == best
        if parts == 2:
            assert found == next(starts for starts in tried if _largest(costs, starts) == best)


def test_a_name_lies_in_a_part_or_in_something_inside_one() -> None:
    parts = {"blocks.1", "head"}
    assert all(lies_in(name, parts) for name in ("head", "head.weight", "blocks.1.linear.weight"))
    assert not any(lies_in(name, parts) for name in ("", "blocks", "blocks.10", "blocks.10.weight", "header"))


def _num_calls(function: Callable[[], Any]) -> int:
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


class Row(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(count)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@functools.cache
def _rehearsed(count: int) -> tuple[ForwardTracer, ForwardTrace]:
    forward_tracer = ForwardTracer(Row(count), lambda model, batch: model(batch), torch.device("cpu"))
    forward_tracer.is_part = parts_of(forward_tracer.meta_model, None)
    return forward_tracer, forward_tracer(torch.zeros(3, 2))


@pytest.mark.parametrize("what", ["parts", "cut", "values", "balance"])
def test_the_work_follows_the_number_of_parts(what: str) -> None:
    calls = []
    for count in (60, 240):
        forward_tracer, forward_trace = _rehearsed(count)
        model = forward_tracer.meta_model
        assert cut(model, forward_trace, 2).bounds == (0, count // 2, count)
        actions: dict[str, Callable[[], Any]] = {
            "parts": lambda model=model: parts_of(model, None),
            "cut": lambda model=model, forward_trace=forward_trace: cut(model, forward_trace, 2),
            "values": lambda forward_tracer=forward_tracer: _plain_values(forward_tracer),
            "balance": lambda count=count: balance([1.0] * count, 4),
        }
        calls.append(_num_calls(actions[what]))
    assert calls[1] < 6 * calls[0]  # four times as many, and what sorting and searching add
