"""The loss on logits that are sharded along the vocabulary, and the gathering of such outputs.

The logits of a language model are often its largest tensor. Sharded by the head, cross entropy needs only three numbers
per token from the other ranks. torch's `loss_parallel` also requires backward inside its context and returns a DTensor;
here the loss is a plain tensor, and losses other than cross entropy work on gathered logits.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from rung.distributed.torch_private import assert_async, tree_any, tree_map_only
from rung.parallel.collectives import gather_parts

# Functions that keep the sharded dimension or that DTensor handles correctly. All others get gathered tensors.
_KEEPS_SHARDING = frozenset(
    ("view", "reshape", "flatten", "unflatten", "transpose", "permute", "movedim", "squeeze", "unsqueeze", "float")
    + ("double", "to", "contiguous", "clone", "detach", "size", "dim", "numel", "stride", "is_contiguous", "__len__")
    + ("is_floating_point", "register_hook", "requires_grad_", "__getitem__", "__get__", "__set__", "__repr__")
)
_CROSS_ENTROPY = inspect.signature(F.cross_entropy)


class VocabularyLoss(TorchFunctionMode):
    """A mode in which cross entropy takes sharded logits, and other functions take them gathered."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not tree_any(lambda leaf: isinstance(leaf, DTensor), (args, kwargs)):
            return func(*args, **kwargs)
        if func is F.cross_entropy:
            loss = _cross_entropy(*args, **kwargs)
            if loss is not None:
                return loss
        elif func.__name__ in _KEEPS_SHARDING and not tree_any(_is_plain, (args, kwargs)):
            try:
                return func(*args, **kwargs)
            except RuntimeError:  # a view that DTensor does not support on uneven shards
                pass
        args, kwargs = tree_map_only(DTensor, _gather_whole, (args, kwargs))
        return func(*args, **kwargs)


def whole_output(output: Any) -> Any:
    """A nested output with every DTensor replaced by a gathered plain tensor. Gradients pass."""
    if isinstance(output, DTensor):
        return _gather_whole(output)
    if isinstance(output, dict):
        changed = copy.copy(output)  # keeps dict subclasses such as Hugging Face's ModelOutput
        for key, value in output.items():
            changed[key] = whole_output(value)
        return changed
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(*map(whole_output, output))
    if isinstance(output, list | tuple):
        return type(output)(map(whole_output, output))
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        copied = copy.copy(output)
        for field in dataclasses.fields(output):
            object.__setattr__(copied, field.name, whole_output(getattr(output, field.name)))
        return copied
    return output


def _gather_whole(cut: DTensor) -> Tensor:
    """Gather a DTensor. Not by `full_tensor`, whose all-gather crashes on gloo with CUDA tensors (torch 2.11)."""
    if cut.device_mesh.ndim > 1 or cut.placements[0].is_partial():
        return cut.full_tensor()
    placement = cut.placements[0]
    local = cut.to_local()
    if not isinstance(placement, Shard):
        return local
    return gather_parts(local, placement.dim, cut.shape[placement.dim], cut.device_mesh.get_group())


def _cross_entropy(*args: Any, **kwargs: Any) -> Tensor | None:
    """Cross entropy of logits sharded along the classes; None for options that need whole logits."""
    bound = _CROSS_ENTROPY.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    logits, target, reduction = given["input"], given["target"], given["reduction"]
    if not isinstance(logits, DTensor) or isinstance(target, DTensor) or logits.dim() < 2:
        return None
    if logits.device_mesh.ndim > 1 or logits.placements[0] != Shard(1) or target.is_floating_point():
        return None
    if any(given[key] is not None for key in ("weight", "size_average", "reduce")) or given["label_smoothing"] != 0:
        return None
    group, num_classes, ignored = logits.device_mesh.get_group(), logits.shape[1], given["ignore_index"]
    first = dist.get_rank(group) * -(-num_classes // dist.get_world_size(group))
    labels = target.flatten()
    counted = labels != ignored
    assert_async((~counted | ((labels >= 0) & (labels < num_classes))).all(), f"a target is not in [0, {num_classes})")
    rows = logits.to_local().movedim(1, -1).flatten(0, -2)
    losses: Tensor = _ShardedCrossEntropy.apply(rows, labels - first, counted, group)  # type: ignore[no-untyped-call]
    if not torch.is_autocast_enabled(rows.device.type):
        losses = losses.to(rows.dtype)
    if reduction == "none":
        return losses.view(target.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / counted.sum()


class _ShardedCrossEntropy(torch.autograd.Function):
    """The loss of each row. `index` is relative to this rank's first class."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, counted: Tensor, group: dist.ProcessGroup) -> Tensor:
        wide = rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows
        highest = wide.amax(dim=1)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        shifted = wide - highest[:, None]
        is_here = counted & (index >= 0) & (index < rows.shape[1])
        index = index.masked_fill(~is_here, 0)[:, None]
        chosen = shifted.gather(1, index)[:, 0].masked_fill(~is_here, 0)
        powers = shifted.exp_()
        sums = torch.stack([powers.sum(dim=1), chosen])
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(powers, sums[0], index, is_here, counted)
        ctx.dtype = rows.dtype
        return (sums[0].log() - sums[1]).masked_fill(~counted, 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        powers, total, index, is_here, counted = ctx.saved_tensors
        result = powers / total[:, None]
        result.scatter_add_(1, index, -is_here[:, None].to(result.dtype))
        result *= gradient.masked_fill(~counted, 0)[:, None]
        return result.to(ctx.dtype), None, None, None


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not isinstance(leaf, DTensor)
