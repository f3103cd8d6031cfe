"""Remove repeated blocks from a model for a faster dry run; the cost of the others is extrapolated.

Only blocks that are equal in type, printed form, and shapes and dtypes of parameters are removed, and only from the
list that contains them. `tests/planner/test_plan.py` compares the extrapolation with whole traces.
"""

from __future__ import annotations

import copy
import glob
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rung.distributed import fake_world
from rung.parallel.blocks import find_list_of_blocks
from rung.parallel.experts.lists import callers_of_lists
from rung.parallel.experts.validate import num_experts_of
from rung.parallel.materialize import NoDraws, own_tensors, put_tensor
from rung.spec.task import Task


def count_blocks(task: Task) -> int:
    """The number of identical blocks in the model's list of blocks; 0 if they differ or there is no list."""
    model = _without_storage(task)
    if model is None:
        return 0
    blocks = find_list_of_blocks(model, task.blocks)
    parents = {name.rpartition(".")[0] for name, _ in blocks}
    if len(parents) != 1:
        return 0
    if any(isinstance(value, Tensor) for module in model.modules() for value in vars(module).values()):
        return 0  # `_give_storage` allocates registered tensors only
    container = model.get_submodule(parents.pop()) if blocks else None
    if not isinstance(container, nn.ModuleList | nn.Sequential) or len(container) != len(blocks):
        return 0
    return len(blocks) if len({_signature(block) for _, block in blocks}) == 1 else 0


def count_experts(task: Task) -> int:
    """The largest number of experts that a layer of the model has and that ranks may share out."""
    model = _without_storage(task)
    if model is None:
        return 0
    lists = [model.get_submodule(name) for name in callers_of_lists(model) if "expert" in name.rpartition(".")[2]]
    counts = [num_experts_of(module) or 0 for module in model.modules()]
    return max([*counts, *(len(list(one.children())) for one in lists)], default=0)


def _without_storage(task: Task) -> nn.Module | None:
    """The task's model on the meta device; None if it cannot be built there."""
    with torch.device("meta"), NoDraws():
        try:
            model: nn.Module = task.model()
        except Exception:
            return None
    return model


def shortened(task: Task, num_blocks: int) -> Task:
    """The task with `num_blocks` blocks in its model, which is built once and copied after that.

    The task names the list that was cut: another one, as that of the encoder beside a decoder, may now be the largest.
    """
    make: Callable[..., Any] = task.model
    with fake_world.outside_fakes(), torch.device("meta"), NoDraws():
        skeleton: nn.Module = make()
    parent = find_list_of_blocks(skeleton, task.blocks)[0][0].rpartition(".")[0]
    container: Any = skeleton.get_submodule(parent)
    del container[num_blocks:]

    def model() -> nn.Module:
        with fake_world.outside_fakes():
            copied = copy.deepcopy(skeleton)
        _give_storage(copied)
        return copied

    return replace(task, model=model, blocks=f"{glob.escape(parent)}.*" if parent else "*")


def _give_storage(model: nn.Module) -> None:
    """Replace meta tensors by empty ones, which are fake in a fake world; `to_empty` cannot make fake tensors."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, old in own_tensors(module):
            if id(old) not in made:
                new = torch.empty(old.shape, dtype=old.dtype)
                made[id(old)] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
            put_tensor(module, name, made[id(old)])


def _signature(block: nn.Module) -> tuple[Any, ...]:
    tensors = [(name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in block.named_parameters()]
    buffers = [(name, tuple(t.shape), t.dtype) for name, t in block.named_buffers()]
    return type(block), repr(block), tuple(tensors), tuple(buffers)
