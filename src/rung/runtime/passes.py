"""Forward and backward of micro-batches through the whole model, and when gradients are synchronised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from rung.data.batch_shard import LocalBatch, MicroBatch
from rung.errors import ModelError, TaskError
from rung.runtime.context import RuntimeContext
from rung.runtime.forward import call_model
from rung.runtime.measure import Measured, measure, weighted, with_turn
from rung.spec.abilities import shards_parameters

# Wraps forward and backward of a micro-batch; the flag marks the last of its step. Decides how gradients are reduced.
GradientSync = Callable[[MicroBatch, bool], AbstractContextManager[Any]]


def no_sync(micro: MicroBatch, is_last: bool) -> AbstractContextManager[Any]:
    """Each rank keeps its own gradients."""
    return nullcontext()


class LossForward:
    """Computes the loss of a micro-batch; checks in the first step what the task returns."""

    def __init__(self, context: RuntimeContext, module: Callable[..., Tensor]) -> None:
        self._context, self._module = context, module

    def __call__(self, micro: MicroBatch, share: float | Tensor) -> Tensor:
        context = self._context
        context.enter("forward")
        is_whole = context.batch_gather is None and not isinstance(share, Tensor) and share == 1.0
        context.check_rows(micro, is_whole=is_whole)
        # A micro-batch without a counted unit may have a mean of 0/0, whose gradient must not reach the model.
        counted = share > 0 if isinstance(share, Tensor) else None
        try:
            with context.autocast(), context.step_log.micro_batch(micro, share):
                loss: Tensor = self._module(micro.data, counted, micro.num_global_samples)
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" in str(error) and shards_parameters(context.world.layout):
                raise ModelError(
                    "a parameter was read where it is not gathered: outside of the forward of the block that holds it, "
                    "or of the model. --shard-by whole gathers all parameters before the model's forward; a task's "
                    "forward(model, batch) must call the model itself, not one of its methods or parts."
                ) from error
            raise
        if context.is_first_step:
            if context.unit_calls is not None:
                context.unit_calls.end_forward()
            name = context.task.name
            if not isinstance(loss, Tensor) or loss.dim() != 0:
                shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
                raise TaskError(f"{name}: loss() must return one number, the mean over its units; it returned {shape}.")
            if not loss.requires_grad:
                turn = context.turns.current
                which = "the loss" if turn is None else f"the loss {turn!r}"
                whose = "trainable parameter" if turn is None else "parameter of the optimizer of that name"
                raise TaskError(f"{name}: {which} does not depend on any {whose}.")
        return loss


class MicroBatchLoop:
    """Runs forward and backward of one micro-batch after the other."""

    def __init__(
        self,
        context: RuntimeContext,
        loss: Callable[..., Tensor],
        sync: GradientSync = no_sync,
        *,
        is_ddp: bool = False,
    ) -> None:
        """`is_ddp`: ranks reduce the sum of a step's gradients during the backward of its last micro-batch."""
        self._context, self._sync, self._is_ddp = context, sync, is_ddp
        self._forward = LossForward(context, loss)

    def run(
        self, micro_batches: list[MicroBatch], shares: list[float | Tensor], averaging: float
    ) -> tuple[Tensor, set[str]]:
        context, unused = self._context, self._context.unused
        loss_share: Tensor | None = None
        used: set[str] = set()
        last = len(micro_batches) - 1
        for number, (micro, share) in enumerate(zip(micro_batches, shares, strict=True)):
            with context.micro_batch(micro):
                before = unused.versions() if number == last > 0 and self._is_ddp else None
                with self._sync(micro, number == last):
                    loss = self._forward(micro, share)
                    used |= unused.reachable(loss)
                    scaled = context.scaled(loss, share, averaging)
                    self._backward(scaled, reduces=self._is_ddp and number == last)
                unused.check_last_micro_batch(before)
            part = weighted(loss.detach(), share)
            loss_share = part if loss_share is None else loss_share + part
        assert loss_share is not None, "a window holds at least one micro-batch"
        return loss_share, used

    def _backward(self, scaled: Tensor, *, reduces: bool) -> None:
        clock = self._context.clock
        self._context.enter("backward")
        clock.follow_backward(scaled, reduces=reduces)
        try:
            scaled.backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if "chunk_cat" in str(error) and "Sparse" in str(error):
                raise ModelError(
                    "a parameter has a sparse gradient, which cannot be sharded. Use sparse=False, or a strategy that "
                    "leaves gradients whole: ddp, zero1 or ps."
                ) from error
            if "setStorage" not in str(error) or not shards_parameters(self._context.world.layout):
                raise
            raise ModelError(
                "backward needs weights that are no longer gathered. That happens when forward computes a gradient "
                "itself (torch.autograd.grad), after which each block's weights are sharded again. --shard-by whole "
                "keeps all weights until the end of backward; so do ddp and zero1."
            ) from error
        clock.reduced()

    def measure(self, window: LocalBatch) -> Iterator[Measured]:
        context = self._context
        for micro in window.micro_batches:
            context.count(micro)
            context.check_rows(micro, is_whole=context.world.layout.num_data_ranks == 1, trains=False)
            found: Measured = {}
            for turn in context.turns.names:
                with context.turns.take(turn), context.autocast():
                    output, target = call_model(context.task, context.model, micro.data)
                    measured = measure(
                        context.task,
                        output,
                        target,
                        micro,
                        context.world,
                        context.batch_gather,
                        with_metrics=context.turns.is_last,  # what other turns put out may be of another form
                    )
                    found = with_turn(found, turn, measured)
            yield found
