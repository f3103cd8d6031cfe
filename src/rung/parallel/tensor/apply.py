"""Apply a tensor-parallel plan to modules, with styles for torch's `parallelize_module`.

Parameters become DTensors; forward computes with their local shards. Activations between modules are plain tensors,
replicated over the axis, or sharded along the sequence inside a run of sequence-parallel blocks. Only a vocabulary head
returns a DTensor: its logits stay sharded for the loss.
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

from rung.distributed import fake_world
from rung.distributed.torch_private import assert_async, tree_map_only
from rung.errors import ModelError
from rung.parallel.chunked_cross_entropy import VocabularyPart
from rung.parallel.chunked_loss import ChunkedLinear
from rung.parallel.collectives import (
    copy_for_parts,
    cut_part,
    gather_for_parts,
    gather_parts,
    sum_into_parts,
    sum_parts,
)
from rung.parallel.float8 import Float8Linear
from rung.parallel.linear_layers import is_conv1d, num_outputs, output_dim
from rung.parallel.tensor.experts import compute_own_experts
from rung.parallel.tensor.plan import TensorPlan
from rung.parallel.tensor.vocab_parallel_loss import VocabularyLoss, whole_output

__all__ = ["apply_sequence_parallel", "apply_tensor_plan", "loss_context", "reduce_partial_gradients", "whole_output"]


def apply_tensor_plan(module: nn.Module, prefix: str, plan: TensorPlan, mesh: DeviceMesh) -> None:
    """Shard the submodules of `module` that the plan names; `prefix` is the name of `module` in the model.

    Weights are whole and equal on all ranks of the mesh, so nothing is sent. Sharded modules are skipped.
    """
    with fake_world.outside_fakes():
        group, rank = mesh.get_group(), mesh.get_local_rank()
    names = {".".join(part for part in (prefix, name) if part): name for name, _ in module.named_modules()}
    entries: dict[str, _Entry] = {}
    for pair in plan.pairs:
        if len(pair.columns) > 1 and names.keys() >= {*pair.columns, pair.rows}:
            entries.update(dict.fromkeys((*pair.columns, pair.rows), _Entry()))
    shards: dict[int, nn.Parameter] = {}
    for full, name in names.items():
        child, style = module.get_submodule(name), plan.styles.get(full)
        if style is None or any(isinstance(p, DTensor) for p in child.parameters(recurse=False)):
            continue
        for key, parameter in list(child.named_parameters(recurse=False)):
            if id(parameter) not in shards:  # a tied weight stays one parameter
                shards[id(parameter)] = _shard_parameter(parameter, _placement(style, child, key), mesh, rank)
            child.register_parameter(key, shards[id(parameter)])
        if style == "experts":
            compute_own_experts(child, plan.experts[full], group)
            continue
        parallel_style: ParallelStyle = _Linear(style, group, entries.get(full))
        if style in ("embedding", "summed"):
            parallel_style = _Embedding(group) if style == "embedding" else _Summed()
        parallelize_module(child, mesh, parallel_style, src_data_rank=None)


def apply_sequence_parallel(blocks: list[tuple[str, nn.Module]], plan: TensorPlan, mesh: DeviceMesh) -> None:
    """Run consecutive blocks on this rank's part of the sequence: the first splits it, the last gathers it."""
    with fake_world.outside_fakes():
        group, num_ranks = mesh.get_group(), mesh.size()

    def cut_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        length = args[0].shape[1]
        if length % num_ranks:
            raise ModelError(
                f"sequence parallelism cannot split a sequence of {length} among {num_ranks} ranks in equal parts. "
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
    """A context for the task's loss that accepts logits sharded along the vocabulary. The loss is a plain tensor."""
    return VocabularyLoss() if plan is not None and plan.keeps_vocabulary_cut else nullcontext()


def reduce_partial_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Sum the gradients of replicated parameters that each rank used on its part of the activations.

    Ranks must pass the same parameters in the same order. One all-reduce for each mesh and dtype.
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


def _placement(style: str, module: nn.Module, key: str) -> Placement:
    if style == "summed":
        return Replicate()
    if style in ("embedding", "experts"):
        return Shard(0)
    if style.startswith("rowwise"):
        return Shard(1 - output_dim(module)) if key == "weight" else Replicate()
    return Shard(output_dim(module)) if key == "weight" else Shard(0)


def _shard_parameter(whole: nn.Parameter, placement: Placement, mesh: DeviceMesh, rank: int) -> nn.Parameter:
    part = whole.detach()
    if isinstance(placement, Shard):
        # A view would keep the whole storage alive, hence the copy.
        part = part.chunk(mesh.size(), placement.dim)[rank].clone(memory_format=torch.contiguous_format)
    sharded = DTensor.from_local(
        part, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.contiguous().stride()
    )
    parameter = nn.Parameter(sharded, requires_grad=whole.requires_grad)
    parameter.__dict__.update(vars(whole))  # attributes that the task set on its parameter
    return parameter


class _Entry:
    """The activation that enters the colwise layers of a pair, copied once for all of them: autograd adds their
    gradients locally, and one all-reduce sums the result over ranks."""

    def __init__(self) -> None:
        self._source: Tensor | None = None
        self._copy: Tensor | None = None

    def copy(self, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        if self._source is not x or self._copy is None or self._copy.requires_grad != x.requires_grad:
            self._source, self._copy = x, copy_for_parts(x, group)
        return self._copy

    def clear(self) -> None:
        self._source = self._copy = None


class _Linear(ParallelStyle):
    """A sharded linear layer on plain tensors.

    torch's own styles go through DTensor's dispatch, whose overhead shows in small models, and need equal shards.
    """

    def __init__(self, style: str, group: dist.ProcessGroup, entry: _Entry | None) -> None:
        super().__init__()
        self._style, self._group, self._entry = style, group, entry

    # The abstract method of ParallelStyle, which `parallelize_module` calls.
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        style, group, entry = self._style, self._group, self._entry
        size, is_turned = num_outputs(module), is_conv1d(module)
        product = module.product if isinstance(module, Float8Linear) else F.linear

        def linear(x: Tensor, bias: Tensor | None) -> Tensor:
            own = _local_part(module.weight)
            return product(x, own.T if is_turned else own, bias)

        def columns(input: Tensor) -> Tensor:
            x = input
            bias: Any = module.bias
            if style != "colwise_sequence":  # the backward of its gather sums the gradients already
                x = copy_for_parts(x, group) if entry is None else entry.copy(x, group)
            own_bias = None if bias is None else bias.to_local()
            if style == "vocabulary_head" and isinstance(module, ChunkedLinear):
                head = module.in_chunks(x, _local_part(module.weight), own_bias, VocabularyPart(group, size))
                if head is not None:
                    return head
            part = linear(x, own_bias)
            if style == "colwise_gather":
                return gather_parts(part, -1, size, group)
            return _sharded_logits(part, size, device_mesh) if style == "vocabulary_head" else part

        def rows(input: Tensor) -> Tensor:
            x = input
            bias: Any = module.bias
            if entry is not None:
                entry.clear()
            if style == "rowwise":
                result = sum_parts(linear(x, None), group)
                return result if bias is None else result + bias.to_local()
            result = sum_into_parts(linear(x, None), 1, group)
            # Each rank adds the bias to its own positions only, so its gradient is a partial sum.
            return result if bias is None else result + bias.to_local(grad_placements=[Partial()])

        module.forward = rows if style.startswith("rowwise") else columns
        # nn.TransformerEncoderLayer takes a fused path that skips `forward` of modules without hooks.
        module.register_forward_pre_hook(lambda mod, inputs: None)
        return module


def _local_part(parameter: Any) -> Tensor:
    """The local shard of a DTensor parameter. With uneven shards of dimension 1, `to_local` guesses the strides of the
    full gradient, and autograd then gathers all of it to change its layout (torch 2.11)."""
    placement = parameter.placements[0]
    is_even = parameter.shape[placement.dim] % parameter.device_mesh.size() == 0
    local: Tensor = parameter.to_local() if is_even or placement.dim == 0 else _UnevenPart.apply(parameter)  # type: ignore[no-untyped-call]
    return local


class _UnevenPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: DTensor) -> Tensor:
        ctx.mesh, ctx.placements = whole.device_mesh, whole.placements
        ctx.shape, ctx.stride = whole.shape, whole.stride()
        local: Tensor = whole.to_local()
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return DTensor.from_local(
            gradient.contiguous(), ctx.mesh, ctx.placements, run_check=False, shape=ctx.shape, stride=ctx.stride
        )


def _sharded_logits(part: Tensor, size: int, mesh: DeviceMesh) -> DTensor:
    shape = torch.Size([*part.shape[:-1], size])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, mesh, [Shard(-1)], run_check=False, shape=shape, stride=stride)


