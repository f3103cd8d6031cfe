"""Reaching the store of a rendezvous: serve it on the machine that the endpoint names, connect to it elsewhere."""

from __future__ import annotations

import contextlib
import errno
import math
import threading
import time
from collections.abc import Callable
from typing import Any

from rung.distributed.signed_store import join_store, serve_store
from rung.errors import EnvironmentProblem
from rung.launch.rendezvous.job_store import STORE_SECONDS, StoreSite
from rung.system.launcher_env import is_in_environment
from rung.system.network import address_among_others, answers, close_connections, split_endpoint
from rung.system.processes import silenced

_NAME_SECONDS = 60.0  # for the name of another machine to become known
_POD_VARIABLE = "KUBERNETES_SERVICE_HOST"  # which every pod has


def reach_store(endpoint: str, nodes: tuple[int, int], say: Callable[[str], None]) -> tuple[Any, StoreSite]:
    """The store at an endpoint. The launcher on that machine serves it, unless another process does already."""
    host, port = split_endpoint(endpoint)
    address, is_ours = _own_address(host, port, say)
    if is_ours:
        # The store listens at the address that the other machines use, where the name may mean loopback here.
        host = host if answers(host, port) else address
        endpoint = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if is_ours and not answers(host, port):
        try:
            store = serve_store(address, port, seconds=STORE_SECONDS)
            return store, StoreSite(nodes, address, endpoint, hosts_store=True)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:  # else another launcher of this machine was quicker
                raise EnvironmentProblem(f"{endpoint} cannot be listened at: {error.strerror}.") from None
    started, has_said = time.monotonic(), False
    while True:
        if answers(host, port) and (store := connect(host, port)) is not None:
            return store, StoreSite(nodes, address, endpoint, hosts_store=False)
        if not has_said and time.monotonic() > started + 3:
            say(f"waiting for the machine at {endpoint}")
            has_said = True
        time.sleep(0.2)


def _own_address(host: str, port: int, say: Callable[[str], None]) -> tuple[str, bool]:
    """The address of this machine among the others, and whether the endpoint names this machine.

    In a cluster a machine's name resolves once the machine is up. A launcher that starts earlier waits for it, on
    Kubernetes for as long as the other pod waits for a node.
    """
    started, has_said = time.monotonic(), False
    limit = math.inf if is_in_environment(_POD_VARIABLE) else _NAME_SECONDS
    while True:
        try:
            return address_among_others(host, port)
        except EnvironmentProblem as error:
            if time.monotonic() > started + limit:
                raise
            if not has_said and time.monotonic() > started + 2:
                how_long = f"looking for it for {limit:.0f} s" if limit < math.inf else "waiting for its pod"
                say(f"{str(error).rstrip('.')}; {how_long}")
                has_said = True
        time.sleep(0.5)


def connect(host: str, port: int) -> Any:
    """The store there; None if it went away meanwhile. In a thread: another program that listens there and never
    answers would block the call for ever."""
    found: list[Any] = []

    def call() -> None:
        with contextlib.suppress(RuntimeError):
            found.append(join_store(host, port, seconds=STORE_SECONDS))

    thread = threading.Thread(target=call, name="rung-connect", daemon=True)
    with silenced():
        thread.start()
        thread.join(STORE_SECONDS + 1)
        deadline = time.monotonic() + STORE_SECONDS
        while thread.is_alive() and time.monotonic() < deadline:
            close_connections()  # which ends its wait for an answer
            thread.join(0.5)
    if not found and answers(host, port):
        raise EnvironmentProblem(
            f"something else than a rendezvous of Rung listens at port {port} of {host}. Give all machines another "
            f"port: --rdzv {host}:PORT."
        )
    return found[0] if found else None
