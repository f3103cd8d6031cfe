"""rpc-pp: a pipeline whose stages call each other, with torch's distributed autograd and its DistributedOptimizer.

All ranks go through the same loop, and each runs its stage on the micro-batches in their order, on the loop's thread.
A stage asks the one before for all results of a step at its beginning, and gets each as soon as it is there, directly
and without a thread that waits for it: so stages work on different micro-batches at the same time. Rank 0 has the first
stage and drives: it opens the autograd context that the stages fetch in, fetches the losses, starts backward, and lets
the DistributedOptimizer step the task's own optimizer on every rank.

Backward takes the micro-batches in reverse order, one at a time on each stage, because the graph says so: what a
micro-batch brings to a stage depends there on the departure of the one before. The sums of gradients are then the same
in every run, and a recomputation has the random numbers and buffers for itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.optim import Optimizer

from rung.parallel.schedule import Action, Chunk, checked
from rung.rpc import (
    Calls,
    answer_first,
    answers_later,
    autograd_context,
    backward,
    distributed_optimizer,
    gradients,
    refer_to,
)
from rung.runtime.base import LocalStep, Traffic
from rung.runtime.staged import StagedRuntime
from rung.windows import MicroBatch, Window

Message = list[Tensor]


class Station:
    """Where the calls of other ranks arrive."""

    def __init__(self, calls: Calls, update: Update) -> None:
        self.update = update
        # Where backward ends on every stage, whatever is frozen; and what tells others whose station this is.
        self.anchor = torch.zeros((), requires_grad=True)
        self._calls = calls
        self._lock = threading.Lock()
        self._handed_on: dict[int, Future[Message]] = {}
        self._coming: dict[int, Future[Message]] = {}

    def handed_on(self, number: int) -> Future[Message]:
        """What this stage hands on of a micro-batch. Giver and taker call it once each, in any order."""
        with self._lock:
            known = self._handed_on.pop(number, None)
            if known is None:
                known = self._handed_on[number] = Future()
            return known

    def ask_for(self, first: int, count: int) -> None:
        """Ask the stage before for what it hands on of some micro-batches."""
        for number in range(first, first + count):
            self._coming[number] = self._calls.start(self._calls.rank - 1, fetch, number)

    def coming(self, number: int) -> Future[Message]:
        return self._coming.pop(number)


_station: Station | None = None  # of this process; calls find it here


def _here() -> Station:
    assert _station is not None, "all ranks have opened their stations before anyone calls"
    return _station


@answers_later  # type: ignore[untyped-decorator]
def fetch(number: int) -> Future[Message]:
    return _here().handed_on(number)


def ask_ahead(first: int, count: int) -> None:
    """Called by rank 0 in its autograd context, which what is asked for here belongs to then."""
    _here().ask_for(first, count)


def refer_to_anchor() -> Any:
    return refer_to(_here().anchor)


def own_update(anchors: list[Any]) -> Update:
    """What the DistributedOptimizer is to step on this rank."""
    return _here().update


class Update:
    """The step of the task's optimizer, with the gradients as this rank has settled them.

    They are the context's, with those of tied copies added and clipped; mostly the very same tensors.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.gradients: list[tuple[nn.Parameter, Tensor | None]] = []
        self.seconds = 0.0
        self.error: BaseException | None = None  # for the thread of the loop: else it would be told as rank 0's

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


class Journal:
    """When this stage computed what, in one step."""

    def __init__(self, stage: int) -> None:
        self.actions: list[Action] = []
        self._stage, self._since = stage, 0.0

    def begin(self) -> None:
        self._since = time.perf_counter()

    def end(self, kind: str, chunk: int) -> None:
        self.actions.append(Action(kind, self._stage, chunk, self._since, time.perf_counter()))

    def seconds(self, kind: str) -> float:
        return sum(action.stop - action.start for action in self.actions if action.kind == kind)


