"""A batch cut into a piece for each replica, and what replicas computed joined again, in any nesting of tensors.

Pieces are rows, as torch's `chunk` cuts them. What has no rows to cut, or could be joined in more than one way, is
refused: every replica would get or give something else than the user thinks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rung.errors import DataError, ModelError
from rung.nested import map_tensors


class Nested:
    """Tensors taken out of a nest of tuples, lists, dicts and dataclasses, and put back. Single numbers stay inside."""

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

    def around(self, tensors: Sequence[Tensor]) -> Any:
        """The same nest with these tensors in the places of its own."""
        rest = iter(tensors)
        return map_tensors(self._data, lambda t: next(rest) if t.dim() > 0 else t.to(tensors[0].device))

    def refuse_uncuttable(self, num_rows: int, strategy: str) -> None:
        """An input: all of its tensors must have a row for each sample."""
        other = "Under ddp each process collates its own samples, so they may be of any form."
        if not self.tensors:
            raise DataError(f"{strategy} cuts a batch by the rows of its tensors, and this one has no tensor. {other}")
        for tensor in self.tensors:
            if tensor.shape[0] != num_rows:
                raise DataError(
                    f"{strategy} cuts a batch by the rows of its tensors, and of {num_rows} samples one has the shape "
                    f"{tuple(tensor.shape)}. {other}"
                )
        if _has_texts(self._data):
            raise DataError(
                f"{strategy} cuts the rows of tensors, and a batch with a list of texts has others. {other}"
            )

    def refuse_unjoinable(self, num_rows: int, strategy: str) -> None:
        """The output of a replica for so many rows: tensors that can follow one another."""
        other = "Return tensors with a row for each sample, or use ddp, where each process takes the loss of its own."
        if self.num_scalars:
            raise ModelError(
                f"under {strategy} each replica computes a part of the output, and the parts are put together row by "
                f"row. The model returns a single number, and which one the whole has is not known. {other}"
            )
        for tensor in self.tensors:
            if tensor.shape[0] % num_rows:
                raise ModelError(
                    f"under {strategy} the parts of the output are put together row by row. The model returns a tensor "
                    f"of the shape {tuple(tensor.shape)} for {num_rows} samples. {other}"
                )


def piece_sizes(num_rows: int, num_pieces: int) -> list[int]:
    """Rows of each piece, as `Tensor.chunk` has them: equal but for the last, and fewer pieces where rows are few."""
    size = -(-num_rows // num_pieces)
    return [min(size, num_rows - start) for start in range(0, num_rows, size)]


def cut_rows(tensor: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Pieces of a tensor, whose rows may be several for each of the rows that `sizes` counts."""
    each = tensor.shape[0] // sum(sizes)
    return torch.split(tensor, [size * each for size in sizes])


def refuse_different_parts(parts: Sequence[Nested], sizes: Sequence[int], strategy: str) -> None:
    """Outputs of replicas must be alike but for their number of rows."""
    forms = {
        tuple((tensor.dtype, tensor.shape[0] / rows, *tensor.shape[1:]) for tensor in part.tensors)
        for part, rows in zip(parts, sizes, strict=True)
    }
    if len(forms) > 1:
        shapes = " and ".join(str([tuple(tensor.shape) for tensor in part.tensors]) for part in parts[:2])
        raise ModelError(
            f"under {strategy} the outputs of replicas are put together row by row, and theirs do not fit: {shapes}. "
            "Return the same shapes for any samples, or use ddp, where each process takes the loss of its own."
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
