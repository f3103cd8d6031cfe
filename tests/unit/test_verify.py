from __future__ import annotations

import math

import torch

from rung.verify import Row, Trace, choose_strategies, compare


def trace(value: torch.Tensor, loss: float = 1.0) -> Trace:
    return Trace([loss], [1.0], {"weight": value, "mean": torch.zeros(2)}, {"mean"})


def test_a_nan_is_a_difference() -> None:
    found = compare(trace(torch.tensor([math.nan])), trace(torch.tensor([1.0])))
    assert found["parameters"] == math.inf
    assert compare(trace(torch.ones(1), math.nan), trace(torch.ones(1)))["losses"] == math.inf


def test_shapes_and_types_must_agree() -> None:
    assert compare(trace(torch.ones(1, 2)), trace(torch.ones(2)))["parameters"] == math.inf
    assert compare(trace(torch.ones(2)), trace(torch.ones(2, dtype=torch.float64)))["parameters"] == math.inf


def test_a_row_passes_only_if_everything_is_the_same() -> None:
    same = Row("ddp", "sgd", 2, 0.0, 0.0, 0.0, 0.0)
    assert same.passes(1e-9)
    assert not Row("ddp", "sgd", 2, 0.0, 0.0, 1e-3, 0.0).passes(1e-9)
    assert not Row("ddp", "sgd", 2).passes(1e-9)
    assert not Row("ddp", "sgd", 2, 0.0, 0.0, 0.0, 0.0, first_differing="x").passes(1e-9)


def test_all_is_every_strategy_that_fits() -> None:
    assert choose_strategies(["all"], 2) == ["ddp", "zero1", "zero2", "zero3", "hsdp"]
    assert choose_strategies(["all"], 3) == ["ddp", "zero1", "zero2", "zero3"]
    assert choose_strategies(["ddp", "hsdp2x2", "ddp"], 2) == ["ddp", "hsdp2x2"]
