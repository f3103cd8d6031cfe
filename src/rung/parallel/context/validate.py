"""Find along which dimensions a block's tensors are cut into positions, and check that it computes the same on parts.

The block runs whole on random numbers, then on the positions of each rank. Attention sees other positions: its queries,
keys, values and masks on a rank must be the rank's part of those of the whole run, and it then goes on with the rank's
part of the result. So must the block's own result. Everything else in the block thus treats positions alike, whatever
they are; rotary angles by the local length, convolutions, recurrences and means over positions do not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from rung.distributed.torch_private import BatchNorm
from rung.errors import ModelError
from rung.parallel.context.arguments import leaves, map_leaves
from rung.parallel.context.attention import attending_with, plain_mask
from rung.parallel.context.positions import RankPositions
from rung.parallel.dropout import SCALED_DOT_PRODUCT_ATTENTION, NoDropout
from rung.parallel.forward_trace import Call, tensors_of
from rung.parallel.random_proof import equal, isolated, random_state
from rung.parallel.tensor.validate import DIFFERENT_IN_TRAINING

_CPU = torch.device("cpu")
_LONG = 256  # positions: code that takes another way for more of them is left to the first step's comparison


@dataclass(frozen=True)
class Cut:
    """The dimension of the positions, of each argument (by its key and place) and of each tensor of the result."""

    dims: dict[Any, int]
    whole: frozenset[Any]  # arguments that every rank has whole
    masks: frozenset[Any]  # those of them that have a row and a column for each position
    output: tuple[int | None, ...]
    attends_to_itself: tuple[bool, ...]  # for each call of attention, whether its keys are those of the sequence


@dataclass(frozen=True)
class _Attended:
    """One call of attention in the whole run."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    is_causal: bool
    options: dict[str, Any]
    output: Tensor


class _Differs(Exception):
    """What a rank computes is not its part of the whole."""


def prove(call: Call, lengths: Sequence[int], num_ranks: int, *, like: Cut | None = None) -> Cut:
    """How the block of a call is cut, or an error that says what does not fit.

    It runs on a few positions, and on as many as the sequence has, up to `_LONG`. With `like`, the cut of a block that
    looks the same, a few are enough.
    """
    reasons: list[str] = []
    if any(isinstance(module, BatchNorm) for module in call.module.modules()):
        raise ModelError(f"context parallelism: {call.name} has a batch norm, whose statistics mix positions.")
    for length in lengths:
        for dims, masks in _choices(call, length):
            few, many = min(length, 4 * num_ranks + 1), min(length, _LONG)
            found = _try(call, length, few, dims, masks, num_ranks)
            if isinstance(found, Cut) and like is None and many > few:
                found = _try(call, length, many, dims, masks, num_ranks)
            if isinstance(found, str) and few < length <= _LONG:  # it may need the length that it was made for
                found = _try(call, length, length, dims, masks, num_ranks)
            if isinstance(found, Cut):
                return found
            reasons.append(found)
    reason = reasons[0] if reasons else "none of its arguments has the length of the queries of its attention"
    raise ModelError(
        f"context parallelism: {call.name} cannot run on a part of the positions: {reason}. Positions (rotary "
        "angles, say) must come from outside of the block, and only F.scaled_dot_product_attention may mix them. Use "
        "fsdp, tp or pp instead."
    )


def why_unknown(what: str) -> str:
    return (
        f"context parallelism exchanges keys and values where {what} calls F.scaled_dot_product_attention, and it does "
        "not, or under another name. Call it as F.scaled_dot_product_attention (transformers: "
        "attn_implementation='sdpa'; nn.MultiheadAttention: need_weights=False), or use a strategy without cp."
    )


def _choices(call: Call, length: int) -> list[tuple[dict[Any, int], set[Any]]]:
    """Where positions may lie: the dimension of each argument, and the arguments that are masks of all positions."""
    given = leaves(call.args, call.kwargs)
    choices: list[tuple[dict[Any, int], set[Any]]] = []
    for first, hidden in given.items():
        middle = [dim for dim in range(max(1, hidden.dim() - 1)) if hidden.shape[dim] == length]
        # The samples of a batch lie first more often. What is square may be a mask, or have as many features.
        for main, has_masks in itertools.product(sorted(middle, key=lambda dim: dim == 0), (True, False)):
            if not hidden.is_floating_point() or hidden.dim() < 2:
                continue
            dims, masks = {first: main}, set()
            for key, tensor in given.items():
                places = [dim for dim, size in enumerate(tensor.shape) if size == length]
                if key == first or not places:
                    continue
                is_square = places[-2:] == [tensor.dim() - 2, tensor.dim() - 1]
                if is_square and tensor.shape != hidden.shape:
                    masks.add(key) if has_masks else dims.update({key: tensor.dim() - 2})
                else:
                    dims[key] = main if main in places and tensor.dim() == hidden.dim() else places[-1 if main else 0]
            if (dims, masks) not in choices:
                choices.append((dims, masks))
    return choices


