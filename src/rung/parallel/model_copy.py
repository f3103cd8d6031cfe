"""Copies of a model: the same modules with tensors of their own, and hooks that act on the copy."""

from __future__ import annotations

import copy
import types
from typing import Any

import torch
from torch import Tensor, nn

from rung.distributed.torch_private import forward_hooks_of, plain_attributes
from rung.parallel.materialize import own_tensors


def meta_copy(model: nn.Module) -> nn.Module:
    """The same modules, with tensors on the meta device."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for _, tensor in own_tensors(module):
            if id(tensor) not in memo:
                bare = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                is_parameter = isinstance(tensor, nn.Parameter)
                memo[id(tensor)] = nn.Parameter(bare, requires_grad=tensor.requires_grad) if is_parameter else bare
        for value in plain_attributes(module):
            if isinstance(value, Tensor) and not value.is_leaf:  # as by torch's old weight_norm; deepcopy refuses it
                memo[id(value)] = torch.empty(value.shape, dtype=value.dtype, device="meta")
    return copy_model(model, memo)


def copy_model(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A deep copy whose functions act on the copy.

    `deepcopy` shares functions, so a hook that keeps an output in a dict of its model (`self.features[name] = output`)
    would fill the original's.
    """
    memo = {} if memo is None else memo
    copied = copy.deepcopy(model, memo)
    for module in copied.modules():
        for hooks in forward_hooks_of(module):
            for number, hook in hooks.items():
                hooks[number] = _rebound(hook, memo)
        for key, value in vars(module).items():
            if isinstance(value, types.FunctionType):
                vars(module)[key] = _rebound(value, memo)
    return copied


def _rebound(function: Any, memo: dict[int, Any]) -> Any:
    """A function whose closure and defaults refer to copies, where `memo` has them by the id of the original."""
    if not isinstance(function, types.FunctionType):
        return function  # deepcopy handles methods and partials

    def own(value: Any) -> Any:
        return memo.get(id(value), value)

    cells = [cell for cell in function.__closure__ or () if _is_filled(cell)]
    named = function.__kwdefaults__ or {}
    held = [*(cell.cell_contents for cell in cells), *(function.__defaults__ or ()), *named.values()]
    if all(own(value) is value for value in held):
        return function
    closure = function.__closure__ and tuple(
        types.CellType(own(cell.cell_contents)) if _is_filled(cell) else cell for cell in function.__closure__
    )
    defaults = function.__defaults__ and tuple(map(own, function.__defaults__))
    rebound = types.FunctionType(function.__code__, function.__globals__, function.__name__, defaults, closure)
    rebound.__kwdefaults__ = {key: own(value) for key, value in named.items()} or None
    rebound.__dict__.update(function.__dict__)
    return rebound


def _is_filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
