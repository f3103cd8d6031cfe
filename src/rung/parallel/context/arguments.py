"""The tensors among the arguments of a call, each by the argument and its place in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from rung.distributed.torch_private import tree_map_only
from rung.parallel.forward_trace import tensors_of

Place = tuple[int | str, int]  # the position or name of an argument, and the number of the tensor in it


def leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Place, Tensor]:
    """The tensors of a call, by the argument and their place in it."""
    found: dict[Place, Tensor] = {}
    named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for name, value in named:
        found.update({(name, place): tensor for place, tensor in enumerate(tensors_of(value))})
    return found


def map_leaves(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Place, Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def changed(name: Any, value: Any) -> Any:
        places = iter(range(len(tensors_of(value))))
        return tree_map_only(Tensor, lambda tensor: change((name, next(places)), tensor), value)

    return tuple(changed(n, v) for n, v in enumerate(args)), {key: changed(key, v) for key, v in kwargs.items()}
