"""ps-async, server side: trainers pull parameters and push gradients, each at its own pace.

The first server decides the order in which gradients are applied, and the others follow it. A trainer sends the other
servers their parts of a gradient before it delivers to the first, and only that delivery makes the gradient count: a
trainer that dies in the middle of a push has pushed nothing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from rung.data.batch_shard import LocalBatch
from rung.data.batches import Batches
from rung.distributed.rpc import Calls, async_execution, served
from rung.distributed.world import World
from rung.parallel.materialize import Weights, is_absent
from rung.runtime.base import LocalStep, Names, Traffic, Updates
from rung.runtime.context import ContextRuntime, RuntimeContext
from rung.runtime.measure import Measured, add_measured, figures_of_set
from rung.runtime.optimizer import learning_rate, learning_rates
from rung.runtime.parameter_server.base import collect_weights, num_bytes
from rung.runtime.parameter_server.scheduler import WorkItem, WorkResult, WorkScheduler
from rung.runtime.parameter_server.sync import Gradients, place_parameters
from rung.spec.config import RunConfig

_PING_SECONDS = 0.5
_EXIT_ACK_SECONDS = 10.0


def keep_server_state(weights: Weights, world: World) -> dict[str, int]:
    """Keep storage for this server's parameters; the first also keeps the buffers, which trainers push like gradients.
    Returns the server of each tensor."""
    model = weights.model
    assert model is not None
    places = place_parameters(model, world.layout.servers, frozen=True)  # trainers take no part in checkpoints
    places |= {name: 0 for name, _ in model.named_buffers()}
    if world.role.is_server:
        weights.keep_only(lambda name: places[name] == world.rank)
    return places


class AsyncEndpoint:
    """A server's state that RPC threads access: parameters, gradients not yet applied, on the first the scheduler."""

    def __init__(self, kept: list[Tensor]) -> None:
        self._kept = kept
        self._version = -1  # no pull before `begin`
        self._pushed: dict[int, Gradients] = {}  # by ticket
        self._order: deque[int] = deque()
        self.traffic = {"push": Traffic(), "pull": Traffic()}  # of this server, with all trainers
        self._changed = threading.Condition()
        self.scheduler: WorkScheduler | None = None

    def begin(self, version: int) -> None:
        """Allow pulls: the parameters are those after `version` updates."""
        with self._changed:
            self._version = version
            self._changed.notify_all()

    def wait_until_ready(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._version >= 0)

    def pull(self, version: int) -> list[Tensor]:
        """Copies of this server's tensors, after `version` updates or more."""
        with self._changed:
            self._changed.wait_for(lambda: self._version >= version)
            # Cloned: on the CPU, `cpu` is no copy, and the next update would change the tensors being sent.
            values = [tensor.detach().cpu().clone() for tensor in self._kept]
            self.traffic["pull"].add(num_bytes(values))
            return values

    @property
    def version(self) -> int:
        return self._version

    def push(self, ticket: int, gradients: Gradients) -> None:
        with self._changed:
            self._pushed[ticket] = gradients
            self.traffic["push"].add(num_bytes(gradients))

    def count_push(self, gradients: Gradients) -> None:
        """On the first server, where gradients go to the scheduler."""
        with self._changed:
            self.traffic["push"].add(num_bytes(gradients))

    def discard(self, ticket: int) -> None:
        with self._changed:
            self._pushed.pop(ticket, None)

    def apply_next(self, ticket: int) -> None:
        """On all but the first server: append to the order of updates."""
        with self._changed:
            self._order.append(ticket)
            self._changed.notify_all()

    def next_in_order(self) -> Gradients:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._order))
            return self._pushed.pop(self._order.popleft())

    def updating(self) -> threading.Condition:
        """To be held while parameters change, so that no pull sees a part of an update."""
        return self._changed

    def updated(self) -> None:
        self._version += 1
        self._changed.notify_all()


def _endpoint() -> AsyncEndpoint:
    endpoint: AsyncEndpoint = served("ps-async")
    return endpoint


