"""ps-async on the servers' side: parameters that trainers pull when they like, and push gradients to at their own pace.

The first server decides the order in which gradients are applied, and the others follow it. A trainer leaves its parts
of a gradient with the others before it delivers to the first, and only what was delivered there counts: a trainer that
dies in the middle of a push has pushed nothing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from rung.batches import Batches
from rung.config import RunConfig
from rung.parallel.materialize import Weights, is_absent
from rung.rpc import answers_later
from rung.runtime.base import LocalStep, Traffic
from rung.runtime.measure import means
from rung.runtime.office import Delivery, Errand, Office
from rung.runtime.optimizer import learning_rate
from rung.runtime.parameter_server import Gradients, place_parameters
from rung.runtime.servers import ServerRuntime, collect_weights, num_bytes
from rung.windows import Window
from rung.world import World

_PING_SECONDS = 0.5
_GOODBYE_SECONDS = 10.0


def keep_own_state(weights: Weights, world: World) -> dict[str, int]:
    """A server's share: its parameters, and on the first one the buffers, which trainers push like gradients."""
    model = weights.model
    assert model is not None
    places = place_parameters(model, world.layout.servers)
    places |= {name: 0 for name, _ in model.named_buffers()}
    if world.is_server:
        weights.keep_only(lambda name: places[name] == world.rank)
    return places


class Desk:
    """What calls find in a server: the parameters, gradients that wait for their turn, and on the first the office."""

    def __init__(self, runtime: AsyncServer) -> None:
        self._runtime = runtime
        self._version = -1  # nothing to be pulled yet
        self._left: dict[int, Gradients] = {}
        self._order: deque[int] = deque()
        self.traffic = {"push": Traffic(), "pull": Traffic()}  # of this server, with all trainers
        self._changed = threading.Condition()
        self.office: Office | None = None

    def begin(self, version: int) -> None:
        """The parameters are those after so many updates, and may be pulled."""
        with self._changed:
            self._version = version
            self._changed.notify_all()

    def wait_for_opening(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._version >= 0)

    def pull(self, version: int) -> list[Tensor]:
        """Copies of what this server keeps, after `version` updates or more."""
        with self._changed:
            self._changed.wait_for(lambda: self._version >= version)
            values = [tensor.detach().cpu().clone() for tensor in self._runtime.pulled]
            self.traffic["pull"].add(num_bytes(values))
            return values

    @property
    def version(self) -> int:
        return self._version

    def leave(self, ticket: int, gradients: Gradients) -> None:
        with self._changed:
            self._left[ticket] = gradients
            self.traffic["push"].add(num_bytes(gradients))

    def arrived(self, gradients: Gradients) -> None:
        """On the first server: delivered."""
        with self._changed:
            self.traffic["push"].add(num_bytes(gradients))

    def discard(self, ticket: int) -> None:
        with self._changed:
            self._left.pop(ticket, None)

    def follow(self, ticket: int) -> None:
        """On all but the first server: whose gradient comes next."""
        with self._changed:
            self._order.append(ticket)
            self._changed.notify_all()

    def next_in_order(self) -> Gradients:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._order))
            return self._left.pop(self._order.popleft())

    def updating(self) -> threading.Condition:
        """Held while parameters change, so that nobody pulls halves."""
        return self._changed

    def updated(self) -> None:
        self._version += 1
        self._changed.notify_all()


_desk: Desk | None = None  # of this process; calls find it here
_is_there = threading.Event()


def _at_desk() -> Desk:
    _is_there.wait()  # a trainer may be built before a server is
    assert _desk is not None
    return _desk


def _at_office() -> Office:
    office = _at_desk().office
    assert office is not None, "the first server keeps it"
    return office


def wait_for_opening() -> None:
    """Returns when the state is in its place."""
    _at_desk().wait_for_opening()


@answers_later  # type: ignore[untyped-decorator]
def ask(trainer: int) -> Future[Errand | str]:
    return _at_office().ask(trainer)


def pull(version: int) -> list[Tensor]:
    return _at_desk().pull(version)


def leave(ticket: int, gradients: Gradients) -> None:
    _at_desk().leave(ticket, gradients)


def discard(ticket: int) -> None:
    _at_desk().discard(ticket)


def follow(ticket: int) -> None:
    _at_desk().follow(ticket)


def deliver(ticket: int, content: Any) -> bool:
    if "gradients" in content:
        _at_desk().arrived(content["gradients"])
    return _at_office().deliver(ticket, content)


def goodbye(trainer: int) -> None:
    _at_office().goodbye(trainer)


def answer_ping() -> None:
    """What a trainer does when it is asked whether it lives."""


