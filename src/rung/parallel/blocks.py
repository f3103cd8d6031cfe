"""Where a model's repeated blocks are: the pieces that are sharded, checkpointed and compiled one by one."""

from __future__ import annotations

import fnmatch
import re
from typing import Any

from torch import nn

from rung.errors import ModelError, nearest


def find_blocks(model: nn.Module, pattern: str | None = None) -> list[tuple[str, nn.Module]]:
    """The blocks, by the task's pattern ("blocks.*") or found: the children of the largest list of like modules.

    A model without such a list is cut at its top level: each child that has parameters is a block.
    """
    found = find_list_of_blocks(model, pattern)
    return found or [(name, child) for name, child in model.named_children() if num_parameters(child) > 0]


def find_list_of_blocks(model: nn.Module, pattern: str | None = None) -> list[tuple[str, nn.Module]]:
    """The blocks by the pattern, or the children of the largest list of like modules; none if there is no such list."""
    named = [(name, module) for name, module in model.named_modules() if name]
    if pattern is not None:
        found = [(n, m) for n, m in named if fnmatch.fnmatchcase(n, pattern) and n.count(".") == pattern.count(".")]
        if not found:
            raise ModelError(
                f"blocks = {pattern!r} matches no module of the model.{nearest(pattern, [n for n, _ in named])}"
            )
        return found
    best: list[tuple[str, nn.Module]] = []
    best_size = 0
    for name, module in [("", model), *named]:
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        children = [(f"{name}.{key}" if name else key, child) for key, child in module.named_children()]
        kinds = {type(child) for _, child in children}
        size = num_parameters(module)
        if len(children) >= 2 and len(kinds) == 1 and size > best_size:
            best, best_size = children, size
    return best


def num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def describe(block: nn.Module) -> tuple[Any, ...]:
    """What two blocks share if one analysis serves both: types, shapes, and the numbers that their modules keep."""
    is_place = re.compile(r"(idx|index|id|number)$")
    numbers = tuple(
        (name, type(module), key, value)
        for name, module in block.named_modules()
        for key, value in sorted(vars(module).items())
        if type(value) in (int, float, bool, str) and not is_place.search(key)
    )
    return type(block), numbers, tuple((name, tuple(p.shape)) for name, p in block.named_parameters())
