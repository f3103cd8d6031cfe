"""Attention in a ring: each rank keeps its queries, and the keys and values of all ranks pass by.

While a rank attends to the keys that it has, they travel on to the next one, so that messages hide behind the
computation, and no rank ever holds the keys of more than two. The results for parts of the keys are put together by
their sums of exponentials. In backward keys and values go round once more, and the sums of their gradients with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rung.errors import ModelError
from rung.parallel.context.positions import RankPositions


def attend_in_ring(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: RankPositions,
    group: dist.ProcessGroup,
    *,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """Attention of this rank's positions to those of all ranks, without a mask and without dropout."""
    if query.device.type == "cuda" and query.dtype not in (torch.float16, torch.bfloat16):
        raise ModelError(
            "--cp-form ring computes with flash attention, which takes half precision alone on a GPU. Use --precision "
            "bf16, or --cp-form ulysses or gather."
        )
    if query.device.type == "cuda" and dist.get_backend(group) == "gloo":
        raise ModelError(
            "--cp-form ring sends from rank to rank, which gloo cannot do from the memory of a GPU. Use --backend "
            "nccl, or --cp-form ulysses or gather."
        )
    ring = _Ring(positions, group, is_causal, query.shape[-1] ** -0.5 if scale is None else scale)
    shape = query.shape[:-1]
    rows = [
        tensor.reshape(-1, *tensor.shape[-3:]) if tensor.dim() != 3 else tensor[None] for tensor in (query, key, value)
    ]
    mixed: Tensor = _RingAttention.apply(*rows, ring)  # type: ignore[no-untyped-call]
    return mixed.reshape(*shape, mixed.shape[-1])


