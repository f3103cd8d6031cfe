"""What a stranger who reaches the port of RPC can do: nothing. TensorPipe itself would do all that they ask for."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rung.distributed.connection_filter import ConnectionFilter
from rung.distributed.job_key import new_key
from rung.distributed.signed_store import LOOPBACK, ForgedMessage, SignedStore, serve_store
from rung.errors import EnvironmentProblem
from tests.harness import on_ranks
from tests.launcher import WarmLauncher, assert_soon
from tests.security.test_stores import SLOW_TASK
from tests.sockets import family_of, listeners

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="socket filters are Linux's")

# A process with torch and without the key of the job. The names are those under which torch's agents find each other.
_ATTACK = r"""
import os, sys, warnings
warnings.simplefilter("ignore")
import torch
from torch.distributed import HashStore, rpc
from torch._C import _distributed_autograd, _distributed_rpc as parts
os.environ["TP_SOCKET_IFNAME"] = "lo"
store, ports = HashStore(), sys.argv[2:]
for number, port in enumerate(ports):
    store.set(f"names/{number}", f"port-{port}")
    store.set(f"addrs/port-{port}", f"uv://127.0.0.1:{port}")
options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=4, _transports=["uv"], _channels=["basic"])
_distributed_autograd._init(len(ports))
rpc.api._init_rpc_states(parts.TensorPipeAgent(store, "stranger", len(ports), len(ports) + 1, options, {}, []))
read = "aten::from_file", 4.0, sys.argv[1], False, 6
asked = {"dtype": torch.uint8, "layout": None, "device": None, "pin_memory": None}
futures = [
    parts._invoke_rpc_builtin(parts.WorkerInfo(f"port-{port}", number), *read, **asked)
    for number, port in enumerate(ports)
]
for future in futures:
    try:
        print("read:", bytes(future.wait().tolist()).decode(), flush=True)
    except RuntimeError as error:
        print("refused:", str(error)[:200], flush=True)
os._exit(0)
"""


def _attack(pids: set[int], secret: Path) -> str:
    """What these processes answer at all places where they listen."""
    ports = sorted(str(listener.port) for listener in listeners(pids))
    command = [sys.executable, "-c", _ATTACK, str(secret), *ports]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    assert told.count("\n") == len(ports) > 0
    return told


def test_a_stranger_has_no_files_read_by_a_parameter_server(launcher: WarmLauncher, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(SLOW_TASK)
    secret = tmp_path / "secret"
    secret.write_text("secret")
    told = []

    def attack(folder: Path) -> None:
        assert_soon((folder / "run" / "metrics.jsonl").exists, "training did not begin", seconds=60)
        told.append(_attack(family_of(launcher.pid) - {launcher.pid}, secret))
        os.kill(launcher.pid, signal.SIGINT)

    words = ["train", "task.py", "--strategy", "ps", "--nproc", "2", "--steps", "400", "--out", "run"]
    outcome = launcher.call(tmp_path, *words, during=attack)
    assert "read:" not in told[0]
    assert outcome.code == 130, f"the job did not go on until it was interrupted:\n{outcome.output}"


def test_the_attack_works_on_an_agent_without_a_filter(tmp_path: Path) -> None:
    """Or the test above would show nothing."""
    secret = tmp_path / "secret"
    secret.write_text("secret")
    program = r"""
