"""Measures collectives in the world that this process is a rank of: correct first, then how long they take.

A time is taken as nccl-tests do: several calls one after the other, divided by their number, on the slowest rank. That
is repeated, and the median and the fastest of the repetitions are kept. Starting the ranks and showing the results
belong to command.py.
"""

from __future__ import annotations

import os
import platform
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rung.distributed.collectives import gather_json
from rung.distributed.world import World, open_world
from rung.hardware.bench.exchanges import EXCHANGES, Collective, Participant
from rung.hardware.collective_records import REDUCING, CollectiveRecord
from rung.spec.strategy import parse
from rung.spec.version import VERSION
from rung.system.host import free_host_bytes, processor_name
from rung.system.launcher_env import environment_local_size, environment_size
from rung.system.units import human_bytes

BATCH_SECONDS = 0.02  # of the calls between two looks at the clock, where they are quick
MOST_CALLS = 200
REPEATS = (3, 15)
_QUICK_SECONDS = 0.05
_COPIES = 4  # of the array that a rank may need: what is sent, what comes, and as much in the backend
_MOST_COUNT = 2**31 - 1
_T = TypeVar("_T")


@dataclass(frozen=True)
class Case:
    op: str
    dtype: str
    num_bytes: int

    @property
    def kind(self) -> tuple[str, str]:
        """Whether a backend supports a case depends on these and not on the size."""
        return self.op, self.dtype


@dataclass(frozen=True)
class SweepPlan:
    """The cases to measure, and where."""

    cases: tuple[Case, ...]
    backend: str
    device: str
    reduction: str = "sum"
    seconds: float = 0.2  # to spend on the times of one case
    timeout_seconds: int = 300  # of a call


@dataclass(frozen=True)
class CollectiveTiming:
    """The result, the same on all ranks. With fewer records than cases, the last one broke the group."""

    environment: dict[str, Any]
    records: list[CollectiveRecord]


def measure(plan: SweepPlan, report: Callable[[Any], None] = lambda _: None) -> CollectiveTiming:
    """Join the world of the environment and measure the cases. Rank 0 reports the environment, then each record."""
    layout = parse("ddp", environment_size(), environment_local_size())
    options = {"device": plan.device, "backend": plan.backend}
    with open_world(layout, timeout_seconds=plan.timeout_seconds, **options) as world:
        bench = _Bench(world, plan)
        environment, records = bench.environment(), []
        if world.is_main:
            report(environment)
        for case in plan.cases:
            record, is_broken = bench.measure(case)
            records.append(record)
            if world.is_main:
                report(record)
            if is_broken:
                break
        return CollectiveTiming(environment, records)


class _NotTimed(Exception):
    """Why a case has no times. Raised on all ranks alike."""

    def __init__(self, state: str, why: str) -> None:
        super().__init__(why)
        self.state = state


