"""Cut a batch into one piece per replica and check that outputs can be joined again, in any nesting of tensors.

Pieces are rows, as `torch.chunk` cuts them. Inputs without a row per sample, and outputs that could be joined in more
than one way, are refused: replicas would compute something other than the user expects.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rung.data.pytree import map_tensors
from rung.errors import DataError, ModelError


class Nested:
    """A nest of tuples, lists, dicts and dataclasses, flattened to its tensors. 0-dim tensors stay in the nest."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self.tensors: list[Tensor] = []
        self.num_scalars = 0
        map_tensors(data, self._take)

    def _take(self, tensor: Tensor) -> Tensor:
        if tensor.dim() > 0:
            self.tensors.append(tensor)
        else:
            self.num_scalars += 1
        return tensor

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        """The same nest with its tensors replaced by these."""
        rest = iter(tensors)  # 0-dim tensors are not scattered, and are copied to the replica's device
        return map_tensors(self._data, lambda t: next(rest) if t.dim() > 0 else t.to(tensors[0].device))

    def validate_input(self, num_rows: int, strategy: str) -> None:
        """Check that all tensors of an input have a row for each sample."""
        other = "Use ddp, where each process collates its own samples: they may have any form."
        if not self.tensors:
            raise DataError(f"{strategy} cuts a batch by the rows of its tensors; this batch has no tensor. {other}")
        for tensor in self.tensors:
            if tensor.shape[0] != num_rows:
                raise DataError(
                    f"{strategy} cuts a batch by the rows of its tensors; a tensor of this batch of {num_rows} samples "
                    f"has the shape {tuple(tensor.shape)}. {other}"
                )
        if _has_texts(self._data):
            raise DataError(
                f"{strategy} cuts a batch by the rows of its tensors; this one has a list of texts. {other}"
            )

    def validate_output(self, num_rows: int, strategy: str) -> None:
        """Check that a replica's output for `num_rows` samples can be concatenated with the others'."""
        other = "Return tensors with a row for each sample, or use ddp, where each process computes its own loss."
        if self.num_scalars:
            raise ModelError(
                f"under {strategy} each replica computes a part of the output, and the parts are put together row by "
                f"row. The model returns a single number, which has no rows. {other}"
            )
        for tensor in self.tensors:
            if tensor.shape[0] % num_rows:
                raise ModelError(
                    f"under {strategy} the parts of the output are put together row by row. The model returns a tensor "
                    f"of the shape {tuple(tensor.shape)} for {num_rows} samples. {other}"
                )


def piece_sizes(num_rows: int, num_pieces: int) -> list[int]:
    """Rows of each piece, as in `Tensor.chunk`: equal except the last, and fewer pieces where rows are few."""
    size = -(-num_rows // num_pieces)
    return [min(size, num_rows - start) for start in range(0, num_rows, size)]


def cut_rows(tensor: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Split a tensor that has one or more rows for each of the rows that `sizes` counts."""
    each = tensor.shape[0] // sum(sizes)
    return torch.split(tensor, [size * each for size in sizes])


def validate_same_form(parts: Sequence[Nested], sizes: Sequence[int], strategy: str) -> None:
    """Check that the replicas' outputs differ in their number of rows only."""
    forms = {
        tuple((tensor.dtype, tensor.shape[0] / rows, *tensor.shape[1:]) for tensor in part.tensors)
        for part, rows in zip(parts, sizes, strict=True)
    }
    if len(forms) > 1:
        shapes = " and ".join(str([tuple(tensor.shape) for tensor in part.tensors]) for part in parts[:2])
        raise ModelError(
            f"under {strategy} the outputs of replicas are put together row by row, but their shapes differ: {shapes}. "
            "Return the same shapes for any samples, or use ddp, where each process computes its own loss."
        )


def num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _has_texts(data: Any) -> bool:
    if isinstance(data, Mapping):
        return any(map(_has_texts, data.values()))
    if isinstance(data, tuple | list):
        return any(isinstance(value, str | bytes) or _has_texts(value) for value in data)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        return any(_has_texts(getattr(data, field.name)) for field in dataclasses.fields(data))
    return False