class _Arrival(torch.autograd.Function):
    """What a micro-batch brings to a stage, and so the last that backward comes to there.

    It is the oldest of the micro-batch's operations, and the engine takes the youngest that is ready. It is always
    reached, by the token, so that everything that was received is answered, with zeros where nothing depends on it.
    """

    @staticmethod
    def forward(ctx: Any, journal: Journal, place: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.journal, ctx.place = journal, place
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.journal.end("B", ctx.place)
        return None, None, None, *grads[1:]


class _Departure(torch.autograd.Function):
    """What a stage hands on of a micro-batch, and so the first that backward comes to."""

    @staticmethod
    def forward(ctx: Any, journal: Journal, place: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.journal = journal
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.journal.begin()
        return None, None, *grads


def _pass(through: Any, journal: Journal, place: int, token: Tensor, tensors: Message) -> tuple[Tensor, Message]:
    """Those tensors that have a gradient, and a token that always has, as results of one operation."""
    token, *passed = through.apply(journal, place, token, *(t for t in tensors if t.requires_grad))
    remaining = iter(passed)
    return token, [next(remaining) if tensor.requires_grad else tensor for tensor in tensors]


class RpcPipelineRuntime(StagedRuntime):
    """Takes steps on one stage."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        global _station
        world, calls = self.world, self.world.calls
        (self._part,) = self.spread.parts
        self._is_last = self._part.stage == world.layout.num_stages - 1
        self._update_here = Update(self.optimizer)
        self._station = _station = Station(calls, self._update_here)
        self._context = 0
        self._count = 0  # of micro-batches since the beginning, which all ranks count alike
        self.journal = Journal(self._part.stage)
        self._traffic = {"activations": Traffic(), "gradients": Traffic()}
        self.notes.append(calls.describe())
        world.barrier()  # all stations are open
        self._optimizers: Any = None
        if world.is_main:
            anchors = [calls.call(rank, refer_to_anchor) for rank in range(world.size)]
            self._optimizers = distributed_optimizer(own_update, anchors)

    # -- training -----------------------------------------------------------------------------------------------

    def step(self, window: Window, *, want_norm: bool = False) -> LocalStep:
        with autograd_context() if self.world.is_main else nullcontext(0) as self._context:
            return super().step(window, want_norm=want_norm)

    def _accumulate(
        self, micro_batches: list[MicroBatch], shares: list[float | Tensor], averaging: float
    ) -> tuple[Tensor, set[str]]:
        losses: list[Tensor] = []
        chunks = self._chunks(micro_batches, self._loss_bodies(micro_batches, shares, averaging, losses))
        results = self._begin(len(micro_batches))
        self.journal = Journal(self._part.stage)
        token = self._station.anchor
        for place, chunk in enumerate(chunks[self._part.stage]):
            token = self._forward_one(place, chunk, token)
        self._enter("backward")
        if self.world.is_main:
            with self._clock.waiting():
                answers = [result.wait() for result in results]
                backward(self._context, [loss for _, loss in answers])
            self._count_gradients(answers)
        self.world.barrier()  # whoever fails meanwhile is missed here
        self._clock.add("backward", self.journal.seconds("B"))
        found = gradients(self._context)
        for _, parameter in self._trainable:
            parameter.grad = found.get(parameter)
        return (torch.stack(losses).sum() if losses else torch.zeros((), device=self.world.device)), set()

    def _begin(self, count: int) -> list[Future[Message]]:
        """Let all stages fetch from each other. Gives rank 0 what the last one will have: the losses."""
        calls, last = self.world.calls, self.world.size - 1
        results = []
        if self.world.is_main:
            asked = [calls.start(rank, ask_ahead, self._count, count) for rank in range(1, self.world.size)]
            results = [calls.start(last, fetch, self._count + place) for place in range(count)]
            for done in asked:
                done.wait()
        told = torch.tensor(self._context)
        dist.broadcast(told, src=0)
        self._context = int(told)
        return results

    def _forward_one(self, place: int, chunk: Chunk, before: Tensor) -> Tensor:
        """One micro-batch through this stage. `before` is the token of the one before; returns this one's."""
        message = self._receive()
        self.journal.begin()
        if message:
            answer_first(message[0])
            self._count_gradients([message])
        token, received = _pass(_Arrival, self.journal, place, before, message)
        sent, outcome = self._run(chunk, received[1:])
        token, handed_on = _pass(_Departure, self.journal, place, token, [outcome] if self._is_last else sent)
        self.journal.end("F", place)
        self._hand_on([token, *handed_on])
        return token

    def _receive(self) -> Message:
        """What the stage before hands on of the next micro-batch."""
        if self._part.stage == 0:
            return []
        with self._clock.waiting():
            return self._station.coming(self._count).wait()

    def _run(self, chunk: Chunk, received: Message) -> tuple[Message, Any]:
        """What this stage makes of what it received: results in host memory, which calls carry, or the last stage's
        outcome."""
        given = [tensor.to(self.world.device) for tensor in received]
        with chunk.around():
            sent, outcome = self._part(chunk.body, chunk.rehearsal, chunk.receives, chunk.sends, given)
        pairs = zip(chunk.sends, sent, strict=True)
        if isinstance(outcome, Tensor):
            outcome = outcome.cpu()
        return [checked(tensor, self._part, chunk, key).cpu() for key, tensor in pairs], outcome

    def _hand_on(self, message: Message) -> None:
        self._traffic["activations"].add(_num_bytes(message))
        self._station.handed_on(self._count).set_result(message)
        self._count += 1

    def _count_gradients(self, messages: list[Message]) -> None:
        """What backward sends for what came."""
        for message in messages:
            self._traffic["gradients"].add(_num_bytes(tensor for tensor in message if tensor.requires_grad))

    def _step_optimizer(self) -> None:
        self._update_here.gradients = [(parameter, parameter.grad) for _, parameter in self._trainable]
        self.world.barrier()  # all gradients are settled
        if self.world.is_main:
            with self._clock.waiting():
                self._optimizers.step(self._context)
        self.world.barrier()
        self._clock.add("update", self._update_here.seconds)
        if self._update_here.error is not None:
            raise self._update_here.error

    # -- evaluation ---------------------------------------------------------------------------------------------

    def _measure_window(self, window: Window) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
        micro_batches = window.micro_batches
        chunks = self._chunks(micro_batches, self._measure_bodies(micro_batches), training=False)
        if self._part.stage > 0:
            self._station.ask_for(self._count, len(micro_batches))
        for chunk in chunks[self._part.stage]:
            sent, outcome = self._run(chunk, self._receive())
            if self._is_last:
                self._count += 1
                yield outcome
            else:
                self._hand_on(sent)
        self.world.barrier()  # or a quick stage would run ahead, and fill its memory with what nobody has fetched

    # -- what is told -------------------------------------------------------------------------------------------

    def traffic(self) -> dict[str, Traffic]:
        return self._traffic


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
