"""torch's dynamic rendezvous, with its state kept in a signed store as JSON.

torch's own backend keeps a pickle there, which can execute its writer's code, and compares the clocks of machines with
each other. Here heartbeats are counters: a launcher is alive as long as its counter changes, as measured by the
reader's own monotonic clock. No other module uses private parts of torch's rendezvous.
"""

from __future__ import annotations

import json
import pickle
import secrets
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    Token,
    # The handler passes its state to a backend as a pickle of these classes, and in no other form.
    _NodeDesc,
    # The handler has one public method for both operations and the ranks' store: see `join`.
    _RendezvousExitOp,
    _RendezvousJoinOp,
    _RendezvousState,
    create_handler,
)

_LOOKS = 2.0  # seconds between two looks at the state; an idle machine takes one


class DynamicRendezvous:
    """One launcher's handle on torch's rendezvous."""

    def __init__(self, store: Store, parameters: RendezvousParameters) -> None:
        last_call_seconds = parameters.get_as_int("last_call_timeout") or 0
        backend = JsonRendezvousBackend(store, parameters.run_id, last_call_seconds)
        self._handler: Any = create_handler(store, backend, parameters)

    @property
    def run_id(self) -> str:
        return str(self._handler.get_run_id())

    @property
    def node(self) -> _NodeDesc:
        """This launcher's descriptor. The public API has only its rank, which changes with each round."""
        node: _NodeDesc = self._handler._this_node
        return node

    @property
    def state(self) -> _RendezvousState:
        """The state as last read. torch's public API has only the number of waiting launchers."""
        state: _RendezvousState = self._handler._state_holder.state
        return state

    def num_waiting(self) -> int:
        """How many launchers want to join. Reads the store at most once a second."""
        return int(self._handler.num_nodes_waiting())

    def join(self, seconds: float, check: Callable[[], None]) -> tuple[int, int]:
        """Join the next round. Returns this launcher's number and the number of launchers.

        `check` is called while waiting and may raise. The handler's own `next_rendezvous` does the same with a random
        delay, and opens a store for the ranks: its blocking wait for the store's address would stall heartbeats.
        """
        handler, join = self._handler, _RendezvousJoinOp()

        def join_unless_stopped(context: Any, deadline: float) -> Any:
            check()
            return join(context, deadline)

        self.leave(seconds)
        handler._op_executor.run(join_unless_stopped, time.monotonic() + seconds, handler._get_deadline)
        handler._start_heartbeats()
        rank, size = handler._get_world()
        return rank, size

    def leave(self, seconds: float) -> None:
        """Leave the round; the other launchers continue. The public `shutdown` would end the rendezvous for all."""
        self._handler._stop_heartbeats()
        self._handler._op_executor.run(_RendezvousExitOp(), time.monotonic() + seconds)

    def close(self) -> None:
        """End the rendezvous for all launchers."""
        self._handler.shutdown()


class JsonRendezvousBackend(RendezvousBackend):
    """Stores the state of torch's handler as JSON. For one handler, whose calls do not overlap."""

    def __init__(self, store: Store, run_id: str, last_call_seconds: float) -> None:
        self._store, self._key = store, f"rendezvous/{run_id}"
        self._codec = StateCodec(last_call_seconds)

    @property
    def name(self) -> str:
        return "c10d"

    def get_state(self) -> tuple[bytes, Token] | None:
        if not self._call("check", [self._key]):
            return None
        found: bytes = self._call("get", self._key)
        return self._pickled(found), found

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        # This pickle comes from the handler of this process, which unpickles what these two methods return.
        wanted = self._codec.encode(pickle.loads(state)).encode()
        found: bytes = self._call("compare_set", self._key, token or b"", wanted)
        return self._pickled(found), found, found == wanted

    def _pickled(self, found: bytes) -> bytes:
        return pickle.dumps(self._codec.decode(found))

    def _call(self, operation: str, *args: Any) -> Any:
        try:
            return getattr(self._store, operation)(*args)
        except (ValueError, RuntimeError, TimeoutError) as error:  # not ForgedMessage: a retry would not help
            raise RendezvousConnectionError(f"the store cannot be reached: {error}") from error


