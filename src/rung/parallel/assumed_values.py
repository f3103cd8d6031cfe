"""Assumed results for operations that read the values of fake tensors, which have none.

A mixture of experts selects rows by a mask, and skips an expert that no row has chosen. On a stage, the part runs its
own code on real values, so a trace needs no more than the shape of the part's result. It goes on as if every element
were selected, every condition held, and every number were 1; where a tensor is split into as many rows as were counted,
as if it were split evenly.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rung.parallel.trace_errors import user_line

_MOST_RUNS = 32  # of one part's forward; each further one changes one answer


class AssumedValues:
    """Answers the questions that one call of a part asks about values.

    An answer may lead into an error: `if x.isnan().any(): raise`, or an index that is out of range. The call then runs
    again, with the other answer (a condition does not hold, a number is 0) to the last question that has one left.
    """

    def __init__(self) -> None:
        self.line = ""  # the first line of the model that asked
        self._is_first: list[bool] = []  # for each question, whether it gets its first answer
        self._num_asked = 0
        self._num_runs = 1

    def result(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The assumed result; NotImplemented for an operation without one."""
        if not self.line:
            self.line = user_line(traceback.extract_stack())
        if operation in _SHAPES:
            return _SHAPES[operation](*args, **kwargs)
        if operation is torch.ops.aten._local_scalar_dense.default:
            kind = bool if args[0].dtype == torch.bool else float if args[0].is_floating_point() else int
            return kind(self._next_answer())
        if operation is torch.ops.aten.equal.default:
            return self._next_answer()
        return NotImplemented

    def fitted(self, operation: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of an operation, with sizes that fit in the place of those that come of assumed numbers."""
        if not self._num_asked or operation is not torch.ops.aten.split_with_sizes.default:
            return args
        tensor, sizes, dim = (*args, 0)[:3]
        length, num_parts = tensor.shape[dim], len(sizes)
        if sum(sizes) == length or num_parts == 0:
            return args
        ends = [length * part // num_parts for part in range(num_parts + 1)]
        return tensor, [stop - start for start, stop in itertools.pairwise(ends)], dim

    def change_answer(self) -> bool:
        """Prepare another run of the call after an error; False if no answer is left to change."""
        while self._is_first and not self._is_first[-1]:
            self._is_first.pop()
        if not self._is_first or self._num_runs == _MOST_RUNS:
            return False
        self._is_first[-1] = False
        self._num_asked = 0
        self._num_runs += 1
        return True

    def _next_answer(self) -> bool:
        if self._num_asked == len(self._is_first):
            self._is_first.append(True)
        self._num_asked += 1
        return self._is_first[self._num_asked - 1]


def _nonzero(tensor: Tensor) -> Tensor:
    return tensor.new_empty((tensor.numel(), tensor.dim()), dtype=torch.int64)


def _masked_select(tensor: Tensor, mask: Tensor) -> Tensor:
    shape = torch.broadcast_shapes(tensor.shape, mask.shape)  # type: ignore[no-untyped-call]
    return tensor.new_empty((shape.numel(),))


def _index(tensor: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """Indexing by a mask is indexing by the places at which it is true."""
    places: list[Tensor | None] = []
    for index in indices:
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        places += _nonzero(index).unbind(1) if is_mask and index is not None else [index]
    found: Tensor = torch.ops.aten.index.Tensor(tensor, places)
    return found


def _unique2(
    tensor: Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    count = tensor.numel()
    return tensor.new_empty(count), *_places(tensor, tensor.shape if return_inverse else 0, count * return_counts)


def _unique_dim(
    tensor: Tensor, dim: int, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    count = tensor.shape[dim]
    return tensor.new_empty(tensor.shape), *_places(tensor, count * return_inverse, count * return_counts)


def _unique_consecutive(
    tensor: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    if dim is not None:
        return _unique_dim(tensor, dim, True, return_inverse, return_counts)
    return _unique2(tensor, True, return_inverse, return_counts)


def _places(tensor: Tensor, inverse: Any, counts: int) -> tuple[Tensor, Tensor]:
    return tensor.new_empty(inverse, dtype=torch.int64), tensor.new_empty(counts, dtype=torch.int64)


def _bincount(tensor: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    kind = torch.int64 if weights is None else torch.float32 if weights.dtype == torch.float32 else torch.float64
    # With a smallest length, no number is beyond it: code that counts the choices of experts goes on with one for each.
    return tensor.new_empty(minlength or tensor.numel(), dtype=kind)


def _repeat_interleave(repeats: Tensor, *, output_size: int | None = None) -> Tensor:
    return repeats.new_empty(repeats.numel() if output_size is None else output_size)


_SHAPES: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.nonzero.default: _nonzero,
    torch.ops.aten.masked_select.default: _masked_select,
    torch.ops.aten.index.Tensor: _index,
    torch.ops.aten._unique2.default: _unique2,
    torch.ops.aten.unique_dim.default: _unique_dim,
    torch.ops.aten.unique_consecutive.default: _unique_consecutive,
    torch.ops.aten.bincount.default: _bincount,
    torch.ops.aten.repeat_interleave.Tensor: _repeat_interleave,
}
