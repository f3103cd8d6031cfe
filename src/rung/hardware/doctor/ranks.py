"""Checks that need the ranks: rendezvous, equal software, clocks, all_reduce, and the speed of ranks, links and GPUs.

`check_ranks` runs on every rank. It communicates through host memory, on a group of its local; rank 0 collects the
findings of all machines.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from rung.distributed.collectives import gather_json
from rung.distributed.world import World, open_world
from rung.hardware.bench.exchanges import AllReduce, Participant
from rung.hardware.doctor import gpus
from rung.hardware.doctor.finding import Finding, at, failed, not_here, ok, warning
from rung.spec.strategy import parse
from rung.spec.version import VERSION
from rung.system.launcher_env import environment_local_rank, environment_local_size, environment_size
from rung.system.units import human_bytes, human_seconds

# Beyond it, logs of machines cannot be put in order. Rung does not need equal clocks: a machine judges the age of
# another's heartbeat by its local clock. torchrun waits 15 s.
_SKEW_SECONDS = 0.5
_SLOW, _VERY_SLOW = 1.5, 3.0
_SLOW_LINK = 3.0
_SLOW_RENDEZVOUS_SECONDS = 20.0
_LINK_BYTES = 4 * 2**20
_ROUNDS = 8


@dataclass(frozen=True)
class RankCheckSettings:
    """How `check_ranks` forms the group, and replacements for its clock and its work."""

    backend: str = "auto"
    device: str = "auto"
    timeout_seconds: int = 60
    started: float = 0.0  # time.time() when the ranks were started; 0 if it is unknown
    clock: Callable[[], float] = time.time
    work: Callable[[], None] | None = None  # replaces the matrix product of the speed check


def check_ranks(local: Sequence[Finding], settings: RankCheckSettings) -> list[Finding]:
    """Join the group and run all checks. `local` are this machine's findings. Rank 0 returns all, the others none."""
    began = time.time()
    layout = parse("ddp", environment_size(), environment_local_size())
    options = {"device": settings.device, "backend": settings.backend}
    with open_world(layout, timeout_seconds=settings.timeout_seconds, **options) as world:
        control = world.host_group()
        dist.barrier(group=control)
        met_seconds = time.time() - (settings.started or began)
        return _RankChecks(world, control, settings).all(local, met_seconds)


