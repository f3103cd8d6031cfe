"""The values that collectives are checked with: exact in every type, and nothing wrong goes unseen."""

from __future__ import annotations

import pytest
import torch

from rung.hardware.bench.options import KNOWN_DTYPES
from rung.hardware.bench.patterns import Patterns, poison

CPU = torch.device("cpu")
COUNT = 3 * 65521 + 17


def patterns(dtype: str = "float32", ranks: int = 4, reduction: str = "sum", count: int = COUNT) -> Patterns:
    return Patterns(getattr(torch, dtype), CPU, ranks, reduction, count)


@pytest.mark.parametrize("dtype", KNOWN_DTYPES)
@pytest.mark.parametrize("ranks", [2, 3, 8, 600])
def test_sums_are_exact_in_any_order(dtype: str, ranks: int) -> None:
    made = patterns(dtype, ranks, count=1000)
    blocks = [made.values(1, rank) for rank in range(ranks)]
    for order in (range(ranks), range(ranks - 1, -1, -1)):
        total = torch.zeros(1000, dtype=torch.float64)
        for rank in order:  # rounded to the type after every addition, as a backend does
            total = _round(total + blocks[rank], getattr(torch, dtype))
        tensor = torch.empty(1000, dtype=getattr(torch, dtype))
        made.fill(tensor, total)
        assert made.num_wrong(tensor, made.reduce(blocks)) == 0


def _round(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    rounded = values.to(dtype)
    return (rounded.real if dtype.is_complex else rounded).to(torch.float64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8", "bool", "float8_e5m2", "int64"])
def test_one_wrong_element_is_seen_wherever_it_is(dtype: str) -> None:
    made = patterns(dtype)
    tensor = torch.empty(COUNT, dtype=getattr(torch, dtype))
    values = made.values(7)
    made.fill(tensor, values)
    assert made.num_wrong(tensor, values) == 0
    for place in (0, 65521, COUNT - 1):
        kept = tensor[place].clone()
        tensor[place] = 1 if float(kept) == 0 else 0
        assert made.num_wrong(tensor, values) == 1
        tensor[place] = kept


@pytest.mark.parametrize("dtype", ["float32", "bool"])
def test_shifted_swapped_and_untouched_data_are_seen(dtype: str) -> None:
    made = patterns(dtype)
    tensor = torch.empty(2**18, dtype=getattr(torch, dtype))
    values = made.values(1)
    made.fill(tensor, values)
    for shift in (1, 4096, 2**16, 2**17):
        assert made.num_wrong(tensor.roll(shift), values) > 2**16
    assert made.num_wrong(tensor, made.values(2)) > 2**16
    poison(tensor)
    assert made.num_wrong(tensor, values) > 2**16


@pytest.mark.parametrize(("reduction", "expected"), [("min", 1.0), ("max", 4.0), ("sum", 7.0), ("avg", 7 / 3)])
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_reductions(reduction: str, expected: float, dtype: str) -> None:
    made = patterns(dtype, 3, reduction, count=5)
    blocks = [torch.full((5,), value) for value in (1, 4, 2)]
    tensor = torch.full((5,), expected, dtype=getattr(torch, dtype))
    assert made.num_wrong(tensor, made.reduce(blocks)) == 0
    assert made.num_wrong(tensor * 1.001, made.reduce(blocks)) == 5
