"""A ring whose ranks are threads of one process, so that its kernels can be checked on one device."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rung.parallel.context import ring as module
from rung.parallel.context.positions import RankPositions


class _Threads(module._Ring):
    """Sends through queues, one for each rank."""

    inboxes: list[queue.Queue[Tensor]]

    def pass_on(self, rows: Tensor) -> tuple[Tensor, list[Any]]:
        rank, num_ranks = self.positions.rank, self.positions.num_ranks
        self.inboxes[(rank + 1) % num_ranks].put(rows.clone())
        return self.inboxes[rank].get(timeout=60), []


def largest_difference(
    length: int, num_ranks: int, *, is_causal: bool, key_heads: int, dtype: torch.dtype, device: str
) -> float:
    """Of results and gradients from those of the whole sequence in float64, over the largest value of each."""
    generator = torch.Generator().manual_seed(length)
    shapes = [(2, 4, length, 16), (2, key_heads, length, 16), (2, key_heads, length, 16), (2, 4, length, 16)]
    query, key, value, direction = (torch.randn(s, generator=generator).to(device, dtype) for s in shapes)
    leaves = [t.double().requires_grad_() for t in (query, key, value)]
    expected = F.scaled_dot_product_attention(*leaves, is_causal=is_causal, enable_gqa=True)
    wanted = [expected, *torch.autograd.grad(expected, leaves, direction.double())]
    found = _run(query, key, value, direction, num_ranks, is_causal)
    return max(
        float((one.double() - other).detach().abs().max() / other.detach().abs().max())
        for one, other in zip(found, wanted, strict=True)
    )


def _run(query: Tensor, key: Tensor, value: Tensor, direction: Tensor, num_ranks: int, is_causal: bool) -> list[Tensor]:
    inboxes: list[queue.Queue[Tensor]] = [queue.Queue() for _ in range(num_ranks)]
    length = query.shape[-2]
    ranks = [RankPositions(length, num_ranks, rank, query.device) for rank in range(num_ranks)]
    parts: dict[int, tuple[Tensor, ...]] = {}
    order, everyone = ranks[0].order, ranks[0].everyone
    kept = torch.zeros(len(everyone), device=query.device).index_fill(0, order, 1).view(num_ranks, -1).to(query.dtype)

    @torch.no_grad()
    def one(positions: RankPositions) -> None:
        own = _Threads(positions, None, is_causal, query.shape[-1] ** -0.5)  # type: ignore[arg-type]
        object.__setattr__(own, "inboxes", inboxes)
        ctx = SimpleNamespace(save_for_backward=lambda *saved: setattr(ctx, "saved_tensors", saved))
        rows = [t.index_select(-2, positions.own) for t in (query, key, value)]
        result = module._RingAttention.forward(ctx, *rows, own)
        # Of rows that have the same position, all but one are dropped, so that no gradient comes from them.
        gradient = direction.index_select(-2, positions.own) * kept[positions.rank].unsqueeze(-1)
        parts[positions.rank] = (result, *module._RingAttention.backward(ctx, gradient)[:3])

    threads = [threading.Thread(target=one, args=(positions,)) for positions in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results, *gradients = (torch.cat([parts[rank][n] for rank in range(num_ranks)], dim=-2) for n in range(4))
    sums = [torch.zeros_like(t).index_add(-2, everyone, g) for t, g in zip((query, key, value), gradients, strict=True)]
    return [results.index_select(-2, order), *sums]
