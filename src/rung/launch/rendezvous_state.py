"""The state of torch's dynamic rendezvous, kept in a signed store as JSON.

torch's own backend keeps a pickle there, which would run the code of whoever wrote it, and compares the clocks of
machines with each other. Here heartbeats are counters: a launcher is alive as long as its counter changes, as measured
by the reader's own monotonic clock.
"""

from __future__ import annotations

import json
import pickle
import secrets
import time
from datetime import UTC, datetime, timedelta
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    Token,
    _NodeDesc,
    _RendezvousState,
)


class JsonRendezvousBackend(RendezvousBackend):
    """Where torch's handler keeps its state. For one handler, whose calls do not overlap."""

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
        except (ValueError, RuntimeError, TimeoutError) as error:  # not a ForgedMessage, which no retry would mend
            raise RendezvousConnectionError(f"the store cannot be reached: {error}") from error


class StateCodec:
    """Between torch's state, with times of this machine's clock, and JSON, with counters that mean the same everywhere.

    Times are computed anew from a monotonic clock whenever a state is read, so that a clock that is set does no harm.
    """

    def __init__(self, last_call_seconds: float) -> None:
        self._last_call_seconds = last_call_seconds
        self._beats: dict[_NodeDesc, tuple[int, float]] = {}  # the newest counter, and when it was first seen
        self._deadline: tuple[str, float] | None = None  # the last call of a round, and when it is over
        self._given: dict[_NodeDesc, datetime] = {}  # heartbeats of the state that was last handed out
        self._given_deadline: datetime | None = None

    def encode(self, state: _RendezvousState) -> str:
        now, clock = datetime.now(UTC), time.monotonic()
        for node, beat in state.last_heartbeats.items():
            if self._given.get(node) != beat:  # a sign of life that this process gives
                # Each time that a launcher joins, its counter begins elsewhere: to one that was cut off meanwhile, it
                # would otherwise seem to have stood still.
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
            raise RendezvousStateError(f"the state of the rendezvous makes no sense: {error}") from None

    def _decode(self, found: dict[str, Any]) -> _RendezvousState:
        now, clock = datetime.now(UTC), time.monotonic()
        state = _RendezvousState()
        state.round = _checked(found["round"], int)
        state.complete, state.closed = _checked(found["complete"], bool), _checked(found["closed"], bool)
        state.participants = {_node(row[:3]): _checked(row[3], int) for row in found["participants"]}
        state.wait_list = {_node(row) for row in found["wait_list"]}
        state.redundancy_list = {_node(row) for row in found["redundancy_list"]}
        counters = {_node(row[:3]): _checked(row[3], int) for row in found["heartbeats"]}
        known = {node: self._beats.get(node, (None, clock)) for node in counters}
        self._beats = {n: (c, known[n][1] if known[n][0] == c else clock) for n, c in counters.items()}
        state.last_heartbeats = {node: now - timedelta(seconds=clock - at) for node, (_, at) in self._beats.items()}
        if (name := found["deadline"]) is not None:
            if self._deadline is None or self._deadline[0] != _checked(name, str):
                self._deadline = (name, clock + self._last_call_seconds)
            state.deadline = now + timedelta(seconds=self._deadline[1] - clock)
        self._given, self._given_deadline = dict(state.last_heartbeats), state.deadline
        return state


def _fields(node: _NodeDesc) -> list[Any]:
    return [node.addr, node.pid, node.local_id]


def _node(row: list[Any]) -> _NodeDesc:
    address, pid, number = row
    return _NodeDesc(_checked(address, str), _checked(pid, int), _checked(number, int))


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r} where a {kind.__name__} should be")
    return value
