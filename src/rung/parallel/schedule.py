"""torch's pipeline schedules on stages of our own.

The order of micro-batches, and when what is sent, is torch's (`torch.distributed.pipelining`). A stage here differs
from torch's in what it is given: every micro-batch has shapes of its own, known beforehand from a rehearsal, so a
ragged or shorter one is no special case, and nothing is exchanged to find shapes out.

This module leans on the interface between torch's schedules and stages, which is private and the same in 2.11 to 2.13.
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

from rung.errors import ModelError
from rung.parallel.pipeline import StagePart
from rung.parallel.rehearsal import Rehearsal
from rung.parallel.separable import is_separable
from rung.parallel.stages import Result

# When a stage fails, torch prints the whole table of actions, a hundred lines and more, over the cause.
logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)


@dataclass(frozen=True)
class Action:
    """Something a stage computed: F forward, B backward, I and W the parts of a backward that is taken apart."""

    kind: str
    stage: int
    chunk: int
    start: float
    stop: float


@dataclass(frozen=True)
class Chunk:
    """One micro-batch as a stage sees it."""

    rehearsal: Rehearsal
    receives: list[Result]
    sends: list[Result]
    body: Callable[[], Any]  # calls the model and the loss
    around: Callable[[], Any]  # a context for everything that this micro-batch computes

    def like(self, key: Result) -> Tensor:
        """The tensor without data that tells a result's shape and type."""
        return self.rehearsal.calls[key[0]].output_tensors()[key[1]]


