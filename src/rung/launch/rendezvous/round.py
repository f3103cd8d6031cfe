"""One round of the rendezvous: the records that its launchers exchange, and the poller of their status."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

from rung.errors import EnvironmentProblem
from rung.system.untrusted import parse_json, printable

if TYPE_CHECKING:  # it imports torch
    from rung.launch.rendezvous.state import DynamicRendezvous

_POLL_SECONDS = 0.25
_STOP_SECONDS = 5.0
_T = TypeVar("_T")


@dataclass(frozen=True)
class HostOffer:
    """What a launcher contributes to a round."""

    processes: int
    resume: bool
    micro_batch: int | None  # reduced from the requested one after a rank ran out of memory
    attempt: int  # the last world that this launcher was in; 0 for none
    confirmed: dict[str, str]  # values that it chose for the job, or found in the plan of an earlier world
    nonce: str  # made for this round
    answers: str  # the nonce of the round's first launcher


@dataclass(frozen=True)
class WorldPlan:
    """The world of a round. Its first launcher makes the plan from all offers."""

    attempt: int
    processes: list[int]  # of each launcher
    size: int
    used: int
    strategy: str
    address: str
    port: int
    resume: bool
    micro_batch: int | None
    confirmed: dict[str, str]  # by at least one launcher of the round
    nonces: list[str]  # of each launcher


def read_message(kind: type[_T], text: bytes, name: str) -> _T:
    """Parse a record that another launcher wrote as JSON. It is signed, but may be of another version of Rung."""
    try:
        values, hints = parse_json(text), get_type_hints(kind)
        for key, hint in hints.items():
            if not _is_a(values[key], hint):
                raise TypeError(f"{key} = {values[key]!r:.100}")
        return kind(**values)
    except (ValueError, TypeError, KeyError) as error:
        raise EnvironmentProblem(
            f"another launcher of this job wrote an invalid {name} ({printable(error)}). Do all machines have the same "
            "version of Rung?"
        ) from None


def _is_a(value: Any, hint: Any) -> bool:
    """Whether a JSON value has a field's type: a plain type, a union, a list of a plain type, or a dict of str."""
    if get_origin(hint) is list:
        return type(value) is list and all(type(item) is get_args(hint)[0] for item in value)
    if get_origin(hint) is dict:
        return type(value) is dict and all(type(item) is str for item in value.values())
    return any(type(value) is kind for kind in get_args(hint) or (hint,))


@dataclass(frozen=True)
class Round:
    """The world of a round from the view of one launcher."""

    attempt: int  # 1 for the first world of the job
    host: int  # the number of this launcher
    num_hosts: int
    first_rank: int  # of this machine
    num_local: int
    size: int  # processes of all machines
    used: int  # processes that the strategy can use; ranks from here on are spares
    strategy: str  # with its sizes
    address: str  # of the ranks' store
    port: int
    resume: bool
    micro_batch: int | None  # replaces the requested one after a rank ran out of memory
    nonces: list[str]  # of each launcher

    @classmethod
    def of(cls, plan: WorldPlan, host: int) -> Round:
        shared = vars(plan).copy()
        counts, _ = shared.pop("processes"), shared.pop("confirmed")
        if not 0 <= host < len(counts):
            raise EnvironmentProblem(f"the plan of this job is for {len(counts)} launchers, and this is number {host}.")
        return cls(host=host, num_hosts=len(counts), first_rank=sum(counts[:host]), num_local=counts[host], **shared)

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.num_local)

    @property
    def num_spares(self) -> int:
        return self.size - self.used


@dataclass(frozen=True)
class LauncherResult:
    """How a round ended for one launcher."""

    kind: str  # finished, stopped, left (stopped and will not rejoin), failed
    address: str
    step: int = 0
    headline: str = ""


@dataclass(frozen=True)
class JobResult:
    """How a job ended, for launchers outside its last world."""

    kind: str  # finished, failed
    headline: str
    nonces: list[str]  # of the launchers that this is addressed to


@dataclass(frozen=True)
class PeerStatus:
    """The other launchers of a round, as last polled."""

    waiting: int = 0  # launchers that want to join
    lost: bool = False  # a launcher of this round is gone, or has formed the next round without this one
    results: Mapping[int, LauncherResult] = field(default_factory=dict)


class PeerPoller:
    """Polls the rendezvous and the peers' results in a thread, because calls block while the network is cut."""

    def __init__(self, handler: DynamicRendezvous, store: Any, round_: Round, number: int, max_hosts: int) -> None:
        self.peers = PeerStatus()
        self._handler, self._store, self._round, self._number = handler, store, round_, number
        self._max_hosts = max_hosts
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="rung-peer-poller", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(_STOP_SECONDS)  # it may be in a call that the network does not answer; it is a daemon

    def _poll(self) -> None:
        results: dict[int, LauncherResult] = {}
        while not self._stop.wait(_POLL_SECONDS):
            try:
                waiting = self._handler.num_waiting()
                state = self._handler.state
                gone = state.round != self._number or len(state.participants) < self._round.num_hosts
                for host in set(range(self._round.num_hosts)) - {self._round.host, *results}:
                    if self._store.check([f"result/{host}"]):
                        with contextlib.suppress(EnvironmentProblem):  # not a message of this job: as if it were none
                            results[host] = self._read_result(host)
                # Launchers beyond the maximum wait, too, and must not cause a new round.
                room = self._max_hosts - self._round.num_hosts
                # Results and who is gone at once: whoever left with a result is not lost.
                self.peers = PeerStatus(min(waiting, room), gone, dict(results))
            except Exception:
                # The store is out of reach. The ranks do not need it while they train: keep the last status.
                continue

    def _read_result(self, host: int) -> LauncherResult:
        return read_message(LauncherResult, self._store.get(f"result/{host}"), f"result/{host}")
