"""torch's pipeline schedules, driving Rung's own stages.

torch's schedules (`torch.distributed.pipelining`) order the micro-batches and the sends and receives. A stage takes the
shapes of each micro-batch from a trace, so micro-batches may differ in shape and no shapes are exchanged.

This module uses the private interface between torch's schedules and stages, which is the same in 2.11 to 2.13, because
the public `PipelineStage` exchanges shapes first and needs equal micro-batches, and the public `schedule.step` splits
tensors into such micro-batches.
"""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.utils.weak import WeakTensorKeyDictionary

from rung.errors import ModelError
from rung.parallel.forward_trace import ForwardTrace
from rung.parallel.pipeline.partition import Result
from rung.parallel.pipeline.stage_forward import StagePart
from rung.parallel.pipeline.zero_bubble import can_split_backward

# When a stage fails, torch logs the whole schedule, a hundred lines and more, which hides the cause.
logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)


@dataclass(frozen=True)
class Action:
    """One computation of a stage: F forward, B backward, I and W a backward split into inputs and weights."""

    kind: str
    stage: int
    chunk: int
    start: float
    stop: float


@dataclass(frozen=True)
class Chunk:
    """One micro-batch as a stage sees it."""

    forward_trace: ForwardTrace
    receives: list[Result]
    sends: list[Result]
    body: Callable[[], Any]  # calls the model and the loss
    around: Callable[[], Any]  # makes the context in which this micro-batch computes

    def like(self, key: Result) -> Tensor:
        """A fake tensor with the shape and dtype of a result."""
        return self.forward_trace.calls[key[0]].output_tensors()[key[1]]