def _try(call: Call, length: int, short: int, dims: dict[Any, int], masks: set[Any], num_ranks: int) -> Cut | str:
    with isolated():
        state = random_state(call.module)
        args, kwargs = _random_call(call, length, short, dims, masks)
        seen: list[_Attended] = []
        try:
            whole = _run(call, state, args, kwargs, _observed(seen))
        except Exception as error:
            return f"it does not run on random numbers ({error})"
        if not seen:
            return "it mixes positions without F.scaled_dot_product_attention, or calls none"
        results = tensors_of(whole)
        output = tuple(_dim_of(tensor, short, dims) for tensor in results)
        if not any(dim is not None for dim in output):
            return "its result has no positions"
        for rank in range(num_ranks):
            positions = RankPositions(short, num_ranks, rank, _CPU)
            own = positions.own
            cut_args, cut_kwargs = map_leaves(args, kwargs, partial(_part, dims, own))
            calls = iter(seen)
            itself: list[bool] = []
            try:
                part = _run(call, state, cut_args, cut_kwargs, _expected(calls, positions, itself))
            except _Differs as error:
                return str(error)
            except Exception as error:
                return f"it fails on a part of them ({error})"
            wanted = [t if dim is None else t.index_select(dim, own) for t, dim in zip(results, output, strict=True)]
            if next(calls, None) is not None or not equal(tensors_of(part), wanted):
                return "code in it other than attention mixes positions, or depends on how many there are"
        whole_arguments = frozenset(leaves(call.args, call.kwargs).keys() - dims.keys())
        return Cut(dict(dims), whole_arguments, frozenset(masks), output, tuple(itself))


def _part(dims: dict[Any, int], own: Tensor, key: Any, tensor: Tensor) -> Tensor:
    return tensor.index_select(dims[key], own) if key in dims else tensor


def _observed(seen: list[_Attended]) -> Callable[..., Tensor]:
    def attend(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, **options: Any,
    ) -> Tensor:  # fmt: skip
        mask, is_causal = plain_mask(attn_mask, is_causal)
        output = SCALED_DOT_PRODUCT_ATTENTION(query, key, value, attn_mask=mask, is_causal=is_causal, **options)
        seen.append(_Attended(query, key, value, mask, is_causal, options, output))
        return output

    return attend


def _expected(calls: Any, positions: RankPositions, itself: list[bool]) -> Callable[..., Tensor]:
    """Attention of one rank: checks that it is given the rank's part, and returns that of the result.

    It adds to `itself` whether the keys of each call were a part. Their number in the whole run does not say so: a
    sequence of its own may have as many positions as this proof.
    """
    own = positions.own

    def part(tensor: Tensor, dim: int) -> Tensor:
        return tensor.index_select(dim, own) if tensor.shape[dim] == positions.length else tensor

    def attend(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, **options: Any,
    ) -> Tensor:  # fmt: skip
        mask, is_causal = plain_mask(attn_mask, is_causal)
        whole: _Attended | None = next(calls, None)
        is_same = whole is not None and (is_causal, options) == (whole.is_causal, whole.options)
        if whole is None or not is_same or (mask is None) != (whole.mask is None):
            raise _Differs("its attention is called in another way, or another number of times, on a part")
        if query.shape == whole.query.shape:
            raise _Differs("its attention has queries that are no positions of the sequence")
        if not equal(query, part(whole.query, -2)):
            raise _Differs("the queries of its attention are not those of the whole sequence")
        for tensor, other in ((key, whole.key), (value, whole.value)):
            if not equal(tensor, other if tensor.shape == other.shape else part(other, -2)):
                raise _Differs("the keys or values of its attention are not those of the whole sequence")
        itself.append(key.shape != whole.key.shape)
        if mask is not None and whole.mask is not None:
            expected = whole.mask
            if mask.dim() > 1 and mask.shape[-2] == mask.shape[-1] == positions.each:
                raise _Differs("it makes the mask of its attention, of the positions that it has")
            for dim in (-1, -2):
                if mask.dim() >= -dim and mask.shape[dim] == positions.each:
                    expected = part(expected, dim)
            if not equal(mask, expected):
                raise _Differs("the mask of its attention is not that of the whole sequence")
        return part(whole.output, -2)

    return attend


def _run(
    call: Call, state: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], attend: Callable[..., Tensor]
) -> Any:
    block = call.module
    training = {module: module.training for module in block.modules()}
    for module in training:
        module.training = not isinstance(module, DIFFERENT_IN_TRAINING)
    try:
        with NoDropout(), attending_with(attend), torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)  # what it draws for a sample is the same for each part of it
            return functional_call(block, state, args, kwargs)
    finally:
        for module, was in training.items():
            module.training = was


def _random_call(
    call: Call, length: int, short: int, dims: dict[Any, int], masks: set[Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Random arguments of the recorded shapes, with a shorter sequence."""
    generator = torch.Generator().manual_seed(1)

    def real(key: Any, leaf: Tensor) -> Tensor:
        shape = list(leaf.shape)
        for dim in [dims[key]] if key in dims else [-1, -2] if key in masks else []:
            shape[dim] = short
        if leaf.is_complex():
            return torch.randn(shape, generator=generator, dtype=torch.complex64)
        if leaf.is_floating_point():
            return torch.randn(shape, generator=generator)
        if leaf.dtype == torch.bool:
            # No row without a key that it sees, and none that sees all.
            mixed = torch.rand(shape, generator=generator) < 0.5
            return mixed | torch.eye(short, dtype=torch.bool) if key in masks else mixed
        numbers = torch.ones(shape, dtype=leaf.dtype)
        if key in dims:  # each position has its own number
            along = [short if dim == dims[key] else 1 for dim in range(leaf.dim())]
            numbers = numbers * torch.arange(short, dtype=leaf.dtype).view(along)
        return numbers

    def fresh(value: Any) -> Any:
        return None if type(value).__name__.endswith("Cache") else value  # it would hold fake tensors of the trace

    args = tuple(fresh(value) for value in call.args)
    return map_leaves(args, {key: fresh(value) for key, value in call.kwargs.items()}, real)


def _dim_of(tensor: Tensor, short: int, dims: dict[Any, int]) -> int | None:
    """The dimension of the positions in a result: that of the main argument, where it has one of that size."""
    main = next(iter(dims.values()))
    if tensor.dim() > main and tensor.shape[main] == short:
        return main
    return next((dim for dim, size in enumerate(tensor.shape) if size == short), None)
