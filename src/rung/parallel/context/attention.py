"""Attention of a sequence whose positions are divided over ranks.

`Attention` stands in for `F.scaled_dot_product_attention` while a block runs. It has three forms. `ulysses` exchanges
positions for heads, so that every rank has some heads of the whole sequence, and exchanges the results back: four times
the size of a part, whatever the number of ranks, and torch's own kernel on whole sequences. `gather` gathers keys and
values on every rank: for any number of heads, and cheaper if keys have far fewer heads than queries. `ring` lets keys
and values pass by (`ring.py`): what `gather` sends, hidden behind computation, in memory that does not grow with ranks.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import CausalBias, causal_lower_right

from rung.distributed.torch_private import saved_tensor_hooks
from rung.errors import ModelError
from rung.parallel.collectives import exchange, gather_for_parts
from rung.parallel.context.positions import RankPositions
from rung.parallel.context.ring import attend_in_ring
from rung.parallel.dropout import SCALED_DOT_PRODUCT_ATTENTION


@contextlib.contextmanager
def attending_with(attention: Callable[..., Tensor]) -> Iterator[None]:
    """Put a function in the place of `F.scaled_dot_product_attention`, for torch's own layers as well.

    A TorchFunctionMode would not see the calls inside `nn.MultiheadAttention`. Its kernel for whole layers, which it
    uses in evaluations, is turned off: that computes attention by itself.
    """
    before, is_fast = F.scaled_dot_product_attention, torch.backends.mha.get_fastpath_enabled()
    F.scaled_dot_product_attention = attention
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        F.scaled_dot_product_attention = before
        torch.backends.mha.set_fastpath_enabled(is_fast)


class Attention:
    """Attention of this rank's positions to those of all ranks."""

    def __init__(
        self, positions: RankPositions, group: dist.ProcessGroup, form: str, attends_to_itself: tuple[bool, ...]
    ) -> None:
        """`attends_to_itself`: for each call in a block, whether keys are those of the sequence, or of another one."""
        self._positions, self._group, self._form = positions, group, form
        self._attends_to_itself = attends_to_itself
        self.num_calls = 0  # so far, in the block that runs
        self._saving: Any = None  # how tensors for backward were saved where the block began

    def begin(self) -> None:
        """A block begins."""
        self.num_calls, self._saving = 0, _saving()

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        each = self._positions.each
        attn_mask, is_causal = plain_mask(attn_mask, is_causal)
        options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
        self.num_calls += 1
        if not torch.compiler.is_compiling() and _saving() != self._saving:
            # Backward would call that part of the block again without the block, and so with torch's attention.
            raise ModelError(
                "context parallelism: a block checkpoints a part of itself (torch.utils.checkpoint, or "
                "gradient_checkpointing_enable() of transformers), or saves tensors in another way of its own. Turn "
                "that off, and use --activation-checkpointing full."
            )
        if query.shape[-2] != each or self.num_calls > len(self._attends_to_itself):
            raise ModelError(
                f"attention in a block has queries of {query.shape[-2]} positions, where this rank has {each} of a "
                f"sequence of {self._positions.length}, or is called more often than with the first sample. Context "
                "parallelism needs one query for each position, and the same calls in every batch."
            )
        if not self._attends_to_itself[self.num_calls - 1]:  # cross attention: every rank has all keys
            if is_causal:
                raise ModelError("context parallelism: causal attention to keys of another sequence has no meaning.")
            mask = self._mask(attn_mask, whole_rows=False, has_all_keys=True)
            return _attend(query, key, value, attn_mask=mask, **options)
        form = self._form if self._form != "auto" else self._cheapest(query)
        if form == "ulysses":
            return self._over_heads(query, key, value, attn_mask, is_causal, options)
        if form == "ring":
            return self._in_ring(query, key, value, attn_mask, is_causal, dropout_p, scale)
        return self._with_all_keys(query, key, value, attn_mask, is_causal, options)

    def _in_ring(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        dropout_p: float,
        scale: float | None,
    ) -> Tensor:
        if mask is not None or dropout_p or query.dim() < 3:
            what = "a mask" if mask is not None else "dropout" if dropout_p else "queries without heads"
            raise ModelError(
                f"--cp-form ring computes with flash attention, and attention in a block has {what}, which that does "
                "not take in parts. Use --cp-form ulysses or gather."
            )
        return attend_in_ring(query, key, value, self._positions, self._group, is_causal=is_causal, scale=scale)

    def _cheapest(self, query: Tensor) -> str:
        """Heads, where every rank gets some: the message does not grow with the ranks, and flash kernels stay."""
        return "ulysses" if query.dim() > 2 and query.shape[-3] % self._positions.num_ranks == 0 else "gather"

    def _over_heads(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, options: dict[str, Any]
    ) -> Tensor:
        positions, num_ranks = self._positions, self._positions.num_ranks
        num_heads = query.shape[-3] if query.dim() > 2 else 0
        if num_heads == 0 or num_heads % num_ranks:
            raise ModelError(
                f"--cp-form ulysses gives every rank some heads, and {num_heads} heads do not divide by {num_ranks} "
                "ranks. Use --cp-form gather, or auto."
            )
        times = _repetition(num_heads, key.shape[-3], num_ranks)
        if times > 1:
            key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
        heads = self._to_heads([query, key, value])
        mask = self._mask(mask, whole_rows=True)
        if mask is not None and mask.dim() > 2 and mask.shape[-3] > 1:
            mask = mask.chunk(num_ranks, -3)[positions.rank]
        options = {**options, "enable_gqa": heads[0].shape[-3] != heads[1].shape[-3]}
        mixed = _attend(*heads, attn_mask=mask, is_causal=is_causal, **options)
        parts = mixed.index_select(-2, positions.everyone)
        shape = (*parts.shape[:-2], num_ranks, positions.each, parts.shape[-1])
        parts = parts.view(shape).movedim(-3, 0)
        return exchange(parts.contiguous(), self._group).movedim(0, -4).flatten(-4, -3)

    def _to_heads(self, tensors: list[Tensor]) -> list[Tensor]:
        """Every rank's heads of the whole sequence, in one message."""
        num_ranks = self._positions.num_ranks
        shapes = [(*t.shape[:-3], num_ranks, t.shape[-3] // num_ranks, *t.shape[-2:]) for t in tensors]
        rows = [t.reshape(shape).movedim(-4, 0) for t, shape in zip(tensors, shapes, strict=True)]
        received = exchange(torch.cat([row.flatten(1) for row in rows], dim=1), self._group)
        found = []
        for row, flat in zip(rows, torch.split(received, [row[0].numel() for row in rows], dim=1), strict=True):
            whole = flat.view(row.shape).movedim(0, -3).flatten(-3, -2)
            found.append(whole.index_select(-2, self._positions.order))
        return found

    def _with_all_keys(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, options: dict[str, Any]
    ) -> Tensor:
        positions = self._positions
        both = self._whole(torch.cat([key, value], dim=-1), -2)
        key, value = torch.split(both, [key.shape[-1], value.shape[-1]], dim=-1)
        if not is_causal:
            return _attend(query, key, value, attn_mask=self._mask(mask, whole_rows=False), **options)
        found = []
        for rows, (start, stop) in zip(query.chunk(2, dim=-2), positions.spans(positions.rank), strict=True):
            # Rows beyond the end of the sequence are dropped later; they see what the last position sees.
            stop = stop if start < stop else positions.length
            first = min(start, stop - 1)
            # Dropout draws a number for each key. All ranks draw as many, since what the model draws outside of blocks
            # (noise, a layer to skip) must be the same on all of them.
            num_keys = positions.length if options["dropout_p"] else stop
            seen = _causal(rows.shape[-2], first, stop, num_keys, query.device)
            found.append(_attend(rows, key[..., :num_keys, :], value[..., :num_keys, :], attn_mask=seen, **options))
        return torch.cat(found, dim=-2)

    def _mask(self, mask: Tensor | None, *, whole_rows: bool, has_all_keys: bool = False) -> Tensor | None:
        """A mask with all keys, and with all rows or this rank's. Of both it comes with this rank's, one, or all; with
        `has_all_keys`, of keys with all: another sequence may be as long as a rank's part."""
        if mask is None:
            return None
        positions = self._positions
        if not has_all_keys and mask.dim() > 1 and mask.shape[-2] == mask.shape[-1] == positions.each:
            raise ModelError(
                "context parallelism: a block makes the mask of its attention of the positions that a rank has. Make "
                "it outside of the blocks, of the whole sequence."
            )
        if not has_all_keys and mask.shape[-1] == positions.each:
            mask = self._whole(mask, -1)
        if mask.dim() > 1 and mask.shape[-2] == positions.each and whole_rows:
            mask = self._whole(mask, -2)
        elif mask.dim() > 1 and mask.shape[-2] == positions.length and not whole_rows:
            mask = mask.index_select(-2, positions.own)
        return mask

    def _whole(self, part: Tensor, dim: int) -> Tensor:
        return whole_positions(part, dim, self._positions, self._group)


def _saving() -> Any:
    """A checkpoint saves tensors by hooks, or runs without gradients. Its hooks hold its inputs, so not for long."""
    hooks = saved_tensor_hooks()
    return torch.is_grad_enabled(), None if hooks is None else weakref.ref(hooks[0])


def whole_positions(part: Tensor, dim: int, positions: RankPositions, group: dist.ProcessGroup) -> Tensor:
    """The parts of all ranks, in the order of the positions."""
    dim = dim % part.dim()
    if part.dtype == torch.bool:
        return gather_for_parts(part.to(torch.uint8), dim, group).index_select(dim, positions.order).bool()
    return gather_for_parts(part, dim, group).index_select(dim, positions.order)


def plain_mask(mask: Tensor | None, is_causal: bool) -> tuple[Tensor | None, bool]:
    """torch's objects for causal masks as the argument that means the same."""
    if not isinstance(mask, CausalBias):
        return mask, is_causal
    if mask.seq_len_q != mask.seq_len_kv:
        raise ModelError("context parallelism: a causal mask between sequences of different lengths is not supported.")
    return None, True


def _attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    if not isinstance(options["attn_mask"], CausalBias):
        return SCALED_DOT_PRODUCT_ATTENTION(query, key, value, **options)
    # torch's causal masks compare the function that they are given to with this name.
    standing_in = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = SCALED_DOT_PRODUCT_ATTENTION
    try:
        return SCALED_DOT_PRODUCT_ATTENTION(query, key, value, **options)
    finally:
        F.scaled_dot_product_attention = standing_in


def _causal(num_rows: int, start: int, stop: int, num_keys: int, device: torch.device) -> Tensor:
    """The mask of rows that begin at position `start`, of which the last sees the keys before `stop`."""
    if device.type == "cuda" and start + num_rows == stop == num_keys and not torch.compiler.is_compiling():
        bias: Tensor = causal_lower_right(num_rows, stop)
        return bias
    rows = torch.arange(start, start + num_rows, device=device).clamp(max=stop - 1)
    return torch.arange(num_keys, device=device) <= rows.unsqueeze(1)


def _repetition(num_heads: int, num_key_heads: int, num_ranks: int) -> int:
    """How often keys are repeated so that every rank gets some, and queries still find theirs."""
    most = num_heads // num_key_heads
    return next((n for n in range(1, most) if most % n == 0 and num_key_heads * n % num_ranks == 0), most)