class Stage(_PipelineStageBase):
    """Forward and backward of one stage and the messages to its neighbours, as called by a torch schedule."""

    def __init__(
        self,
        part: StagePart,
        num_stages: int,
        device: torch.device,
        group: dist.ProcessGroup,
        before_backward: Callable[[nn.Module, list[Tensor], bool], None],
        set_phase: Callable[[str], None],
        *,
        splits_backward: bool,
    ) -> None:
        # An empty module: schedules call unshard and reshard on an FSDP module, which our stage does in its forward.
        super().__init__(nn.Module(), part.stage, num_stages, device, group)
        self.part = part
        self._before_backward = before_backward
        self._set_phase = set_phase
        self._splits_backward = splits_backward  # whether the schedule computes weight gradients after input gradients
        self._steps: list[Chunk] = []
        self._received: dict[int, list[Tensor]] = {}
        self._outputs: dict[int, list[Tensor]] = {}
        self._output_grads: dict[int, list[Tensor | None]] = {}
        self._input_grads: dict[int, list[Tensor | None]] = {}
        self._deferred: dict[int, Callable[[], None]] = {}
        self._separable: dict[tuple[int, int], bool] = {}  # cache, by trace and number of outputs
        self.log: list[Action] | None = None  # set to a list to record actions
        # Set to record the phase of each message: schedules post some messages before their phase begins.
        self.message_phases: WeakTensorKeyDictionary | None = None

    def begin(self, chunks: list[Chunk], *, has_backward: bool = True) -> None:
        self._steps = chunks
        self.has_backward = has_backward
        self.clear_runtime_states()

    # -- messages -----------------------------------------------------------------------------------------------

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        chunk = self._steps[fwd_chunk_id]
        buffers = [_buffer(chunk.like(key), self.device) for key in chunk.receives]
        self._received[fwd_chunk_id] = buffers
        return [self._message(dist.irecv, buffer, self.stage_index - 1, "forward") for buffer in buffers]

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last:
            return []
        return [
            self._message(dist.isend, t.detach(), self.stage_index + 1, "forward") for t in self._outputs[fwd_chunk_id]
        ]

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last:
            return []
        chunk = self._steps[bwd_chunk_id]
        likes = [chunk.like(key) for key in chunk.sends]
        grads = [_buffer(like, self.device) if _has_gradient(like) else None for like in likes]
        self._output_grads[bwd_chunk_id] = grads
        return [self._message(dist.irecv, grad, self.stage_index + 1, "backward") for grad in grads if grad is not None]

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first:
            return []
        grads = self._input_grads.pop(bwd_chunk_id)
        return [self._message(dist.isend, grad, self.stage_index - 1, "backward") for grad in grads if grad is not None]

    def _message(self, operation: Any, tensor: Tensor, stage: int, phase: str) -> dist.P2POp:
        message = tensor.contiguous()  # sends and receives need it
        if self.message_phases is not None:
            self.message_phases[message] = phase
        return dist.P2POp(operation, message, self._peer(stage), self.group)

    def _peer(self, stage: int) -> int:
        assert self.group is not None
        return dist.get_global_rank(self.group, self.stage_index_to_group_rank[stage])

    # -- forward ------------------------------------------------------------------------------------------------

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        started = time.perf_counter()
        self._set_phase("forward")
        chunk = self._steps[fwd_chunk_id]
        received = self._received.setdefault(fwd_chunk_id, [])
        for tensor in received:
            tensor.requires_grad_(_has_gradient(tensor) and torch.is_grad_enabled())
        with chunk.around():
            with warnings.catch_warnings():
                # FSDP2 warns that an in-place change of a view output drops its hook; these outputs are only sent.
                warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
                sent, outcome = self.part(chunk.body, chunk.forward_trace, chunk.receives, chunk.sends, received)
        pairs = zip(chunk.sends, sent, strict=True)
        self._outputs[fwd_chunk_id] = [checked(tensor, self.part, chunk, key) for key, tensor in pairs]
        self._log_action("F", fwd_chunk_id, started)
        return outcome

    def _log_action(self, kind: str, chunk: int, started: float) -> None:
        if self.log is not None:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # time kernels, not their launches
            self.log.append(Action(kind, self.stage_index, chunk, started, time.perf_counter()))

    # -- backward -----------------------------------------------------------------------------------------------

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        started = time.perf_counter()
        chunk = self._steps[bwd_chunk_id]
        received = self._received.pop(bwd_chunk_id, [])
        outputs: list[Tensor]
        grads: list[Tensor | None]
        if self.is_last:
            self._outputs.pop(bwd_chunk_id, None)
            assert loss is not None
            outputs, grads = [loss], [None]
        else:
            pairs = zip(self._outputs.pop(bwd_chunk_id), self._output_grads.pop(bwd_chunk_id), strict=True)
            kept = [(output, grad) for output, grad in pairs if output.requires_grad]
            outputs, grads = [output for output, _ in kept], [grad for _, grad in kept]
        passes_through = any(output is tensor for output in outputs for tensor in received)
        # Only a stage with received inputs can split backward: their gradients are computed first and sent.
        splits_backward = not full_backward and not passes_through and self._is_separable(chunk, outputs, received)
        with chunk.around():
            if splits_backward:
                self._backward_to_inputs(bwd_chunk_id, outputs, grads, received)
            elif full_backward or received:
                self._before_backward(self.part, outputs, last_backward and not self._splits_backward)
                if outputs:
                    torch.autograd.backward(outputs, grads)
                self._deferred[bwd_chunk_id] = _no_op
            else:  # the first stage has no input gradients: its whole backward runs as the weights' part

                def backward() -> None:
                    self._before_backward(self.part, outputs, False)
                    if outputs:
                        torch.autograd.backward(outputs, grads)

                self._deferred[bwd_chunk_id] = backward
        if not splits_backward:
            self._input_grads[bwd_chunk_id] = [_grad_of(tensor) for tensor in received]
        if full_backward or received:
            self._log_action("B" if full_backward or not splits_backward else "I", bwd_chunk_id, started)

    def _is_separable(self, chunk: Chunk, outputs: list[Tensor], received: list[Tensor]) -> bool:
        key = (id(chunk.forward_trace), len(outputs))
        # The graph of a part that branches on values may differ between micro-batches of one shape.
        if key not in self._separable or any(call.reads_values for call in chunk.forward_trace.calls):
            self._separable[key] = can_split_backward(outputs, [tensor for tensor in received if tensor.requires_grad])
        return self._separable[key]

    def _backward_to_inputs(
        self, index: int, outputs: list[Tensor], grads: list[Tensor | None], received: list[Tensor]
    ) -> None:
        self._before_backward(self.part, outputs, False)
        given: Any = None if self.is_last else grads
        found, groups = stage_backward_input(outputs, given, received, iter(self.part.parameters()))
        self._input_grads[index] = [
            None if not _has_gradient(tensor) else grad if grad is not None else torch.zeros_like(tensor)
            for tensor, grad in zip(received, found, strict=True)
        ]

        def backward() -> None:
            self._before_backward(self.part, [], False)
            stage_backward_weight(iter(self.part.parameters()), groups)

        self._deferred[index] = backward

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        started = time.perf_counter()
        backward = self._deferred.pop(bwd_chunk_id)
        if backward is _no_op:
            return
        with self._steps[bwd_chunk_id].around():
            backward()
        self._log_action("W" if self._steps[bwd_chunk_id].receives else "B", bwd_chunk_id, started)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        # FSDP's hooks reduce gradients in a full backward; a split backward does not run these hooks.
        if self._splits_backward and isinstance(self.part, FSDPModule):
            shell, self.submod = self.submod, self.part
            try:
                super().perform_reduce_grad(1)  # losses are weighted, so gradients need no factor
            finally:
                self.submod = shell

    # -- shape setup of torch's schedules, which traces replace --------------------------------------------------

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        self.chunks = num_microbatches
        self.args_recv_info = dict.fromkeys(range(num_microbatches), ())
        return ()

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        self.chunks = num_microbatches
        return None

    def _create_grad_recv_info(self, act_send_info: Any) -> Any:
        return ()

    def clear_runtime_states(self) -> None:
        for store in (self._received, self._outputs, self._output_grads, self._input_grads, self._deferred):
            store.clear()


