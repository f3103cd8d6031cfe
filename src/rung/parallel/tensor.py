"""Tensor parallelism on a mesh: carries out a plan, module by module, in styles for torch's `parallelize_module`.

Parameters become DTensors of the whole; forward computes with their local parts.

Between modules, activations are plain tensors that all ranks of the axis have alike; inside a sequence-parallel run,
plain parts of them. Only a vocabulary head leaves its result cut, as a DTensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from rung import fakes
from rung.errors import ModelError
from rung.parallel.collectives import (
    copy_for_parts,
    cut_part,
    gather_for_parts,
    gather_parts,
    sum_into_parts,
    sum_parts,
)
from rung.parallel.tensor_layers import is_conv1d, num_outputs, output_dim
from rung.parallel.tensor_plan import TensorPlan
from rung.parallel.vocabulary import VocabularyLoss, whole_output

__all__ = ["apply_sequence_parallel", "apply_tensor_plan", "loss_context", "settle_gradients", "whole_output"]


def apply_tensor_plan(module: nn.Module, prefix: str, plan: TensorPlan, mesh: DeviceMesh) -> None:
    """Cut what the plan names below `module`, which is called `prefix` in the whole model.

    Weights are whole and equal on all ranks of the mesh, so nothing is sent. What is cut already is left alone.
    """
    with fakes.outside_fakes():
        group, rank = mesh.get_group(), mesh.get_local_rank()
    names = {".".join(part for part in (prefix, name) if part): name for name, _ in module.named_modules()}
    entries: dict[str, _Entry] = {}
    for pair in plan.pairs:
        if len(pair.columns) > 1 and names.keys() >= {*pair.columns, pair.rows}:
            entries.update(dict.fromkeys((*pair.columns, pair.rows), _Entry()))
    cut: dict[int, nn.Parameter] = {}
    for full, name in names.items():
        child, word = module.get_submodule(name), plan.styles.get(full)
        if word is None or any(isinstance(p, DTensor) for p in child.parameters(recurse=False)):
            continue
        for key, parameter in list(child.named_parameters(recurse=False)):
            if id(parameter) not in cut:  # a tied weight stays one parameter
                cut[id(parameter)] = _cut_parameter(parameter, _placement(word, child, key), mesh, rank)
            child.register_parameter(key, cut[id(parameter)])
        style: ParallelStyle = _Linear(word, group, entries.get(full))
        if word in ("embedding", "summed"):
            style = _Embedding(group) if word == "embedding" else _Summed()
        parallelize_module(child, mesh, style, src_data_rank=None)


def apply_sequence_parallel(blocks: list[tuple[str, nn.Module]], plan: TensorPlan, mesh: DeviceMesh) -> None:
    """Consecutive blocks of this rank: the first takes its part of the sequence, the last gives the whole again."""
    with fakes.outside_fakes():
        group, num_ranks = mesh.get_group(), mesh.size()

    def cut_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        length = args[0].shape[1]
        if length % num_ranks:
            raise ModelError(
                f"sequence parallelism cannot cut a sequence of {length} among {num_ranks} ranks in equal parts. "
                f"Use lengths that {num_ranks} divides, or leave sequence parallelism off."
            )
        return (cut_part(args[0], 1, group), *args[1:])

    def gather_output(module: nn.Module, args: Any, output: Any) -> Any:
        return tree_map_only(Tensor, lambda part: gather_parts(part, 1, part.shape[1] * num_ranks, group), output)

    assert all(name in plan.sequence_blocks for name, _ in blocks)
    for block_name, block in blocks:
        for name, child in block.named_modules(prefix=block_name):
            if name in plan.gathers:
                child.register_forward_pre_hook(partial(_gather_arguments, plan.gathers[name], group), with_kwargs=True)
    blocks[0][1].register_forward_pre_hook(cut_input)
    blocks[-1][1].register_forward_hook(gather_output)


def _gather_arguments(
    keys: tuple[int | str, ...],
    group: dist.ProcessGroup,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    taken = [gather_for_parts(arg, 1, group) if place in keys else arg for place, arg in enumerate(args)]
    return tuple(taken), {k: gather_for_parts(v, 1, group) if k in keys else v for k, v in kwargs.items()}


def loss_context(plan: TensorPlan | None) -> AbstractContextManager[Any]:
    """Around the task's loss: lets it take an output whose vocabulary is cut. The loss is a plain tensor."""
    return VocabularyLoss() if plan is not None and plan.keeps_vocabulary_cut else nullcontext()


