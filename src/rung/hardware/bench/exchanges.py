"""The measured collectives: each with its buffers, its call, and a check of every element of its result.

Sizes are those of nccl-tests: of the whole array. If ranks have parts of it, the size is rounded down to equal parts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rung.hardware.bench.patterns import Patterns, poison

_ROOT = 0
_DELAY_SECONDS = 0.1
_NUM_TRIES = 3
_REDUCTIONS = {
    "": dist.ReduceOp.SUM,
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


@dataclass(frozen=True)
class Participant:
    """This rank's place in the group, and the device of its tensors."""

    rank: int
    size: int
    device: torch.device


class Collective:
    """One collective of one size and type on the default group. Subclasses define the data sent and expected."""

    in_parts = False  # whether each rank has a part of the array

    def __init__(self, participant: Participant, dtype: torch.dtype, num_bytes: int, reduction: str) -> None:
        self.rank, self.size, self.device = participant.rank, participant.size, participant.device
        self.is_root, self._dtype = self.rank == _ROOT, dtype
        self._op = _REDUCTIONS[reduction]
        self._round = 0
        count = max(1, num_bytes // dtype.itemsize)
        self.part_count = max(1, count // self.size)
        self.count = self.part_count * self.size if self.in_parts else count
        self._patterns = Patterns(dtype, self.device, self.size, reduction, self.count)
        self.allocate()

    @property
    def num_bytes(self) -> int:
        return self.count * self._dtype.itemsize

    def allocate(self) -> None:
        raise NotImplementedError

    def fill(self) -> None:
        """Write new values, different in each round, so that an earlier round's data cannot pass for a result."""
        self._round += 1
        self.put()

    def put(self) -> None:
        raise NotImplementedError

    def run(self) -> None:
        raise NotImplementedError

    def num_wrong(self) -> int:
        """The number of wrong elements on this rank after `fill` and one `run`."""
        raise NotImplementedError

    # -- for subclasses ----------------------------------------------------------------------------------------------

    def _empty(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=self._dtype, device=self.device)

    def _values(self, *key: int) -> torch.Tensor:
        return self._patterns.values(self._round, *key)

    def _parts(self, whole: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.split(whole, self.part_count))

    def _put_parts(self, whole: torch.Tensor, keys: list[tuple[int, ...]]) -> None:
        for part, key in zip(self._parts(whole), keys, strict=True):
            self._patterns.fill(part, self._values(*key))

    def _wrong_parts(self, whole: torch.Tensor, keys: list[tuple[int, ...]]) -> int:
        pairs = zip(self._parts(whole), keys, strict=True)
        return sum(self._patterns.num_wrong(part, self._values(*key)) for part, key in pairs)


class AllReduce(Collective):
    def allocate(self) -> None:
        self.tensor = self._empty(self.count)

    def put(self) -> None:
        self._patterns.fill(self.tensor, self._values(self.rank))

    def run(self) -> None:
        dist.all_reduce(self.tensor, op=self._op)

    def num_wrong(self) -> int:
        blocks = [self._values(rank) for rank in range(self.size)]
        return self._patterns.num_wrong(self.tensor, self._patterns.reduce(blocks))


class Reduce(AllReduce):
    """Only the root has a result: the others' tensors are undefined afterwards (gloo leaves partial sums there)."""

    def run(self) -> None:
        dist.reduce(self.tensor, dst=_ROOT, op=self._op)

    def num_wrong(self) -> int:
        return super().num_wrong() if self.is_root else 0


class Broadcast(Collective):
    def allocate(self) -> None:
        self.tensor = self._empty(self.count)

    def put(self) -> None:
        poison(self.tensor)
        if self.is_root:
            self._patterns.fill(self.tensor, self._values(_ROOT))

    def run(self) -> None:
        dist.broadcast(self.tensor, src=_ROOT)

    def num_wrong(self) -> int:
        return self._patterns.num_wrong(self.tensor, self._values(_ROOT))


class Scatter(Collective):
    in_parts = True

    def allocate(self) -> None:
        self.source = self._empty(self.count if self.is_root else 0)
        self.target = self._empty(self.part_count)

    def put(self) -> None:
        poison(self.target)
        if self.is_root:
            self._put_parts(self.source, [(rank,) for rank in range(self.size)])

    def run(self) -> None:
        dist.scatter(self.target, self._parts(self.source) if self.is_root else None, src=_ROOT)

    def num_wrong(self) -> int:
        return self._patterns.num_wrong(self.target, self._values(self.rank))


class Gather(Collective):
    in_parts = True

    def allocate(self) -> None:
        self.source = self._empty(self.part_count)
        self.target = self._empty(self.count if self.is_root else 0)

    def put(self) -> None:
        poison(self.target)
        self._patterns.fill(self.source, self._values(self.rank))

    def run(self) -> None:
        dist.gather(self.source, self._parts(self.target) if self.is_root else None, dst=_ROOT)

    def num_wrong(self) -> int:
        if not self.is_root:
            return 0
        return self._wrong_parts(self.target, [(rank,) for rank in range(self.size)])


class AllGather(Collective):
    in_parts = True

    def allocate(self) -> None:
        self.source, self.target = self._empty(self.part_count), self._empty(self.count)
        # torch 2.13 renames these and warns of the old names, which are the only ones that 2.11 has.
        self._call: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def put(self) -> None:
        poison(self.target)
        self._patterns.fill(self.source, self._values(self.rank))

    def run(self) -> None:
        self._call(self.target, self.source)

    def num_wrong(self) -> int:
        return self._wrong_parts(self.target, [(rank,) for rank in range(self.size)])


class ReduceScatter(Collective):
    in_parts = True

    def allocate(self) -> None:
        self.source, self.target = self._empty(self.count), self._empty(self.part_count)
        self._call: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def put(self) -> None:
        poison(self.target)
        self._put_parts(self.source, [(self.rank, part) for part in range(self.size)])

    def run(self) -> None:
        self._call(self.target, self.source, op=self._op)

    def num_wrong(self) -> int:
        blocks = [self._values(rank, self.rank) for rank in range(self.size)]
        return self._patterns.num_wrong(self.target, self._patterns.reduce(blocks))


class AllToAll(Collective):
    in_parts = True

    def allocate(self) -> None:
        self.source, self.target = self._empty(self.count), self._empty(self.count)

    def put(self) -> None:
        poison(self.target)
        self._put_parts(self.source, [(self.rank, part) for part in range(self.size)])

    def run(self) -> None:
        dist.all_to_all_single(self.target, self.source)

    def num_wrong(self) -> int:
        return self._wrong_parts(self.target, [(rank, self.rank) for rank in range(self.size)])


class SendRecv(Collective):
    """A ring shift as in nccl-tests: each rank sends to the next and receives from the previous at the same time."""

    def allocate(self) -> None:
        self.source, self.target = self._empty(self.count), self._empty(self.count)
        self._next, self._previous = (self.rank + 1) % self.size, (self.rank - 1) % self.size

    def put(self) -> None:
        poison(self.target)
        self._patterns.fill(self.source, self._values(self.rank))

    def run(self) -> None:
        send = dist.P2POp(dist.isend, self.source, self._next)
        receive = dist.P2POp(dist.irecv, self.target, self._previous)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()

    def num_wrong(self) -> int:
        return self._patterns.num_wrong(self.target, self._values(self._previous))


class Barrier(Collective):
    """Checked by delay: the first and the last rank arrive late in turn, and the others must have waited for them.

    A rank that the machine itself delayed waits less, so the check is repeated and the longest wait counts.
    """

    def allocate(self) -> None:
        self.count = 0

    def put(self) -> None:
        pass

    def run(self) -> None:
        is_cuda = self.device.type == "cuda"
        dist.barrier(device_ids=[self.device.index] if is_cuda else None)
        if is_cuda:
            torch.cuda.synchronize(self.device)

    def num_wrong(self) -> int:
        wrong = 0
        for late in {0, self.size - 1}:
            waits = [self._measure_wait(late) for _ in range(_NUM_TRIES)]
            wrong += max(waits) < _DELAY_SECONDS / 2 and late != self.rank
        return wrong

    def _measure_wait(self, late: int) -> float:
        self.run()
        if self.rank == late:
            time.sleep(_DELAY_SECONDS)
        started = time.monotonic()
        self.run()
        return time.monotonic() - started


EXCHANGES: dict[str, type[Collective]] = {
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
