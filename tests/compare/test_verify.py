from __future__ import annotations

import math

import torch

from rung.compare.verify import RunTrace, VerifyRow, choose_strategies, compare
from rung.spec.strategy import parse, required_num_ranks


def trace(value: torch.Tensor, loss: float = 1.0) -> RunTrace:
    return RunTrace([loss], [1.0], {"weight": value, "mean": torch.zeros(2)}, {"mean"})


def test_a_nan_is_a_difference() -> None:
    found = compare(trace(torch.tensor([math.nan])), trace(torch.tensor([1.0])))
    assert found["parameters"] == math.inf
    assert compare(trace(torch.ones(1), math.nan), trace(torch.ones(1)))["losses"] == math.inf


def test_shapes_and_types_must_agree() -> None:
    assert compare(trace(torch.ones(1, 2)), trace(torch.ones(2)))["parameters"] == math.inf
    assert compare(trace(torch.ones(2)), trace(torch.ones(2, dtype=torch.float64)))["parameters"] == math.inf


def test_a_row_passes_only_if_everything_is_the_same() -> None:
    same = VerifyRow("ddp", "sgd", 2, 0.0, 0.0, 0.0, 0.0)
    assert same.passes(1e-9)
    assert not VerifyRow("ddp", "sgd", 2, 0.0, 0.0, 1e-3, 0.0).passes(1e-9)
    assert not VerifyRow("ddp", "sgd", 2).passes(1e-9)
    assert not VerifyRow("ddp", "sgd", 2, 0.0, 0.0, 0.0, 0.0, first_differing="x").passes(1e-9)


def test_all_is_every_strategy_that_fits() -> None:
    data = ["ddp", "zero1", "zero2", "zero3", "hsdp"]
    assert choose_strategies(["all"], 1) == data
    cut = ["dp2", "cp2", "ep2", "tp2", "pp2:gpipe", "pp2:1f1b", "pp2:interleaved", "pp2:zb"]
    assert choose_strategies(["all"], 2) == [*data, *cut, "ps", "rpc-pp2"]
    assert "ddp+ps" in choose_strategies(["all"], 2, has_remote=True)
    assert "hsdp" not in choose_strategies(["all"], 3)
    for size in (1, 2, 3, 4, 6, 8):
        for name in choose_strategies(["all"], size):
            own = required_num_ranks(name) or size
            assert parse(name, own).num_ranks == own == (1 if name == f"dp{size}" else size)
    assert {"pp2,fsdp", "fsdp,tp2", "pp2,tp2", "fsdp,cp2", "pp2,cp2"} <= set(choose_strategies(["all"], 4))
    assert "pp2,fsdp,tp2" in choose_strategies(["all"], 8)
    assert choose_strategies(["ddp", "hsdp2x2", "ddp"], 2) == ["ddp", "hsdp2x2"]


def test_a_strategy_that_cannot_be_is_no_failure_unless_it_was_named() -> None:
    assert VerifyRow("pp8", "sgd", 8, impossible="too few parts").passes(1e-9)
