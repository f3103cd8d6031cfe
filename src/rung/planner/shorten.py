"""A model with fewer of its repeated blocks, for a quicker look: what one block more costs can be added up.

Only blocks that are alike in everything that can be seen (type, printed form, shapes and types of parameters) are taken
out, and only from the list that they stand in. `tests/fake/test_plan.py` holds the sums against whole traces.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from rung.parallel.blocks import find_list_of_blocks
from rung.task import Task


def count_blocks(task: Task) -> int:
    """How many alike blocks the model has in one list; 0 if they are not alike, or it has no such list."""
    with torch.device("meta"):
        try:
            model = task.model()
        except Exception:
            return 0
    blocks = find_list_of_blocks(model, task.blocks)
    parents = {name.rpartition(".")[0] for name, _ in blocks}
    if len(parents) != 1:
        return 0
    if any(isinstance(value, Tensor) for module in model.modules() for value in vars(module).values()):
        return 0  # a tensor that nobody has registered would be lost in a copy
    container = model.get_submodule(parents.pop()) if blocks else None
    if not isinstance(container, nn.ModuleList | nn.Sequential) or len(container) != len(blocks):
        return 0
    return len(blocks) if len({_form(block) for _, block in blocks}) == 1 else 0


def shortened(task: Task, num_blocks: int) -> Task:
    """The task with so many blocks in its model, which is made once; after that it is copied."""
    make: Callable[..., Any] = task.model
    skeleton: list[nn.Module] = []

    def model() -> nn.Module:
        if not skeleton:
            with unset_fake_temporarily(), torch.device("meta"):
                skeleton.append(make())
            blocks = find_list_of_blocks(skeleton[0], task.blocks)
            container: Any = skeleton[0].get_submodule(blocks[0][0].rpartition(".")[0])
            del container[num_blocks:]
        with unset_fake_temporarily():
            copied = copy.deepcopy(skeleton[0])
        _give_storage(copied)
        return copied

    return replace(task, model=model)


def _give_storage(model: nn.Module) -> None:
    """In the place of meta tensors, such as are made now. (`to_empty` cannot put fake ones there.)"""
    made: dict[int, Any] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, old in tensors.items():
                if old is None:
                    continue
                if id(old) not in made:
                    new = torch.empty(old.shape, dtype=old.dtype)
                    made[id(old)] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
                tensors[name] = made[id(old)]


def _form(block: nn.Module) -> tuple[Any, ...]:
    tensors = [(name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in block.named_parameters()]
    buffers = [(name, tuple(t.shape), t.dtype) for name, t in block.named_buffers()]
    return type(block), repr(block), tuple(tensors), tuple(buffers)
