"""Checks that need the ranks themselves: do they meet, agree, keep the same time, and run at the same pace?

`examine` runs on every rank. What it sends goes through host memory, on a group of its own; the first rank brings the
findings of all machines together.
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

from rung.bench.exchanges import AllReduce, Seat
from rung.doctor import gpus
from rung.doctor.finding import Finding, at, failed, not_here, ok, warning
from rung.environment import environment_local_rank, environment_local_size, environment_size
from rung.sizes import human_bytes, human_seconds
from rung.strategy import parse
from rung.version import VERSION
from rung.world import World, gather_json, open_world

# Rung's machines take one for lost whose last sign of life is so old by their own clock; torchrun's wait 15 s.
_LOST_SECONDS = 3.0
_SKEW_SECONDS = 0.5
_SLOW, _VERY_SLOW = 1.5, 3.0
_SLOW_LINK = 3.0
_SLOW_MEETING_SECONDS = 20.0
_LINK_BYTES = 4 * 2**20
_ROUNDS = 8


@dataclass(frozen=True)
class Examination:
    """What is to be looked at."""

    backend: str = "auto"
    device: str = "auto"
    timeout_seconds: int = 60
    started: float = 0.0  # by the clock of whoever started the ranks; 0 where that is not known
    clock: Callable[[], float] = time.time
    work: Callable[[], None] | None = None  # instead of a small matrix product, the same on each rank


def examine(own: Sequence[Finding], how: Examination) -> list[Finding]:
    """Join the world and look. `own` is what was found on this machine; the first rank gets all, the others none."""
    began = time.time()
    layout = parse("ddp", environment_size(), environment_local_size())
    with open_world(layout, device=how.device, backend=how.backend, timeout_seconds=how.timeout_seconds) as world:
        control = world.host_group()
        dist.barrier(group=control)
        met_seconds = time.time() - (how.started or began)
        return _Look(world, control, how).all(own, met_seconds)


def rendezvous_failed(error: BaseException | str) -> Finding:
    """What there is to say where the ranks did not meet."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    fix = "see the checks above; between machines, open the ports and name the interface with GLOO_SOCKET_IFNAME"
    return failed("rendezvous", f"the ranks did not get through: {lines[-1]}", fix)


