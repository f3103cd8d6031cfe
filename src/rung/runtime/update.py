"""The update of the parameters by the task's own optimizer on each rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rung.distributed.world import World
from rung.errors import TaskError
from rung.parallel.combined_optimizer import kind_of
from rung.parallel.gradients import clip, global_norm
from rung.runtime.context import RuntimeContext
from rung.spec.abilities import cuts_only_batch, keeps_whole_state


class OptimizerUpdate:
    """Unscale, clip, step; under zero1, the optimizer steps slices of the parameters."""

    def __init__(
        self,
        context: RuntimeContext,
        *,
        norm: Callable[[list[nn.Parameter]], Tensor] | None = None,
        step_optimizer: Callable[[], object] | None = None,
        has_equal_gradients: bool | None = None,
    ) -> None:
        """`norm` is over all ranks. `has_equal_gradients`: all ranks have the same ones, and so the same overflows."""
        layout = context.world.layout
        self._context, self._norm = context, norm or partial(norm_with_experts, context)
        self._step_optimizer = step_optimizer
        if has_equal_gradients is None:
            has_equal_gradients = keeps_whole_state(layout)
        self._has_equal_gradients = has_equal_gradients

    def __call__(self, want_norm: bool) -> Tensor | None:
        context, parameters = self._context, self._context.parameters
        scaler, update, max_norm = context.scaler, context.sharded_update, context.config.clip
        if scaler is not None:
            if update is not None:
                update.take_gradients()  # the scaler reads the gradients of the optimizer's parameters
            scaler.unscale_(context.optimizer)
            if not self._has_equal_gradients:
                # Each rank has checked its own part: all must skip a step that overflowed on any of them.
                scaler.sync_overflow(context.optimizer, context.world.device)
        if update is not None and scaler is not None:
            parameters = update.slices()  # only these were unscaled
        norm = self._norm(parameters) if max_norm is not None or want_norm else None
        if max_norm is not None:
            assert norm is not None
            clip(parameters, max_norm, norm)
        if update is not None and scaler is None:
            update.take_gradients()  # after clipping, which changes the whole gradients
        context.updates.begin()
        step_scaled(context, self._step_optimizer if context.evaluate is None else self._step_with_closure)
        if update is not None:
            update.share_parameters()
            update.drop_gradients()
        end_update(context)
        return norm

    def _step_with_closure(self) -> None:
        """The first evaluation has been done, with its gradients clipped."""
        context, evaluate, max_norm = self._context, self._context.evaluate, self._context.config.clip
        assert evaluate is not None
        num_evaluations = 0

        @torch.enable_grad()
        def closure() -> Tensor:
            nonlocal num_evaluations
            loss = evaluate()
            num_evaluations += 1
            if max_norm is not None and num_evaluations > 1:
                clip(context.parameters, max_norm, self._norm(context.parameters))
            return loss

        context.optimizer.step(closure)  # type: ignore[arg-type]


def refuse_closure(context: RuntimeContext) -> None:
    """Only where every rank holds the whole model does an optimizer that evaluates the loss itself take one way."""
    layout, config = context.world.layout, context.config
    name, reason = kind_of(context.optimizer), None
    if not keeps_whole_state(layout) or not cuts_only_batch(layout):
        reason = f"under {layout.name} no rank has the whole gradient, from which it chooses its next step"
    elif config.compress != "none" or config.local_steps > 1:
        reason = "with --compress or --local-steps ranks have gradients of their own"
    elif context.scaler is not None:
        reason = "with --precision fp16 gradients are scaled, and a step that overflows is skipped"
    elif context.world.tensors.fake_mode is not None:
        reason = "how often depends on the values, so it cannot be planned"
    if reason is not None:
        raise TaskError(
            f"{context.task.name}: {name} evaluates the loss several times a step: {reason}. It trains under single, "
            "ddp and dp, in fp32, fp64 or bf16; AdamW trains under every strategy."
        )


def step_scaled(context: RuntimeContext, step_optimizer: Callable[[], object] | None = None) -> None:
    """Step the optimizer, unless the scaler found an overflow."""
    optimizer, scaler = context.optimizer, context.scaler
    if scaler is None:
        (step_optimizer or optimizer.step)()
        return
    if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
        scaler.step(optimizer)
    scaler.update()


def norm_over_ranks(own: Tensor, world: World, group: dist.ProcessGroup | None = None) -> Tensor:
    """The norm over all ranks, from the norm of each rank's own part. A collective of the group, or of all ranks."""
    squared = own.to(device=world.device, dtype=torch.promote_types(own.dtype, torch.float32)).square()
    dist.all_reduce(squared, group=group)
    return squared.sqrt()


def norm_with_experts(context: RuntimeContext, parameters: list[nn.Parameter]) -> Tensor:
    """The norm over the data ranks, of which those that share out lists of experts hold different ones."""
    lists = context.parallel.experts.lists if context.parallel.experts is not None else []
    apart = {id(parameter) for one in lists for parameter in one.module.parameters()}
    norm = global_norm([parameter for parameter in parameters if id(parameter) not in apart])
    if not lists:
        return norm
    norm = norm.to(context.world.device)
    # All ranks of the group reduce, whether these have gradients or not.
    own = global_norm([parameter for parameter in parameters if id(parameter) in apart]).to(norm)
    own = norm_over_ranks(own, context.world, lists[0].group).to(norm)
    whole: Tensor = torch.linalg.vector_norm(torch.stack([norm, own]))
    return whole


def end_update(context: RuntimeContext) -> None:
    for parameter in context.parameters:
        parameter.grad = None
    if not context.turns.is_last:
        return  # the step goes on
    if context.schedule is not None:
        context.schedule.step()
    context.updates.end()
