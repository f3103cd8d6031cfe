"""One job's part of a rendezvous store: its keys, its c10d rendezvous, its end.

A store outlives a job where it is a process of its own, and the next job can use it. So everything that a job writes
stands under a number, its generation, which goes up when the job is over.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousParameters

from rung.distributed.job_key import new_nonce
from rung.distributed.signed_store import SignedStore
from rung.launch.rendezvous.elastic import SETTINGS
from rung.launch.rendezvous.round import JobResult, read_message
from rung.launch.rendezvous.state import DynamicRendezvous

JOIN_SECONDS = 7 * 24 * 3600  # the user decides how long to wait for other machines
STORE_SECONDS = 20
PARTING_SECONDS = 3.0
# torch's defaults make every join and every loss of a machine cost half a minute.
_TIMING = {"last_call_timeout": 1, "keep_alive_interval": 1, "keep_alive_max_attempt": 3}
_ABANDONED_SECONDS = 8.0  # without a heartbeat of any launcher
_GENERATION = "rung/generation"
_RESULT = "ending"
_NUM_GONE = "gone"  # counts the launchers that have read the result


class LauncherLost(Exception):
    """A launcher went away while the world was forming."""


@dataclass(frozen=True)
class StoreSite:
    """Where this launcher reaches the store, and where other machines reach this launcher."""

    nodes: tuple[int, int]  # machines that the job takes, at least and at most
    address: str  # of this machine
    endpoint: str | None  # of the store; None for a job of this machine alone
    hosts_store: bool  # the store ends with this launcher


class JobStore:
    """One generation of a store, as one launcher of the job uses it."""

    def __init__(self, store: Any, key: str, site: StoreSite) -> None:
        self.base = SignedStore(store, key)
        self.generation = self.base.compare_set(_GENERATION, "", "0").decode()
        self.prefix = f"rung/{self.generation}"
        self.store = PrefixStore(self.prefix, self.base)
        parameters = RendezvousParameters(
            backend="c10d",
            endpoint=site.endpoint or "127.0.0.1:0",
            run_id=f"rung-{self.generation}",
            min_nodes=site.nodes[0],
            max_nodes=site.nodes[1],
            local_addr=site.address,
            join_timeout=JOIN_SECONDS,
            **_TIMING,
        )
        self.handler = DynamicRendezvous(self.base, parameters)
        # The launcher that ends the job addresses its result to this one too, if it still waits for a place.
        self.nonce = new_nonce()
        self.store.set(_arrival(self.handler.node), self.nonce)

    def is_current(self) -> bool:
        """False once another launcher has ended the job, or taken it for abandoned."""
        return bool(self.base.get(_GENERATION).decode() == self.generation)

    def is_abandoned(self) -> bool:
        """Whether all launchers of the job that uses this store are gone. Takes a few seconds if so."""
        deadline = time.monotonic() + _ABANDONED_SECONDS
        while self.store.check([SETTINGS]):
            self.handler.num_waiting()  # reads the state, at most once a second
            state = self.handler.state
            if state.participants or state.wait_list or state.redundancy_list:
                return False
            if time.monotonic() > deadline or state.closed:
                return True
            time.sleep(0.2)
        return False

    def end_generation(self) -> None:
        self.base.compare_set(_GENERATION, self.generation, str(int(self.generation) + 1))

    # -- the end of the job ------------------------------------------------------------------------------------------

    def end(self, kind: str, headline: str, nonces: list[str]) -> None:
        """Close the rendezvous and write how the job ended, for the launchers with these nonces and those waiting."""
        self.handler.close()  # from here on no launcher begins to wait for a place
        result = JobResult(kind, headline, [*nonces, *self._nonces_of_waiting()])
        self.store.compare_set(_RESULT, "", json.dumps(asdict(result)))
        self.end_generation()

    def _nonces_of_waiting(self) -> list[str]:
        """A launcher takes no result that is not addressed to its nonce: it may be another job's."""
        state = self.handler.state
        names = [_arrival(node) for node in (*state.wait_list, *state.redundancy_list)]
        return [self.store.get(name).decode() for name in names if self.store.check([name])]

    def acknowledge_end(self) -> None:
        self.store.add(_NUM_GONE, 1)

    def wait_for_acknowledgements(self, num_others: int) -> None:
        """Keep the store up until the others have read the result. They poll every second."""
        state = self.handler.state
        deadline = time.monotonic() + PARTING_SECONDS / 2
        while state.wait_list or state.redundancy_list or self.store.add(_NUM_GONE, 0) < num_others:
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)

    def result(self, nonces: list[str]) -> tuple[str, str]:
        """Kind and headline of how the closed job ended, if that was written for this launcher or these nonces."""
        deadline = time.monotonic() + PARTING_SECONDS
        while not self.store.check([_RESULT]) and time.monotonic() < deadline:
            time.sleep(0.02)
        if not self.store.check([_RESULT]):
            return "failed", "it was closed"
        result = read_message(JobResult, self.store.get(_RESULT), _RESULT)
        is_ours = {self.nonce, *nonces} & set(result.nonces)
        return (result.kind, result.headline) if is_ours else ("failed", "it was closed")


def _arrival(node: Any) -> str:
    return f"arrival/{node.addr}/{node.pid}/{node.local_id}"