@dataclass(frozen=True)
class ScheduleChoice:
    """torch's schedule object, and whether it is the requested schedule."""

    schedule: Any
    runs_as: str
    is_requested: bool


def make_schedule(name: str, stages: list[Stage], num_chunks: int) -> ScheduleChoice:
    """torch's schedule for `num_chunks` micro-batches, or one with equal results if it cannot take that number."""
    # A chunk's body returns its weighted loss, so torch must neither compute a loss nor scale gradients.
    options: dict[str, Any] = {"n_microbatches": num_chunks, "loss_fn": _as_is, "scale_grads": False}
    stage = stages[0]
    several: list[_PipelineStageBase] = [*stages]
    if len(stages) > 1:
        try:
            return ScheduleChoice(ScheduleInterleaved1F1B(several, **options), name, True)
        except ValueError:  # the number of micro-batches must be a multiple of the schedule's rounds
            return ScheduleChoice(ScheduleLoopedBFS(several, **options), "all forwards, then all backwards", False)
    if name == "zb":
        with contextlib.suppress(ValueError):  # as above
            return ScheduleChoice(ScheduleInterleavedZeroBubble(several, **options), name, True)
    if name == "1f1b" and num_chunks >= stage.num_stages:
        return ScheduleChoice(Schedule1F1B(stage, **options), name, True)
    return ScheduleChoice(ScheduleGPipe(stage, **options), "gpipe", name == "gpipe")


def run_schedule(schedule: Any, num_chunks: int) -> None:
    # Not `schedule.step`, which splits tensors: the inputs of a chunk are in its body.
    nothing: list[Any] = [()] * num_chunks
    schedule._step_microbatches(nothing, [{}] * num_chunks, [None] * num_chunks, None, return_outputs=False)


def forward_only(stages: list[Stage], num_chunks: int) -> list[Any]:
    """Run every micro-batch through the stages of this rank without backward; returns the last stage's results."""
    outcomes = []
    sent: list[Any] = []
    for index in range(num_chunks):
        for stage in stages:
            for work in _start(stage.get_fwd_recv_ops(index)):
                work.wait()
            outcome = stage.forward_one_chunk(index, ())
            sent += _start(stage.get_fwd_send_ops(index))  # awaited at the end, not to block on the receiver
            if stage.is_last:
                outcomes.append(outcome)
    for work in sent:
        work.wait()
    return outcomes


def _start(operations: list[dist.P2POp]) -> list[Any]:
    return list(dist.batch_isend_irecv(operations)) if operations else []


def checked(tensor: Tensor, part: StagePart, chunk: Chunk, key: Result) -> Tensor:
    """The tensor, if it has the shape, dtype and gradient that the next stage expects; raises otherwise."""
    call, like = chunk.forward_trace.calls[key[0]], chunk.like(key)
    if torch.is_grad_enabled() and _has_gradient(tensor) and not tensor.requires_grad:
        trained = {id(p) for p in part.parameters() if p.requires_grad}
        module = part.module_named(call.name)
        if module is not None and any(id(p) in trained for p in module.parameters()):
            raise ModelError(
                f"{call.name} returned a result without a gradient, though it has weights to train. Reentrant "
                "checkpointing does that: use use_reentrant=False, or Rung's --activation-checkpointing."
            )
    if tensor.shape != like.shape or tensor.dtype != like.dtype:
        raise ModelError(
            f"{call.name} returned {tuple(tensor.shape)} {tensor.dtype}, but its trace has {tuple(like.shape)} "
            f"{like.dtype}, which the next stage expects. Does its result depend on values or random numbers?"
        )
    return tensor


def _as_is(output: Tensor, target: None) -> Tensor:
    return output


def _has_gradient(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _no_op() -> None:
    pass


def _buffer(like: Tensor, device: torch.device) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=device)


def _grad_of(tensor: Tensor) -> Tensor | None:
    if not _has_gradient(tensor):
        return None
    return tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
