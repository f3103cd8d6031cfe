"""How the launchers of a round agree on one world: each offers its processes, the first plans for all of them.

Values at the store are signed, but a stranger who reaches the store can put older ones back: of an earlier round, or of
another job with the same key. So each launcher makes a nonce for each round. The others answer the nonce of the round's
first launcher in their offers; its plan lists all nonces, and a launcher takes no plan without its own. The key of the
world is derived from these nonces. A value that launchers agreed on before the first round counts only if a launcher of
the round confirms it in its offer, because it has chosen it. The state of the rendezvous can still be set back: it
decides which launchers wait for each other, and which are in a round.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from rung.errors import EnvironmentProblem, StrategyError
from rung.launch.rendezvous.elastic import BEGINS, Unconfirmed
from rung.launch.rendezvous.job_store import STORE_SECONDS, JobStore, LauncherLost
from rung.launch.rendezvous.round import HostOffer, WorldPlan, read_message
from rung.spec.config import RunConfig
from rung.spec.strategy import fit
from rung.system.untrusted import printable


class Agreements:
    """Values that the launchers agreed on before the first round: settings, run directory, whether the run begins."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}  # this launcher goes by these
        self.confirmed: dict[str, str] = {}  # a launcher of this job chose these

    def agree(self, job: JobStore, name: str, value: str) -> str:
        """The value of the first launcher to come. The next round shows whether that launcher is part of this job."""
        found: str = job.store.compare_set(name, "", value).decode()
        self._values[name] = found
        if found == value:
            self.confirmed[name] = found
        return found

    def forget_beginning(self, job: JobStore) -> None:
        """At a new store, launchers agree anew whether the run begins: those that come back find that it has begun."""
        known = self._values.get(BEGINS)
        if known is not None and (not job.store.check([BEGINS]) or job.store.get(BEGINS).decode() != known):
            self._values.pop(BEGINS)
            self.confirmed = {name: value for name, value in self.confirmed.items() if name != BEGINS}

    def check(self, plan: WorldPlan, job: JobStore, endpoint: str | None) -> None:
        """Refuse a value that was found at the store and that no launcher of the round has chosen."""
        for name, value in self._values.items():
            if plan.confirmed.get(name) != value:
                kind = EnvironmentProblem
                if name not in plan.confirmed:  # rather than another value, which the others of this world go by
                    job.end_generation()
                    kind = Unconfirmed
                raise kind(
                    f"{printable(value):.80} was found at {endpoint} as the {name} of this job, and no machine that "
                    "takes part has chosen it. Either those that did are gone, or an entry that another job wrote was "
                    "put back. Start the job again."
                )
        self.confirmed = plan.confirmed


def exchange_offers(
    job: JobStore, host: int, num_hosts: int, own: HostOffer, plan: Callable[[list[HostOffer]], WorldPlan]
) -> WorldPlan:
    """The plan of the world, which `plan` makes on the round's first launcher from the offers of all."""
    number = job.handler.state.round
    name = f"round/{number}"
    store = PrefixStore(name, job.store)

    def is_broken() -> bool:
        if num_hosts == 1:
            return False
        job.handler.num_waiting()  # reads the state, at most once a second
        state = job.handler.state
        return state.round != number or len(state.participants) < num_hosts

    def read(kind: Any, key: str) -> Any:
        return read_message(kind, _poll(store, key, is_broken), key)

    if host == 0:
        store.set("first", own.nonce)
    else:
        own = replace(own, answers=_poll(store, "first", is_broken).decode())
    store.set(f"host/{host}", json.dumps(asdict(own)))
    if host == 0:
        offers = [read(HostOffer, f"host/{other}") for other in range(num_hosts)]
        for other, offer in enumerate(offers):
            if offer.answers != own.nonce:
                raise job.base.replayed(f"{name}/host/{other}")
        store.set("plan", json.dumps(asdict(plan(offers))))
    found: WorldPlan = read(WorldPlan, "plan")
    if found.nonces[host : host + 1] != [own.nonce]:
        raise job.base.replayed(f"{name}/plan")
    return found


def _poll(store: Any, key: str, is_broken: Callable[[], bool]) -> bytes:
    """Wait for a value of another launcher. Polls, because a blocking get would stall this launcher's heartbeats, which
    go through the same connection."""
    deadline = time.monotonic() + STORE_SECONDS
    while not store.check([key]):
        if is_broken() or time.monotonic() > deadline:
            raise LauncherLost
        time.sleep(0.02)
    found: bytes = store.get(key)
    return found


def plan_world(hosts: list[HostOffer], strategy: str, config: RunConfig, address: str, port: int) -> WorldPlan:
    """What the strategy makes of the processes of these launchers; its ranks find each other at address and port."""
    counts = [host.processes for host in hosts]
    try:
        layout, spares = fit(strategy, sum(counts), max(counts), config.schedule, config.servers)
        used, name = sum(counts) - spares, layout.name
    except StrategyError:
        used, name = 0, strategy  # all processes are spares until more launchers join
    attempt = 1 + max(host.attempt for host in hosts)
    micro_batches = [host.micro_batch for host in hosts if host.micro_batch is not None]
    return WorldPlan(
        attempt=attempt,
        processes=counts,
        size=sum(counts),
        used=used,
        strategy=name,
        address=address,
        port=port,
        resume=attempt > 1 or any(host.resume for host in hosts),
        micro_batch=min(micro_batches, default=None),
        confirmed={name: value for host in hosts for name, value in host.confirmed.items()},
        nonces=[host.nonce for host in hosts],
    )
