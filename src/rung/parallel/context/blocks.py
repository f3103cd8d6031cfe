"""Run the blocks of a model on a part of the positions: cut at the entry of the first, put together after the last.

Code outside of blocks, embeddings, positions and the loss among it, sees whole sequences on every rank. A block's
arguments that have the sequence's length are cut; its result stays cut if nothing but another block reads it. The loss
is the same on all ranks that share a sequence, each of which has the gradient of its own positions, times their number:
putting a sequence together sums the gradients of all. Averaging over all data ranks, as for other data parallelism,
then gives the gradient of the loss, for every parameter.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from rung.distributed.torch_private import is_in_backward, tree_map_only
from rung.distributed.world import World
from rung.errors import ModelError
from rung.parallel.blocks import describe, find_list_of_blocks
from rung.parallel.context.arguments import leaves, map_leaves
from rung.parallel.context.attention import Attention, attending_with, whole_positions
from rung.parallel.context.positions import RankPositions
from rung.parallel.context.validate import Cut, prove, why_unknown
from rung.parallel.dropout import SCALED_DOT_PRODUCT_ATTENTION
from rung.parallel.forward_trace import Call, ForwardTrace, signature, tensors_of
from rung.parallel.forward_tracer import ForwardTracer

_LENGTH = "rung_length"  # the argument that tells the sequence's to a block that is computed again in backward


@dataclass(frozen=True)
class BlockPlan:
    """How one block is called on a part of the positions."""

    cut: Cut
    arrives_cut: frozenset[Any] = frozenset()  # arguments that are the cut results of another block
    stays_cut: bool = False  # its result goes to other blocks alone


@dataclass
class ContextPlan:
    """How each block of a model is called."""

    blocks: dict[str, BlockPlan]
    notes: list[str] = field(default_factory=list)


def plan_context(
    tracer: ForwardTracer, blocks: str | None, world: World, example: Any, stage_of: Callable[[str], Any]
) -> ContextPlan:
    """Find how the blocks are cut, and prove on random numbers that each computes the same on a part of the positions.

    `stage_of` names the stage of a block: results that go to another stage are whole.
    """
    names = {name for name, _ in find_list_of_blocks(tracer.meta_model, blocks)}
    if not names:
        raise ModelError(
            "context parallelism cuts sequences at the entry of a model's blocks, and this model has no list of them. "
            'Name them in the task, as in blocks = "layers.*".'
        )
    lengths: Counter[int] = Counter()

    def note(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        lengths[query.shape[-2]] += 1
        return SCALED_DOT_PRODUCT_ATTENTION(query, *args, **kwargs)

    with attending_with(note):
        trace = tracer.watch(example, lambda name, _: name in names)
    if not lengths:
        raise ModelError(why_unknown("the model"))
    for call in trace.calls:
        if call.index in trace.leaks:
            raise ModelError(
                f"context parallelism: {call.name} hands on a tensor that it does not return "
                f"({trace.leaks[call.index]}), which would be that of a part of the positions. Return it."
            )
    alike: dict[Any, Cut] = {}
    cuts: list[Cut] = []
    for call in trace.calls:
        key = describe(call.module), *(signature(leaf) for leaf in tensors_of((call.args, call.kwargs)))
        # Every block, also those that look like another: what they do may depend on their number.
        cuts.append(prove(call, [n for n, _ in lengths.most_common()], world.layout.cp, like=alike.get(key)))
        alike.setdefault(key, cuts[-1])
    stays = [_stays(trace, cuts, call, stage_of) for call in trace.calls]
    plans: dict[str, BlockPlan] = {}
    for call, cut in zip(trace.calls, cuts, strict=True):
        plan = BlockPlan(cut, frozenset(_arriving(trace, stays, call)), stays[call.index])
        plans[call.name] = plan if plans.get(call.name, plan) == plan else BlockPlan(cut)
    return ContextPlan(_agreed(plans, trace), [_summary(plans, world)])


def _arriving(trace: ForwardTrace, stays: list[bool], call: Call) -> set[Any]:
    """The arguments that are cut results of other blocks."""
    cut = {id(tensor) for other in trace.calls if stays[other.index] for tensor in other.output_tensors()}
    return {key for key, tensor in leaves(call.args, call.kwargs).items() if id(tensor) in cut}


def _stays(trace: ForwardTrace, cuts: list[Cut], call: Call, stage_of: Callable[[str], Any]) -> bool:
    """Whether the result goes to blocks of the same stage alone, which take it as positions of their own sequence."""
    results = {id(tensor): cuts[call.index].output[place] for place, tensor in enumerate(call.output_tensors())}
    ends = {id(tensor) for tensor in tensors_of(trace.output)}
    if results.keys() & ends or any((call.index, leaf) in trace.read_between for leaf in range(len(results))):
        return False
    readers = [
        (other, key, results[id(tensor)])
        for other in trace.calls
        for key, tensor in leaves(other.args, other.kwargs).items()
        if id(tensor) in results
    ]
    return bool(readers) and all(
        stage_of(other.name) == stage_of(call.name) and dim is not None and cuts[other.index].dims.get(key) == dim
        for other, key, dim in readers
    )


def _agreed(plans: dict[str, BlockPlan], trace: ForwardTrace) -> dict[str, BlockPlan]:
    """Every block by itself, if one that is called several times does not get and give the same each time."""
    calls: dict[str, int] = Counter(call.name for call in trace.calls)
    if all(count == 1 for count in calls.values()):
        return plans
    return {name: replace(plan, arrives_cut=frozenset(), stays_cut=False) for name, plan in plans.items()}


def _summary(plans: dict[str, BlockPlan], world: World) -> str:
    together = sum(not plan.stays_cut for plan in plans.values())
    return (
        f"context parallel: {len(plans)} blocks on 1/{world.layout.cp} of the positions; "
        f"sequences are put together after {together if together > 1 else 'the last'} of them"
    )


class ContextParallel:
    """Applies a plan to the blocks of a rank."""

    def __init__(self, plan: ContextPlan, world: World, form: str) -> None:
        self._plan, self._world, self._form = plan, world, form
        self._group: dist.ProcessGroup = world.axis("cp").get_group()
        self._rank = dist.get_rank(self._group)
        self._known: dict[int, RankPositions] = {}  # by length
        self._attentions: dict[Any, tuple[Attention, Callable[..., Tensor]]] = {}
        self._cut_by: str | None = None  # the block whose cut result no other has taken yet
        self._current: RankPositions | None = None  # of the forward pass that is under way
        self._inside: RankPositions | None = None  # of the block whose forward runs

    def watch(self, model: nn.Module) -> None:
        """Notice when a model's forward ends with a cut result, because it calls its blocks in another way."""

        def check(*_: Any) -> None:
            name, self._cut_by = self._cut_by, None
            if name is not None:
                raise _changed(name, "what takes its result")

        model.register_forward_hook(check)

    def is_even(self) -> bool | None:
        """Whether no rank has a position again, in the block whose forward runs; None outside of blocks."""
        return self._inside.is_even if self._inside is not None else None

    def recompute(self, name: str, block: nn.Module) -> None:
        """Let a block find its positions when backward computes it again. Before activation checkpointing."""
        forward = block.forward

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            with attending_with(self._attention(name, self._known[kwargs.pop(_LENGTH)])):
                return forward(*args, **kwargs)

        block.forward = run

    def apply(self, name: str, block: nn.Module, *, is_recomputed: bool) -> None:
        """Cut the arguments of a block, and put its result together where it is needed whole. After all wrappers."""
        forward = block.forward

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            plan = self._plan.blocks.get(name)
            if plan is None:
                raise _changed(name, "with that it was not called, and")
            is_again = is_in_backward()  # because the model's own forward checkpoints the block
            if not is_again and not plan.arrives_cut and self._cut_by is not None:
                raise _changed(self._cut_by, "what takes its result")
            given = leaves(args, kwargs)
            positions = self._positions_again(name, plan, given) if is_again else self._positions(name, plan, given)
            args, kwargs = map_leaves(args, kwargs, functools.partial(self._part, name, plan, positions))
            before, self._inside = self._inside, positions
            try:
                if is_recomputed:
                    output = forward(*args, **kwargs, **{_LENGTH: positions.length})
                else:
                    with attending_with(self._attention(name, positions)):
                        output = forward(*args, **kwargs)
            finally:
                self._inside = before
            if not is_again:
                self._cut_by = name if plan.stays_cut else None
            if plan.stays_cut:
                return output
            places = iter(range(len(plan.cut.output)))
            return tree_map_only(Tensor, lambda tensor: self._whole(tensor, plan, positions, next(places)), output)

        block.forward = run

    def _attention(self, name: str, positions: RankPositions) -> Callable[..., Tensor]:
        """One function for each block and length: compiled code is compiled again for another one."""
        if (name, positions) not in self._attentions:
            itself = self._plan.blocks[name].cut.attends_to_itself
            attention = Attention(positions, self._group, self._form, itself)
            self._attentions[name, positions] = attention, attention.__call__
        attention, call = self._attentions[name, positions]
        attention.begin()
        return call

    def _positions(self, name: str, plan: BlockPlan, given: dict[Any, Tensor]) -> RankPositions:
        """From the length of the first argument that comes whole; else those of the pass."""
        for key, dim in plan.cut.dims.items():
            if key in given and key not in plan.arrives_cut:
                length, device = given[key].shape[dim], given[key].device
                if length not in self._known:
                    self._known[length] = RankPositions(length, self._world.layout.cp, self._rank, device)
                if plan.arrives_cut and self._current is not self._known[length]:
                    raise _changed(name, key)
                self._current = self._known[length]
                return self._current
        if self._current is None:
            raise _changed(name, "its input")
        return self._current

    def _positions_again(self, name: str, plan: BlockPlan, given: dict[Any, Tensor]) -> RankPositions:
        """Those of a pass that is over: others may have begun since, of sequences of another length."""
        for key, dim in plan.cut.dims.items():
            if key in given and key not in plan.arrives_cut:
                return self._known[given[key].shape[dim]]
        eachs = {given[key].shape[dim] for key, dim in plan.cut.dims.items() if key in given}
        found = [positions for positions in self._known.values() if positions.each in eachs]
        if len(found) == 1:
            return found[0]
        raise ModelError(
            f"context parallelism: the model computes {name} again in backward, where parts of sequences of "
            f"{' and of '.join(str(one.length) for one in found)} positions look alike. Leave that to "
            "--activation-checkpointing full."
        )

    def _part(self, name: str, plan: BlockPlan, positions: RankPositions, key: Any, tensor: Tensor) -> Tensor:
        dim = plan.cut.dims.get(key)
        if key in plan.arrives_cut:
            if dim is None or tensor.shape[dim] != positions.each:
                raise _changed(name, key)
            return tensor
        if dim is None:
            is_mask = key in plan.cut.masks
            if key not in plan.cut.whole or (is_mask and tensor.shape[-2:] != (positions.length, positions.length)):
                raise _changed(name, key)
            return tensor
        if tensor.dim() <= dim or tensor.shape[dim] != positions.length:
            raise _changed(name, key)
        return tensor.index_select(dim, positions.own)

    def _whole(self, tensor: Tensor, plan: BlockPlan, positions: RankPositions, place: int) -> Tensor:
        dim = plan.cut.output[place]
        return tensor if dim is None else whole_positions(tensor, dim, positions, self._group)


def _changed(name: str, key: Any) -> ModelError:
    what = f"argument {key[0]}" if isinstance(key, tuple) else str(key)
    return ModelError(
        f"context parallelism: {name} is called in another way than with the first sample: {what} has another form. "
        "Give blocks the same arguments in every batch, or use a strategy without cp."
    )
