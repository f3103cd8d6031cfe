"""Where the processes of each command listen: on loopback alone, unless the user asked for more."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.faults.hosts import Hosts, possible
from tests.launcher import WarmLauncher
from tests.marks import slow
from tests.sockets import Listener, family_of, listeners

_TASK = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

defaults = {"batch_size": 8, "steps": 2, "device": "cpu", "log_every": 1}
remote = ["0"]

def model(): return nn.Sequential(nn.Embedding(16, 8), nn.Flatten(), nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 2))
def train_data():
    x = torch.randint(0, 16, (64, 4), generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum(1) > 30).long())
def loss(output, target): return F.cross_entropy(output, target)
def optimizer(model): return torch.optim.SGD(model.parameters(), lr=0.1)
"""


def _listening_while(
    *words: str,
    folder: Path,
    prefix: tuple[str, ...] = (),
    through: Sequence[str] = ("-m",),
    variables: Mapping[str, str] | None = None,
) -> tuple[set[Listener], str]:
    """Every place at which a command or a process that it started ever listened."""
    (folder / "task.py").write_text(_TASK)
    job = subprocess.Popen(
        [*prefix, sys.executable, *through, "rung", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})},
    )

    try:
        with _looking_at(job.pid) as found:
            told, _ = job.communicate(timeout=180)
    finally:
        job.kill()
    assert job.returncode == 0, told
    return found, told


@contextlib.contextmanager
def _looking_at(pid: int) -> Iterator[set[Listener]]:
    """Every place at which a process or one that it started ever listens meanwhile."""
    found: set[Listener] = set()
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.02):
            found.update(listeners(family_of(pid)))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield found
    finally:
        over.set()
        looking.join()


def _is_loopback(listener: Listener) -> bool:
    return ipaddress.ip_address(listener.address).is_loopback


# One row for each way in which ranks come to be and talk; strategies of the mesh all open the same world.
COMMANDS = [
    "train task.py --strategy ddp --nproc 2 --checkpoint-every 1 --set workers=1",
    "train task.py --strategy ps --nproc 2",
    "train task.py --strategy rpc-pp2",
    "compare task.py --nproc 2 --strategies zero2 pp2 --steps 4 --out page.html",
    "bench collectives --nproc 2 --sizes 1K --seconds 0.01",
    "doctor --nproc 2",
]
MORE = [
    "train task.py --strategy zero3 --nproc 1:2 --replicate-state",
    "train task.py --strategy ps-async --nproc 2",
    "verify task.py --nproc 2 --strategies tp2 hsdp --steps 2",
    "train task.py --strategy single",
    "train task.py --strategy dp2",
    "train task.py --strategy zero1 --nproc 2",
    "train task.py --strategy zero2 --nproc 2",
    "train task.py --strategy hsdp --nproc 4",
    "train task.py --strategy tp2",
    "train task.py --strategy pp2",
    "train task.py --strategy pp2,ddp2",
    "train task.py --strategy ddp+ps --nproc 3",
    "train task.py --strategy ddp --nproc 2 --profile 1",
    "plan task.py --cluster 2xH100",
    "explain task.py --strategy ddp --nproc 2",
]
ALONE = ("single", "dp2", "plan", "explain")  # no process of these listens at all


@pytest.mark.parametrize("command", [*COMMANDS, *(slow(more) for more in MORE)])
def test_a_command_listens_on_loopback_alone(launcher: WarmLauncher, command: str, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(_TASK)
    with _looking_at(launcher.pid) as found:
        outcome = launcher.call(tmp_path, *command.split(), limit=180)
    assert outcome.code == 0, outcome.output
    assert {listener for listener in found if not _is_loopback(listener)} == set()
    if not any(word in command for word in ALONE):
        assert len({listener.pid for listener in found}) > 1, "the test did not see the sockets of ranks"


@pytest.mark.skipif(not possible(), reason="network namespaces need root")
@pytest.mark.parametrize(
    "command", ["train task.py --strategy ps --nproc 2", slow("bench collectives --nproc 2 --sizes 1K --seconds 0.01")]
)
def test_a_job_of_one_machine_stays_on_loopback_whatever_interface_is_named(command: str, tmp_path: Path) -> None:
    with Hosts(1) as hosts:
        named = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}
        found, told = _listening_while(*command.split(), folder=tmp_path, prefix=(*hosts.prefix(0),), variables=named)
    assert len({listener.pid for listener in found}) > 1 and all(map(_is_loopback, found))
    line = "GLOO_SOCKET_IFNAME=eth0 and NCCL_SOCKET_IFNAME=eth0 are in the environment, but this job uses loopback"
    assert told.count(line) == 1


def test_ranks_of_torchrun_listen_on_loopback_alone(tmp_path: Path) -> None:
    """The store is torchrun's own and listens everywhere; what ranks open beside it does not."""
    (tmp_path / "task.py").write_text(_TASK)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    found, _ = _listening_while("train", "task.py", "--strategy", "ddp", folder=tmp_path, through=words)
    # By ports: a rank holds torchrun's for an instant too, after torchrun has forked and before it is another program.
    open_to_all = {listener.port for listener in found if not _is_loopback(listener)}
    holders = [{listener.pid for listener in found if listener.port == port} for port in open_to_all]
    assert open_to_all and set.intersection(*holders), "one process, torchrun, has opened all of these"
    assert {listener.port for listener in found} - open_to_all


def test_a_store_for_others_is_kept_where_it_is_asked_for(tmp_path: Path) -> None:
    for place, expected in (("127.0.0.1:0", "127.0.0.1"), ("0", "0.0.0.0")):
        server = subprocess.Popen([sys.executable, "-m", "rung", "rdzv", place], stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            told = server.stdout.readline()
            assert ("of all interfaces of this machine" in told) == (expected == "0.0.0.0")
            assert {listener.address for listener in listeners({server.pid})} == {expected}
        finally:
            server.kill()
            server.wait()


@pytest.mark.skipif(not possible(), reason="network namespaces need root")
@pytest.mark.parametrize("strategy", [slow("ddp"), "ps"])
def test_machines_listen_on_the_interface_that_they_meet_through(strategy: str, tmp_path: Path) -> None:
    """Each machine has another interface, on which nothing may listen."""
    with Hosts(2) as hosts:
        for number in range(2):
            for words in (
                ["link", "add", "other", "type", "veth", "peer", "name", "end"],
                ["link", "set", "other", "up"],
            ):
                subprocess.run(["ip", "-n", hosts.names[number], *words], check=True)
            address = ["addr", "add", f"10.99.{number}.1/24", "dev", "other"]
            subprocess.run(["ip", "-n", hosts.names[number], *address], check=True)
        command = ["train", "task.py", "--strategy", strategy, "--nproc", "1", "--nnodes", "2", "--out", "run"]
        command += ["--rdzv", f"{hosts.address(0)}:29500"]
        found: dict[int, set[Listener]] = {}

        def start(number: int) -> None:
            (tmp_path / str(number)).mkdir()
            words = (*hosts.prefix(number),)
            found[number], _ = _listening_while(*command, folder=tmp_path / str(number), prefix=words)

        machines = [threading.Thread(target=start, args=(number,)) for number in range(2)]
        for machine in machines:
            machine.start()
        for machine in machines:
            machine.join()
        for number in range(2):
            assert {listener.address for listener in found[number]} == {hosts.address(number)}
