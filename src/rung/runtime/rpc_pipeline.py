"""rpc-pp: pipeline stages that call each other over RPC, with distributed autograd and the DistributedOptimizer.

Every rank runs the same loop, and its stage on the micro-batches in order, on the loop's thread. At the beginning of a
step a stage requests all results of the previous stage; each request resolves as soon as its result exists, and no
thread waits for it, so that stages work on different micro-batches at the same time. Rank 0 has the first stage and
drives the step: it opens the autograd context in which the stages fetch, fetches the losses, starts backward, and lets
the DistributedOptimizer step the task's own optimizer on every rank.

Backward takes the micro-batches in reverse order, one at a time on each stage, because a token in the graph makes each
micro-batch's input to a stage depend on the previous micro-batch's output there. The sums of gradients are then the
same in every run, and no two micro-batches recompute activations at once, with the same random numbers and buffers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.optim import Optimizer

from rung.data.batch_shard import LocalBatch, MicroBatch
from rung.distributed.rpc import (
    Calls,
    async_execution,
    autograd_context,
    backward,
    distributed_optimizer,
    gradients,
    prioritize_backward,
    remote_reference,
    served,
)
from rung.parallel.pipeline.schedule import Action, Chunk, checked
from rung.runtime.base import Traffic
from rung.runtime.context import RuntimeContext
from rung.runtime.measure import Measured
from rung.runtime.optimizer import local_bytes
from rung.runtime.staged import StagedModel
from rung.runtime.step import StepParts, StepRuntime

Message = list[Tensor]


class StageEndpoint:
    """Handles the calls of other ranks to a stage."""

    def __init__(self, calls: Calls, update: Update) -> None:
        self.update = update
        # A leaf that backward reaches on every stage, whatever is frozen. Its RRef names this rank to the optimizer.
        self.anchor = torch.zeros((), requires_grad=True)
        self._calls = calls
        self._lock = threading.Lock()
        self._outgoing: dict[int, Future[Message]] = {}
        self._incoming: dict[int, Future[Message]] = {}

    def outgoing(self, number: int) -> Future[Message]:
        """This stage's result for a micro-batch. Sender and receiver call it once each, in any order."""
        with self._lock:
            future = self._outgoing.pop(number, None)
            if future is None:
                future = self._outgoing[number] = Future()
            return future

    def fetch_inputs(self, first: int, count: int) -> None:
        """Request the previous stage's results for `count` micro-batches."""
        for number in range(first, first + count):
            self._incoming[number] = self._calls.start(self._calls.rank - 1, fetch, number)

    def incoming(self, number: int) -> Future[Message]:
        return self._incoming.pop(number)


def _endpoint() -> StageEndpoint:
    endpoint: StageEndpoint = served("rpc-pp")
    return endpoint


@async_execution  # type: ignore[untyped-decorator]
def fetch(number: int) -> Future[Message]:
    return _endpoint().outgoing(number)


def prefetch(first: int, count: int) -> None:
    """Called by rank 0 in its autograd context, to which the requests made here then belong."""
    _endpoint().fetch_inputs(first, count)


def reference_to_anchor() -> Any:
    return remote_reference(_endpoint().anchor)


def local_update(anchors: list[Any]) -> Update:
    """The optimizer that the DistributedOptimizer steps on this rank."""
    return _endpoint().update