class _Look:
    """One rank's part in the checks."""

    def __init__(self, world: World, control: dist.ProcessGroup, how: Examination) -> None:
        self._world, self._control, self._how = world, control, how
        self._host = socket.gethostname()
        self._hosts: list[str] = self.gather(self._host)

    def all(self, own: Sequence[Finding], met_seconds: float) -> list[Finding]:
        seen = at(self._host, own) if environment_local_rank() == 0 else []
        machines = self.gather([asdict(finding) for finding in seen])
        findings = [
            self._meeting(met_seconds),
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
        told = [Finding(**finding) for findings in machines for finding in findings]
        return [*(told if several else at("", told)), *findings]

    def gather(self, value: Any) -> list[Any]:
        return gather_json(value, self._control)

    def _meeting(self, seconds: float) -> Finding:
        size, hosts = self._world.size, len(set(self._hosts))
        found = f"{size} rank{'s' * (size != 1)} on {hosts} machine{'s' * (hosts != 1)} met in {human_seconds(seconds)}"
        found += f" ({self._world.backend})"
        if seconds > _SLOW_MEETING_SECONDS:
            return warning("rendezvous", found, "see host name above: a name that is looked up in vain costs seconds")
        return ok("rendezvous", found)

    def _versions(self) -> Finding:
        own = {"torch": torch.__version__, "rung": VERSION, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "-")}
        return judge_alike(self.gather(own), self._hosts)

    def _clocks(self) -> Finding:
        offsets = clock_offsets(self._world.rank, self._world.size, self._control, self._how.clock)
        return judge_clocks(offsets, self._hosts)

    def _collective(self) -> Finding:
        """On the group that training uses: right, and how long."""
        seat = Seat(self._world.rank, self._world.size, self._world.device)
        times, wrong = [], 0
        for num_bytes in (2**10, 2**22):
            exchange = AllReduce(seat, torch.float32, num_bytes, "sum")
            exchange.fill()
            exchange.run()
            wrong += exchange.num_wrong()
            times.append(min(self._timed(exchange.run) for _ in range(_ROUNDS)))
        if sum(self.gather(wrong)):
            return failed("all_reduce", "wrong sums", "rung bench collectives shows which sizes; do not train on this")
        small, large = human_seconds(times[0]), human_seconds(times[1])
        return ok("all_reduce", f"right; {small} for 1 KiB, {large} for {human_bytes(2**22)}")

    def _pace(self) -> Finding:
        """The same work at the same time on each rank. The quickest of several rounds: chance only makes slower."""
        work = self._how.work or _product(self._world.device)
        self._timed(work)
        own = min(self._timed(work) for _ in range(_ROUNDS))
        return judge_pace(self.gather(own), self._hosts)

    def _timed(self, work: Callable[[], object]) -> float:
        dist.barrier(group=self._control)
        is_cuda = self._world.device.type == "cuda"
        torch.cuda.synchronize(self._world.device) if is_cuda else None
        started = time.perf_counter()
        work()
        torch.cuda.synchronize(self._world.device) if is_cuda else None
        return time.perf_counter() - started

    def _links(self) -> Finding:
        """Between each rank and the next, one after the other, through host memory."""
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
    """(offset, uncertainty) of each rank's clock against the first one's, in seconds; empty on the others.

    As NTP does it: the first rank notes when it asks and when the answer comes, the other one when it was asked and
    when it answers. The round trip that took the shortest time counts; half of it is what remains unknown.
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


def judge_alike(own: Sequence[dict[str, str]], hosts: Sequence[str]) -> Finding:
    for key in own[0]:
        values = {facts[key]: hosts[rank] for rank, facts in reversed(list(enumerate(own)))}
        if len(values) > 1:
            told = ", ".join(f"{value} on {host}" for value, host in values.items())
            return failed("same software", f"{key} differs: {told}", f"make {key} the same on all machines")
    return ok("same software", "the same on all ranks")


def judge_clocks(offsets: Sequence[tuple[float, float]], hosts: Sequence[str]) -> Finding:
    if len(offsets) < 2:
        return not_here("clocks", "one rank has nobody to compare with")
    rank, (offset, unsure) = max(enumerate(offsets), key=lambda item: abs(item[1][0]))
    found = f"rank {rank} on {hosts[rank]} is {offset * 1e3:+.3g} ms (+-{unsure * 1e3:.2g}) from rank 0"
    fix = f"start chrony or ntpd on {hosts[rank]}"
    if abs(offset) - unsure > _LOST_SECONDS:
        return failed(
            "clocks", f"{found}: machines further apart than {_LOST_SECONDS:g} s take each other for lost", fix
        )
    if abs(offset) - unsure > _SKEW_SECONDS:
        return warning("clocks", f"{found}: logs cannot be put in order", fix)
    return ok("clocks", f"{abs(offset) * 1e3:.3g} ms (+-{unsure * 1e3:.2g}) apart at most")


def judge_pace(seconds: Sequence[float], hosts: Sequence[str]) -> Finding:
    """The slowest against the median of the others."""
    if len(seconds) < 2:
        return not_here("slow rank", "one rank has nobody to compare with")
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
    """`rates` are bytes a second into each rank from the one before. Links inside a machine are of another kind."""
    size = len(rates)
    for inside in (True, False):
        kind = {rank: rates[rank] for rank in range(size) if (hosts[rank] == hosts[rank - 1]) == inside}
        if len(kind) < 3:
            continue
        usual = statistics.median(kind.values())
        slowest = min(kind, key=lambda rank: kind[rank])
        if kind[slowest] * _SLOW_LINK < usual:
            ends = f"{_place((slowest - 1) % size, hosts)} to {_place(slowest, hosts)}"
            found = f"{ends}: {kind[slowest] / 1e9:.3g} GB/s, the others {usual / 1e9:.3g}"
            return warning(
                "links", found, f"look at the cable and the interface of {hosts[slowest]} (ethtool), or leave it out"
            )
    return ok("links", f"{min(rates) / 1e9:.3g} to {max(rates) / 1e9:.3g} GB/s from rank to rank, through host memory")


def _place(rank: int, hosts: Sequence[str]) -> str:
    return f"rank {rank} on {hosts[rank]}" if len(set(hosts)) > 1 else f"rank {rank}"
