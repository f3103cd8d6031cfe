"""Batch normalisation over the whole micro-batch, however it is cut among ranks.

torch's SyncBatchNorm refuses the CPU and counts every row it sees. This one works on any device and leaves out a rank
whose piece is a stand-in. The statistics are combined from each rank's own mean and squared deviations, so nothing is
lost to cancellation.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from rung.errors import ModelError
from rung.world import gather_flat


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
        # Channels and the count of one rank make one row, so a single collective carries all.
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
        if ctx.counted:  # the statistics depend on this rank's samples, and pass gradient back to them
            grad = grad - all_sum.view(shape) - normal * all_dot.view(shape)
        grad_input = grad * scale.view(shape)
        return grad_input.to(ctx.input_dtype), grad_weight, grad_bias, None, None, None


class SyncBatchNorm(_BatchNorm):
    """A batch norm whose training statistics span the ranks of a group.

    The user's module becomes one and keeps its parameters, buffers and names. `counted` is set to False by the runtime
    while a stand-in sample passes.
    """

    group: dist.ProcessGroup
    counted: bool = True

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"batch norm needs at least 2 dimensions, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        output, mean, variance, total = _SyncStatistics.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.eps, self.counted, self.group
        )
        if (
            self.training
            and self.track_running_stats
            and self.running_mean is not None
            and self.running_var is not None
        ):
            with torch.no_grad():
                if self.num_batches_tracked is not None:
                    self.num_batches_tracked.add_(1)
                factor = self.momentum
                if factor is None:
                    assert self.num_batches_tracked is not None
                    keep = 1.0 / self.num_batches_tracked.to(mean.dtype)
                else:
                    keep = mean.new_tensor(factor)
                unbiased = variance * (total / (total - 1).clamp(min=1))
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), keep.to(self.running_mean.dtype))
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), keep.to(self.running_var.dtype))
        return output  # type: ignore[no-any-return]


def batch_norms(model: nn.Module) -> list[tuple[str, _BatchNorm]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, _BatchNorm)]


def synchronise_batch_norm(model: nn.Module, group: dist.ProcessGroup) -> list[SyncBatchNorm]:
    """Turn every batch norm of the model into one that spans `group`, in place: same objects, same names."""
    turned = []
    for name, module in batch_norms(model):
        if type(module) not in _KNOWN:
            raise ModelError(
                f"{name} is a {type(module).__name__}, a batch norm with code of its own, which cannot be "
                "synchronised. Use --set batch_norm=local, or torch's own class."
            )
        module.__class__ = SyncBatchNorm
        assert isinstance(module, SyncBatchNorm)
        module.group = group
        turned.append(module)
    return turned


_KNOWN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
