"""The values of tensors that forward makes from numbers alone: a causal mask, positions.

Fake tensors have no values, but these are the same in every run, so a decision by them is too: `nn.TransformerDecoder`
compares the mask that it is given with a causal one. They are computed when such a decision is met, not before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rung.distributed import fake_world
from rung.distributed.torch_private import storage_id, tree_flatten, tree_map_only

_MOST_ELEMENTS = 1 << 26  # of a tensor that is computed; a larger one stays unknown


@dataclass(frozen=True)
class _Recipe:
    """How a tensor was made: an operation on recipes, and which of its results the tensor is."""

    operation: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    place: int
    fake: Tensor  # keeps it alive, so that Python cannot reuse its id()


class Constants:
    """Recipes of the tensors of one trace whose values are known, by the id of the fake tensor."""

    def __init__(self) -> None:
        self._recipes: dict[int, _Recipe] = {}

    def note(self, operation: Any, args: Any, kwargs: Any, given: list[Tensor], output: Any) -> None:
        """Keep the recipe of a result if the values of all arguments are known and no chance is involved."""
        is_lifted = operation is torch.ops.aten.lift_fresh.default  # of a real tensor: torch.tensor([1, 2])
        if not is_lifted and not all(id(tensor) in self._recipes for tensor in given):
            return
        is_random = torch.Tag.nondeterministic_seeded in operation.tags
        if is_random or "empty" in str(operation.overloadpacket):  # the values of empty tensors are anything
            return
        for place, tensor in enumerate(_tensors(output)):
            if tensor.numel() <= _MOST_ELEMENTS:
                self._recipes[id(tensor)] = _Recipe(operation, *self._with_recipes(args, kwargs), place, tensor)

    def forget(self, written: list[Tensor]) -> None:
        """Forget tensors that an operation writes to, and those that share memory with them."""
        storages = {storage_id(tensor.untyped_storage()) for tensor in written}
        if storages and self._recipes:
            self._recipes = {
                key: recipe
                for key, recipe in self._recipes.items()
                if storage_id(recipe.fake.untyped_storage()) not in storages
            }

    def result(self, operation: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operation that reads values, if all of them are known; else NotImplemented."""
        given = _tensors((args, kwargs))
        if not given or not all(id(tensor) in self._recipes for tensor in given):
            return NotImplemented
        with fake_world.outside_fakes(), torch.no_grad():
            real = _compute(operation, *self._with_recipes(args, kwargs), {})
        return tree_map_only(Tensor, lambda t: given[0].new_empty(t.shape, dtype=t.dtype), real)

    def _with_recipes(self, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def known(tensor: Tensor) -> Any:
            return self._recipes.get(id(tensor), tensor)

        found: tuple[tuple[Any, ...], dict[str, Any]] = tree_map_only(Tensor, known, (tuple(args), dict(kwargs)))
        return found


def _compute(operation: Any, args: Any, kwargs: Any, done: dict[int, Any]) -> Any:
    def real(recipe: _Recipe) -> Tensor:
        if id(recipe.fake) not in done:
            made = _compute(recipe.operation, recipe.args, recipe.kwargs, done)
            done[id(recipe.fake)] = _tensors(made)[recipe.place]
        found: Tensor = done[id(recipe.fake)]
        return found

    args, kwargs = tree_map_only(_Recipe, real, (args, kwargs))
    # On the host: the trace's device may be one that this process should not use.
    args, kwargs = tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs))
    return operation(*args, **kwargs)


def _tensors(data: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(data)[0] if isinstance(leaf, Tensor)]
