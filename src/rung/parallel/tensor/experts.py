"""Share out the experts of a layer among the ranks of a tensor group.

All ranks of the group have the same rows and route them alike. Each keeps some whole experts, computes the rows that
chose one of them, with zeros for the others, and the results are summed. A rank without rows takes part all the same.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rung.distributed import fake_world
from rung.distributed.torch_private import assert_async
from rung.parallel.collectives import copy_for_parts, sum_parts
from rung.parallel.experts.validate import ExpertCall, part_of, run_rows


def compute_own_experts(module: nn.Module, call: ExpertCall, group: dist.ProcessGroup) -> None:
    """Replace the forward of a module whose parameters are DTensors, cut along the dimension of experts."""
    own = part_of(call.num_experts, dist.get_world_size(group), dist.get_rank(group))
    bare = copy.copy(module)  # FSDP changes the module's class

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        hidden = call.hidden_values(args, kwargs)
        rows, index, weight = call.arguments(args, kwargs)
        in_range = ((index >= 0) & (index < call.num_experts)).all()
        assert_async(in_range, f"the number of an expert is not in [0, {call.num_experts})")
        taken, place, numbers = _choices(index, own, call.num_experts)
        own_rows = copy_for_parts(rows, group)[taken]
        own_weight = None if weight is None else copy_for_parts(weight, group)[taken, place]
        bare.training = module.training
        local: dict[str, Any] = {name: p.to_local() for name, p in module.named_parameters()}  # type: ignore[attr-defined]
        result = run_rows(bare, local, call, args, kwargs, own_rows, numbers, own_weight)
        total = sum_parts(result.new_zeros(len(rows), result.shape[1]).index_add(0, taken, result), group)
        return total if hidden.dim() == 2 else total.reshape(*hidden.shape[:-1], -1)

    module.forward = torch.compiler.disable(forward)  # type: ignore[no-untyped-call]


def _choices(index: Tensor, own: range, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The rows that chose one of this rank's experts, the place of that choice, and its number among these experts.

    Choices in a dry run, which have no values, are taken to be even.
    """
    if fake_world.is_fake(index):
        each = torch.arange(-(-index.numel() * len(own) // num_experts), device=index.device)
        return each % len(index), each % index.shape[1], each % len(own)
    taken, place = ((index >= own.start) & (index < own.stop)).nonzero(as_tuple=True)
    return taken, place, index[taken, place] - own.start


@contextlib.contextmanager
def without_experts(model: nn.Module, calls: Mapping[str, ExpertCall]) -> Iterator[None]:
    """Replace the forward of modules with experts by one that depends on all that theirs depends on, quickly.

    Experts read values, which is proven to be their own affair; the code around them may not read any.
    """
    found = [(model.get_submodule(name), call) for name, call in calls.items()]
    kept = [(module, vars(module).get("forward")) for module, _ in found]
    for module, call in found:
        module.forward = _stand_in(module, call)
    try:
        yield
    finally:
        for module, forward in kept:
            del module.forward
            if forward is not None:
                module.forward = forward


def _stand_in(module: nn.Module, call: ExpertCall) -> Callable[..., Tensor]:
    def forward(*args: Any, **kwargs: Any) -> Tensor:
        hidden = call.hidden_values(args, kwargs)
        rows, index, weight = call.arguments(args, kwargs)
        factor = (index + 1).to(rows.dtype)
        if weight is not None:
            factor = factor * weight.to(rows.dtype)
        for parameter in module.parameters(recurse=False):
            factor = factor + parameter[(0,) * parameter.dim()].to(rows.dtype)
        result = rows * factor.sum(dim=-1, keepdim=True)
        if call.width != result.shape[-1]:
            result = result.sum(dim=-1, keepdim=True).repeat(1, call.width)
        return result.reshape(*hidden.shape[:-1], call.width)

    return forward