import os, sys, warnings
warnings.simplefilter("ignore")
from torch.distributed import rpc
os.environ["TP_SOCKET_IFNAME"] = "lo"
options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{sys.argv[1]}", _transports=["uv"], _channels=["basic"])
rpc.init_rpc("rank-0", rank=0, world_size=1, rpc_backend_options=options)
print("ready", flush=True)
sys.stdin.read()
os._exit(0)
"""
    victim = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "store")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert victim.stdout is not None and victim.stdout.readline() == "ready\n"
        assert "read: secret\n" in _attack({victim.pid}, secret)
    finally:
        victim.kill()
        victim.wait()


def _call_each_other() -> list[int]:
    from rung.distributed.world import open_world
    from rung.spec.strategy import parse
    from rung.system.launcher_env import environment_size

    with open_world(parse("ps", environment_size()), device="cpu", timeout_seconds=30) as world:
        return [world.calls.call(rank, os.getpid) for rank in range(3) for _ in range(2)]


def test_ranks_call_each_other_and_themselves() -> None:
    found = on_ranks(_call_each_other, 3)
    assert found[0] == found[1] == found[2] and len(set(found[0])) == 3


def _call_each_other_late() -> list[int]:
    from rung.distributed import rpc

    start, rank = rpc.Calls.start, int(os.environ["RANK"])

    def start_late(calls: rpc.Calls, *args: Any) -> Any:
        rpc.Calls.start = start  # type: ignore[method-assign]
        time.sleep(2 if rank == 2 else 0)  # by then the others have connected and wait for this one
        return start(calls, *args)

    rpc.Calls.start = start_late  # type: ignore[method-assign]
    return _call_each_other()


def test_a_rank_that_connects_after_all_others_is_admitted() -> None:
    found = on_ranks(_call_each_other_late, 3)
    assert found[0] == found[1] == found[2] and len(set(found[0])) == 3


# -- the filter by itself ----------------------------------------------------------------------------------------------


@pytest.fixture
def store() -> SignedStore:
    return SignedStore(serve_store(LOOPBACK), new_key())


@pytest.fixture
def listener() -> Any:
    with socket.create_server((LOOPBACK, 0)) as found:
        found.settimeout(5)
        yield found


_STRANGER = """
import socket, struct, sys
peer = socket.create_connection(("127.0.0.1", int(sys.argv[1])), 5, ("127.0.0.1", int(sys.argv[2])))
peer.sendall(b"word")
print(peer.getsockname()[1], flush=True)
sys.stdin.read()
peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # its port is free at once
"""


def _come(port: int, origin: int = 0) -> tuple[subprocess.Popen[str], int]:
    """Another process that connects and says something, and the port from which it does."""
    command = [sys.executable, "-c", _STRANGER, str(port), str(origin)]
    found = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert found.stdout is not None
    return found, int(found.stdout.readline())


def _address(listener: socket.socket) -> bytes:
    return f"uv://{LOOPBACK}:{listener.getsockname()[1]}".encode()


def test_only_what_a_rank_has_announced_is_heard(store: SignedStore, listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    filtered = ConnectionFilter(0, 2, store, "test")
    filtered.guard("addrs/rank-0", _address(listener))
    peer, origin = _come(port)
    try:
        accepted, _ = listener.accept()
        accepted.settimeout(1)
        with pytest.raises(TimeoutError):
            accepted.recv(4)
        assert f"{LOOPBACK}:{origin} that no rank has announced" in str(filtered.failure())
        store.set("test/opened/1", f'[[["{LOOPBACK}", {origin}], ["{LOOPBACK}", {port}]]]')
        accepted.settimeout(5)
        assert accepted.recv(4) == b"word"
        accepted.close()
        # When all are connected, nobody else comes in.
        store.set("test/connected/1", "yes")
        filtered.seal(5)
        with pytest.raises(TimeoutError):
            socket.create_connection((LOOPBACK, port), 1)
    finally:
        filtered.end()
        peer.kill()
        peer.wait()


def test_an_announcement_lets_one_connection_in(store: SignedStore, listener: socket.socket) -> None:
    """A rank that has ended leaves its port to others, who were not announced."""
    port = listener.getsockname()[1]
    filtered = ConnectionFilter(0, 2, store, "test")
    filtered.guard("addrs/rank-0", _address(listener))
    peer, origin = _come(port)
    store.set("test/opened/1", f'[[["{LOOPBACK}", {origin}], ["{LOOPBACK}", {port}]]]')
    try:
        with listener.accept()[0] as accepted:
            accepted.settimeout(5)
            assert accepted.recv(4) == b"word"
            peer.communicate()
        peer, _ = _come(port, origin)
        with listener.accept()[0] as accepted:
            accepted.settimeout(1)
            with pytest.raises(TimeoutError):
                accepted.recv(4)
    finally:
        filtered.end()
        peer.kill()
        peer.wait()


def test_a_rank_without_filters_keeps_no_other_waiting(store: SignedStore, listener: socket.socket) -> None:
    filtered = ConnectionFilter(0, 2, store, "test")
    filtered.problem = "this system takes no socket filter"
    filtered.guard("addrs/rank-0", _address(listener))
    try:
        with socket.create_server((LOOPBACK, 0)) as other, socket.create_connection(other.getsockname()) as opened:
            own = list(opened.getsockname())
            deadline = time.monotonic() + 10
            while not store.check(["test/opened/0"]) or own not in [pair[0] for pair in json.loads(_opened(store))]:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        store.set("test/connected/1", "yes")
        filtered.seal(5)
        assert store.check(["test/connected/0"]) and filtered.failure() is None
        socket.create_connection((LOOPBACK, listener.getsockname()[1]), 1).close()
    finally:
        filtered.end()


def _opened(store: SignedStore) -> bytes:
    return store.get("test/opened/0")


def test_an_announcement_of_a_stranger_is_refused(store: SignedStore, listener: socket.socket) -> None:
    filtered = ConnectionFilter(0, 2, store, "test")
    filtered.guard("addrs/rank-0", _address(listener))
    port = listener.getsockname()[1]
    peer, origin = _come(port)
    try:
        store.unsigned.set("test/opened/1", f'[[["{LOOPBACK}", {origin}], ["{LOOPBACK}", {port}]]]')
        accepted, _ = listener.accept()
        with accepted:
            accepted.settimeout(1)
            with pytest.raises(TimeoutError):
                accepted.recv(4)
        assert isinstance(filtered.failure(), ForgedMessage)
    finally:
        filtered.end()
        peer.kill()
        peer.wait()


@pytest.mark.parametrize("accepted", [False, True])
def test_who_came_before_the_filter_ends_the_job(store: SignedStore, listener: socket.socket, accepted: bool) -> None:
    filtered = ConnectionFilter(0, 2, store, "test")
    peer, _ = _come(listener.getsockname()[1])
    try:
        kept = listener.accept() if accepted else None
        with pytest.raises(EnvironmentProblem, match="before the address was published"):
            filtered.guard("addrs/rank-0", _address(listener))
        del kept
    finally:
        peer.kill()
        peer.wait()
