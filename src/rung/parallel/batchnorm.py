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


class _SyncStatistics(torch.autograd.Function):
    """Normalise by the statistics of all ranks. Returns (output, mean, biased variance, count)."""

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
        dims = [d for d in range(x.dim()) if d != 1]
        values = x.to(torch.promote_types(x.dtype, torch.float32))
        count = values.new_full((1,), float(x.numel() // num_channels) if counted else 0.0)
        variance, mean = torch.var_mean(values, dim=dims, correction=0)
        # Mean, variance and count of a rank in one row, so that one collective is enough.
        own = torch.cat([mean, variance, count])
        rows = gather_flat(own, group)
        means, variances, counts = rows[:, :num_channels], rows[:, num_channels:-1], rows[:, -1:]
        total = counts.sum()
        mean = (means * counts).sum(0) / total
        variance = ((variances + (means - mean).square()) * counts).sum(0) / total
        inverse = (variance + eps).rsqrt()
        shape = [1, num_channels] + [1] * (x.dim() - 2)
        normal = (values - mean.view(shape)) * inverse.view(shape)
        output = normal if weight is None else normal * weight.view(shape)
        output = output if bias is None else output + bias.view(shape)
        ctx.save_for_backward(values, weight, mean, inverse, total)
        ctx.group, ctx.counted, ctx.has_bias, ctx.input_dtype = group, counted, bias is not None, x.dtype
        ctx.mark_non_differentiable(mean, variance, total)
        return output.to(x.dtype), mean, variance, total

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
        values, weight, mean, inverse, total = ctx.saved_tensors
        dims = [d for d in range(values.dim()) if d != 1]
        shape = [1, values.shape[1]] + [1] * (values.dim() - 2)
        grad = grad_output.to(values.dtype)
        normal = (values - mean.view(shape)) * inverse.view(shape)
        own_sum, own_dot = grad.sum(dims), (grad * normal).sum(dims)
        grad_weight = own_dot.to(weight.dtype) if weight is not None else None
        grad_bias = own_sum.to(weight.dtype if weight is not None else values.dtype) if ctx.has_bias else None
        sums = torch.cat([own_sum, own_dot])
        if not ctx.counted:
            sums = torch.zeros_like(sums)
        dist.all_reduce(sums, group=ctx.group)
        all_sum, all_dot = sums[: values.shape[1]] / total, sums[values.shape[1] :] / total
        scale = inverse if weight is None else inverse * weight
        if ctx.counted:  # only counted samples affect the statistics and get a gradient through them
            grad = grad - all_sum.view(shape) - normal * all_dot.view(shape)
        grad_input = grad * scale.view(shape)
        return grad_input.to(ctx.input_dtype), grad_weight, grad_bias, None, None, None


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
                momentum = 1.0 / self.num_batches_tracked.to(torch.promote_types(input.dtype, torch.float32))
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
                for running, new in ((running_mean, mean), (running_var, unbiased)):
                    share = torch.as_tensor(momentum, dtype=running.dtype, device=running.device)
                    running.lerp_(new.to(running.dtype), share)
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
