"""Where the launchers of a job meet, and what they tell each other there.

torch's c10d rendezvous says who takes part in a round. What a round then looks like (how many processes each machine
has, which of them the strategy can use, where the ranks find each other) is told by its first launcher to the others
through the same store, and at the end each launcher tells its fate, so that no machine waits for a dead one. A job on
one machine meets by itself, on a port of the system's choice.

Values are signed, and a stranger who reaches the store can still put older ones back: of an earlier round, or of
another job with the same key. So each launcher makes a nonce for each round. The others answer that of the round's
first launcher in their offers; its plan lists all of them, and a launcher takes no plan without its own. The key of the
world is derived from these nonces. What launchers agreed upon before the first round counts only if a launcher of the
round confirms it in its offer, because it has chosen it. The state of the rendezvous can still be set back: it decides
who waits for whom, and who is in a round.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, TypeVar

from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    _RendezvousExitOp,
    _RendezvousJoinOp,
    create_handler,
)

from rung.config import RunConfig
from rung.environment import is_in_environment
from rung.errors import EnvironmentProblem, StrategyError
from rung.job_key import derive_key, new_key, new_nonce
from rung.launch.elastic import FINISHED
from rung.launch.rendezvous_state import JsonRendezvousBackend
from rung.launch.rounds import Ending, Fate, HostOffer, Lookout, News, Round, WorldPlan, read_message
from rung.network import address_among_others, answers, close_connections, interface_of, split_endpoint
from rung.processes import silenced
from rung.signed_store import LOOPBACK, SignedStore, join_store, serve_store
from rung.strategy import fit
from rung.untrusted import printable

# torch's defaults make every join and every loss of a machine cost half a minute.
_TIMING = {"last_call_timeout": 1, "keep_alive_interval": 1, "keep_alive_max_attempt": 3}
_JOIN_SECONDS = 7 * 24 * 3600  # how long to wait for other machines is for whoever started the job to say
_STORE_SECONDS = 20
_PARTING_SECONDS = 3.0
_NAME_SECONDS = 60.0  # for the name of another machine to become known
_POD_VARIABLE = "KUBERNETES_SERVICE_HOST"  # which every pod has
_ABANDONED_SECONDS = 8.0  # without a sign of life of any launcher


_SETTINGS = "settings"
_T = TypeVar("_T")


class LauncherLost(Exception):
    """A launcher went away while the world was forming."""


class Meeting:
    """This launcher's place at the meeting. For one thread, beside the watch that it starts itself."""

    def __init__(
        self,
        store: Any,
        key: str,
        nodes: tuple[int, int],
        address: str,
        endpoint: str | None,
        hosts_store: bool,
    ) -> None:
        self._key = key
        self.address = address
        self.interface = interface_of(address)
        self.endpoint = endpoint
        self.hosts_store = hosts_store  # the store goes with this launcher
        self.nodes = nodes
        self._world_store: Any = None
        self._round_store: Any = None  # the same, under the name of the round
        self._round: Round | None = None
        self._round_number = 0
        self._agreed: dict[str, str] = {}  # what this launcher goes by
        self._confirmed: dict[str, str] = {}  # what it knows to be said by a launcher of this job
        self._ranks_store: Any = None
        self._lookout: Lookout | None = None
        self._has_left = False
        self._forming = threading.Lock()
        self._sit_down(store)
        if self.endpoint is not None:
            self._begin_anew_if_abandoned()

    def _sit_down(self, store: Any) -> None:
        self._base = store = SignedStore(store, self._key)
        # When a job is over, the next one can meet at the same place.
        self._generation = store.compare_set("rung/generation", "", "0").decode()
        self._store = PrefixStore(f"rung/{self._generation}", store)
        parameters = RendezvousParameters(
            backend="c10d",
            endpoint=self.endpoint or "127.0.0.1:0",
            run_id=f"rung-{self._generation}",
            min_nodes=self.nodes[0],
            max_nodes=self.nodes[1],
            local_addr=self.address,
            join_timeout=_JOIN_SECONDS,
            **_TIMING,
        )
        backend = JsonRendezvousBackend(store, parameters.run_id, _TIMING["last_call_timeout"])
        self.handler: Any = create_handler(store, backend, parameters)
        # For whoever ends the job while this launcher waits for a place in it.
        self._nonce = new_nonce()
        self._store.set(_arrival(self.handler._this_node), self._nonce)

    def _begin_anew_if_abandoned(self) -> None:
        """A store in a process of its own remembers a job whose launchers are all gone. Nobody waits for those."""
        deadline = time.monotonic() + _ABANDONED_SECONDS
        while self._store.check([_SETTINGS]):
            self.handler.num_nodes_waiting()  # looks, at most once a second
            state = self.handler._state_holder.state
            if state.participants or state.wait_list or state.redundancy_list:
                return
            if time.monotonic() > deadline or state.closed:
                self._end_generation()
                self._sit_down(self._base.unsigned)
                return
            time.sleep(0.2)

    def _end_generation(self) -> None:
        following = str(int(self._generation) + 1)
        self._base.compare_set("rung/generation", self._generation, following)

    def reconnect(self) -> None:
        """After an error at the store: a new connection, if somebody answers."""
        time.sleep(0.5)
        self.stop_watching()
        if self.endpoint is not None and not self.hosts_store:
            host, port = split_endpoint(self.endpoint)
            if answers(host, port) and (store := _connect(host, port)) is not None:
                self._sit_down(store)

    def key_of(self, round_: Round) -> str:
        """What the ranks of one world sign with: what those of another one said is of no use to them."""
        return derive_key(self._key, f"world of launchers {' '.join(round_.nonces)}")

    def is_reachable(self) -> bool:
        return self.endpoint is None or self.hosts_store or answers(*split_endpoint(self.endpoint))

    @property
    def is_alone(self) -> bool:
        """Whether the job is of this machine alone."""
        return self.nodes[1] == 1

    def agree_on_settings(self, own: str) -> str:
        """The settings of the first launcher to come."""
        return self.agree(_SETTINGS, own)

    def agree(self, key: str, value: str) -> str:
        """What the first launcher to come said. The next round shows whether it is part of this job."""
        found: str = self._store.compare_set(key, "", value).decode()
        self._agreed[key] = found
        if found == value:
            self._confirmed[key] = found
        return found

    # -- a round -----------------------------------------------------------------------------------------------------

    def form(
        self, num_local: int, strategy: str, config: RunConfig, resume: bool, micro_batch: int | None = None
    ) -> Round:
        """Meet the others; returns when the world is complete. Blocks."""
        with self._forming:
            self.stop_watching()
            attempt = self._round.attempt if self._round is not None else 0
            nonce = new_nonce()
            own = HostOffer(num_local, resume, micro_batch, attempt, self._confirmed, nonce, answers=nonce)
            return self._form(own, strategy, config)

    def _form(self, own: HostOffer, strategy: str, config: RunConfig) -> Round:
        host, num_hosts = self._join()
        if self._base.get("rung/generation").decode() != self._generation:  # it was taken for abandoned
            self._sit_down(self._base.unsigned)
            raise LauncherLost
        self._round_number = self.handler._state_holder.state.round
        name = f"round/{self._round_number}"
        store = PrefixStore(name, self._store)
        if host == 0:
            store.set("first", own.nonce)
        else:
            own = replace(own, answers=self._wait_for(store, "first", num_hosts).decode())
        store.set(f"host/{host}", json.dumps(asdict(own)))
        if host == 0:
            hosts = [self._read(HostOffer, store, f"host/{number}", num_hosts) for number in range(num_hosts)]
            for number, offer in enumerate(hosts):
                if offer.answers != own.nonce:
                    raise self._base.replayed(f"{name}/host/{number}")
            store.set("plan", json.dumps(asdict(self._plan(hosts, strategy, config))))
        plan = self._read(WorldPlan, store, "plan", num_hosts)
        if plan.nonces[host : host + 1] != [own.nonce]:
            raise self._base.replayed(f"{name}/plan")
        self._refuse_unconfirmed(plan)
        self._round = Round.of(plan, host)
        self._confirmed = plan.confirmed
        self._world_store = SignedStore(self._base.unsigned, self.key_of(self._round))
        self._round_store = store = PrefixStore(f"rung/{self._generation}/{name}", self._world_store)
        if not self.is_alone:
            self._lookout = Lookout(self.handler, store, self._round, self._round_number, self.nodes[1])
        return self._round

    def _join(self) -> tuple[int, int]:
        """Take part in the next round of the rendezvous: the number of this launcher, and of how many.

        What the handler's own `next_rendezvous` does, less a random delay and a store for the ranks, for whose address
        it would wait in a way that holds up the signs of life.
        """
        handler, join = self.handler, _RendezvousJoinOp()

        def join_unless_left(context: Any, deadline: float) -> Any:
            if self._has_left:
                raise LauncherLost
            return join(context, deadline)

        handler._stop_heartbeats()
        deadline = time.monotonic() + _JOIN_SECONDS
        handler._op_executor.run(_RendezvousExitOp(), deadline)
        handler._op_executor.run(join_unless_left, deadline, handler._get_deadline)
        handler._start_heartbeats()
        rank, size = handler._get_world()
        return rank, size

    def _refuse_unconfirmed(self, plan: WorldPlan) -> None:
        """Go by nothing that was found at the store and is not said by a launcher that is there."""
        for name, value in self._agreed.items():
            if plan.confirmed.get(name) != value:
                raise EnvironmentProblem(
                    f"{printable(value):.80} was found at {self.endpoint} as the {name} of this job, and no machine "
                    "that takes part has chosen it. Either the one that did left before the first world was formed, or "
                    "somebody has put back what another job wrote. Start the job again."
                )

    def _read(self, kind: type[_T], store: Any, key: str, num_hosts: int) -> _T:
        """A record that another launcher is about to write."""
        return read_message(kind, self._wait_for(store, key, num_hosts), key)

    def _wait_for(self, store: Any, key: str, num_hosts: int) -> bytes:
        """Asks again and again, since a read that waits holds up all else that goes through the same connection, the
        signs of life first."""
        deadline = time.monotonic() + _STORE_SECONDS
        while not store.check([key]):
            if (num_hosts > 1 and self._is_broken(num_hosts)) or time.monotonic() > deadline:
                raise LauncherLost
            time.sleep(0.02)
        found: bytes = store.get(key)
        return found

    def _is_broken(self, num_hosts: int) -> bool:
        """Whether a launcher is missing in the round that was just formed."""
        self.handler.num_nodes_waiting()  # looks, at most once a second
        state = self.handler._state_holder.state
        return state.round != self._round_number or len(state.participants) < num_hosts

    def _plan(self, hosts: list[HostOffer], strategy: str, config: RunConfig) -> WorldPlan:
        counts = [host.processes for host in hosts]
        try:
            layout, spares = fit(strategy, sum(counts), max(counts), config.schedule, config.servers)
            used, name = sum(counts) - spares, layout.name
        except StrategyError:
            used, name = 0, strategy  # all of them wait for more to come
        attempt = 1 + max(host.attempt for host in hosts)
        confirmed = {name: value for host in hosts for name, value in host.confirmed.items()}
        micro_batches = [host.micro_batch for host in hosts if host.micro_batch is not None]
        # A store of its own for each world: the addresses of dead ranks would be found in an old one.
        self._ranks_store = serve_store(self.address)
        return WorldPlan(
            attempt=attempt,
            processes=counts,
            size=sum(counts),
            used=used,
            strategy=name,
            address=self.address,
            port=self._ranks_store.port,
            resume=attempt > 1 or any(host.resume for host in hosts),
            micro_batch=min(micro_batches, default=None),
            confirmed=confirmed,
            nonces=[host.nonce for host in hosts],
        )

    def news(self) -> News:
        return self._lookout.news if self._lookout is not None else News()

    def tell(self, fate: Fate) -> None:
        """Tell the other launchers of this round how it ended here."""
        if self._round is not None and not self.is_alone:
            key = f"fate/{self._round.host}"
            self._try(lambda: self._round_store.set(key, json.dumps(asdict(fate))))

    def stop_watching(self) -> None:
        if self._lookout is not None:
            self._lookout.stop()
            self._lookout = None

    # -- the end -----------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Go, and let the others go on. Without it, they find out by themselves in three seconds."""
        self._has_left = True
        self._ranks_store = None  # which closes its port

        def go() -> None:
            with self._forming:  # somebody may still be at it, and finds out within a second
                self.stop_watching()
                self.handler._stop_heartbeats()
                self.handler._op_executor.run(_RendezvousExitOp(), time.monotonic() + _PARTING_SECONDS)

        self._try(go)

    def close(self, kind: str, headline: str) -> None:
        """The job is over: nobody can join it any more, and another one can meet at the same store."""

        def end() -> None:
            self.stop_watching()
            self.handler.shutdown()  # from here on nobody begins to wait for a place
            ending = Ending(kind, headline, [*(self._round.nonces if self._round else []), *self._nonces_of_others()])
            self._store.compare_set("ending", "", json.dumps(asdict(ending)))
            if kind == "finished":
                self._base.set(FINISHED, "1")
            self._end_generation()
            self._part_as_keeper() if self.hosts_store else self._store.add("gone", 1)

        self._try(end)

    def _nonces_of_others(self) -> list[str]:
        """Of the launchers that wait for a place, and would take no word of the end that is not meant for them."""
        state = self.handler._state_holder.state
        names = [_arrival(node) for node in (*state.wait_list, *state.redundancy_list)]
        return [self._store.get(name).decode() for name in names if self._store.check([name])]

    def _part_as_keeper(self) -> None:
        """The store goes with this launcher: let the others read there how the job ended. They look every second."""
        state = self.handler._state_holder.state
        deadline = time.monotonic() + _PARTING_SECONDS / 2
        while state.wait_list or state.redundancy_list or self._store.add("gone", 0) < self._num_others():
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)

    def _num_others(self) -> int:
        return self._round.num_hosts - 1 if self._round is not None else 0

    def ending(self) -> tuple[str, str]:
        """How the job ended that was found closed. What was not written for this launcher may be of another job."""
        deadline = time.monotonic() + _PARTING_SECONDS
        while not self._store.check(["ending"]) and time.monotonic() < deadline:
            time.sleep(0.02)
        if not self._store.check(["ending"]):
            return "failed", "it was closed"
        ending = read_message(Ending, self._store.get("ending"), "ending")
        own = {self._nonce, *(self._round.nonces if self._round is not None else [])}
        return (ending.kind, ending.headline) if own & set(ending.nonces) else ("failed", "it was closed")

    def _try(self, work: Callable[[], None]) -> None:
        """Something that matters less than to come to an end: the network may be cut, and the store gone."""

        def call() -> None:
            with contextlib.suppress(Exception):
                work()

        thread = threading.Thread(target=call, name="rung-parting", daemon=True)
        thread.start()
        thread.join(_PARTING_SECONDS)


