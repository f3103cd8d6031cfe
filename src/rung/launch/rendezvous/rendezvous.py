"""How the launchers of a job find each other and form its worlds, one after the other.

torch's c10d rendezvous decides which launchers take part in a round. The first launcher of the round then plans the
world (how many processes each machine has, which of them the strategy can use, where the ranks find each other) and
sends the plan to the others through the same store (forming.py). When a round is over, each launcher writes its result
there, so that no machine waits for a dead one. A job on one machine uses a store on loopback.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from rung.distributed.job_key import derive_key, new_key, new_nonce
from rung.distributed.signed_store import LOOPBACK, SignedStore, serve_store
from rung.launch.rendezvous.elastic import FINISHED
from rung.launch.rendezvous.endpoint import connect, reach_store
from rung.launch.rendezvous.forming import Agreements, exchange_offers, plan_world
from rung.launch.rendezvous.job_store import (
    JOIN_SECONDS,
    PARTING_SECONDS,
    STORE_SECONDS,
    JobStore,
    LauncherLost,
    StoreSite,
)
from rung.launch.rendezvous.round import HostOffer, LauncherResult, PeerPoller, PeerStatus, Round, WorldPlan
from rung.spec.config import RunConfig
from rung.system.network import answers, interface_of, split_endpoint


class Rendezvous:
    """One launcher's part in the rendezvous of its job. For one thread, beside the poller that it starts itself."""

    def __init__(self, store: Any, key: str, site: StoreSite) -> None:
        self._key = key
        self._site = site
        self.address = site.address
        self.interface = interface_of(site.address)
        self._round: Round | None = None
        self._world_store: Any = None  # signs with the key of the round's world
        self._round_store: Any = None  # the same under the name of the round; does not keep the other one alive
        self._agreements = Agreements()
        self._ranks_store: Any = None
        self._poller: PeerPoller | None = None
        self._has_left = False
        self._forming = threading.Lock()
        self._use(store)
        # A store in a process of its own remembers a job whose launchers are all gone.
        if site.endpoint is not None and self.job.is_abandoned():
            self.job.end_generation()
            self._use(store)

    def _use(self, store: Any) -> None:
        self.job = JobStore(store, self._key, self._site)
        self._agreements.forget_beginning(self.job)

    def reconnect(self) -> None:
        """After an error at the store: open a new connection, if a store answers."""
        time.sleep(0.5)
        self.stop_polling()
        if self._site.endpoint is not None and not self._site.hosts_store:
            host, port = split_endpoint(self._site.endpoint)
            if answers(host, port) and (store := connect(host, port)) is not None:
                self._use(store)

    def key_of(self, round_: Round) -> str:
        """The key that the ranks of one world sign with. Values signed in another world do not verify under it."""
        return derive_key(self._key, f"world of launchers {' '.join(round_.nonces)}")

    def is_reachable(self) -> bool:
        site = self._site
        return site.endpoint is None or site.hosts_store or answers(*split_endpoint(site.endpoint))

    @property
    def is_alone(self) -> bool:
        """Whether the job is of this machine alone."""
        return self._site.nodes[1] == 1

    def agree(self, name: str, value: str) -> str:
        """The value that the first launcher to come gave for this name."""
        return self._agreements.agree(self.job, name, value)

    def form(
        self, num_local: int, strategy: str, config: RunConfig, resume: bool, micro_batch: int | None = None
    ) -> Round:
        """Join the next round, and return when its world is planned. Blocks until enough machines are there."""
        with self._forming:
            self.stop_polling()
            attempt = self._round.attempt if self._round is not None else 0
            nonce = new_nonce()
            confirmed = self._agreements.confirmed
            own = HostOffer(num_local, resume, micro_batch, attempt, confirmed, nonce, answers=nonce)
            return self._form(own, strategy, config)

    def _form(self, own: HostOffer, strategy: str, config: RunConfig) -> Round:
        job = self.job

        def plan(offers: list[HostOffer]) -> WorldPlan:
            # A store of its own for each world: the addresses of dead ranks would be found in an old one.
            self._ranks_store = serve_store(self.address)
            return plan_world(offers, strategy, config, self.address, self._ranks_store.port)

        def refuse_if_left() -> None:
            if self._has_left:
                raise LauncherLost

        host, num_hosts = job.handler.join(JOIN_SECONDS, refuse_if_left)
        if not job.is_current():  # another launcher took the job for abandoned
            self._use(job.base.unsigned)
            raise LauncherLost
        number = job.handler.state.round
        found = exchange_offers(job, host, num_hosts, own, plan)
        self._agreements.check(found, job, self._site.endpoint)
        self._round = Round.of(found, host)
        self._world_store = SignedStore(job.base.unsigned, self.key_of(self._round))
        self._round_store = PrefixStore(f"{job.prefix}/round/{number}", self._world_store)
        if not self.is_alone:
            self._poller = PeerPoller(job.handler, self._round_store, self._round, number, self._site.nodes[1])
        return self._round

    def peers(self) -> PeerStatus:
        return self._poller.peers if self._poller is not None else PeerStatus()

    def report(self, result: LauncherResult) -> None:
        """Write for the other launchers of this round how it ended here."""
        if self._round is not None and not self.is_alone:
            key = f"result/{self._round.host}"
            _try(lambda: self._round_store.set(key, json.dumps(asdict(result))))

    def stop_polling(self) -> None:
        if self._poller is not None:
            self._poller.stop()
            self._poller = None

    def leave(self) -> None:
        """Leave the round; the others continue. Without it, they would notice after three seconds."""
        self._has_left = True
        self._ranks_store = None  # which closes its port

        def go() -> None:
            with self._forming:  # another thread may still wait in `form`, and gives up within a second
                self.stop_polling()
                self.job.handler.leave(PARTING_SECONDS)

        _try(go)

    def close(self, kind: str, headline: str) -> None:
        """End the job: no launcher can join it any more, and another job can use the store."""
        nonces = self._round.nonces if self._round is not None else []
        num_others = self._round.num_hosts - 1 if self._round is not None else 0

        def end() -> None:
            self.stop_polling()
            if kind == "finished":
                _publish_end(
                    self.job, self._site, self._key
                )  # first: `rung rdzv --once` waits for it, and the time for all this is limited
            self.job.end(kind, headline, nonces)
            self.job.wait_for_acknowledgements(num_others) if self._site.hosts_store else self.job.acknowledge_end()

        _try(end)

    def ending(self) -> tuple[str, str]:
        """Kind and headline of how the job ended that was found closed."""
        return self.job.result(self._round.nonces if self._round is not None else [])


