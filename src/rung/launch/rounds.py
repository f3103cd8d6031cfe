"""One forming of the world: what the launchers that take part in it know of it and of each other."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from rung.errors import EnvironmentProblem
from rung.untrusted import parse_json, printable

_LOOK_SECONDS = 0.25
_T = TypeVar("_T")


@dataclass(frozen=True)
class HostOffer:
    """What a launcher brings into a round."""

    processes: int
    resume: bool
    micro_batch: int | None  # that is left of the one asked for, after running out of memory
    attempt: int  # the last world that this launcher was in; 0 for none
    confirmed: dict[str, str]  # what it chose for the job itself, or found in the plan of an earlier world
    nonce: str  # made for this round
    answers: str  # the nonce of the round's first launcher


@dataclass(frozen=True)
class WorldPlan:
    """What the first launcher of a round decides for all of them."""

    attempt: int
    processes: list[int]  # of each launcher
    size: int
    used: int
    strategy: str
    address: str
    port: int
    resume: bool
    micro_batch: int | None
    confirmed: dict[str, str]  # by a launcher that takes part
    nonces: list[str]  # of each launcher


def read_message(kind: type[_T], text: bytes, name: str) -> _T:
    """A record that another launcher wrote as JSON. It is signed, and may be of another version of Rung."""
    try:
        values, hints = parse_json(text), get_type_hints(kind)
        for key, hint in hints.items():
            if not _is_a(values[key], hint):
                raise TypeError(f"{key} = {values[key]!r:.100}")
        return kind(**values)
    except (ValueError, TypeError, KeyError) as error:
        raise EnvironmentProblem(
            f"what another launcher of this job wrote as {name} makes no sense ({printable(error)}). Do all machines "
            "have the same version of Rung?"
        ) from None


def _is_a(value: Any, hint: Any) -> bool:
    """Whether a JSON value has the type of a field: a plain one, one of several, a list of one, or texts by name."""
    if get_origin(hint) is list:
        return type(value) is list and all(type(one) is get_args(hint)[0] for one in value)
    if get_origin(hint) is dict:
        return type(value) is dict and all(type(one) is str for one in value.values())
    return any(type(value) is kind for kind in get_args(hint) or (hint,))


@dataclass(frozen=True)
class Round:
    """One forming of the world, as this launcher sees it."""

    attempt: int  # 1 for the first world of the job
    host: int  # the number of this launcher
    num_hosts: int
    first_rank: int  # of this machine
    num_local: int
    size: int  # processes of all machines
    used: int  # those that the strategy can use; the ranks from here on are spares
    strategy: str  # with its sizes
    address: str  # where the ranks' store is
    port: int
    resume: bool
    micro_batch: int | None  # instead of the one asked for, after a rank ran out of memory
    nonces: list[str]  # of each launcher

    @classmethod
    def of(cls, plan: WorldPlan, host: int) -> Round:
        told = vars(plan).copy()
        counts, _ = told.pop("processes"), told.pop("confirmed")
        if not 0 <= host < len(counts):
            raise EnvironmentProblem(f"the plan of this job is for {len(counts)} launchers, and this is number {host}.")
        return cls(host=host, num_hosts=len(counts), first_rank=sum(counts[:host]), num_local=counts[host], **told)

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.num_local)

    @property
    def num_spares(self) -> int:
        return self.size - self.used


@dataclass(frozen=True)
class Fate:
    """How a round ended for one launcher."""

    kind: str  # finished, stopped, left (stopped, and does not come back), failed
    address: str
    step: int = 0
    headline: str = ""


@dataclass(frozen=True)
class Ending:
    """How a job ended, for the launchers that were not part of its last world."""

    kind: str  # finished, failed
    headline: str
    nonces: list[str]  # of those for whom this was written


@dataclass(frozen=True)
class News:
    """What has come to light about the other launchers of a round."""

    waiting: int = 0  # launchers that would join
    lost: bool = False  # one of this round is gone, or has gone on without this one
    fates: Mapping[int, Fate] = field(default_factory=dict)


class Lookout:
    """Looks at the rendezvous and at the others' fates, in a thread: a network that is cut lets no call return."""

    def __init__(self, handler: Any, store: Any, round_: Round, number: int, max_hosts: int) -> None:
        self.news = News()
        self._handler, self._store, self._round, self._number = handler, store, round_, number
        self._max_hosts = max_hosts
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="rung-meeting", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        fates: dict[int, Fate] = {}
        while not self._stop.wait(_LOOK_SECONDS):
            try:
                waiting = self._handler.num_nodes_waiting()
                state = self._handler._state_holder.state
                gone = state.round != self._number or len(state.participants) < self._round.num_hosts
                for host in set(range(self._round.num_hosts)) - {self._round.host, *fates}:
                    if self._store.check([f"fate/{host}"]):
                        fates[host] = read_message(Fate, self._store.get(f"fate/{host}"), f"fate/{host}")
                # A launcher for which there is no room may stand in the list, too.
                room = self._max_hosts - self._round.num_hosts
                self.news = News(min(waiting, room), gone, dict(fates))
            except Exception:
                # The store is out of reach. As long as the ranks get on, that is no reason to disturb them.
                continue