def _scheduler() -> WorkScheduler:
    scheduler = _endpoint().scheduler
    assert scheduler is not None, "only the first server is called for it"
    return scheduler


# -- called by trainers and by the first server, over RPC --------------------------------------------------------------


def wait_until_ready() -> None:
    """Returns when the server's state is loaded."""
    _endpoint().wait_until_ready()


@async_execution  # type: ignore[untyped-decorator]
def ask(trainer: int) -> Future[WorkItem | str]:
    return _scheduler().ask(trainer)


def pull(version: int) -> list[Tensor]:
    return _endpoint().pull(version)


def push(ticket: int, gradients: Gradients) -> None:
    _endpoint().push(ticket, gradients)


def discard(ticket: int) -> None:
    _endpoint().discard(ticket)


def apply_next(ticket: int) -> None:
    _endpoint().apply_next(ticket)


def deliver(ticket: int, content: Any) -> bool:
    if "gradients" in content:
        _endpoint().count_push(content["gradients"])
    return _scheduler().deliver(ticket, content)


def acknowledge_exit(trainer: int) -> None:
    _scheduler().acknowledge_exit(trainer)


def answer_ping() -> None:
    """Runs on a trainer; `ping_trainers` only needs the call to succeed."""


class AsyncUpdates(Updates):
    """Counts as running while gradients are in flight: the state may hold updates of later windows already."""

    scheduler: WorkScheduler | None = None

    @property
    def is_running(self) -> bool:
        return self.scheduler is not None and not self.scheduler.is_consistent