def _publish_end(job: JobStore, site: StoreSite, key: str) -> None:
    """Write FINISHED for the process that serves the store. That may be another process than the one the launcher
    connected to: while ranks train, a store that is replaced goes unnoticed."""
    try:
        job.base.set(FINISHED, "1")
    except Exception:
        if site.endpoint is None or site.hosts_store:
            raise
        store = connect(*split_endpoint(site.endpoint))
        if store is not None:
            SignedStore(store, key).set(FINISHED, "1")


def _try(work: Callable[[], None]) -> None:
    """Best effort with a limit of 3 s: the network may be cut, and the store gone. Errors are ignored."""

    def call() -> None:
        with contextlib.suppress(Exception):
            work()

    thread = threading.Thread(target=call, name="rung-parting", daemon=True)
    thread.start()
    thread.join(PARTING_SECONDS)


def local_rendezvous() -> Rendezvous:
    """For a job of this machine alone: its key never leaves this process, and its store is on loopback."""
    store = serve_store(LOOPBACK, seconds=STORE_SECONDS)
    return Rendezvous(store, new_key(), StoreSite((1, 1), LOOPBACK, None, hosts_store=True))


def open_rendezvous(endpoint: str, key: str, nodes: tuple[int, int], say: Callable[[str], None]) -> Rendezvous:
    """The rendezvous of a job on several machines. One job at a time uses an endpoint; its launchers share the key."""
    store, site = reach_store(endpoint, nodes, say)
    return Rendezvous(store, key, site)
