"""Find the layers of a block that can be sharded in colwise/rowwise pairs, by running the block whole and sharded.

A pair is one or more colwise layers and the rowwise layer that consumes their result, with no communication between
them. Whether a pair is valid depends on all code in between (heads, gates, views with fixed sizes), so module names
are not enough: each rank's part is computed on random numbers and compared with the whole block.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from rung.distributed.torch_private import BatchNorm, Dropout, tree_map_only
from rung.parallel.dropout import NoDropout
from rung.parallel.forward_trace import Call, tensors_of
from rung.parallel.linear_layers import can_shard, is_conv1d, is_linear, is_norm, num_inputs, num_outputs
from rung.parallel.random_proof import equal, isolated, random_inputs, random_state

# Module -> the arguments (by position or name) that are gathered before it is called.
Points = dict[str, tuple[int | str, ...]]

_SHORT_LENGTH = 8
# Modules that draw random numbers or mix samples in training run in eval mode; the code around them is under test.
DIFFERENT_IN_TRAINING = (Dropout, BatchNorm, nn.MultiheadAttention, nn.RNNBase)


@dataclass(frozen=True)
class Pair:
    columns: tuple[str, ...]  # layers sharded by output features
    rows: str  # the layer sharded by input features
    summed: tuple[str, ...] = ()  # norms in between, whose gradients are partial sums on each rank

    def below(self, start: str) -> Pair:
        """The pair with names relative to the model."""
        return Pair(tuple(start + n for n in self.columns), start + self.rows, tuple(start + n for n in self.summed))

    def within(self, start: str) -> Pair:
        """The pair with names relative to its block."""
        return Pair(
            tuple(n.removeprefix(start) for n in self.columns),
            self.rows.removeprefix(start),
            tuple(n.removeprefix(start) for n in self.summed),
        )


class _Reached(Exception):
    """Ends a run once the input under test is captured."""


class ShardingCheck:
    """A block with random weights and inputs, on which candidate pairs are checked."""

    def __init__(
        self,
        block: nn.Module,
        call: Call,
        num_ranks: int,
        *,
        training: bool = True,
        tensors: dict[str, Tensor] | None = None,
    ) -> None:
        self.block = block
        self.has_dropout = False  # whether forward calls an active dropout; `_run` turns it off
        self._training = training
        self.modules = {name: module for name, module in block.named_modules() if name}
        self.modules[""] = block
        self.num_calls: dict[str, int] = {}
        self.given: dict[str, dict[int | str, Any]] = {}  # arguments of the first call
        self.inputs: dict[str, Tensor] = {}
        self.results: dict[str, Tensor] = {}
        self.order: list[str] = []  # linear layers in call order
        self.reason = ""
        # At least two positions per rank, and a multiple of the number of ranks.
        length = max(_SHORT_LENGTH // num_ranks, 2) * num_ranks
        with isolated():
            self.tensors = tensors if tensors is not None else random_state(block)
            for short, flag in ((length, True), (length, False), (0, True), (0, False)):
                self.args, self.kwargs = random_inputs(call, short, num_ranks, flag)
                with contextlib.suppress(Exception):
                    self._observe()
                    return
        self.order = []
        self.reason = "it does not run on its own with random inputs"

    def prove(self, columns: Sequence[str], rows: str, num_ranks: int, *, on: int | None = None) -> Pair | None:
        """The pair, if sharding these layers reproduces the whole block in forward and backward; else None.

        With `on`, only that rank is checked, which is enough if an identical block was checked on all ranks.
        """
        if not {*columns, rows} <= set(self.order):
            return None
        layers = [*columns, rows]
        sizes = [*(num_outputs(self.modules[name]) for name in columns), num_inputs(self.modules[rows])]
        if any(self.num_calls[name] != 1 for name in layers) or not all(can_shard(s, num_ranks) for s in sizes):
            return None
        if len(self.inputs[rows].chunk(num_ranks, dim=-1)) < num_ranks:
            return None
        with isolated():
            try:
                if not all(self._affects(name, rows) for name in columns):
                    return None
                ranks = range(num_ranks) if on is None else [on]
                found = [self._check_rank(columns, rows, rank, num_ranks) for rank in ranks]
            except Exception:  # for example a view with a hard-coded size
                return None
        summed = {name for names in found for name in names or ()}
        return None if None in found else Pair(tuple(columns), rows, tuple(sorted(summed)))

    def prove_sequence(self, pairs: Sequence[Pair], num_ranks: int) -> Points | str:
        """The arguments to gather before the colwise layers if each rank holds a part of dimension 1 (the rowwise
        layers shard it again); or the reason why the block cannot run on such parts."""
        hidden = self.args[0] if self.args else None
        after = tensors_of(self.output)
        if not isinstance(hidden, Tensor) or hidden.dim() != 3 or len(after) != 1 or after[0].shape != hidden.shape:
            return "it does not turn one tensor (batch, sequence, features) into one of the same shape"
        owned = {name for pair in pairs for name in (*pair.columns, pair.rows, *pair.summed)}
        for name, module in self.modules.items():
            if name not in owned and not is_norm(module) and any(True for _ in module.parameters(recurse=False)):
                return f"{name or 'the block itself'} is neither in a pair of sharded layers nor a norm"
        if hidden.shape[1] < num_ranks:
            return f"its sequence of {hidden.shape[1]} is shorter than {num_ranks} ranks"
        # Gather at the module around a pair if possible: it may use the sequence length, and its layers then share one
        # gathered tensor. Otherwise gather at each layer.
        around = [self._module_around(pair, owned) for pair in pairs]
        layers = [pair.columns for pair in pairs]
        for points in ([(m,) if m else own for m, own in zip(around, layers, strict=True)], layers):
            with isolated(), contextlib.suppress(Exception):
                wanted = {name for names in points for name in names}
                found = [self._cut_positions(pairs, wanted, rank, num_ranks) for rank in range(num_ranks)]
                if found[0] and all(keys == found[0] for keys in found):
                    return found[0]
        return "code outside of its sharded layers mixes positions"

    def _module_around(self, pair: Pair, owned: set[str]) -> str:
        """The innermost module around a pair, if it is called once and has no other parameters; else empty."""
        paths = [name.split(".")[:-1] for name in (*pair.columns, pair.rows)]
        common = [parts[0] for parts in itertools.takewhile(lambda p: len(set(p)) == 1, zip(*paths, strict=False))]
        name = ".".join(common)
        owners = {
            f"{name}.{key}".strip(".")
            for key, m in self.modules[name].named_modules()
            if list(m.parameters(recurse=False))
        }
        return name if name and self.num_calls.get(name) == 1 and owners <= owned else ""

    def _observe(self) -> None:
        """Run the whole block and record the reference results."""
        self.num_calls, self.given, self.inputs, self.results, self.order = {}, {}, {}, {}, []

        def watch(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
            def watched(*args: Any, **kwargs: Any) -> Any:
                self.num_calls[name] = self.num_calls.get(name, 0) + 1
                self.given.setdefault(name, _arguments(args, kwargs))
                result = forward(*args, **kwargs)
                if is_linear(self.modules[name]) and name not in self.order:
                    self.order.append(name)
                    self.inputs[name], self.results[name] = args[0].detach(), result.detach()
                return result

            return watched

        output = self._run({name: watch(name, module.forward) for name, module in self.modules.items() if name})
        self.output = tree_map_only(Tensor, Tensor.detach, output)
        self.given = tree_map_only(Tensor, Tensor.detach, self.given)
        seen = [*tensors_of(self.output), *self.results.values()]
        if not all(bool(t.isfinite().all()) for t in seen if t.is_floating_point()):
            raise ValueError("the block returns values that are not finite")

    def _run(self, replaced: Mapping[str, Callable[..., Any]], args: tuple[Any, ...] | None = None) -> Any:
        kept = {}
        for name, forward in replaced.items():
            kept[name] = vars(self.modules[name]).get("forward")
            self.modules[name].forward = forward
        training = {module: module.training for module in self.block.modules()}
        for module in training:
            module.training = self._training and not isinstance(module, DIFFERENT_IN_TRAINING)
        try:
            # The same random numbers in every run and on every rank: ranks must come to the same plan.
            with NoDropout() as dropout, torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(0)  # torch.manual_seed formats a stack for each kind of device
                return functional_call(self.block, self.tensors, self.args if args is None else args, self.kwargs)
        finally:
            self.has_dropout = self.has_dropout or dropout.found
            for module, was in training.items():
                module.training = was
            for name, own in kept.items():
                del self.modules[name].forward
                if own is not None:
                    self.modules[name].forward = own

    def _part(self, name: str, rank: int, num_ranks: int) -> Callable[[Tensor], Tensor]:
        """The forward of one rank's shard of a colwise layer."""
        weight = self.tensors[f"{name}.weight"]
        weight = weight.T if is_conv1d(self.modules[name]) else weight
        bias = self.tensors.get(f"{name}.bias")
        rows = weight.chunk(num_ranks)[rank]
        part = None if bias is None else bias.chunk(num_ranks)[rank]
        return lambda x: F.linear(x, rows, part)

    def _recorded(self, name: str) -> Callable[[Tensor], Tensor]:
        """The forward of a layer after the pair: its recorded result if its input is unchanged, to save time."""
        forward = self.modules[name].forward

        def known(x: Tensor) -> Tensor:
            result: Tensor = self.results[name] if equal(x, self.inputs[name]) else forward(x)
            return result

        return known

    def _affects(self, name: str, rows: str) -> bool:
        """Whether a layer's result changes the input of `rows`; if it does not, the check proves nothing."""
        captured: list[Tensor] = []
        whole = self._part(name, 0, 1)

        def catch(x: Tensor) -> Tensor:
            captured.append(x)
            raise _Reached

        with contextlib.suppress(_Reached):
            self._run({name: lambda x: 1 - whole(x), rows: catch})  # any other values would do
        return not equal(captured[0], self.inputs[rows])

    def _check_rank(self, columns: Sequence[str], rows: str, rank: int, num_ranks: int) -> list[str] | None:
        """The norms with partial gradients if one rank's part is correct; None if it is not."""
        captured: list[Tensor] = []

        def catch(x: Tensor) -> Tensor:
            captured.append(x)
            return self.results[rows]

        def run(detached: bool) -> tuple[Any, list[Tensor | None]]:
            captured.clear()
            parts = {name: self._part(name, rank, num_ranks) for name in columns}
            replaced: dict[str, Callable[..., Any]] = {
                name: (lambda x, part=part: part(x.detach() if detached else x)) for name, part in parts.items()
            }
            later = self.order[self.order.index(rows) + 1 :]
            known = {name: self._recorded(name) for name in later if name not in columns and self.num_calls[name] == 1}
            output = self._run({**known, **replaced, rows: catch})
            # A random cotangent, so that errors of single elements cannot cancel in the sum.
            weights = torch.randn(captured[0].shape, generator=torch.Generator().manual_seed(rank))
            return output, _gradients((captured[0] * weights).sum(), sources)

        cut = {f"{name}.{key}" for name in columns for key in ("weight", "bias")}
        named = {name: tensor for name, tensor in self.tensors.items() if name not in cut and tensor.requires_grad}
        sources = [*named.values(), *(t for t in tensors_of((self.args, self.kwargs)) if t.requires_grad)]
        # The input of the colwise layers is replicated and its gradient is summed over ranks. A gradient that bypasses
        # these layers would not be summed, so none may arrive once their inputs are detached (norms excepted).
        output, around = run(detached=True)
        wanted = self.inputs[rows].chunk(num_ranks, dim=-1)[rank]
        if len(captured) != 1 or not equal(captured[0], wanted) or not equal(output, self.output):
            return None
        if all(gradient is None for gradient in around):
            return []
        _, everything = run(detached=False)
        names: list[str | None] = [*named, *[None] * (len(sources) - len(named))]
        summed = set()
        for name, gradient, total in zip(names, around, everything, strict=True):
            if gradient is None:
                continue
            owner = "" if name is None else name.rpartition(".")[0]
            if not owner or not is_norm(self.modules[owner]) or self.num_calls[owner] != 1:
                return None
            if total is None or not equal(gradient, total):
                return None
            summed.add(owner)
        return sorted(summed)

    def _cut_positions(self, pairs: Sequence[Pair], points: set[str], rank: int, num_ranks: int) -> Points | None:
        """The arguments to gather at `points`, if the block is correct on one rank's positions; else None.

        Each gathered argument must equal this rank's positions of the reference. If that holds on every rank, gathering
        the parts restores the whole argument, so the module continues from the reference value.
        """
        right: list[bool] = []
        found: Points = {}

        def positions(tensor: Tensor) -> Tensor:
            return tensor.chunk(num_ranks, dim=1)[rank]

        def enter(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
            def gathering(*args: Any, **kwargs: Any) -> Any:
                arguments = _arguments(args, kwargs)
                for key, value in arguments.items():
                    whole = self.given[name][key]
                    if isinstance(value, Tensor) and value.shape != whole.shape:
                        right.append(equal(value, positions(whole)))
                        found[name] = (*found.get(name, ()), key)
                        arguments[key] = whole
                return forward(*(arguments[n] for n in range(len(args))), **{key: arguments[key] for key in kwargs})

            return gathering

        def row(name: str) -> Callable[[Tensor], Tensor]:
            def forward(x: Tensor) -> Tensor:
                right.append(equal(x, self.inputs[name].chunk(num_ranks, dim=-1)[rank]))
                return positions(self.results[name])

            return forward

        replaced: dict[str, Callable[..., Any]] = {pair.rows: row(pair.rows) for pair in pairs}
        replaced |= {name: self._part(name, rank, num_ranks) for pair in pairs for name in pair.columns}
        replaced |= {name: enter(name, replaced.get(name, self.modules[name].forward)) for name in points}
        output = self._run(replaced, (positions(self.args[0]), *self.args[1:]))
        is_right = all(right) and equal(tensors_of(output)[0], positions(tensors_of(self.output)[0]))
        return found if is_right and set(found) == points else None


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int | str, Any]:
    arguments: dict[int | str, Any] = dict(enumerate(args))
    arguments.update(kwargs)
    return arguments


def _gradients(loss: Tensor, sources: list[Tensor]) -> list[Tensor | None]:
    if not loss.requires_grad:
        return [None] * len(sources)
    found = torch.autograd.grad(loss, sources, allow_unused=True)
    return [gradient if gradient is not None and bool(gradient.any()) else None for gradient in found]