class AsyncServer(ContextRuntime):
    """Holds a part of the state, and applies one trainer's gradient in each step."""

    def __init__(self, context: RuntimeContext) -> None:
        context.updates = self._async_updates = AsyncUpdates()  # before super().__init__, which copies it
        super().__init__(context)
        self._buffers = [b for _, b in self.model.named_buffers() if not is_absent(b)]
        layout, bound = self.world.layout, context.config.staleness
        self._trainers = list(range(layout.servers, layout.num_ranks))
        self._staleness = bound if bound is not None else 2 * len(self._trainers)
        self.notes.append(
            f"each trainer takes whole steps at its own pace; a gradient is at most {self._staleness} updates late"
        )
        if context.config.workers:
            self.notes.append(
                "workers: trainers read samples themselves, since the servers assign windows to trainers at run time"
            )
        self.notes.append(self.world.calls.describe())
        self._is_over = threading.Event()
        self._barriers: Barriers | None = None
        self._endpoint = AsyncEndpoint([*context.parameters, *self._buffers])
        context.world.calls.serve("ps-async", self._endpoint)

    def begin(self, start: int, batches: Batches) -> None:
        if batches.is_stream:
            batches.window(start + 1)  # raises: a stream has no windows by number
        context, calls = self.context, self.world.calls
        self._barriers = Barriers.of(batches, context.config, evaluates=context.task.eval_data is not None)
        if self.world.is_main:

            def discard_there(ticket: int) -> None:
                for server in range(1, self.world.layout.servers):
                    calls.start(server, discard, ticket)

            scheduler = WorkScheduler(self._trainers, staleness=self._staleness, applied=start, discard=discard_there)
            self._endpoint.scheduler = self._async_updates.scheduler = scheduler
            threading.Thread(
                target=ping_trainers, args=(scheduler, calls, self._is_over), name="rung-trainers", daemon=True
            ).start()
        self._endpoint.begin(start)

    def place(self, windows: Iterable[LocalBatch]) -> Iterator[LocalBatch]:
        return iter(windows)

    def step(self, window: LocalBatch, *, want_norm: bool = False) -> LocalStep:
        assert self._barriers is not None
        scheduler, content, own = self._endpoint.scheduler, None, self.context.parameters
        with self.clock.begin(0.0):
            self.context.enter("update")
            with self.clock.waiting():
                result = scheduler.take(self._barriers.after(window.step)) if scheduler is not None else None
                gradients = self._gradients(result)
            # Before the schedule's step changes them.
            rate, rates = learning_rate(self.optimizer), learning_rates(self.optimizer)
            with self._endpoint.updating():
                for parameter, gradient in zip(own, gradients, strict=True):
                    parameter.grad = None if gradient is None else gradient.to(parameter.device)
                self.optimizer.step()
                for parameter in own:
                    parameter.grad = None
                if result is not None:
                    content = result.content
                    with torch.no_grad():
                        for buffer, value in zip(self._buffers, content["buffers"], strict=True):
                            buffer.copy_(value)
                if self.schedule is not None:
                    self.schedule.step()
                self._endpoint.updated()
            self.updates.end()
            if scheduler is not None and result is not None:
                scheduler.applied(result)
        loss = content["loss"] if content is not None else torch.zeros(())
        return LocalStep(
            loss.to(self.world.device),
            content["norm"] if content is not None else torch.zeros_like(loss),
            rate,
            rates,
            staleness=result.staleness if result is not None else None,
        )

    def _gradients(self, result: WorkResult | None) -> Gradients:
        if result is None:
            return self._endpoint.next_in_order()
        for server in range(1, self.world.layout.servers):
            self.world.calls.call(server, apply_next, result.item.ticket)
        found: Gradients = result.content["gradients"]
        return found

    @torch.no_grad()
    def evaluate(self, windows: Iterable[LocalBatch]) -> dict[str, float]:
        numbers = [window.step for window in windows]
        found: Measured = {}
        with self.evaluated_weights():
            if self._endpoint.scheduler is not None:
                results = self._endpoint.scheduler.measure(numbers)
                for number in numbers:
                    add_measured(found, results[number])
            pairs = {name: value for name, value in found.items() if isinstance(value, tuple)}
            return figures_of_set(self.world, pairs, found)

    def share_weights(self) -> None:
        self.world.barrier()  # until all servers have them; trainers pull them for each window

    def is_consistent(self) -> bool:
        """Whether every dispatched window is applied. Called when the run is to stop, so it stops the dispatch."""
        scheduler = self._endpoint.scheduler
        last = float(scheduler.pause_dispatch()) if scheduler is not None else 0.0
        return self.world.gather([last])[0][0] <= self._endpoint.version

    def close(self, *, stopped: bool) -> None:
        scheduler = self._endpoint.scheduler
        if scheduler is not None:
            scheduler.close("stopped" if stopped else "finished", _EXIT_ACK_SECONDS)
            self._is_over.set()

    def traffic(self) -> dict[str, Traffic]:
        return self._endpoint.traffic

    def named_weights(self, names: Names = None) -> Iterator[tuple[str, Tensor]]:
        return collect_weights(self.context, names)


def ping_trainers(scheduler: WorkScheduler, calls: Calls, is_over: threading.Event) -> None:
    """Detect dead trainers: a call to one fails at once, while a busy trainer answers later."""
    pending: dict[int, Future[Any]] = {}
    while not is_over.wait(_PING_SECONDS):
        for trainer in scheduler.alive:
            answer = pending.get(trainer)
            if answer is not None and not answer.done():
                continue  # at most one ping in flight for each trainer
            try:
                if answer is not None:
                    answer.value()
                pending[trainer] = calls.start(trainer, answer_ping)
            except RuntimeError:
                scheduler.remove_trainer(trainer)


class Barriers:
    """Steps after which no gradient may be in flight: a save or evaluation there is of exactly that step's state."""

    def __init__(self, total: int, every: list[int]) -> None:
        self._total, self._every = total, every

    @classmethod
    def of(cls, batches: Batches, config: RunConfig, *, evaluates: bool) -> Barriers:
        assert batches.total_steps is not None
        assert batches.steps_per_epoch is not None
        every = [config.checkpoint_every] if config.checkpoint_every is not None else []
        if evaluates and config.eval_every != "never":
            every.append(batches.steps_per_epoch if config.eval_every == "epoch" else int(config.eval_every))
        return cls(batches.total_steps, every)

    def after(self, step: int) -> int:
        """The first barrier at or after a step."""
        return min([self._total, *(-(-step // every) * every for every in self._every)])
