"""Layouts whose ranks each run the whole model: single, ddp, zero1, zero2, zero3/fsdp, hsdp, tp and compositions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rung.data.batch_shard import MicroBatch
from rung.distributed.ddp import replicate
from rung.parallel.gradients import gradient_figures
from rung.parallel.sharding import average_whole, set_gradient_sync
from rung.parallel.tensor.apply import reduce_partial_gradients
from rung.runtime.context import RuntimeContext
from rung.runtime.forward import LossModule
from rung.runtime.passes import GradientSync, MicroBatchLoop, no_sync
from rung.runtime.step import StepParts
from rung.runtime.update import OptimizerUpdate
from rung.runtime.weights import gathered_weights


def mesh_parts(context: RuntimeContext) -> StepParts:
    """The parts of a step whose gradients DDP, FSDP2 or nothing synchronises, by the layout."""
    world, finds_unused = context.world, context.config.unused_parameters == "allow"
    if world.layout.uses_ddp:
        return ddp_parts(context, partial(replicate, world, find_unused=finds_unused))

    def set_fully_shard(micro: MicroBatch, is_last: bool) -> AbstractContextManager[Any]:
        set_gradient_sync(context.model, world, is_last=is_last)
        return nullcontext()

    return whole_model_parts(context, set_fully_shard if world.layout.uses_fully_shard else no_sync)


def ddp_parts(context: RuntimeContext, replicate: Callable[[nn.Module], DistributedDataParallel]) -> StepParts:
    # A DDP for each turn: it expects a gradient for each parameter that was trainable when it was made.
    replicas: dict[str | None, DistributedDataParallel] = {}
    loss = loss_module(context)
    for turn in context.turns.names:
        with context.turns.take(turn), context.world.tensors.mode():
            replicas[turn] = replicate(loss)

    def sync(micro: MicroBatch, is_last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if is_last else replicas[context.turns.current].no_sync()

    return whole_model_parts(context, sync, replicas)


def whole_model_parts(
    context: RuntimeContext,
    sync: GradientSync = no_sync,
    replicas: Mapping[str | None, DistributedDataParallel] | None = None,
) -> StepParts:
    """A step of a loop over micro-batches and the task's optimizer on every rank. `replicas`: the DDP of each turn."""
    modules: Mapping[str | None, nn.Module] = replicas or dict.fromkeys(context.turns.names, loss_module(context))
    if context.config.compile and not context.parallel.compiles_blocks:
        for module in {id(module): module for module in modules.values()}.values():
            module.compile()

    def loss(*given: Any) -> Tensor:
        return modules[context.turns.current](*given)  # type: ignore[no-any-return]

    return StepParts(
        MicroBatchLoop(context, loss, sync, is_ddp=replicas is not None),
        OptimizerUpdate(context),
        float(context.world.layout.num_data_ranks),
        partial(gathered_weights, context),
        gradient_finalizers(context),
        gradient_figures=partial(gradient_figures, context.trainable, context.world.device),
    )


def loss_module(context: RuntimeContext) -> LossModule:
    return LossModule(context.model, context.task, context.parallel.plan, context.batch_gather)


def gradient_finalizers(context: RuntimeContext) -> list[Callable[[], None]]:
    """Of the gradients of parameters that are whole on every rank of a tensor group, or of those that shard others."""
    found: list[Callable[[], None]] = []
    if context.parallel.plan is not None:
        found.append(lambda: reduce_partial_gradients(context.parameters))
    if context.parallel.host_weights is not None:
        found.append(context.parallel.host_weights.return_gradients)
    has_numbers = any(parameter.dim() == 0 for parameter in context.parameters)
    if has_numbers and context.world.layout.uses_fully_shard and context.world.layout.num_gradient_ranks > 1:
        found.append(lambda: average_whole([p for p in context.parameters if p.dim() == 0], context.world))
    return found
