"""The collectives that are measured: each with its buffers, its call, and a look at all that came out of it.

Sizes are those of nccl-tests: of the whole array. Where ranks have parts of it, all parts are equal, and the size is
rounded down to what makes them so.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rung.bench.patterns import Patterns, poison

_ROOT = 0
_LATE_SECONDS = 0.1
_TRIES = 3
_REDUCTIONS = {
    "": dist.ReduceOp.SUM,
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


@dataclass(frozen=True)
class Seat:
    """Which rank takes part, and where its tensors are."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_root(self) -> bool:
        return self.rank == _ROOT


class Exchange:
    """One collective of one size and type on the default group. Subclasses say what is sent and what must come."""

    in_parts = False  # whether the array is cut among the ranks

    def __init__(self, seat: Seat, dtype: torch.dtype, num_bytes: int, reduction: str) -> None:
        self.seat, self._dtype = seat, dtype
        self._op = _REDUCTIONS[reduction]
        self._round = 0
        count = max(1, num_bytes // dtype.itemsize)
        self.part_count = max(1, count // seat.size)
        self.count = self.part_count * seat.size if self.in_parts else count
        self._patterns = Patterns(dtype, seat.device, seat.size, reduction, self.count)
        self.allocate()

    @property
    def num_bytes(self) -> int:
        return self.count * self._dtype.itemsize

    def allocate(self) -> None:
        raise NotImplementedError

    def fill(self) -> None:
        """Other values in each round, so that what an earlier one left is not taken for a result."""
        self._round += 1
        self.put()

    def put(self) -> None:
        raise NotImplementedError

    def run(self) -> None:
        raise NotImplementedError

    def num_wrong(self) -> int:
        """How many elements on this rank are not what they must be after `fill` and one `run`."""
        raise NotImplementedError

    # -- for subclasses ----------------------------------------------------------------------------------------------

    def _empty(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=self._dtype, device=self.seat.device)

    def _values(self, *key: int) -> torch.Tensor:
        return self._patterns.values(self._round, *key)

    def _parts(self, whole: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.split(whole, self.part_count))

    def _put_parts(self, whole: torch.Tensor, keys: list[tuple[int, ...]]) -> None:
        for part, key in zip(self._parts(whole), keys, strict=True):
            self._patterns.put(part, self._values(*key))

    def _wrong_parts(self, whole: torch.Tensor, keys: list[tuple[int, ...]]) -> int:
        pairs = zip(self._parts(whole), keys, strict=True)
        return sum(self._patterns.num_wrong(part, self._values(*key)) for part, key in pairs)


class AllReduce(Exchange):
    def allocate(self) -> None:
        self.tensor = self._empty(self.count)

    def put(self) -> None:
        self._patterns.put(self.tensor, self._values(self.seat.rank))

    def run(self) -> None:
        dist.all_reduce(self.tensor, op=self._op)

    def num_wrong(self) -> int:
        blocks = [self._values(rank) for rank in range(self.seat.size)]
        return self._patterns.num_wrong(self.tensor, self._patterns.reduced(blocks))


class Reduce(AllReduce):
    """Only the root has a result: what the others' tensors hold afterwards is the backend's affair (gloo leaves
    partial sums there)."""

    def run(self) -> None:
        dist.reduce(self.tensor, dst=_ROOT, op=self._op)

    def num_wrong(self) -> int:
        return super().num_wrong() if self.seat.is_root else 0


class Broadcast(Exchange):
    def allocate(self) -> None:
        self.tensor = self._empty(self.count)

    def put(self) -> None:
        poison(self.tensor)
        if self.seat.is_root:
            self._patterns.put(self.tensor, self._values(_ROOT))

    def run(self) -> None:
        dist.broadcast(self.tensor, src=_ROOT)

    def num_wrong(self) -> int:
        return self._patterns.num_wrong(self.tensor, self._values(_ROOT))


class Scatter(Exchange):
    in_parts = True

    def allocate(self) -> None:
        self.source = self._empty(self.count if self.seat.is_root else 0)
        self.target = self._empty(self.part_count)

    def put(self) -> None:
        poison(self.target)
        if self.seat.is_root:
            self._put_parts(self.source, [(rank,) for rank in range(self.seat.size)])

    def run(self) -> None:
        dist.scatter(self.target, self._parts(self.source) if self.seat.is_root else None, src=_ROOT)

    def num_wrong(self) -> int:
        return self._patterns.num_wrong(self.target, self._values(self.seat.rank))


class Gather(Exchange):
    in_parts = True

    def allocate(self) -> None:
        self.source = self._empty(self.part_count)
        self.target = self._empty(self.count if self.seat.is_root else 0)

    def put(self) -> None:
        poison(self.target)
        self._patterns.put(self.source, self._values(self.seat.rank))

    def run(self) -> None:
        dist.gather(self.source, self._parts(self.target) if self.seat.is_root else None, dst=_ROOT)

    def num_wrong(self) -> int:
        if not self.seat.is_root:
            return 0
        return self._wrong_parts(self.target, [(rank,) for rank in range(self.seat.size)])


class AllGather(Exchange):
    in_parts = True

    def allocate(self) -> None:
        self.source, self.target = self._empty(self.part_count), self._empty(self.count)
        # torch 2.13 renames these and warns of the old names, which are the only ones that 2.11 has.
        self._call: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def put(self) -> None:
        poison(self.target)
        self._patterns.put(self.source, self._values(self.seat.rank))

    def run(self) -> None:
        self._call(self.target, self.source)

    def num_wrong(self) -> int:
        return self._wrong_parts(self.target, [(rank,) for rank in range(self.seat.size)])


class ReduceScatter(Exchange):
    in_parts = True

    def allocate(self) -> None:
        self.source, self.target = self._empty(self.count), self._empty(self.part_count)
        self._call: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def put(self) -> None:
        poison(self.target)
        self._put_parts(self.source, [(self.seat.rank, part) for part in range(self.seat.size)])

    def run(self) -> None:
        self._call(self.target, self.source, op=self._op)

    def num_wrong(self) -> int:
        blocks = [self._values(rank, self.seat.rank) for rank in range(self.seat.size)]
        return self._patterns.num_wrong(self.target, self._patterns.reduced(blocks))


class AllToAll(Exchange):
    in_parts = True

    def allocate(self) -> None:
        self.source, self.target = self._empty(self.count), self._empty(self.count)

    def put(self) -> None:
        poison(self.target)
        self._put_parts(self.source, [(self.seat.rank, part) for part in range(self.seat.size)])

    def run(self) -> None:
        dist.all_to_all_single(self.target, self.source)

    def num_wrong(self) -> int:
        return self._wrong_parts(self.target, [(rank, self.seat.rank) for rank in range(self.seat.size)])


class SendRecv(Exchange):
    """As in nccl-tests: each rank sends to the next and receives from the one before, both at a time."""

    def allocate(self) -> None:
        self.source, self.target = self._empty(self.count), self._empty(self.count)
        self._next, self._before = (self.seat.rank + 1) % self.seat.size, (self.seat.rank - 1) % self.seat.size

    def put(self) -> None:
        poison(self.target)
        self._patterns.put(self.source, self._values(self.seat.rank))

    def run(self) -> None:
        send = dist.P2POp(dist.isend, self.source, self._next)
        receive = dist.P2POp(dist.irecv, self.target, self._before)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()

    def num_wrong(self) -> int:
        return self._patterns.num_wrong(self.target, self._values(self._before))


class Barrier(Exchange):
    """Its result is that nobody leaves before the last one came: two ranks come late in turn, and the others must
    have waited. A rank that the machine keeps from waiting looks the same, so it is tried again."""

    def allocate(self) -> None:
        self.count = 0

    def put(self) -> None:
        pass

    def run(self) -> None:
        device = self.seat.device
        dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def num_wrong(self) -> int:
        wrong = 0
        for late in {0, self.seat.size - 1}:
            waits = [self._wait_for(late) for _ in range(_TRIES)]
            wrong += max(waits) < _LATE_SECONDS / 2 and late != self.seat.rank
        return wrong

    def _wait_for(self, late: int) -> float:
        self.run()
        if self.seat.rank == late:
            time.sleep(_LATE_SECONDS)
        started = time.monotonic()
        self.run()
        return time.monotonic() - started


EXCHANGES: dict[str, type[Exchange]] = {
    "all_reduce": AllReduce,
    "broadcast": Broadcast,
    "reduce": Reduce,
    "scatter": Scatter,
    "gather": Gather,
    "all_gather": AllGather,
    "reduce_scatter": ReduceScatter,
    "all_to_all": AllToAll,
    "send_recv": SendRecv,
    "barrier": Barrier,
}
