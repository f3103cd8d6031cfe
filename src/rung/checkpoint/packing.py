"""Plain values as JSON: numbers, strings, lists, tuples, dicts, small tensors. No objects: loading runs no code."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rung.checkpoint.files import DTYPES, dtype_name
from rung.errors import CheckpointError


class NeedsPickleError(CheckpointError):
    """A value that only pickle could save."""


def pack(value: Any, where: str) -> Any:
    """Convert a value to JSON types. Floats round-trip exactly."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [pack(item, where) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [pack(item, where) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[pack(key, where), pack(item, f"{where}[{key!r}]")] for key, item in value.items()]}
    if type(value) in (Tensor, nn.Parameter) and value.numel() <= 4096:
        shown = value.detach().cpu()
        return {"tensor": shown.tolist(), "dtype": dtype_name(value.dtype)}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return pack(value.tolist(), where)
    raise NeedsPickleError(f"{where} is a {type(value).__name__}, which only pickle could save; checkpoints have none.")


def unpack(value: Any) -> Any:
    """The inverse of `pack`. Refuses values that `pack` does not make."""
    try:
        return _unpack(value)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError):
        raise CheckpointError("the checkpoint holds a value that no save writes.") from None


def _unpack(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpack(item) for item in value]
    if isinstance(value, dict):
        if "tuple" in value:
            return tuple(_unpack(item) for item in value["tuple"])
        if "tensor" in value:
            return torch.tensor(value["tensor"], dtype=DTYPES[value["dtype"]])
        return {_unpack(key): _unpack(item) for key, item in value["dict"]}
    return value