class _Bench:
    """Measures on this rank. Ranks agree through a group of their own, not through the one under test."""

    def __init__(self, world: World, plan: SweepPlan) -> None:
        self._plan, self._device = plan, world.device
        self._control = world.host_group()
        self._own = Participant(world.rank, world.size, world.device)
        self._hosts: list[str] = sorted(set(self._gather(socket.gethostname())))

    def measure(self, case: Case) -> tuple[CollectiveRecord, bool]:
        """One record, and whether the group is broken after it."""
        num_bytes = case.num_bytes
        try:
            self._agree(_refusal(case, self._plan, self._own), "not supported")
            exchange = self._attempt(lambda: self._make(case), "not supported")
            num_bytes = exchange.num_bytes
            self._check(exchange, "not supported")
            times, runs = self._time(exchange)
            self._check(exchange, "failed")
        except _NotTimed as verdict:
            is_broken = verdict.state == "failed" or (verdict.state == "not supported" and not self._is_sound())
            return self._record(case, num_bytes, verdict.state, why=str(verdict)), is_broken
        median, fastest = (float(f"{value:.5g}") for value in (statistics.median(times), min(times)))
        return self._record(case, num_bytes, "ok", seconds=median, fastest_seconds=fastest, runs=runs), False

    # -- one case ----------------------------------------------------------------------------------------------------

    def _make(self, case: Case) -> Collective:
        dtype = getattr(torch, case.dtype or "uint8")
        return EXCHANGES[case.op](self._own, dtype, case.num_bytes, self._plan.reduction)

    def _check(self, exchange: Collective, state: str) -> None:
        """Run once and check every element; an error on the way is a verdict of that state."""

        def run() -> int:
            exchange.fill()
            exchange.run()
            self._synchronize()
            return exchange.num_wrong()

        for rank, wrong in enumerate(self._everyone(run, state)):
            if wrong and exchange.count == 0:
                raise _NotTimed("wrong", f"rank {rank} did not wait for a late one")
            if wrong:
                raise _NotTimed("wrong", f"rank {rank} has {wrong:,} wrong elements; the array has {exchange.count:,}")

    def _time(self, exchange: Collective) -> tuple[list[float], int]:
        """Seconds of a call on the slowest rank in each repetition, and the number of timed calls."""
        once = max(self._everyone(lambda: self._batch(exchange, 1), "failed"))
        if once < _QUICK_SECONDS:  # a slow one needs no warm-up beyond the checked call
            once = max(self._everyone(lambda: min(self._batch(exchange, 1) for _ in range(5)), "failed"))
        calls = max(1, min(MOST_CALLS, int(min(BATCH_SECONDS, self._plan.seconds / REPEATS[0]) / once)))
        repeats = max(REPEATS[0], min(REPEATS[1], int(self._plan.seconds / (once * calls))))
        times = self._everyone(lambda: [self._batch(exchange, calls) / calls for _ in range(repeats)], "failed")
        return [max(column) for column in zip(*times, strict=True)], calls * repeats

    def _batch(self, exchange: Collective, calls: int) -> float:
        dist.barrier(group=self._control)
        self._synchronize()
        started = time.perf_counter()
        for _ in range(calls):
            exchange.run()
        self._synchronize()
        return time.perf_counter() - started

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _record(self, case: Case, num_bytes: int, state: str, **further: Any) -> CollectiveRecord:
        return CollectiveRecord(
            op=case.op,
            backend=self._plan.backend,
            device=self._device.type,
            dtype=case.dtype,
            reduction=self._plan.reduction if case.op in REDUCING else "",
            bytes=num_bytes,
            ranks=self._own.size,
            hosts=len(self._hosts),
            state=state,
            **further,
        )

    def _is_sound(self) -> bool:
        """Whether the group still computes, after a call that failed."""
        try:
            self._check(self._make(Case("all_reduce", "float32", 64)), "failed")
        except _NotTimed:
            return False
        return True

    # -- agreement between ranks ---------------------------------------------------------------------------------------

    def _everyone(self, call: Callable[[], _T], state: str) -> list[_T]:
        """The result of the call on each rank."""
        return self._gather(self._attempt(call, state))

    def _attempt(self, call: Callable[[], _T], state: str) -> _T:
        """The result of the call on this rank. If it fails on any rank, all raise the same verdict."""
        found, why = [], None
        try:
            found.append(call())
        except Exception as error:
            why = _explain(error, self._plan)
        self._agree(why, state)
        return found[0]

    def _agree(self, why: str | None, state: str) -> None:
        first = next((found for found in self._gather(why) if found is not None), None)
        if first is not None:
            raise _NotTimed(state, first)

    def _gather(self, value: Any) -> list[Any]:
        return gather_json(value, self._control)

    def environment(self) -> dict[str, Any]:
        is_cuda = self._device.type == "cuda"
        own = torch.cuda.get_device_name(self._device) if is_cuda else processor_name()
        names, threads = self._gather(own), self._gather(torch.get_num_threads())
        return {
            "backend": self._plan.backend,
            "ranks": self._own.size,
            "hosts": self._hosts,
            "device": self._device.type,
            "device_names": sorted(set(names)),
            "threads_per_rank": sorted(set(threads)),
            "cores": os.cpu_count(),
            "load_average_before": round(os.getloadavg()[0], 2),
            "interface": os.environ.get(f"{'NCCL' if is_cuda else 'GLOO'}_SOCKET_IFNAME"),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "rung": VERSION,
            "library": _library(self._plan.backend),
        }


def _refusal(case: Case, plan: SweepPlan, own: Participant) -> str | None:
    """Why a case cannot run, if that is known beforehand and would not end in an error that can be caught."""
    if case.op == "send_recv" and own.size == 1:
        return "one rank has no other to send to"
    if case.op == "send_recv" and plan.backend == "gloo" and own.device.type == "cuda":
        return "gloo sends from host memory only"
    if case.op == "barrier":
        return None
    count = case.num_bytes // getattr(torch, case.dtype).itemsize
    if plan.backend == "mpi" and dist.is_mpi_available() and count > _MOST_COUNT:
        return f"torch's own MPI backend counts to 2^31 - 1, not to {count:,}"
    needed = _COPIES * case.num_bytes
    if own.device.type == "cuda":
        torch.cuda.empty_cache()
        free: int | None = torch.cuda.mem_get_info(own.device)[0]
        return _too_large(needed, free, "of GPU memory")
    return _too_large(needed * environment_local_size(), free_host_bytes(), "of memory in a machine")


def _explain(error: Exception, plan: SweepPlan) -> str:
    """An error of the backend in one line."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if line.startswith("[") and "] " in line:  # gloo and NCCL begin with the place in their source
        line = line.partition("] ")[2]
    if "Invalid scalar type" in line:
        return f"{plan.backend} does not know this type ({line})"
    if "can't be cast" in line and plan.reduction == "avg":
        return f"{plan.backend} has no mean of integers ({line})"
    return line


def _too_large(needed: int, free: int | None, what: str) -> str | None:
    if free is None or needed <= free:
        return None
    return f"needs up to {human_bytes(needed)} {what}, and {human_bytes(free)} are free"


def _library(backend: str) -> str | None:
    if backend == "nccl":
        return "NCCL " + ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    if backend == "mpi" and not dist.is_mpi_available():
        from mpi4py import MPI  # optional package

        return MPI.Get_library_version().partition(",")[0].strip("\0 \n")
    return None
