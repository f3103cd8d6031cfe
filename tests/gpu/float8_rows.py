"""float8 on a GPU that has it: the kernel that casts against torch's operations, and runs against emulated ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rung.parallel.float8_cast import cast_both_ways, to_float8
from tests.harness import on_ranks
from tests.parallel.test_float8_ranks import GATHERED, _apart, _config, make_task
from tests.parity import with_rung

_SIZES = [(1, 16), (21, 48), (128, 128), (1000, 4112), (4099, 272)]
_KINDS = (torch.float8_e4m3fn, torch.float8_e5m2)


def cast_kernel() -> str:
    """Every byte, of matrices in any order in memory, with one scale and with one for each row."""
    count = 0
    for num_rows, num_columns in _SIZES:
        for dtype in (torch.float32, torch.bfloat16):
            for matrix in _matrices(num_rows, num_columns, dtype):
                for kind in _KINDS:
                    for scales_rows in (False, True):
                        _compare(matrix, kind, scales_rows)
                        count += 1
    _not_a_number()
    return f"{count} casts, every byte the same"


def _matrices(num_rows: int, num_columns: int, dtype: torch.dtype) -> list[Tensor]:
    matrix = torch.randn(num_rows, num_columns, device="cuda") * torch.logspace(-3, 3, num_columns, device="cuda")
    matrix = matrix.to(dtype)
    wide = torch.randn(num_rows, num_columns + 3, device="cuda").to(dtype)[:, 1:-2]
    return [matrix, matrix.t().contiguous().t(), wide, matrix[:1].expand(num_rows, -1)]


def _compare(matrix: Tensor, kind: torch.dtype, scales_rows: bool) -> None:
    found = to_float8(matrix, kind, scales_rows=scales_rows, plain=True, turned=True)
    expected = to_float8(matrix.cpu(), kind, scales_rows=scales_rows, plain=True, turned=True)
    for (ours, our_scale), (other, other_scale) in zip(found, expected, strict=True):
        assert torch.equal(our_scale.cpu(), other_scale), (matrix.shape, kind, scales_rows)
        assert torch.equal(ours.cpu().view(torch.uint8), other.view(torch.uint8)), (matrix.shape, kind, scales_rows)
    only = to_float8(matrix, kind, scales_rows=scales_rows, plain=False, turned=True)
    assert torch.equal(only[1][0].view(torch.uint8), found[1][0].view(torch.uint8)), (matrix.shape, kind, scales_rows)
    assert not only[0][0].numel()


def _not_a_number() -> None:
    """What is no number stays none, and what is too large becomes the largest."""
    matrix = torch.ones(16, 16, device="cuda")
    matrix[0, 0], matrix[1, 1] = torch.nan, 1e9
    for kind in _KINDS:
        scale = torch.ones((), device="cuda")
        for own in cast_both_ways(matrix, kind, scale, scale):
            values = own.float()
            found = values[0, 0].item(), int(values.isnan().sum()), values[1, 1].item()
            assert str(found) == str((math.nan, 1, torch.finfo(kind).max)), found


def trains(strategy: str, num_ranks: int, **changes: Any) -> str:
    expected = with_rung(make_task, "single", _config())
    config = replace(_config(**changes), fp8_emulate=False, device="cuda", backend="gloo" if num_ranks > 1 else "auto")
    found = on_ranks(with_rung, num_ranks, make_task, strategy, config, timeout=400)[0]
    apart = _apart(found, expected)
    assert 0 < apart < 0.1, f"differs by {apart:.1e}"
    gathers = strategy in ("zero2", "zero3") and num_ranks > 1 and config.fp8_scaling == "tensor"
    assert (GATHERED.format(8) in found.notes) == gathers, found.notes
    return f"{apart:.1e} of the way" + (", gathered in float8" if gathers else "")


def rows() -> list[tuple[str, Callable[[], str]]]:
    cases: list[tuple[str, int, dict[str, Any]]] = [
        ("single", 1, {}), ("single", 1, {"fp8_scaling": "row"}), ("single", 1, {"compile": True}),
        ("ddp", 2, {}), ("zero2", 2, {}), ("zero3", 1, {}), ("zero3", 2, {}), ("zero3", 2, {"compile": True}),
        ("tp2", 2, {}), ("tp2", 2, {"sequence_parallel": True, "fp8_scaling": "row"}), ("fsdp2,tp2", 4, {}),
    ]  # fmt: skip
    found: list[tuple[str, Callable[[], str]]] = [("kernel of float8", cast_kernel)]
    for strategy, num_ranks, changes in cases:
        words = " ".join(f"{key}={value}" for key, value in changes.items())
        name = f"float8 {strategy} {num_ranks} ranks {words}".strip()
        found.append((name, lambda s=strategy, n=num_ranks, c=changes: trains(s, n, **c)))  # type: ignore[misc]
    return found