class AsyncServer(ServerRuntime):
    """Keeps a part of the state, and applies one trainer's gradient in each step."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        layout = self.world.layout
        buffers = [b for _, b in self.model.named_buffers() if not is_absent(b)]
        self._buffers = buffers
        self.pulled: list[Tensor] = [*self._own, *buffers]
        trainers = list(range(layout.servers, layout.num_ranks))
        bound = self.config.staleness
        self._staleness = bound if bound is not None else 2 * len(trainers)
        self._trainers = trainers
        self.notes.append(
            f"each trainer takes whole steps at its own pace; a gradient is at most {self._staleness} updates late"
        )
        if self.config.workers:
            self.notes.append(
                "workers: trainers read samples themselves, since it is not known beforehand who reads which"
            )
        self.notes.append(self.world.calls.describe())
        self._watch: threading.Thread | None = None
        self._is_over = threading.Event()
        self._barriers: Barriers | None = None
        global _desk
        self._desk = _desk = Desk(self)
        _is_there.set()

    def begin(self, start: int, batches: Batches) -> None:
        """Trainers may come."""
        if batches.is_stream:
            batches.window(start + 1)  # which says why that cannot be
        self._barriers = Barriers.of(batches, self.config, evaluates=self.task.eval_data is not None)
        if self.world.is_main:
            self._desk.office = Office(
                self._trainers, staleness=self._staleness, applied=start, discard=self._tell_to_discard
            )
            self._watch = threading.Thread(target=self._look_after_trainers, name="rung-trainers", daemon=True)
            self._watch.start()
        self._desk.begin(start)

    def step(self, window: Window, *, want_norm: bool = False) -> LocalStep:
        assert self._barriers is not None
        office, told = self._desk.office, None
        with self._clock.begin(0.0):
            self._enter("update")
            with self._clock.waiting():
                delivery = office.take(self._barriers.after(window.step)) if office is not None else None
                gradients = self._gradients(delivery)
            rate = learning_rate(self.optimizer)
            with self._desk.updating():
                for parameter, gradient in zip(self._own, gradients, strict=True):
                    parameter.grad = None if gradient is None else gradient.to(parameter.device)
                self.optimizer.step()
                for parameter in self._own:
                    parameter.grad = None
                if delivery is not None:
                    told = delivery.content
                    with torch.no_grad():
                        for buffer, value in zip(self._buffers, told["buffers"], strict=True):
                            buffer.copy_(value)
                if self.schedule is not None:
                    self.schedule.step()
                self._desk.updated()
            self.num_updates += 1
            if office is not None and delivery is not None:
                office.applied(delivery)
        loss = told["loss"] if told is not None else torch.zeros(())
        return LocalStep(
            loss.to(self.world.device),
            told["norm"] if told is not None else torch.zeros_like(loss),
            rate,
            staleness=delivery.staleness if delivery is not None else None,
        )

    def _gradients(self, delivery: Delivery | None) -> Gradients:
        if delivery is None:
            return self._desk.next_in_order()
        for server in range(1, self.world.layout.servers):
            self.world.calls.call(server, follow, delivery.errand.ticket)
        found: Gradients = delivery.content["gradients"]
        return found

    @torch.no_grad()
    def evaluate(self, windows: Iterable[Window]) -> dict[str, float]:
        numbers = [window.step for window in windows]
        found: dict[str, tuple[float, float]] = {}
        if self._desk.office is not None:
            results = self._desk.office.measure(numbers)
            for number in numbers:
                for name, (total, count) in results[number].items():
                    known = found.get(name, (0.0, 0.0))
                    found[name] = known[0] + total, known[1] + count
        return means(self.world.gather_objects(found))

    def is_settled(self) -> bool:
        """Asked when the run is to stop: whether all that was handed out is applied. Nothing more is handed out."""
        office = self._desk.office
        last = float(office.close_door()) if office is not None else 0.0
        return self.world.gather([last])[0][0] <= self._desk.version

    def dismiss(self, *, stopped: bool) -> None:
        office = self._desk.office
        if office is not None:
            office.dismiss("stopped" if stopped else "finished", _GOODBYE_SECONDS)
            self._is_over.set()

    @property
    def is_updating(self) -> bool:
        """Whether the state now is of no use to go on from: gradients of later windows may be in it already."""
        office = self._desk.office if self._desk is not None else None
        return office is not None and not office.is_settled

    @is_updating.setter
    def is_updating(self, value: bool) -> None: ...

    def _look_after_trainers(self) -> None:
        """A trainer that is gone does not say so. A call to it fails at once; one that is busy answers later."""
        office, calls = self._desk.office, self.world.calls
        assert office is not None
        pending: dict[int, Future[Any]] = {}
        while not self._is_over.wait(_PING_SECONDS):
            for trainer in office.living:
                answer = pending.get(trainer)
                if answer is not None and not answer.done():
                    continue
                try:
                    if answer is not None:
                        answer.value()
                    pending[trainer] = calls.start(trainer, answer_ping)
                except RuntimeError:
                    office.lose(trainer)

    def _tell_to_discard(self, ticket: int) -> None:
        for server in range(1, self.world.layout.servers):
            self.world.calls.start(server, discard, ticket)

    def traffic(self) -> dict[str, Traffic]:
        return self._desk.traffic

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return collect_weights(self.model, self.world, self.spread.places)


class Barriers:
    """Steps after which nothing may be under way: what is saved or measured there is the state of exactly that step."""

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
        """The first one at or after a step."""
        return min([self._total, *(-(-step // every) * every for every in self._every)])