class _Summed(ParallelStyle):
    """A norm on sharded activations: its weight is replicated, and its gradient becomes a partial sum.

    A norm over the last dimension treats all others alike, so Shard(0) is correct whichever of them is sharded.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def take(mod: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return (DTensor.from_local(inputs[0], device_mesh, [Shard(0)], run_check=False), *inputs[1:])

        module.register_forward_pre_hook(take)
        module.register_forward_hook(lambda mod, inputs, output: output.to_local())
        return module


class _Embedding(ParallelStyle):
    """An embedding sharded by rows: each rank looks up its own, with zeros for the others; the results are summed."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group = group

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        num_rows, padding = module.num_embeddings, module.padding_idx
        first_row = dist.get_rank(self._group) * -(-num_rows // dist.get_world_size(self._group))

        def look_up(input: Tensor) -> Tensor:
            tokens = input
            weight: Any = module.weight
            rows = weight.to_local()
            assert_async(((tokens >= 0) & (tokens < num_rows)).all(), f"an index is not in [0, {num_rows})")
            index = tokens - first_row
            absent = (index < 0) | (index >= rows.shape[0])
            found = F.embedding(index.masked_fill(absent, 0), rows).masked_fill(absent.unsqueeze(-1), 0)
            if padding is not None:
                found = torch.where((tokens == padding).unsqueeze(-1), found.detach(), found)
            return sum_parts(found, self._group)

        module.forward = look_up  # type: ignore[method-assign]
        return module