@dataclass(frozen=True)
class _Ring:
    """How the keys of all ranks come to this one, and which of them its queries see."""

    positions: RankPositions
    group: dist.ProcessGroup
    is_causal: bool
    scale: float

    def blocks(self, source: int) -> Iterator[tuple[slice, slice, bool]]:
        """Rows of queries, rows of the keys of a rank, and whether these two have the same positions under a causal
        mask. Rows that only fill up the last chunks see what others see, and are seen by none."""
        size, num_ranks = self.positions.chunk, self.positions.num_ranks
        own = (self.positions.rank, 2 * num_ranks - 1 - self.positions.rank)
        theirs = (source, 2 * num_ranks - 1 - source)
        for place, (start, stop) in enumerate(self.positions.spans(source)):
            keys = slice(place * size, place * size + stop - start)
            for part, chunk in enumerate(own):
                is_same = self.is_causal and chunk == theirs[place]
                if start == stop or (self.is_causal and chunk < theirs[place]):
                    continue
                yield slice(part * size, part * size + (stop - start if is_same else size)), keys, is_same

    def source(self, step: int) -> int:
        return (self.positions.rank - step) % self.positions.num_ranks

    def pass_on(self, rows: Tensor) -> tuple[Tensor, list[Any]]:
        """Send a tensor to the next rank and receive that of the one before, in the background."""
        received = torch.empty_like(rows)
        peers = [(self.positions.rank + step) % self.positions.num_ranks for step in (1, -1)]
        following, previous = (dist.get_global_rank(self.group, peer) for peer in peers)
        return received, dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, rows, following, self.group),
                dist.P2POp(dist.irecv, received, previous, self.group),
            ]
        )


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: _Ring) -> Tensor:
        width, times = key.shape[-1], query.shape[1] // key.shape[1]
        total, weight = torch.zeros_like(query[..., : value.shape[-1]], dtype=_precise(query.dtype)), None
        here = torch.cat([key, value], dim=-1).contiguous()
        num_ranks = ring.positions.num_ranks
        for step in range(num_ranks):
            coming, works = ring.pass_on(here) if step < num_ranks - 1 else (here, [])
            for rows, keys, is_same in ring.blocks(ring.source(step)):
                part, part_weight = _attend(
                    query[:, :, rows], *_split(here[:, :, keys], width, times), is_same, ring.scale
                )
                if weight is None:
                    weight = torch.full_like(part_weight[:, :, :1], -torch.inf).repeat(1, 1, query.shape[2])
                both = torch.logaddexp(weight[:, :, rows], part_weight)
                total[:, :, rows] = total[:, :, rows] * (weight[:, :, rows] - both).exp().unsqueeze(-1) + part * (
                    part_weight - both
                ).exp().unsqueeze(-1)
                weight[:, :, rows] = both
            _wait(works)
            here = coming
        result = total.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, weight)
        ctx.ring = ring
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value, result, weight = ctx.saved_tensors
        ring: _Ring = ctx.ring
        width, times, num_ranks = key.shape[-1], query.shape[1] // key.shape[1], ring.positions.num_ranks
        precise = _precise(query.dtype)
        here = torch.cat([key, value], dim=-1).contiguous()
        of_query, of_here = torch.zeros_like(query, dtype=precise), torch.zeros_like(here, dtype=precise)
        arriving: tuple[Tensor, list[Any]] | None = None
        for step in range(num_ranks):
            coming, works = ring.pass_on(here) if step < num_ranks - 1 else (here, [])
            own = torch.zeros_like(of_here)
            for rows, keys, is_same in ring.blocks(ring.source(step)):
                found = _attend_backward(
                    gradient[:, :, rows], query[:, :, rows], *_split(here[:, :, keys], width, times),
                    result[:, :, rows], weight[:, :, rows], is_same, ring.scale,
                )  # fmt: skip
                of_query[:, :, rows] += found[0]
                own[:, :, keys] += torch.cat([_folded(each, times) for each in found[1:]], dim=-1)
            if arriving is not None:  # what the ranks before have added to the gradient of these keys
                of_here, pending = arriving
                _wait(pending)
                own += of_here
            arriving = ring.pass_on(own)  # after the last step to where the keys belong
            _wait(works)
            here = coming
        assert arriving is not None
        of_here, pending = arriving
        _wait(pending)
        of_key, of_value = torch.split(of_here.to(key.dtype), [width, of_here.shape[-1] - width], dim=-1)
        return of_query.to(query.dtype), of_key, of_value, None


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()


def _precise(dtype: torch.dtype) -> torch.dtype:
    """That of sums over parts."""
    return torch.promote_types(dtype, torch.float32)


def _split(both: Tensor, width: int, times: int) -> tuple[Tensor, Tensor]:
    """Keys and values, repeated for the queries that share them."""
    key, value = torch.split(both, [width, both.shape[-1] - width], dim=-1)
    return key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)


def _folded(gradient: Tensor, times: int) -> Tensor:
    """The gradient of what `_split` has repeated."""
    return gradient if times == 1 else torch.unflatten(gradient, 1, (-1, times)).sum(2)


def _attend(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attention, and the logarithm of the sum of exponentials of each row."""
    tensors = [tensor.contiguous() for tensor in (query, key, value)]
    if query.device.type == "cuda":
        result, weight, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*tensors, 0.0, is_causal, scale=scale)
    else:
        result, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *tensors, 0.0, is_causal, scale=scale
        )
    return result, weight


def _attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    result: Tensor,
    weight: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients for part of the keys, from the result and the sums for all of them."""
    tensors = [tensor.contiguous() for tensor in (gradient, query, key, value, result, weight)]
    if query.device.type == "cuda":
        no_dropout = torch.empty(2, dtype=torch.uint64, device=query.device), torch.empty((), device=query.device)
        sizes = None, None, query.shape[2], key.shape[2]
        found = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *tensors, *sizes, 0.0, is_causal, *no_dropout, scale=scale
        )
    else:
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *tensors, 0.0, is_causal, scale=scale
        )
    return found[0], found[1], found[2]