class Stage(_PipelineStageBase):
    """What a schedule drives: forward and backward of one stage, and the messages to its neighbours."""

    def __init__(
        self,
        part: StagePart,
        num_stages: int,
        device: torch.device,
        group: dist.ProcessGroup,
        before_backward: Callable[[nn.Module, bool], None],
        tell_phase: Callable[[str], None],
        *,
        takes_apart: bool,
    ) -> None:
        # Schedules shard and gather a stage that is an FSDP module by themselves. Ours does so on its own, in forward.
        super().__init__(nn.Module(), part.stage, num_stages, device, group)
        self.part = part
        self._before_backward = before_backward
        self._tell_phase = tell_phase
        self._takes_apart = takes_apart  # whether the schedule separates the inputs' gradients from the weights'
        self._steps: list[Chunk] = []
        self._received: dict[int, list[Tensor]] = {}
        self._outputs: dict[int, list[Tensor]] = {}
        self._output_grads: dict[int, list[Tensor | None]] = {}
        self._input_grads: dict[int, list[Tensor | None]] = {}
        self._deferred: dict[int, Callable[[], None]] = {}
        self._separable: dict[tuple[int, int], bool] = {}  # by the form of a micro-batch
        self.log: list[Action] | None = None  # of what was computed, if anyone wants it

    def begin(self, chunks: list[Chunk], *, has_backward: bool = True) -> None:
        self._steps = chunks
        self.has_backward = has_backward
        self.clear_runtime_states()

    # -- messages -----------------------------------------------------------------------------------------------

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        chunk = self._steps[fwd_chunk_id]
        buffers = [_buffer(chunk.like(key), self.device) for key in chunk.receives]
        self._received[fwd_chunk_id] = buffers
        return [self._receive(buffer, self.stage_index - 1, "forward") for buffer in buffers]

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last:
            return []
        return [self._send(t.detach(), self.stage_index + 1, "forward") for t in self._outputs[fwd_chunk_id]]

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last:
            return []
        chunk = self._steps[bwd_chunk_id]
        likes = [chunk.like(key) for key in chunk.sends]
        grads = [_buffer(like, self.device) if _has_gradient(like) else None for like in likes]
        self._output_grads[bwd_chunk_id] = grads
        return [self._receive(grad, self.stage_index + 1, "backward") for grad in grads if grad is not None]

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first:
            return []
        grads = self._input_grads.pop(bwd_chunk_id)
        return [self._send(grad, self.stage_index - 1, "backward") for grad in grads if grad is not None]

    def _receive(self, buffer: Tensor, stage: int, phase: str) -> dist.P2POp:
        buffer.rung_phase = phase  # type: ignore[attr-defined]  # for `rung.record`: messages are posted early
        return dist.P2POp(dist.irecv, buffer, self._peer(stage), self.group)

    def _send(self, tensor: Tensor, stage: int, phase: str) -> dist.P2POp:
        message = tensor.contiguous()
        message.rung_phase = phase  # type: ignore[attr-defined]
        return dist.P2POp(dist.isend, message, self._peer(stage), self.group)

    def _peer(self, stage: int) -> int:
        assert self.group is not None
        return dist.get_global_rank(self.group, self.stage_index_to_group_rank[stage])

    # -- forward ------------------------------------------------------------------------------------------------

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        started = time.perf_counter()
        self._tell_phase("forward")
        chunk = self._steps[fwd_chunk_id]
        received = self._received.setdefault(fwd_chunk_id, [])
        for tensor in received:
            tensor.requires_grad_(_has_gradient(tensor) and torch.is_grad_enabled())
        with chunk.around():
            with warnings.catch_warnings():
                # FSDP is afraid of in-place changes to what a module returns. Here it is only sent.
                warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
                sent, outcome = self.part(chunk.body, chunk.rehearsal, chunk.receives, chunk.sends, received)
        pairs = zip(chunk.sends, sent, strict=True)
        self._outputs[fwd_chunk_id] = [checked(tensor, self.part, chunk, key) for key, tensor in pairs]
        self._note("F", fwd_chunk_id, started)
        return outcome

    def _note(self, kind: str, chunk: int, started: float) -> None:
        if self.log is not None:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
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
        # Taking backward apart needs something to be done first: the gradient of what was received.
        takes_apart = not full_backward and not passes_through and self._is_separable(chunk, outputs, received)
        with chunk.around():
            if takes_apart:
                self._backward_to_inputs(bwd_chunk_id, outputs, grads, received)
            elif full_backward or received:
                self._before_backward(self.part, last_backward and not self._takes_apart)
                if outputs:
                    torch.autograd.backward(outputs, grads)
                self._deferred[bwd_chunk_id] = _nothing
            else:  # a first stage: all of it is the weights' part

                def backward() -> None:
                    self._before_backward(self.part, False)
                    if outputs:
                        torch.autograd.backward(outputs, grads)

                self._deferred[bwd_chunk_id] = backward
        if not takes_apart:
            self._input_grads[bwd_chunk_id] = [_grad_of(tensor) for tensor in received]
        if full_backward or received:
            self._note("B" if full_backward or not takes_apart else "I", bwd_chunk_id, started)

    def _is_separable(self, chunk: Chunk, outputs: list[Tensor], received: list[Tensor]) -> bool:
        key = (id(chunk.rehearsal), len(outputs))
        if key not in self._separable:
            self._separable[key] = is_separable(outputs, [tensor for tensor in received if tensor.requires_grad])
        return self._separable[key]

    def _backward_to_inputs(
        self, index: int, outputs: list[Tensor], grads: list[Tensor | None], received: list[Tensor]
    ) -> None:
        self._before_backward(self.part, False)
        given: Any = None if self.is_last else grads
        found, groups = stage_backward_input(outputs, given, received, iter(self.part.parameters()))
        self._input_grads[index] = [
            None if not _has_gradient(tensor) else grad if grad is not None else torch.zeros_like(tensor)
            for tensor, grad in zip(received, found, strict=True)
        ]

        def backward() -> None:
            self._before_backward(self.part, False)
            stage_backward_weight(iter(self.part.parameters()), groups)

        self._deferred[index] = backward

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        started = time.perf_counter()
        backward = self._deferred.pop(bwd_chunk_id)
        if backward is _nothing:
            return
        with self._steps[bwd_chunk_id].around():
            backward()
        self._note("W" if self._received_anything(bwd_chunk_id) else "B", bwd_chunk_id, started)

    def _received_anything(self, chunk: int) -> bool:
        return bool(self._steps[chunk].receives)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        # A whole backward reduces by itself. One that was taken apart passes by the hooks that would.
        if self._takes_apart and isinstance(self.part, FSDPModule):
            shell, self.submod = self.submod, self.part
            try:
                super().perform_reduce_grad(1)
            finally:
                self.submod = shell

    # -- what torch's schedules prepare, and ours have ready -----------------------------------------------------

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
class Made:
    """torch's schedule object, and whether it is the one asked for."""

    schedule: Any
    runs_as: str
    is_as_asked: bool


