"""Find a model's repeated blocks, which are sharded, checkpointed and compiled one by one."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from rung.errors import ModelError, nearest


@dataclass
class BlockReuse:
    """A cache of per-block results that the dry runs of one task share. Training does not use one."""

    proofs: dict[Any, list[Any]] = field(default_factory=dict)  # tensor-parallel pairs of a block that were checked
    wrap: Callable[[nn.Module], None] | None = None  # replaces a block's forward by one that replays a recorded trace

    @property
    def is_quick(self) -> bool:
        """Whether blocks of equal types and shapes are assumed to be identical, which is enough for an estimate."""
        return self.wrap is not None


def find_blocks(model: nn.Module, pattern: str | None = None) -> list[tuple[str, nn.Module]]:
    """The blocks by the task's pattern ("blocks.*"), or the children of the largest list of modules of one class.

    In a model without such a list, each top-level child that has parameters is a block.
    """
    found = find_list_of_blocks(model, pattern)
    return found or [(name, child) for name, child in model.named_children() if num_parameters(child) > 0]


def find_list_of_blocks(model: nn.Module, pattern: str | None = None) -> list[tuple[str, nn.Module]]:
    """The blocks by the pattern, or the children of the largest list of modules of one class, if there is one that is
    not of experts."""
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
        if not isinstance(module, nn.ModuleList | nn.Sequential) or "expert" in name.rpartition(".")[2]:
            continue  # experts are alternatives, of which ranks may skip different ones
        children = [(f"{name}.{key}" if name else key, child) for key, child in module.named_children()]
        kinds = {type(child) for _, child in children}
        size = num_parameters(module)
        if len(children) >= 2 and len(kinds) == 1 and size > best_size:
            best, best_size = children, size
    return best


def fold(names: Iterable[str]) -> list[str]:
    """Distinct names, with block numbers replaced by `*`."""
    return list(dict.fromkeys(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name) for name in names))


def num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def describe(block: nn.Module) -> tuple[Any, ...]:
    """A key of types, shapes and plain attributes; one analysis serves all blocks of equal key."""
    is_layer_index = re.compile(r"(idx|index|id|number)$")
    numbers = tuple(
        (name, type(module), key, value)
        for name, module in block.named_modules()
        for key, value in sorted(vars(module).items())
        if type(value) in (int, float, bool, str) and not is_layer_index.search(key)
    )
    return type(block), numbers, tuple((name, tuple(p.shape)) for name, p in block.named_parameters())
