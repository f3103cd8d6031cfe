"""Batch normalisation over the whole micro-batch of all ranks.

torch's SyncBatchNorm does not run on the CPU and counts every row. This one runs on any device and leaves out ranks
whose batch is a stand-in sample. Statistics are combined from each rank's mean and squared deviations, which avoids the
cancellation of a sum of squares.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rung.distributed.collectives import gather_flat
from rung.distributed.torch_private import BatchNorm
from rung.errors import ModelError
from rung.parallel.collectives import copy_for_parts, sum_parts


@torch.library.impl("aten::batch_norm_update_stats", "Meta")
def _statistics_of_shape(x: Tensor, *unused: Any) -> tuple[Tensor, Tensor]:
    """For tensors without data. torch has none, and computes with real zeros of the same size instead."""
    mean = x.new_empty(x.shape[1], dtype=_type_of_statistics(x))
    return mean, torch.empty_like(mean)


def _type_of_statistics(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


class _SyncStatistics(torch.autograd.Function):
    """Normalise by the statistics of all ranks. Returns (output, mean, biased variance, count).

    torch's kernels do what passes over the whole input, and only the input is kept for backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        counted: bool,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        num_channels = x.shape[1]
        # The running statistics do not change, by a momentum of 0, but say the type: otherwise it would be the input's.
        unused = x.new_zeros(num_channels, dtype=_type_of_statistics(x))
        mean, variance = torch.batch_norm_update_stats(x, unused, unused, 0.0)
        count = mean.new_full((1,), float(x.numel() // num_channels) if counted else 0.0)
        # Mean, variance and count of a rank in one row, so that one collective is enough.
        rows = gather_flat(torch.cat([mean, variance, count]), group)
        means, variances, counts = torch.split_with_sizes(rows, [num_channels, num_channels, 1], dim=1)
        total = counts.sum()
        shares = counts / total.clamp(min=1)  # 0 if no rank has a sample that could be read
        mean = (means * shares).sum(0)
        variance = ((variances + (means - mean).square()) * shares).sum(0)
        ctx.save_for_backward(x, weight, mean, (variance + eps).rsqrt(), total)
        ctx.group, ctx.counted, ctx.bias_dtype = group, counted, bias.dtype if bias is not None else None
        ctx.eps = eps
        ctx.mark_non_differentiable(mean, variance, total)
        weight, bias = (given if given is None else given.to(mean.dtype) for given in (weight, bias))
        return F.batch_norm(x, mean, variance, weight, bias, eps=eps), mean, variance, total

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse, total = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return *_differentiable_gradients(ctx, x, weight, total, grad_output), None, None, None
        shape = [1, x.shape[1]] + [1] * (x.dim() - 2)
        # Of torch's backward only the sums over this rank's samples, which need no weight: any vector stands for it.
        own_dot, own_sum = torch.ops.aten.native_batch_norm_backward(
            grad_output, x, inverse, None, None, mean, inverse, True, 0.0, [False, True, True]
        )[1:]
        grad_weight = own_dot.to(weight.dtype) if weight is not None else None
        grad_bias = own_sum.to(ctx.bias_dtype) if ctx.bias_dtype is not None else None
        sums = torch.cat([own_sum, own_dot]) if ctx.counted else mean.new_zeros(2 * x.shape[1])
        dist.all_reduce(sums, group=ctx.group)
        scale = inverse if weight is None else inverse * weight.to(inverse.dtype)
        if not ctx.counted:  # only counted samples affect the statistics and get a gradient through them
            return (grad_output * scale.view(shape)).to(x.dtype), grad_weight, grad_bias, None, None, None
        shift, slope = sums.view(2, -1) * (scale / -total)
        # (grad - mean of grad - normal * mean of grad * normal) * scale, in fp32 at least. Each step takes one vector,
        # since the CPU's kernels are several times slower with two.
        grad_input = x - mean.view(shape)
        grad_input *= (slope * inverse).view(shape)
        grad_input.addcmul_(grad_output, scale.view(shape))
        grad_input += shift.view(shape)
        return grad_input.to(x.dtype), grad_weight, grad_bias, None, None, None


def _differentiable_gradients(
    ctx: Any, x: Tensor, weight: Tensor | None, total: Tensor, grad_output: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients of `_SyncStatistics` by operations that have gradients themselves, as a gradient penalty needs.

    The statistics are computed again, since they depend on the input, and the sums over ranks are sums in backward,
    too. A rank that is not counted takes part in all of them, with zeros.
    """
    dims = [dim for dim in range(x.dim()) if dim != 1]
    shape = [1, -1] + [1] * (x.dim() - 2)
    counted = float(ctx.counted)
    num_values = total.clamp(min=1)

    def mean_over_ranks(own: Tensor) -> Tensor:
        return copy_for_parts(sum_parts(own * counted, ctx.group), ctx.group) / num_values

    values, gradient = x.to(total.dtype), grad_output.to(total.dtype)
    centred = values - mean_over_ranks(values.sum(dims)).view(shape)
    inverse = (mean_over_ranks(centred.square().sum(dims)) + ctx.eps).rsqrt()
    normal = centred * inverse.view(shape)
    own_sum, own_dot = gradient.sum(dims), (gradient * normal).sum(dims)
    through_mean, through_variance = mean_over_ranks(torch.stack([own_sum, own_dot])) * counted
    scale = inverse if weight is None else inverse * weight.to(inverse.dtype)
    grad_input = gradient - through_mean.view(shape) - normal * through_variance.view(shape)
    return (
        (grad_input * scale.view(shape)).to(x.dtype),
        own_dot.to(weight.dtype) if weight is not None else None,
        own_sum.to(ctx.bias_dtype) if ctx.bias_dtype is not None else None,
    )


class SyncBatchNorm(BatchNorm):
    """A batch norm whose training statistics span the ranks of a group.

    The user's module becomes one in place and keeps its parameters, buffers and names. The runtime sets `counted` to
    False while a stand-in sample passes.
    """

    group: dist.ProcessGroup
    counted: bool = True

    def forward(self, input: Tensor) -> Tensor:
        if input.dim() < 2:
            raise ValueError(f"batch norm needs at least 2 dimensions, got {input.dim()}")
        if not self.training and self.running_mean is not None:
            return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        tracked = self.training and self.track_running_stats
        momentum: float | Tensor | None = self.momentum
        if tracked and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if momentum is None:
                momentum = 1.0 / self.num_batches_tracked.to(_type_of_statistics(input))
        return self.normalise(
            input, self.running_mean if tracked else None, self.running_var if tracked else None, momentum, self.eps
        )

    def normalise(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float | Tensor | None,
        eps: float,
    ) -> Tensor:
        """Normalise by the statistics of all ranks, and update the running ones, if they are given."""
        output, mean, variance, total = _SyncStatistics.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, eps, self.counted, self.group
        )
        if running_mean is not None and running_var is not None and momentum is not None:
            with torch.no_grad():
                unbiased = variance * (total / (total - 1).clamp(min=1))  # the clamp avoids 1 / 0 for a single value
                if isinstance(momentum, Tensor):
                    momentum = momentum.to(running_mean.dtype)
                for running, new in ((running_mean, mean), (running_var, unbiased)):
                    running.lerp_(new.to(running.dtype), momentum)
        return output  # type: ignore[no-any-return]


class _SynchronisedCall(TorchFunctionMode):
    """Inside the forward of a subclass of batch norm (timm's have an activation in it): its F.batch_norm becomes ours.

    Refuses a forward that normalises anything but its input, such as parts of the batch, or by code of its own.
    """

    def __init__(self, module: SyncBatchNorm, input: Tensor) -> None:
        super().__init__()
        self._module, self._input = module, input
        self.is_done = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.batch_norm:
            return func(*args, **kwargs)
        given = inspect.signature(F.batch_norm).bind(*args, **kwargs)
        given.apply_defaults()
        values = given.arguments
        if not values["training"]:
            self.is_done = True
            return func(*args, **kwargs)
        if self.is_done or values["input"] is not self._input or values["weight"] is not self._module.weight:
            raise _not_synchronised(self._module)
        self.is_done = True
        names = ("input", "running_mean", "running_var", "momentum", "eps")
        return self._module.normalise(*(values[name] for name in names))


def _synchronised(cls: type[BatchNorm]) -> type[SyncBatchNorm]:
    """A subclass of the user's class, whose forward runs with synchronised statistics."""

    def forward(self: SyncBatchNorm, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with _SynchronisedCall(self, input) as call:
            output: Tensor = cls.forward(self, input, *args, **kwargs)
        if not call.is_done:
            raise _not_synchronised(self)
        return output

    return type(cls.__name__, (SyncBatchNorm, cls), {"forward": forward})


def _not_synchronised(module: nn.Module) -> ModelError:
    return ModelError(
        f"{type(module).__name__} is a subclass of batch norm with its own code, which cannot be synchronised: it does "
        "not normalise its whole input by F.batch_norm. Use --set batch_norm=local, or one of torch's classes."
    )


def batch_norms(model: nn.Module) -> list[tuple[str, BatchNorm]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, BatchNorm)]


def synchronise_batch_norm(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Change the class of every batch norm of the model to SyncBatchNorm over `group`, in place."""
    classes: dict[type[BatchNorm], type[SyncBatchNorm]] = dict.fromkeys(_KNOWN, SyncBatchNorm)
    for _, module in batch_norms(model):
        cls = type(module)
        classes[cls] = classes.get(cls) or _synchronised(cls)
        module.__class__ = classes[cls]
        assert isinstance(module, SyncBatchNorm)
        module.group = group


_KNOWN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
