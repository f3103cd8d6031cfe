"""What the ranks of a test do that mpirun has started: every collective against what it means, and strategies."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import reduce
from operator import mul
from typing import Any

import torch
import torch.distributed as dist

from rung.distributed.world import open_world
from rung.spec.config import RunConfig
from rung.spec.strategy import parse
from rung.system.launcher_env import environment_size
from tests.matrix import BATCH_SIZE, GLOBAL_MICRO_BATCH
from tests.parity import Outcome, with_rung
from tests.tasks import TASKS

DTYPES = {
    "float32": (torch.float32, ("SUM", "AVG", "PRODUCT", "MIN", "MAX")),
    "float64": (torch.float64, ("SUM", "AVG")),
    "float16": (torch.float16, ("SUM", "AVG", "MAX")),
    "bfloat16": (torch.bfloat16, ("SUM", "AVG", "MIN")),
    "int8": (torch.int8, ("SUM", "MIN", "BAND", "BOR", "BXOR")),
    "int64": (torch.int64, ("SUM", "PRODUCT", "MAX")),
    "uint8": (torch.uint8, ("SUM", "BXOR")),
    "bool": (torch.bool, ("SUM", "PRODUCT", "MAX", "MIN", "BOR", "BAND", "BXOR")),
    "complex64": (torch.complex64, ("SUM", "AVG")),
}
EXPECTED = {
    "SUM": lambda rows: rows.any(0) if rows.dtype is torch.bool else rows.sum(0).to(rows.dtype),
    "AVG": lambda rows: (rows.sum(0, dtype=torch.promote_types(rows.dtype, torch.float32)) / len(rows)).to(rows.dtype),
    "PRODUCT": lambda rows: reduce(torch.logical_and if rows.dtype is torch.bool else mul, rows),
    "MIN": lambda rows: reduce(torch.minimum, rows),
    "MAX": lambda rows: reduce(torch.maximum, rows),
    "BAND": lambda rows: reduce(torch.bitwise_and, rows),
    "BOR": lambda rows: reduce(torch.bitwise_or, rows),
    "BXOR": lambda rows: reduce(torch.bitwise_xor, rows),
}


def values(dtype: torch.dtype, rank: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Small whole numbers: exact in every type, in any order."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 7 + 5 * rank) % 4 - int(dtype.is_signed)).to(dtype).view(shape)


def exercise(group: dist.ProcessGroup | None, ranks: list[int]) -> None:
    """Every collective among these ranks, against what it means."""
    rank, size = dist.get_rank(group), len(ranks)
    first, last = ranks[0], ranks[-1]
    for dtype, operations in DTYPES.values():
        for shape in ((), (5,), (3, 4), (0,)):
            rows = torch.stack([values(dtype, r, shape) for r in range(size)])
            for name in operations:
                op = getattr(dist.ReduceOp, name)
                wanted = EXPECTED[name](rows)
                own = rows[rank].clone()
                dist.all_reduce(own, op, group=group)
                assert torch.equal(own, wanted), (dtype, shape, name, own, wanted)
                own = rows[rank].clone()
                dist.reduce(own, last, op, group=group)
                assert torch.equal(own, wanted if dist.get_rank() == last else rows[rank]), (dtype, shape, name)
            own = rows[rank].clone()
            dist.broadcast(own, last, group=group)
            assert torch.equal(own, rows[-1])
            everyone = [torch.zeros_like(own) for _ in ranks]
            dist.all_gather(everyone, rows[rank].clone(), group=group)
            assert torch.equal(torch.stack(everyone), rows)
            places = [torch.zeros_like(own) for _ in ranks] if dist.get_rank() == first else None
            dist.gather(rows[rank].clone(), places, first, group=group)
            assert places is None or torch.equal(torch.stack(places), rows)
            dist.scatter(own, list(rows.clone()) if dist.get_rank() == last else None, last, group=group)
            assert torch.equal(own, rows[rank])
        # All ranks' parts for all ranks: [from, to, element]
        parts = torch.stack([values(dtype, r, (size, 6)) for r in range(size)])
        flat = torch.zeros(size * 6, dtype=dtype)
        dist.all_gather_into_tensor(flat, parts[rank, 0].clone(), group=group)
        assert torch.equal(flat.view(size, 6), parts[:, 0])
        dist.all_gather_into_tensor(flat, flat[rank * 6 : rank * 6 + 6], group=group)  # in place, as FSDP does
        assert torch.equal(flat.view(size, 6), parts[:, 0])
        for name in operations:
            op, own = getattr(dist.ReduceOp, name), torch.zeros(6, dtype=dtype)
            dist.reduce_scatter_tensor(own, parts[rank].clone(), op, group=group)
            assert torch.equal(own, EXPECTED[name](parts[:, rank])), (dtype, name)
            dist.reduce_scatter(own.zero_(), list(parts[rank].clone()), op, group=group)
            assert torch.equal(own, EXPECTED[name](parts[:, rank])), (dtype, name)
        dist.all_to_all_single(flat, parts[rank].reshape(-1).clone(), group=group)
        assert torch.equal(flat.view(size, 6), parts[:, rank])
        received = [torch.zeros(6, dtype=dtype) for _ in ranks]
        dist.all_to_all(received, list(parts[rank].clone()), group=group)
        assert torch.equal(torch.stack(received), parts[:, rank])
        own = parts[rank, 0].clone()
        if rank == 0 and size > 1:
            dist.send(own, last, group=group, tag=3)
        elif size > 1 and dist.get_rank() == last:
            assert dist.recv(own, first, group=group, tag=3) == first
            assert torch.equal(own, parts[0, 0])
    dist.barrier(group)


def exercise_odd_ones(rank: int, size: int) -> None:
    # Parts of different sizes, some of them empty.
    sizes = [[(source + 2 * target) % 3 for target in range(size)] for source in range(size)]
    sent = torch.cat([torch.full((n,), float(10 * rank + target)) for target, n in enumerate(sizes[rank])])
    theirs = [sizes[source][rank] for source in range(size)]
    received = torch.zeros(sum(theirs))
    dist.all_to_all_single(received, sent, theirs, sizes[rank])
    wanted = torch.cat([torch.full((n,), float(10 * source + rank)) for source, n in enumerate(theirs)])
    assert torch.equal(received, wanted)
    everyone = [torch.zeros(r) for r in range(size)]
    dist.all_gather(everyone, torch.full((rank,), float(rank)))
    assert all(torch.equal(got, torch.full((r,), float(r))) for r, got in enumerate(everyone))
    # Not contiguous, and one that remembers its history.
    whole = torch.zeros(4, 6)
    whole[:, ::2] = rank + 1.0
    dist.all_reduce(whole[:, ::2])
    assert torch.equal(whole[:, ::2], torch.full((4, 3), size * (size + 1) / 2)) and not whole[:, 1::2].any()
    weight = torch.nn.Parameter(torch.full((3,), float(rank)))
    dist.broadcast(weight, 1)
    assert torch.equal(weight.data, torch.ones(3))
    with torch.inference_mode():
        half = torch.full((3,), rank + 1.0, dtype=torch.bfloat16)
        dist.all_reduce(half, dist.ReduceOp.AVG)
        assert torch.equal(half, torch.full((3,), (size + 1) / 2, dtype=torch.bfloat16))
    # Many at once: they end in any order, and each has its own result.
    tensors = [torch.full((n + 1,), float(rank + n)) for n in range(40)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    assert torch.equal(works[7].get_future().wait()[0], tensors[7])
    for n, work in reversed(list(enumerate(works))):
        assert work.wait() and work.is_completed() and work.is_success()
        assert torch.equal(tensors[n], torch.full((n + 1,), size * (size - 1) / 2 + size * n))
    # Messages in both directions around a ring; those of one pair arrive in order.
    left, right = (rank - 1) % size, (rank + 1) % size
    inbox = [torch.zeros(2) for _ in range(3)]
    swaps = [dist.P2POp(dist.irecv, place, left) for place in inbox]
    swaps += [dist.P2POp(dist.isend, torch.full((2,), 10.0 * rank + n), right) for n in range(3)]
    for work in dist.batch_isend_irecv(swaps):
        work.wait()
    assert [place[0].item() for place in inbox] == [10.0 * left + n for n in range(3)]
    if rank:
        dist.send(torch.tensor([rank]), 0, tag=9)
    else:
        found = {}
        for _ in range(size - 1):
            number = torch.zeros(1, dtype=torch.int64)
            source = dist.recv(number, tag=9)
            found[source] = number.item()
        assert found == {r: r for r in range(1, size)}
    told: list[Any] = [None] * size
    dist.all_gather_object(told, {"rank": rank})
    assert told == [{"rank": r} for r in range(size)]


def refusals() -> list[str]:
    """What MPI cannot do is said, by name."""
    asked = [
        lambda: dist.all_reduce(torch.ones(2, dtype=torch.int32), dist.ReduceOp.AVG),
        lambda: dist.all_reduce(torch.ones(2).to(torch.float8_e4m3fn)),
        lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND),
        lambda: dist.all_reduce(torch.ones(2).to_sparse()),
        lambda: dist.all_gather_into_tensor(torch.ones(9), torch.ones(2)),
    ]
    return [message_of(call) for call in asked]


def message_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("it was not refused")


def exercise_all(strategies: list[str]) -> tuple[list[str], dict[str, Outcome]]:
    """On one rank: every collective among all and among some; then each of these strategies."""
    size = environment_size()
    with open_world(parse("ddp", size), device="cpu", backend="mpi", timeout_seconds=60) as world:
        exercise(None, list(range(size)))
        pairs = [[r for r in range(size) if r % 2 == odd] for odd in (0, 1)]
        groups = [dist.new_group(pair) for pair in pairs]
        exercise(groups[world.rank % 2], pairs[world.rank % 2])
        exercise_odd_ones(world.rank, size)
        said = refusals()
        # A call of MPI counts no further than 2^31: the same in parts, which are small ones here.
        from rung.distributed.mpi.process_group import MpiGroup

        whole, MpiGroup.MOST_BYTES = MpiGroup.MOST_BYTES, 5
        exercise(groups[world.rank % 2], pairs[world.rank % 2])
        MpiGroup.MOST_BYTES = whole
        # A rank that does not come: an error after the timeout, and not for ever.
        lonely = dist.new_group(list(range(size)), timeout=timedelta(seconds=0.3))
        if world.is_main:
            said.append(message_of(lambda: dist.all_reduce(torch.ones(1), group=lonely)))
        world.barrier()
    return said, train_all(strategies)


def train_all(strategies: list[str]) -> dict[str, Outcome]:
    return {strategy: with_rung(TASKS["gpt"], strategy, parity_config(strategy)) for strategy in strategies}


def parity_config(strategy: str) -> RunConfig:
    layout = parse(strategy, environment_size())
    micro = max(1, GLOBAL_MICRO_BATCH // layout.num_data_ranks)
    return RunConfig(
        batch_size=BATCH_SIZE, micro_batch=micro, steps=3, precision="fp64", clip=1.0, device="cpu", backend="mpi"
    )
