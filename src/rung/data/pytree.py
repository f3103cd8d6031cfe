"""Map over the tensors of a batch: nested tuples, lists, dicts and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from torch import Tensor


def map_tensors(data: Any, function: Callable[[Tensor], Any]) -> Any:
    """Apply a function to every tensor in nested tuples, lists, dicts and dataclasses."""
    if isinstance(data, Tensor):
        return function(data)
    if isinstance(data, Mapping):
        mapped = {key: map_tensors(value, function) for key, value in data.items()}
        if type(data) is dict or not isinstance(data, MutableMapping):
            return mapped
        same = copy.copy(data)  # keep the class, as for the outputs of Hugging Face's models
        for key, value in mapped.items():
            same[key] = value
        return same
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(map_tensors(value, function) for value in data))
    if isinstance(data, tuple | list):
        return type(data)(map_tensors(value, function) for value in data)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        changes = {f.name: map_tensors(getattr(data, f.name), function) for f in dataclasses.fields(data)}
        return dataclasses.replace(data, **changes)
    return data


def tensors_in(data: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(data, found.append)
    return found