def _arrival(node: Any) -> str:
    return f"arrival/{node.addr}/{node.pid}/{node.local_id}"


def meet_here() -> Meeting:
    """For a job of this machine alone: nobody else knows its key, and its store is on loopback."""
    return Meeting(serve_store(LOOPBACK, seconds=_STORE_SECONDS), new_key(), (1, 1), LOOPBACK, None, True)


def open_meeting(endpoint: str, key: str, nodes: tuple[int, int], say: Callable[[str], None]) -> Meeting:
    """Go to where the launchers of a job meet; the one whose machine it is keeps the store, unless somebody does.

    One job at a time meets at an endpoint. All its launchers have the same key.
    """
    host, port = split_endpoint(endpoint)
    address, is_ours = _find(host, port, say)
    if is_ours:
        # The store listens at the address that the other machines use, where the name may mean loopback here.
        host = host if answers(host, port) else address
        endpoint = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if is_ours and not answers(host, port):
        try:
            store = serve_store(address, port, seconds=_STORE_SECONDS)
            return Meeting(store, key, nodes, address, endpoint, True)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:  # else another launcher of this machine was quicker
                raise EnvironmentProblem(f"{endpoint} cannot be listened at: {error.strerror}.") from None
    started, told = time.monotonic(), False
    while True:
        if answers(host, port) and (store := _connect(host, port)) is not None:
            return Meeting(store, key, nodes, address, endpoint, False)
        if not told and time.monotonic() > started + 3:
            say(f"waiting for somebody at {endpoint}")
            told = True
        time.sleep(0.2)