def settle_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Sum the gradients of parameters that every rank has whole but used on a part of the activations.

    Ranks must pass the same parameters in the same order. One all-reduce for each mesh and type.
    """
    partial_ones: dict[tuple[DeviceMesh, torch.dtype], list[nn.Parameter]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
            continue
        if gradient.placements == parameter.placements:
            continue
        if gradient.device_mesh.ndim == 1 and gradient.placements == (Partial(),):
            partial_ones.setdefault((gradient.device_mesh, gradient.dtype), []).append(parameter)
        else:
            parameter.grad = gradient.redistribute(placements=parameter.placements)
    for (mesh, _), group in partial_ones.items():
        locals_ = [parameter.grad.to_local() for parameter in group]  # type: ignore[union-attr]
        flat = torch.cat([part.flatten() for part in locals_])
        dist.all_reduce(flat, group=mesh.get_group())
        for parameter, part in zip(group, torch.split(flat, [part.numel() for part in locals_]), strict=True):
            parameter.grad = DTensor.from_local(part.view(parameter.shape), mesh, [Replicate()], run_check=False)


def _placement(word: str, module: nn.Module, key: str) -> Placement:
    if word == "summed":
        return Replicate()
    if word == "embedding":
        return Shard(0)
    if word.startswith("rowwise"):
        return Shard(1 - output_dim(module)) if key == "weight" else Replicate()
    return Shard(output_dim(module)) if key == "weight" else Shard(0)


def _cut_parameter(whole: nn.Parameter, placement: Placement, mesh: DeviceMesh, rank: int) -> nn.Parameter:
    part = whole.detach()
    if isinstance(placement, Shard):
        # A copy: a view would keep the whole alive.
        part = part.chunk(mesh.size(), placement.dim)[rank].clone(memory_format=torch.contiguous_format)
    spread = DTensor.from_local(
        part, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.contiguous().stride()
    )
    parameter = nn.Parameter(spread, requires_grad=whole.requires_grad)
    parameter.__dict__.update(vars(whole))
    return parameter


class _Entry:
    """Where one activation enters the layers of a pair: copied once for all of them, so that the gradients they leave
    are added up before the ranks' are."""

    def __init__(self) -> None:
        self._source: Tensor | None = None
        self._copy: Tensor | None = None

    def copy(self, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        if self._source is not x or self._copy is None or self._copy.requires_grad != x.requires_grad:
            self._source, self._copy = x, copy_for_parts(x, group)
        return self._copy

    def leave(self) -> None:
        self._source = self._copy = None


class _Linear(ParallelStyle):
    """A linear layer of which each rank has a part, on plain tensors.

    torch's own styles go through DTensor's dispatch, which small models feel, and expect parts of equal size.
    """

    def __init__(self, word: str, group: dist.ProcessGroup, entry: _Entry | None) -> None:
        super().__init__()
        self._word, self._group, self._entry = word, group, entry

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        word, group, entry = self._word, self._group, self._entry
        size, is_turned = num_outputs(module), is_conv1d(module)

        def linear(x: Tensor, bias: Tensor | None) -> Tensor:
            own = _local_part(module.weight)
            return F.linear(x, own.T if is_turned else own, bias)

        def columns(input: Tensor) -> Tensor:
            x = input
            bias: Any = module.bias
            if word != "colwise_sequence":  # there, the gather before does it
                x = copy_for_parts(x, group) if entry is None else entry.copy(x, group)
            part = linear(x, None if bias is None else bias.to_local())
            if word == "colwise_gather":
                return gather_parts(part, -1, size, group)
            return _cut_result(part, size, device_mesh) if word == "vocabulary_head" else part

        def rows(input: Tensor) -> Tensor:
            x = input
            bias: Any = module.bias
            if entry is not None:
                entry.leave()
            if word == "rowwise":
                result = sum_parts(linear(x, None), group)
                return result if bias is None else result + bias.to_local()
            result = sum_into_parts(linear(x, None), 1, group)
            # Every rank adds it to its own positions, so that each has a part of its gradient.
            return result if bias is None else result + bias.to_local(grad_placements=[Partial()])

        module.forward = rows if word.startswith("rowwise") else columns
        # torch's encoder layer takes a shortcut around modules that have no hook.
        module.register_forward_pre_hook(lambda mod, inputs: None)
        return module


def _local_part(parameter: Any) -> Tensor:
    """Of a DTensor parameter. Where columns are cut unevenly, `to_local` guesses the strides of the gradient's whole,
    and autograd then gathers all of it to lay it out anew (torch 2.11)."""
    placement = parameter.placements[0]
    is_even = parameter.shape[placement.dim] % parameter.device_mesh.size() == 0
    local: Tensor = parameter.to_local() if is_even or placement.dim == 0 else _UnevenPart.apply(parameter)  # type: ignore[no-untyped-call]
    return local


class _UnevenPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: DTensor) -> Tensor:
        ctx.mesh, ctx.placements, ctx.shape, ctx.stride = (
            whole.device_mesh,
            whole.placements,
            whole.shape,
            whole.stride(),
        )
        local: Tensor = whole.to_local()
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return DTensor.from_local(
            gradient.contiguous(), ctx.mesh, ctx.placements, run_check=False, shape=ctx.shape, stride=ctx.stride
        )


def _cut_result(part: Tensor, size: int, mesh: DeviceMesh) -> DTensor:
    shape = torch.Size([*part.shape[:-1], size])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, mesh, [Shard(-1)], run_check=False, shape=shape, stride=stride)


class _Summed(ParallelStyle):
    """A norm that works on a part of the activations: to autograd its weight is whole, its gradient a partial sum.

    Which dimension is cut does not matter to a norm over the last one, so the first stands for it.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def take(mod: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return (DTensor.from_local(inputs[0], device_mesh, [Shard(0)], run_check=False), *inputs[1:])

        module.register_forward_pre_hook(take)
        module.register_forward_hook(lambda mod, inputs, output: output.to_local())
        return module


class _Embedding(ParallelStyle):
    """Each rank looks up its rows and leaves zeros for others; the results are summed."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group = group

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        num_rows, padding = module.num_embeddings, module.padding_idx
        first = dist.get_rank(self._group) * -(-num_rows // dist.get_world_size(self._group))

        def look_up(input: Tensor) -> Tensor:
            tokens = input
            weight: Any = module.weight
            rows = weight.to_local()
            torch._assert_async(((tokens >= 0) & (tokens < num_rows)).all(), f"an index is not in [0, {num_rows})")
            index = tokens - first
            absent = (index < 0) | (index >= rows.shape[0])
            found = F.embedding(index.masked_fill(absent, 0), rows).masked_fill(absent.unsqueeze(-1), 0)
            if padding is not None:
                found = torch.where((tokens == padding).unsqueeze(-1), found.detach(), found)
            return sum_parts(found, self._group)

        module.forward = look_up  # type: ignore[method-assign]
        return module