def rendezvous_failed(error: BaseException | str) -> Finding:
    """The finding for ranks that could not form a group."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    fix = "see the checks above; between machines, open the ports and name the interface with GLOO_SOCKET_IFNAME"
    return failed("rendezvous", f"the ranks could not connect: {lines[-1]}", fix)


class _RankChecks:
    """One rank's part in the checks."""

    def __init__(self, world: World, control: dist.ProcessGroup, settings: RankCheckSettings) -> None:
        self._world, self._control, self._settings = world, control, settings
        self._host = socket.gethostname()
        self._hosts: list[str] = self.gather(self._host)

    def all(self, local: Sequence[Finding], met_seconds: float) -> list[Finding]:
        seen = at(self._host, local) if environment_local_rank() == 0 else []
        machines = self.gather([asdict(finding) for finding in seen])
        findings = [
            self._rendezvous(met_seconds),
            self._versions(),
            self._clocks(),
            self._collective(),
            self._pace(),
            self._links(),
            *self._gpu_speed(),
        ]
        if not self._world.is_main:
            return []
        several = len(set(self._hosts)) > 1
        collected = [Finding(**finding) for local in machines for finding in local]
        return [*(collected if several else at("", collected)), *findings]

    def gather(self, value: Any) -> list[Any]:
        return gather_json(value, self._control)

    def _rendezvous(self, seconds: float) -> Finding:
        size, hosts = self._world.size, len(set(self._hosts))
        found = f"{size} rank{'s' * (size != 1)} on {hosts} machine{'s' * (hosts != 1)} met in {human_seconds(seconds)}"
        found += f" ({self._world.backend})"
        if seconds > _SLOW_RENDEZVOUS_SECONDS:
            return warning("rendezvous", found, "see host name above: a failing name lookup costs seconds")
        return ok("rendezvous", found)

    def _versions(self) -> Finding:
        versions = {"torch": torch.__version__, "rung": VERSION}
        versions["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "-")
        return judge_versions(self.gather(versions), self._hosts)

    def _clocks(self) -> Finding:
        offsets = clock_offsets(self._world.rank, self._world.size, self._control, self._settings.clock)
        return judge_clocks(offsets, self._hosts)

    def _collective(self) -> Finding:
        """Check and time an all_reduce on the group that training uses."""
        participant = Participant(self._world.rank, self._world.size, self._world.device)
        times, wrong = [], 0
        for num_bytes in (2**10, 2**22):
            exchange = AllReduce(participant, torch.float32, num_bytes, "sum")
            exchange.fill()
            exchange.run()
            wrong += exchange.num_wrong()
            times.append(min(self._timed(exchange.run) for _ in range(_ROUNDS)))
        if sum(self.gather(wrong)):
            return failed("all_reduce", "wrong sums", "do not train here; rung bench collectives shows which sizes")
        small, large = human_seconds(times[0]), human_seconds(times[1])
        return ok("all_reduce", f"correct; {small} for 1 KiB, {large} for {human_bytes(2**22)}")

    def _pace(self) -> Finding:
        """Time the same work on all ranks at once. The best of several rounds counts: disturbances only add time."""
        work = self._settings.work or _product(self._world.device)
        self._timed(work)
        best = min(self._timed(work) for _ in range(_ROUNDS))
        return judge_pace(self.gather(best), self._hosts)

    def _timed(self, work: Callable[[], object]) -> float:
        dist.barrier(group=self._control)
        is_cuda = self._world.device.type == "cuda"
        torch.cuda.synchronize(self._world.device) if is_cuda else None
        started = time.perf_counter()
        work()
        torch.cuda.synchronize(self._world.device) if is_cuda else None
        return time.perf_counter() - started

    def _links(self) -> Finding:
        """Time a message from each rank to the next, one pair after the other, through host memory."""
        rank, size = self._world.rank, self._world.size
        if size == 1:
            return not_here("links", "one rank has none")
        block, seconds = torch.zeros(_LINK_BYTES, dtype=torch.uint8), 0.0
        for sender in range(size):
            receiver = (sender + 1) % size
            for _ in range(3):
                dist.barrier(group=self._control)
                started = time.perf_counter()
                if rank == sender:
                    dist.send(block, receiver, group=self._control)
                elif rank == receiver:
                    dist.recv(block, sender, group=self._control)
                    took = time.perf_counter() - started
                    seconds = min(seconds, took) if seconds else took
        return judge_links([_LINK_BYTES / took for took in self.gather(seconds)], self._hosts)

    def _gpu_speed(self) -> list[Finding]:
        device = self._world.device
        if device.type != "cuda":
            return []
        speeds = self.gather(gpus.probe_speed(device))
        names = self.gather(torch.cuda.get_device_name(device))
        return [gpus.judge_speed(names, speeds, [_place(rank, self._hosts) for rank in range(self._world.size)])]


def clock_offsets(
    rank: int, size: int, group: dist.ProcessGroup, clock: Callable[[], float], rounds: int = _ROUNDS
) -> list[tuple[float, float]]:
    """(offset, uncertainty) of each rank's clock against rank 0's, in seconds; empty on other ranks.

    As in NTP: rank 0 records when it sends a request and receives the reply, the other rank when it receives and
    replies. The shortest round trip counts; half of it is the uncertainty.
    """
    found = [(0.0, 0.0)]
    for other in range(1, size):
        trips = []
        for _ in range(rounds):
            if rank == 0:
                asked = clock()
                dist.send(torch.zeros(1, dtype=torch.float64), other, group=group)
                answer = torch.zeros(2, dtype=torch.float64)
                dist.recv(answer, other, group=group)
                came = clock()
                heard, answered = answer.tolist()
                trip = (came - asked) - (answered - heard)
                trips.append((trip, ((heard - asked) + (answered - came)) / 2))
            elif rank == other:
                dist.recv(torch.zeros(1, dtype=torch.float64), 0, group=group)
                heard = clock()
                dist.send(torch.tensor([heard, clock()], dtype=torch.float64), 0, group=group)
        if rank == 0:
            trip, offset = min(trips)
            found.append((offset, trip / 2))
    return found if rank == 0 else []


def _product(device: torch.device) -> Callable[[], object]:
    size = 4096 if device.type == "cuda" else 256
    matrix = torch.randn(size, size, device=device)
    return lambda: torch.mm(matrix, matrix)


# -- verdicts --------------------------------------------------------------------------------------------------------


def judge_versions(versions: Sequence[dict[str, str]], hosts: Sequence[str]) -> Finding:
    for key in versions[0]:
        values = {own[key]: hosts[rank] for rank, own in reversed(list(enumerate(versions)))}
        if len(values) > 1:
            listed = ", ".join(f"{value} on {host}" for value, host in values.items())
            return failed("same software", f"{key} differs: {listed}", f"make {key} the same on all machines")
    return ok("same software", "the same on all ranks")


def judge_clocks(offsets: Sequence[tuple[float, float]], hosts: Sequence[str]) -> Finding:
    if len(offsets) < 2:
        return not_here("clocks", "one rank has no other to compare with")
    rank, (offset, unsure) = max(enumerate(offsets), key=lambda item: abs(item[1][0]))
    found = f"rank {rank} on {hosts[rank]} is {offset * 1e3:+.3g} ms (+-{unsure * 1e3:.2g}) from rank 0"
    fix = f"start chrony or ntpd on {hosts[rank]}"
    if abs(offset) - unsure > _SKEW_SECONDS:
        return warning("clocks", f"{found}: logs cannot be put in order", fix)
    return ok("clocks", f"{abs(offset) * 1e3:.3g} ms (+-{unsure * 1e3:.2g}) apart at most")


def judge_pace(seconds: Sequence[float], hosts: Sequence[str]) -> Finding:
    """Compare the slowest rank with the median of the others."""
    if len(seconds) < 2:
        return not_here("slow rank", "one rank has no other to compare with")
    rank = max(range(len(seconds)), key=lambda number: seconds[number])
    others = statistics.median([took for number, took in enumerate(seconds) if number != rank])
    ratio = seconds[rank] / others
    if ratio < _SLOW:
        return ok("slow rank", f"none: the slowest takes {ratio:.2f} times as long as the others")
    found = (
        f"{_place(rank, hosts)} takes {human_seconds(seconds[rank])} for what takes the others {human_seconds(others)}"
    )
    fix = f"see what else runs on {hosts[rank]} (top, nvidia-smi), or leave it out: all ranks wait for the slowest"
    return (failed if ratio >= _VERY_SLOW else warning)("slow rank", f"{found}, {ratio:.1f} times", fix)


def judge_links(rates: Sequence[float], hosts: Sequence[str]) -> Finding:
    """Compare links of one kind, inside or between machines. `rates` are bytes/s into each rank from the previous."""
    size = len(rates)
    for inside in (True, False):
        same_kind = {rank: rates[rank] for rank in range(size) if (hosts[rank] == hosts[rank - 1]) == inside}
        if len(same_kind) < 3:
            continue
        typical = statistics.median(same_kind.values())
        slowest = min(same_kind, key=lambda rank: same_kind[rank])
        if same_kind[slowest] * _SLOW_LINK < typical:
            ends = f"{_place((slowest - 1) % size, hosts)} to {_place(slowest, hosts)}"
            found = f"{ends}: {same_kind[slowest] / 1e9:.3g} GB/s, the others {typical / 1e9:.3g}"
            return warning(
                "links", found, f"check the cable and the interface of {hosts[slowest]} (ethtool), or leave it out"
            )
    return ok("links", f"{min(rates) / 1e9:.3g} to {max(rates) / 1e9:.3g} GB/s from rank to rank, through host memory")


def _place(rank: int, hosts: Sequence[str]) -> str:
    return f"rank {rank} on {hosts[rank]}" if len(set(hosts)) > 1 else f"rank {rank}"