class Update:
    """The step of the task's optimizer, with the gradients that this rank has finalized.

    These are the context's gradients, summed over tied copies and clipped: mostly the same tensors.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.gradients: list[tuple[nn.Parameter, Tensor | None]] = []
        self.seconds = 0.0
        self.error: BaseException | None = None  # raised by the loop; from an RPC it would be reported as rank 0's

    def step(self) -> None:
        started = time.perf_counter()
        try:
            for parameter, gradient in self.gradients:
                parameter.grad = gradient
            self._optimizer.step()
        except BaseException as error:
            self.error = error
        self.gradients = []
        self.seconds = time.perf_counter() - started


class StageLog:
    """Start and stop of each forward and backward of this stage in one step."""

    def __init__(self, stage: int) -> None:
        self.actions: list[Action] = []
        self._stage, self._since = stage, 0.0

    def begin(self) -> None:
        self._since = time.perf_counter()

    def end(self, kind: str, chunk: int) -> None:
        self.actions.append(Action(kind, self._stage, chunk, self._since, time.perf_counter()))

    def seconds(self, kind: str) -> float:
        return sum(action.stop - action.start for action in self.actions if action.kind == kind)


class _StageInput(torch.autograd.Function):
    """The first operation of a micro-batch on a stage: its backward ends the micro-batch's backward there.

    It is the oldest of the micro-batch's operations, and the engine runs the youngest that is ready. The token always
    reaches it, so that every received tensor gets a gradient, zeros where nothing depends on it: distributed autograd
    waits for an answer to every message.
    """

    @staticmethod
    def forward(ctx: Any, stage_log: StageLog, place: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.stage_log, ctx.place = stage_log, place
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.stage_log.end("B", ctx.place)
        return None, None, None, *grads[1:]


class _StageOutput(torch.autograd.Function):
    """The last operation of a micro-batch on a stage: its backward begins the micro-batch's backward there."""

    @staticmethod
    def forward(ctx: Any, stage_log: StageLog, place: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.stage_log = stage_log
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.stage_log.begin()
        return None, None, *grads


def _pass(through: Any, stage_log: StageLog, place: int, token: Tensor, tensors: Message) -> tuple[Tensor, Message]:
    """Pass the tensors that require a gradient, and the token, which always does, through one operation."""
    token, *passed = through.apply(stage_log, place, token, *(t for t in tensors if t.requires_grad))
    remaining = iter(passed)
    return token, [next(remaining) if tensor.requires_grad else tensor for tensor in tensors]


def build(context: RuntimeContext) -> StepRuntime:
    return StepRuntime(context, rpc_pipeline_parts(context))


def rpc_pipeline_parts(context: RuntimeContext) -> StepParts:
    staged = StagedModel(context)
    passes = RpcPasses(context, staged)
    parts = staged.parts(passes, step_optimizer=passes.step_optimizers)
    parts.around_step, parts.traffic = passes.around_step, lambda: passes.traffic
    return parts


class RpcPasses:
    """One stage: it fetches from the previous stage, and the next fetches from it."""

    def __init__(self, context: RuntimeContext, staged: StagedModel) -> None:
        world, calls = context.world, context.world.calls
        self._context, self._world, self._staged = context, world, staged
        (self._part,) = context.parallel.parts
        self._is_last = self._part.stage == world.layout.num_stages - 1
        self._update_here = Update(context.optimizer)
        self._endpoint = StageEndpoint(calls, self._update_here)
        calls.serve("rpc-pp", self._endpoint)
        self._autograd_id = 0  # of the step's autograd context
        self._count = 0  # of micro-batches since the beginning, the same on all ranks
        self.stage_log = StageLog(self._part.stage)
        self.traffic = {"activations": Traffic(), "gradients": Traffic()}
        context.notes.append(calls.describe())
        world.barrier()  # until all endpoints are registered
        self._optimizers: Any = None
        if world.is_main:
            anchors = [calls.call(rank, reference_to_anchor) for rank in range(world.size)]
            self._optimizers = distributed_optimizer(local_update, anchors)

    # -- training -----------------------------------------------------------------------------------------------

    @contextmanager
    def around_step(self) -> Iterator[None]:
        with autograd_context() if self._world.is_main else nullcontext(0) as self._autograd_id:
            yield

    def run(
        self, micro_batches: list[MicroBatch], shares: list[float | Tensor], averaging: float
    ) -> tuple[Tensor, set[str]]:
        losses: list[Tensor] = []
        chunks = self._staged.training_chunks(micro_batches, shares, averaging, losses)
        results = self._begin(len(micro_batches))
        self.stage_log = StageLog(self._part.stage)
        token = self._endpoint.anchor
        for place, chunk in enumerate(chunks[self._part.stage]):
            token = self._forward_one(place, chunk, token)
        self._context.enter("backward")
        if self._world.is_main:
            with self._context.clock.waiting():
                answers = [result.wait() for result in results]
                backward(self._autograd_id, [loss for _, loss in answers])
            self._count_gradients(answers)
        self._world.barrier()  # surfaces the failure of a rank during backward
        self._context.clock.add("backward", self.stage_log.seconds("B"))
        found = gradients(self._autograd_id)
        for parameter in self._context.parameters:
            parameter.grad = found.get(parameter)
        if self._context.is_probing:
            self._world.barrier()  # rank 0 then ends the autograd context; in a step, the update has barriers
        return self._staged.sum_of(losses), set()

    def _begin(self, count: int) -> list[Future[Message]]:
        """Start all fetches of the step, and share the autograd context's id. Returns the losses' futures on rank 0."""
        calls, last = self._world.calls, self._world.size - 1
        results = []
        if self._world.is_main:
            started = [calls.start(rank, prefetch, self._count, count) for rank in range(1, self._world.size)]
            results = [calls.start(last, fetch, self._count + place) for place in range(count)]
            for done in started:
                done.wait()
        autograd_id = torch.tensor(self._autograd_id)
        dist.broadcast(autograd_id, src=0)
        self._autograd_id = int(autograd_id)
        return results

    def _forward_one(self, place: int, chunk: Chunk, before: Tensor) -> Tensor:
        """Run one micro-batch through this stage. `before` is the previous micro-batch's token; returns this one's."""
        message = self._receive()
        self.stage_log.begin()
        if message:
            prioritize_backward(message[0])
            self._count_gradients([message])
        token, received = _pass(_StageInput, self.stage_log, place, before, message)
        sent, outcome = self._run(chunk, received[1:])
        token, outgoing = _pass(_StageOutput, self.stage_log, place, token, [outcome] if self._is_last else sent)
        self.stage_log.end("F", place)
        self._send([token, *outgoing])
        return token

    def _receive(self) -> Message:
        """The previous stage's result for the next micro-batch."""
        if self._part.stage == 0:
            return []
        with self._context.clock.waiting():
            return self._endpoint.incoming(self._count).wait()

    def _run(self, chunk: Chunk, received: Message) -> tuple[Message, Any]:
        """Compute this stage: its results in host memory, for RPC, or the last stage's outcome."""
        given = [tensor.to(self._world.device) for tensor in received]
        with chunk.around():
            sent, outcome = self._part(chunk.body, chunk.forward_trace, chunk.receives, chunk.sends, given)
        pairs = zip(chunk.sends, sent, strict=True)
        if isinstance(outcome, Tensor):
            outcome = outcome.cpu()
        return [checked(tensor, self._part, chunk, key).cpu() for key, tensor in pairs], outcome

    def _send(self, message: Message) -> None:
        self.traffic["activations"].add(sum(map(local_bytes, message)))
        self._endpoint.outgoing(self._count).set_result(message)
        self._count += 1

    def _count_gradients(self, messages: list[Message]) -> None:
        """Count the gradients that backward will send for these messages."""
        for message in messages:
            self.traffic["gradients"].add(sum(local_bytes(tensor) for tensor in message if tensor.requires_grad))

    def step_optimizers(self) -> None:
        self._update_here.gradients = [(parameter, parameter.grad) for parameter in self._context.parameters]
        self._world.barrier()  # until the gradients are final on all ranks
        if self._world.is_main:
            with self._context.clock.waiting():
                self._optimizers.step(self._autograd_id)
        self._world.barrier()
        self._context.clock.add("update", self._update_here.seconds)
        if self._update_here.error is not None:
            raise self._update_here.error

    # -- evaluation ---------------------------------------------------------------------------------------------

    def measure(self, window: LocalBatch) -> Iterator[Measured]:
        micro_batches = window.micro_batches
        chunks = self._staged.evaluation_chunks(micro_batches)
        if self._part.stage > 0:
            self._endpoint.fetch_inputs(self._count, len(micro_batches))
        for chunk in chunks[self._part.stage]:
            sent, outcome = self._run(chunk, self._receive())
            if self._is_last:
                self._count += 1
                yield outcome
            else:
                self._send(sent)
        self._world.barrier()  # else a fast stage would run ahead and fill memory with results not fetched yet