def _find(host: str, port: int, say: Callable[[str], None]) -> tuple[str, bool]:
    """The address of this machine among the others. In a cluster a machine's name is known once it is there: who comes
    before it waits, and on Kubernetes as long as the other pod waits for a node."""
    started, told = time.monotonic(), False
    limit = math.inf if is_in_environment(_POD_VARIABLE) else _NAME_SECONDS
    while True:
        try:
            return address_among_others(host, port)
        except EnvironmentProblem as error:
            if time.monotonic() > started + limit:
                raise
            if not told and time.monotonic() > started + 2:
                how_long = f"looking for it for {limit:.0f} s" if limit < math.inf else "waiting for its pod"
                say(f"{str(error).rstrip('.')}; {how_long}")
                told = True
        time.sleep(0.5)


def _connect(host: str, port: int) -> Any:
    """The store there; None if it went away meanwhile. In a thread: another program that listens there and says nothing
    would let the call wait for ever."""
    found: list[Any] = []

    def call() -> None:
        with contextlib.suppress(RuntimeError):
            found.append(join_store(host, port, seconds=_STORE_SECONDS))

    thread = threading.Thread(target=call, name="rung-connect", daemon=True)
    with silenced():
        thread.start()
        thread.join(_STORE_SECONDS + 1)
        deadline = time.monotonic() + _STORE_SECONDS
        while thread.is_alive() and time.monotonic() < deadline:
            close_connections()  # which ends its wait for an answer
            thread.join(0.5)
    if not found and answers(host, port):
        raise EnvironmentProblem(
            f"something else than a meeting place of Rung's listens at port {port} of {host}. Give all machines "
            f"another port: --rdzv {host}:PORT."
        )
    return found[0] if found else None
