"""Values of integers in a dry run, by which models decide, for instance whether a mask hides anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Computes with real values inside a dispatch mode. torch has no public way out of one.
from torch.utils._mode_utils import no_dispatch
from torch.utils.weak import WeakTensorKeyDictionary

from rung.distributed.torch_private import schema, tree_map_only

_MOST_KNOWN = 2**22  # elements of a tensor whose values a dry run computes


class KnownIndices:
    """The values of fake integers and truth values, as far as they follow from others that are known.

    A tensor without initial values is known while it `learns_empty`, if only known values are written there later.
    """

    learns_empty = False

    def __init__(self) -> None:
        self._values: Any = WeakTensorKeyDictionary()
        self._lost: dict[int, Any] = {}  # storages of values that were overwritten by unknown ones, by their address

    def get(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values of a fake tensor, if they are known; a real one has its own."""
        if type(tensor) is torch.Tensor:
            return tensor
        found: torch.Tensor | None = self._values.get(tensor)
        return None if found is None or found.untyped_storage().data_ptr() in self._lost else found

    def learn(self, fake: torch.Tensor, value: torch.Tensor) -> None:
        is_index = not fake.is_floating_point() and not fake.is_complex()
        if is_index and fake.numel() <= _MOST_KNOWN and type(value) is torch.Tensor:
            self._values[fake] = value

    @property
    def has_any(self) -> bool:
        return len(self._values) > 0

    def follow(self, func: Any, args: Any, kwargs: Any, output: Any, *, learns: bool) -> None:
        """Compute the values of an operation's results, or forget those that it overwrites with unknown ones.

        An operation that takes no tensors, such as `zeros`, counts while it `learns`.
        """
        outputs = argument_tensors(output)
        if any(leaf.is_floating_point() or leaf.is_complex() or leaf.numel() > _MOST_KNOWN for leaf in outputs):
            return
        written = [
            leaf
            for argument, value in zip(schema(func).arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for leaf in argument_tensors(value)
        ]
        is_drawn = torch.Tag.nondeterministic_seeded in func.tags
        taken = argument_tensors((args, kwargs))
        if is_drawn or any(self.get(leaf) is None for leaf in taken) or not (taken or learns):
            for leaf in written:
                self._forget(leaf)
            return
        name = func.overloadpacket.__name__
        is_done = any(type(leaf) is torch.Tensor for leaf in written)  # torch writes to real tensors itself
        is_empty = name.startswith(("empty", "new_empty")) and not self.learns_empty
        if not outputs or is_done or is_empty or func.namespace != "aten":
            return
        real: Any = tree_map_only(torch.Tensor, self.get, (args, kwargs))
        with no_dispatch():
            computed = argument_tensors(func(*real[0], **real[1]))
        for leaf, value in zip(outputs, computed, strict=True):
            self.learn(leaf, value)

    def choose_evenly(self, func: Any, args: Any, output: Any) -> None:
        """Take the choices of rows, as those of a mixture of experts, to be even: row r of k choices among n takes
        k * r, k * r + 1, ... modulo n. Their values are not known in a dry run."""
        if func is torch.ops.aten.topk.default:
            chosen = output[1]
            dim = args[2] if len(args) > 2 else -1
        elif func is torch.ops.aten.argmax.default and len(args) > 1 and args[1] is not None:
            chosen, dim = output, args[1]
        else:
            return
        among = args[0].shape[dim]
        if self.get(chosen) is None and dim in (-1, args[0].dim() - 1) and chosen.numel() <= _MOST_KNOWN:
            with no_dispatch():
                self.learn(chosen, (torch.arange(chosen.numel()) % among).view(chosen.shape))

    def result_of(self, func: Any, args: Any, kwargs: Any, from_tensor: Callable[[torch.Tensor], Any]) -> Any:
        """The result of an operation whose shape depends on values, if these are known; else NotImplemented."""
        if func is torch.ops.aten.index.Tensor:
            places = [self._places(index, from_tensor) for index in args[1]]
            if all(place is not None for place in places):
                return func(args[0], [one for place in places for one in place or ()])
        if any(self.get(leaf) is None for leaf in argument_tensors((args, kwargs))):
            return NotImplemented
        real: Any = tree_map_only(torch.Tensor, self.get, (args, kwargs))
        with no_dispatch():
            found = func(*real[0], **real[1])
        return tree_map_only(torch.Tensor, from_tensor, found)

    def _places(self, index: Any, from_tensor: Callable[[torch.Tensor], Any]) -> list[Any] | None:
        """The indices that select what a known mask does; those of another index are itself."""
        if index is None or index.dtype != torch.bool:
            return [index]
        known = self.get(index)
        if known is None:
            return None
        with no_dispatch():
            places = known.nonzero(as_tuple=True)
        return [from_tensor(place) for place in places]

    def _forget(self, fake: torch.Tensor) -> None:
        """Also of the tensors that share its storage."""
        value = self.get(fake)
        if value is not None and value is not fake:
            storage = value.untyped_storage()
            self._lost[storage.data_ptr()] = storage  # kept, so that no other gets its address


def argument_tensors(values: Any) -> list[torch.Tensor]:
    """The tensors among arguments or results of an operation, which are in lists and tuples at most. torch's own
    function knows every container, and a dry run asks tens of thousands of times."""
    found: list[torch.Tensor] = []
    _collect(values, found)
    return found


def _collect(values: Any, found: list[torch.Tensor]) -> None:
    if isinstance(values, torch.Tensor):
        found.append(values)
    elif isinstance(values, list | tuple):
        for value in values:
            _collect(value, found)
    elif isinstance(values, dict):
        _collect(list(values.values()), found)
