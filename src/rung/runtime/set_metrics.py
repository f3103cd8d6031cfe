"""Metrics of a whole set: objects of the task that have seen some samples, can `merge` and `compute`.

Ranks send their states, not the objects: nothing that arrives is unpickled. A state is what an object's attributes
hold, or torchmetrics' `metric_state`: numbers, strings, tensors and arrays in lists, tuples, sets and dicts.
"""

from __future__ import annotations

import base64
import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rung.errors import TaskError

_REDUCTIONS: dict[str | None, Callable[[Tensor, Tensor], Tensor]] = {
    "dim_zero_sum": torch.add,
    "dim_zero_max": torch.maximum,
    "dim_zero_min": torch.minimum,
    "dim_zero_cat": lambda one, other: torch.cat([one, other]),
}
_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set}


def is_set_metric(value: Any) -> bool:
    return hasattr(value, "compute") and (hasattr(value, "merge") or hasattr(value, "merge_state"))


def merged(name: str, one: Any, other: Any) -> Any:
    """By `merge`, or by `merge_state` as torchmetrics calls it. Either may change the first or return a new one. One of
    torchmetrics without a `merge_state` of its own is merged by what it says of its states, as between ranks."""
    if type(one) is not type(other):
        raise TaskError(
            f"metrics()[{name!r}] is a {type(one).__name__} for one batch, a {type(other).__name__} for another."
        )
    merge = getattr(one, "merge", None)
    if merge is None and type(one).merge_state.__module__ == "torchmetrics.metric":
        # Its own refuses some for reasons of `forward`, and takes the second of two means for their mean.
        return _with_merged_states(name, one, other)
    result = (merge or one.merge_state)(other)
    return one if result is None else result


def _refuse_wrapper(name: str, value: Any) -> None:
    """One of torchmetrics that has others inside: its own state is not all."""
    inside = next((one for one in value.modules() if one is not value and hasattr(one, "merge_state")), None)
    if inside is not None:
        raise TaskError(
            f"metrics()[{name!r}]: {type(value).__name__} wraps a {type(inside).__name__}, and the states of metrics "
            "inside of others are not merged. Return that one itself, and compute the rest from its figure."
        )


def _with_merged_states(name: str, one: Any, other: Any) -> Any:
    _refuse_wrapper(name, one)
    for key, reduction in one._reductions.items():
        kind = getattr(reduction, "__name__", None)  # of a function of torchmetrics
        own, theirs = getattr(one, key), getattr(other, key)
        both: Any
        if kind in _REDUCTIONS and isinstance(own, Tensor):
            both = _REDUCTIONS[kind](own, theirs)
        elif kind in (None, "dim_zero_cat") and isinstance(own, list):
            both = [*own, *theirs]
        elif kind is None and isinstance(own, Tensor) and type(one).__module__.startswith("torchmetrics."):
            # Their compute() takes stacked states apart: those of a correlation have means, variances and counts.
            dims = one._defaults[key].dim()
            both = torch.cat([part if part.dim() > dims else part[None] for part in (own, theirs)])
        elif kind == "dim_zero_mean" and torch.equal(torch.as_tensor(own), torch.as_tensor(theirs)):
            both = own  # a setting, such as the range of the data
        else:
            how = {"dim_zero_mean": "by the mean", None: "by stacking tensors"}.get(kind, f"by {kind}()")
            raise TaskError(
                f"metrics()[{name!r}]: {type(one).__name__} reduces its state {key!r} {how}, and batches differ in "
                "size: the figure would depend on how ranks share the set. Keep sums and counts "
                "(dist_reduce_fx='sum'), or define merge(other)."
            )
        setattr(one, key, both)
    one._update_count += other._update_count
    one._computed = None
    return one


def computed(name: str, value: Any) -> dict[str, float]:
    """A number, or several if it is a dict of them."""
    if hasattr(value, "distributed_available_fn"):  # torchmetrics would merge the states of all ranks once more
        value.distributed_available_fn = lambda: False
    result = value.compute()
    parts = {f"{name}/{key}": part for key, part in result.items()} if isinstance(result, Mapping) else {name: result}
    found = {}
    for full, part in parts.items():
        try:
            found[full] = float(part)
        except (TypeError, ValueError, RuntimeError):
            got = f"a tensor of shape {tuple(part.shape)}" if isinstance(part, Tensor) else type(part).__name__
            raise TaskError(
                f"metrics()[{name!r}].compute() gives {got}. It must give a number, or a dict of numbers."
            ) from None
    return found


def state_of(name: str, value: Any) -> Any:
    """The state as JSON."""
    if isinstance(getattr(value, "metric_state", None), Mapping):
        _refuse_wrapper(name, value)
    return {key: _encoded(part, f"metrics()[{name!r}].{key}") for key, part in _attributes(value).items()}


def with_state(like: Any, state: Mapping[str, Any], device: torch.device) -> Any:
    """An object like this one with the state of another."""
    other = copy.deepcopy(like)
    for key, part in state.items():
        setattr(other, key, _decoded(part, device))
    return other


def _attributes(value: Any) -> dict[str, Any]:
    kept = getattr(value, "metric_state", None)  # torchmetrics: the other attributes are its settings
    return dict(kept) if isinstance(kept, Mapping) else dict(vars(value))


def _encoded(part: Any, where: str) -> Any:
    if part is None or isinstance(part, bool | int | float | str):
        return part
    if isinstance(part, Tensor):
        whole = part.detach().to("cpu").to_dense()
        flat = whole.new_empty(whole.numel()).copy_(whole.reshape(-1)).view(torch.uint8).numpy().tobytes()
        kind = str(whole.dtype).removeprefix("torch.")
        return {"tensor": kind, "shape": list(whole.shape), "data": base64.b64encode(flat).decode()}
    if isinstance(part, np.ndarray | np.generic):
        return {"array": _encoded(torch.as_tensor(np.asarray(part)), where), "scalar": isinstance(part, np.generic)}
    if isinstance(part, Mapping):
        pairs = [[_encoded(key, where), _encoded(one, where)] for key, one in part.items()]
        return {"dict": pairs}
    word = next((word for word, kind in _SEQUENCES.items() if isinstance(part, kind)), None)
    if word is not None:
        return {word: [_encoded(one, where) for one in part]}
    raise TaskError(
        f"{where} is a {type(part).__name__}, and ranks send each other only numbers, strings, tensors and arrays, in "
        "lists, tuples, sets and dicts. Keep the rest outside of the object."
    )


def _decoded(part: Any, device: torch.device) -> Any:
    if not isinstance(part, dict):
        return part
    if "tensor" in part:
        flat = torch.frombuffer(bytearray(base64.b64decode(part["data"])) or bytearray(8), dtype=torch.uint8)
        numbers = flat[: 0 if not part["data"] else None].view(getattr(torch, part["tensor"]))
        return numbers.reshape(part["shape"]).to(device)
    if "array" in part:
        array = _decoded(part["array"], torch.device("cpu")).numpy()
        return array[()] if part["scalar"] else array
    if "dict" in part:
        return {_decoded(key, device): _decoded(one, device) for key, one in part["dict"]}
    ((word, ones),) = part.items()
    return _SEQUENCES[word](_decoded(one, device) for one in ones)
