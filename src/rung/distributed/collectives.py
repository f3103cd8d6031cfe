"""Collectives that torch lacks in this form: of JSON values, of any type, into rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist


def start_gather(values: Sequence[float], num_ranks: int) -> Callable[[], list[list[float]]]:
    """Send values to all ranks, through host memory. The returned call waits for those of every rank."""
    if num_ranks == 1:
        return lambda: [list(values)]
    own = torch.tensor(values, dtype=torch.float64)
    everyone = [torch.empty_like(own) for _ in range(num_ranks)]
    work = dist.all_gather(everyone, own, async_op=True)

    def rows() -> list[list[float]]:
        if work is not None:
            work.wait()
        return [row.tolist() for row in everyone]

    return rows


def start_sum(values: Sequence[float], num_ranks: int) -> Callable[[], list[float]]:
    """Add up values over all ranks, through host memory. The returned call waits for the sums."""
    if num_ranks == 1 or not values:
        return lambda: list(values)
    total = torch.tensor(values, dtype=torch.float64)
    work = dist.all_reduce(total, async_op=True)

    def sums() -> list[float]:
        if work is not None:
            work.wait()
        found: list[float] = total.tolist()
        return found

    return sums


def gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """A JSON value of every rank of a group, on every rank. Tuples become lists.

    torch's `all_gather_object` unpickles what arrives, and connections between ranks do not authenticate the sender.
    """
    own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([own.numel()]), group=group)
    largest = max(int(size) for size in sizes)
    rows = [torch.zeros(largest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(rows, torch.cat([own, own.new_zeros(largest - own.numel())]), group=group)
    return [json.loads(row[: int(size)].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]


def broadcast_from(source: int, tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Broadcast from a (global) rank to its group, in place. As bytes: gloo does not support every type."""
    assert tensor.is_contiguous()
    dist.broadcast(tensor.detach().reshape(-1).view(torch.uint8), src=source, group=group)


def gather_flat(own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The same-sized flat tensors of all ranks of a group, as rows."""
    return gather_rows(own, group).view(-1, own.numel())


def gather_rows(own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The rows of all ranks of a group, as many of each, one after the other."""
    everyone = own.new_empty(dist.get_world_size(group) * len(own), *own.shape[1:])
    # torch 2.13 renames the collective and warns about the old name, which is the only one that 2.11 has.
    collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    collective(everyone, own, group=group)
    return everyone
