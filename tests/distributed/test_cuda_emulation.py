"""What a GPU's kernels do with tensors that lie in memory in different ways."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rung.distributed.cuda_emulation import pieces_of

ATEN = torch.ops.aten


def matrix(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(*(shape or (8, 6)), dtype=dtype)


# Kernels that read several elements at a time, and such that do not, as measured on an H200 with torch 2.11.
CASES: dict[str, tuple[bool, Callable[[], tuple[object, list[Tensor], Tensor]]]] = {
    "same shapes": (False, lambda: (ATEN.mul.Tensor, [matrix(), matrix()], matrix())),
    "a row for all": (True, lambda: (ATEN.mul.Tensor, [matrix(), matrix(6)], matrix())),
    "a column for all": (True, lambda: (ATEN.mul.Tensor, [matrix(), matrix(8, 1)], matrix())),
    "a number": (False, lambda: (ATEN.mul.Tensor, [matrix(), torch.zeros(())], matrix())),
    "every second column": (True, lambda: (ATEN.mul.Scalar, [matrix(8, 12)[:, ::2]], matrix())),
    "both transposed": (False, lambda: (ATEN.add.Tensor, [matrix(6, 8).t(), matrix(6, 8).t()], matrix(6, 8).t())),
    "one transposed": (True, lambda: (ATEN.add.Tensor, [matrix(6, 8).t(), matrix()], matrix())),
    "copy of a transposed one": (True, lambda: (ATEN.clone.default, [matrix(6, 8).t()], matrix())),
    "to bf16": (False, lambda: (ATEN._to_copy.default, [matrix()], matrix(dtype=torch.bfloat16))),
    "from bf16": (True, lambda: (ATEN._to_copy.default, [matrix(dtype=torch.bfloat16)], matrix())),
    "a mask for all heads": (True, lambda: (ATEN.where.self, [matrix(1, 6) > 0, matrix(), torch.zeros(())], matrix())),
    "a product of matrices": (False, lambda: (ATEN.mm.default, [matrix(8, 4), matrix(4, 6)], matrix())),
}


@pytest.mark.parametrize("case", CASES)
def test_elements_that_are_read_one_by_one(case: str) -> None:
    is_slow, make = CASES[case]
    operation, inputs, output = make()
    assert pieces_of(operation, inputs, [output]) == (48 if is_slow else 0)


def test_rows_of_a_layer_norm() -> None:
    normalised, mean, deviation = torch.native_layer_norm(matrix(), [6], None, None, 1e-5)
    assert pieces_of(ATEN.native_layer_norm.default, [matrix()], [normalised, mean, deviation]) == 8
    inputs = [normalised, matrix(), mean, deviation]
    assert pieces_of(ATEN.native_layer_norm_backward.default, inputs, [matrix()]) == 8