class StateCodec:
    """Converts between torch's state, which has times of this machine's clock, and JSON, which has counters instead.

    Every decoded state gets new times from a monotonic clock, so that setting the system clock does no harm.
    """

    def __init__(self, last_call_seconds: float) -> None:
        self._last_call_seconds = last_call_seconds
        self._beats: dict[_NodeDesc, tuple[int, float]] = {}  # the newest counter, and when it was first seen
        self._deadline: tuple[str, float] | None = None  # the name of a round's last call, and when it expires
        self._given: dict[_NodeDesc, datetime] = {}  # heartbeats of the state that was last decoded
        self._given_deadline: datetime | None = None
        self._looked: float | None = None  # when a state was last decoded

    def encode(self, state: _RendezvousState) -> str:
        now, clock = datetime.now(UTC), time.monotonic()
        for node, heartbeat in state.last_heartbeats.items():
            if self._given.get(node) != heartbeat:  # changed by this process since it was decoded
                # The counter starts at a random value each time a launcher joins. With a fixed start, a launcher that
                # was cut off meanwhile could read the value it saw before the cut, and take this one for dead.
                first = secrets.randbelow(2**48)
                self._beats[node] = (self._beats.get(node, (first, 0.0))[0] + 1, clock)
        if state.deadline is not None and state.deadline != self._given_deadline:
            self._deadline = (secrets.token_hex(8), clock + (state.deadline - now).total_seconds())
        return json.dumps(
            {
                "round": state.round,
                "complete": state.complete,
                "closed": state.closed,
                "deadline": self._deadline[0] if state.deadline is not None and self._deadline is not None else None,
                "participants": [[*_fields(node), rank] for node, rank in state.participants.items()],
                "wait_list": [_fields(node) for node in sorted(state.wait_list)],
                "redundancy_list": [_fields(node) for node in sorted(state.redundancy_list)],
                "heartbeats": [[*_fields(node), self._beats[node][0]] for node in state.last_heartbeats],
            }
        )

    def decode(self, text: bytes) -> _RendezvousState:
        try:
            return self._decode(json.loads(text))
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
            raise RendezvousStateError(f"the state of the rendezvous is invalid: {error}") from None

    def _decode(self, found: dict[str, Any]) -> _RendezvousState:
        now, clock = datetime.now(UTC), time.monotonic()
        state = _RendezvousState()
        state.round = _checked(found["round"], int)
        state.complete, state.closed = _checked(found["complete"], bool), _checked(found["closed"], bool)
        state.participants = {_node(row[:3]): _checked(row[3], int) for row in found["participants"]}
        state.wait_list = {_node(row) for row in found["wait_list"]}
        state.redundancy_list = {_node(row) for row in found["redundancy_list"]}
        counters = {_node(row[:3]): _checked(row[3], int) for row in found["heartbeats"]}
        self._forgive(clock)
        known = {node: self._beats.get(node, (None, clock)) for node in counters}
        self._beats = {n: (c, known[n][1] if known[n][0] == c else clock) for n, c in counters.items()}
        state.last_heartbeats = {node: now - timedelta(seconds=clock - at) for node, (_, at) in self._beats.items()}
        if (name := found["deadline"]) is not None:
            if self._deadline is None or self._deadline[0] != _checked(name, str):
                self._deadline = (name, clock + self._last_call_seconds)
            state.deadline = now + timedelta(seconds=self._deadline[1] - clock)
        self._given, self._given_deadline = dict(state.last_heartbeats), state.deadline
        return state

    def _forgive(self, clock: float) -> None:
        """Do not hold the time against the others in which this process did not look, because its machine is busy."""
        missed = clock - self._looked - _LOOKS if self._looked is not None else 0.0
        self._looked = clock
        if missed > 0:
            self._beats = {node: (count, min(clock, at + missed)) for node, (count, at) in self._beats.items()}


def _fields(node: _NodeDesc) -> list[Any]:
    return [node.addr, node.pid, node.local_id]


def _node(row: list[Any]) -> _NodeDesc:
    address, pid, number = row
    return _NodeDesc(_checked(address, str), _checked(pid, int), _checked(number, int))


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return value