def make_schedule(name: str, stages: list[Stage], num_chunks: int) -> Made:
    """torch's schedule for so many micro-batches. Where it cannot take that number, one that can: same numbers."""
    options: dict[str, Any] = {"n_microbatches": num_chunks, "loss_fn": _as_is, "scale_grads": False}
    stage = stages[0]
    several: list[_PipelineStageBase] = [*stages]
    if len(stages) > 1:
        try:
            return Made(ScheduleInterleaved1F1B(several, **options), name, True)
        except ValueError:
            return Made(ScheduleLoopedBFS(several, **options), "all forwards, then all backwards", False)
    if name == "zb":
        with contextlib.suppress(ValueError):
            return Made(ScheduleInterleavedZeroBubble(several, **options), name, True)
    if name == "1f1b" and num_chunks >= stage.num_stages:
        return Made(Schedule1F1B(stage, **options), name, True)
    return Made(ScheduleGPipe(stage, **options), "gpipe", name == "gpipe")


def run_schedule(schedule: Any, num_chunks: int) -> None:
    nothing: list[Any] = [()] * num_chunks
    schedule._step_microbatches(nothing, [{}] * num_chunks, [None] * num_chunks, None, return_outputs=False)


def forward_only(stages: list[Stage], num_chunks: int) -> list[Any]:
    """Every micro-batch through every stage of this rank, without a backward. Gives what the last stage returned."""
    outcomes = []
    sent: list[Any] = []
    for index in range(num_chunks):
        for stage in stages:
            for work in _start(stage.get_fwd_recv_ops(index)):
                work.wait()
            outcome = stage.forward_one_chunk(index, ())
            sent += _start(stage.get_fwd_send_ops(index))
            if stage.is_last:
                outcomes.append(outcome)
    for work in sent:
        work.wait()
    return outcomes


def _start(operations: list[dist.P2POp]) -> list[Any]:
    return list(dist.batch_isend_irecv(operations)) if operations else []


def checked(tensor: Tensor, part: StagePart, chunk: Chunk, key: Result) -> Tensor:
    """A result that is about to be sent, if it is what the next stage expects."""
    call, like = chunk.rehearsal.calls[key[0]], chunk.like(key)
    if torch.is_grad_enabled() and _has_gradient(tensor) and not tensor.requires_grad:
        trained = {id(p) for p in part.parameters() if p.requires_grad}
        if trained & {id(p) for p in call_parameters(part, call.name)}:
            raise ModelError(
                f"{call.name} gave a result without a gradient, though it has weights to train. Reentrant "
                "checkpointing does that: use use_reentrant=False, or Rung's --activation-checkpointing."
            )
    if tensor.shape != like.shape or tensor.dtype != like.dtype:
        raise ModelError(
            f"{call.name} gave {tuple(tensor.shape)} {tensor.dtype}, but {tuple(like.shape)} {like.dtype} was expected "
            "from its shapes; the next stage waits for that. Does its result depend on values or random numbers?"
        )
    return tensor


def call_parameters(part: StagePart, name: str) -> list[nn.Parameter]:
    """The parameters of the part of this stage that has this name; none if it is another stage's."""
    module = part.module_named(name)
    return list(module.parameters()) if module is not None else []


def _as_is(output: Tensor, target: None) -> Tensor:
    return output


def _has_gradient(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _nothing() -> None:
    pass


def _buffer(like: Tensor, device: torch.device) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=device)


def _grad_of(tensor: Tensor) -> Tensor | None:
    if not _has_gradient(tensor):
        return None
    return tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
