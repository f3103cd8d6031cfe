"""Which layers of a block can be cut in pairs, found by trying: the block runs on random numbers, whole and cut.

A pair is some layers cut by their outputs and the layer that takes the result, cut by its inputs; between the two
nothing has to be exchanged. Whether that is right depends on everything in between (heads, gates, views with fixed
sizes), so it is not guessed from names: each rank's part is computed here and held against the whole.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from rung import fakes
from rung.parallel.dropout import NoDropout
from rung.parallel.rehearsal import Call, tensors_of
from rung.parallel.tensor_layers import can_be_cut, is_conv1d, is_linear, is_norm, num_inputs, num_outputs

# Modules, and which of their arguments (by place or name) are gathered when they are called.
Points = dict[str, tuple[int | str, ...]]

_SHORT_BATCH, _SHORT_LENGTH = 2, 8
# After so many numbers they come again: drawing takes long, and no row is like another, as it is odd.
_PERIOD = 2**20 - 3
_SHIFT = 7  # in a larger weight each row is the one before, moved by so many numbers: it takes no memory to speak of
# Modules that draw random numbers or look at the whole batch in training; the code around them is what is tried.
_DIFFERENT_IN_TRAINING = (
    nn.modules.dropout._DropoutNd,
    nn.modules.batchnorm._BatchNorm,
    nn.MultiheadAttention,
    nn.RNNBase,
)


@dataclass(frozen=True)
class Pair:
    columns: tuple[str, ...]  # cut by their outputs
    rows: str  # cut by its inputs
    summed: tuple[str, ...] = ()  # norms in between: each rank's gradient is a part of theirs

    def below(self, start: str) -> Pair:
        """The pair under the names it has in the whole model."""
        return Pair(tuple(start + n for n in self.columns), start + self.rows, tuple(start + n for n in self.summed))

    def within(self, start: str) -> Pair:
        """The pair under the names it has in its block."""
        return Pair(
            tuple(n.removeprefix(start) for n in self.columns),
            self.rows.removeprefix(start),
            tuple(n.removeprefix(start) for n in self.summed),
        )


class _Reached(Exception):
    """What was to be seen was seen."""


class Trial:
    """One block with random weights and inputs. Built once, asked for many pairs."""

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
        self.drops = False  # whether a dropout was met; it is off here
        self._training = training
        self.modules = {name: module for name, module in block.named_modules() if name}
        self.modules[""] = block
        self.num_calls: dict[str, int] = {}
        self.given: dict[str, dict[int | str, Any]] = {}  # arguments of the first call
        self.inputs: dict[str, Tensor] = {}
        self.results: dict[str, Tensor] = {}
        self.order: list[str] = []  # of the linear layers, as they were called
        self.reason = ""
        # Long enough for each rank to have two positions, and a multiple of the ranks where sequences are that long.
        length = max(_SHORT_LENGTH // num_ranks, 2) * num_ranks
        with _apart():
            self.tensors = tensors if tensors is not None else _random_state(block)
            for short, flag in ((length, True), (length, False), (0, True), (0, False)):
                self.args, self.kwargs = _random_inputs(call, short, num_ranks, flag)
                with contextlib.suppress(Exception):
                    self._observe()
                    return
        self.order = []
        self.reason = "it could not be run alone on random numbers"

    def prove(self, columns: Sequence[str], rows: str, num_ranks: int, *, on: int | None = None) -> Pair | None:
        """The pair, if cutting these layers gives what the whole block gives, forward and backward.

        `on` is the one rank to try, where a block like this one was tried on all.
        """
        if not {*columns, rows} <= set(self.order):
            return None
        layers = [*columns, rows]
        sizes = [*(num_outputs(self.modules[name]) for name in columns), num_inputs(self.modules[rows])]
        if any(self.num_calls[name] != 1 for name in layers) or not all(can_be_cut(s, num_ranks) for s in sizes):
            return None
        if len(self.inputs[rows].chunk(num_ranks, dim=-1)) < num_ranks:
            return None
        with _apart():
            try:
                if not all(self._matters(name, rows) for name in columns):
                    return None
                ranks = range(num_ranks) if on is None else [on]
                found = [self._prove_on(columns, rows, rank, num_ranks) for rank in ranks]
            except Exception:  # a size that is fixed in forward
                return None
        summed = {name for names in found for name in names or ()}
        return None if None in found else Pair(tuple(columns), rows, tuple(sorted(summed)))

    def prove_sequence(self, pairs: Sequence[Pair], num_ranks: int) -> Points | str:
        """Whether the block is also right when each rank holds a part of dimension 1: where the parts must be gathered
        again for the layers in columns (the layers in rows cut their results), or why it is not."""
        hidden = self.args[0] if self.args else None
        after = tensors_of(self.output)
        if not isinstance(hidden, Tensor) or hidden.dim() != 3 or len(after) != 1 or after[0].shape != hidden.shape:
            return "it does not turn one tensor (batch, sequence, features) into one of the same shape"
        owned = {name for pair in pairs for name in (*pair.columns, pair.rows, *pair.summed)}
        for name, module in self.modules.items():
            if name not in owned and not is_norm(module) and any(True for _ in module.parameters(recurse=False)):
                return f"{name or 'the block itself'} is neither in a pair of cut layers nor a norm"
        if hidden.shape[1] < num_ranks:
            return f"its sequence of {hidden.shape[1]} is shorter than {num_ranks} ranks"
        # At the module around a pair if there is one: it may look at the length of what it is given, and several layers
        # then share what is gathered. Else at each layer.
        around = [self._module_around(pair, owned) for pair in pairs]
        layers = [pair.columns for pair in pairs]
        for points in ([(m,) if m else own for m, own in zip(around, layers, strict=True)], layers):
            with _apart(), contextlib.suppress(Exception):
                wanted = {name for names in points for name in names}
                found = [self._cut_positions(pairs, wanted, rank, num_ranks) for rank in range(num_ranks)]
                if found[0] and all(keys == found[0] for keys in found):
                    return found[0]
        return "what it does outside of its cut layers mixes positions"

    def _module_around(self, pair: Pair, owned: set[str]) -> str:
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
        """The whole run that all others are held against."""
        self.num_calls, self.given, self.inputs, self.results, self.order = {}, {}, {}, {}, []

        def watch(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
            def watched(*args: Any, **kwargs: Any) -> Any:
                self.num_calls[name] = self.num_calls.get(name, 0) + 1
                self.given.setdefault(name, _by_key(args, kwargs))
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
            raise ValueError("the whole block does not give numbers")

    def _run(self, replaced: Mapping[str, Callable[..., Any]], args: tuple[Any, ...] | None = None) -> Any:
        kept = {}
        for name, forward in replaced.items():
            kept[name] = vars(self.modules[name]).get("forward")
            self.modules[name].forward = forward
        training = {module: module.training for module in self.block.modules()}
        for module in training:
            module.training = self._training and not isinstance(module, _DIFFERENT_IN_TRAINING)
        try:
            with NoDropout() as dropout:
                return functional_call(self.block, self.tensors, self.args if args is None else args, self.kwargs)
        finally:
            self.drops = self.drops or dropout.met
            for module, was in training.items():
                module.training = was
            for name, own in kept.items():
                del self.modules[name].forward
                if own is not None:
                    self.modules[name].forward = own

    def _part(self, name: str, rank: int, num_ranks: int) -> Callable[[Tensor], Tensor]:
        """A layer that holds one rank's share of its outputs."""
        weight = self.tensors[f"{name}.weight"]
        weight = weight.T if is_conv1d(self.modules[name]) else weight
        bias = self.tensors.get(f"{name}.bias")
        rows = weight.chunk(num_ranks)[rank]
        part = None if bias is None else bias.chunk(num_ranks)[rank]
        return lambda x: F.linear(x, rows, part)

    def _as_known(self, name: str) -> Callable[[Tensor], Tensor]:
        """A layer after those that are tried: what it is given is what it was given, so its result is known, too."""
        forward = self.modules[name].forward

        def known(x: Tensor) -> Tensor:
            result: Tensor = self.results[name] if _equal(x, self.inputs[name]) else forward(x)
            return result

        return known

    def _matters(self, name: str, rows: str) -> bool:
        """Whether a layer's result has any effect on what `rows` takes: else these inputs prove nothing."""
        reached: list[Tensor] = []
        whole = self._part(name, 0, 1)

        def catch(x: Tensor) -> Tensor:
            reached.append(x)
            raise _Reached

        with contextlib.suppress(_Reached):
            self._run({name: lambda x: 1 - whole(x), rows: catch})
        return not _equal(reached[0], self.inputs[rows])

    def _prove_on(self, columns: Sequence[str], rows: str, rank: int, num_ranks: int) -> list[str] | None:
        """Whether one rank's part is right; the norms whose gradient is then a part of the whole one."""
        reached: list[Tensor] = []

        def catch(x: Tensor) -> Tensor:
            reached.append(x)
            return self.results[rows]

        def run(detached: bool) -> tuple[Any, list[Tensor | None]]:
            reached.clear()
            parts = {name: self._part(name, rank, num_ranks) for name in columns}
            replaced: dict[str, Callable[..., Any]] = {
                name: (lambda x, part=part: part(x.detach() if detached else x)) for name, part in parts.items()
            }
            later = self.order[self.order.index(rows) + 1 :]
            known = {name: self._as_known(name) for name in later if name not in columns and self.num_calls[name] == 1}
            output = self._run({**known, **replaced, rows: catch})
            weights = torch.randn(reached[0].shape, generator=torch.Generator().manual_seed(rank))
            return output, _gradients((reached[0] * weights).sum(), sources)

        cut = {f"{name}.{key}" for name in columns for key in ("weight", "bias")}
        named = {name: tensor for name, tensor in self.tensors.items() if name not in cut and tensor.requires_grad}
        sources = [*named.values(), *(t for t in tensors_of((self.args, self.kwargs)) if t.requires_grad)]
        # What the layers in columns take is the same on every rank, and its gradient is summed over ranks. Gradients
        # that go around them would not be: with those inputs detached, nothing may arrive.
        output, around = run(detached=True)
        wanted = self.inputs[rows].chunk(num_ranks, dim=-1)[rank]
        if len(reached) != 1 or not _equal(reached[0], wanted) or not _equal(output, self.output):
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
            if total is None or not _equal(gradient, total):
                return None
            summed.add(owner)
        return sorted(summed)

    def _cut_positions(self, pairs: Sequence[Pair], points: set[str], rank: int, num_ranks: int) -> Points | None:
        """The arguments to gather at some modules, if the block is right on one rank's positions.

        Each must be this rank's positions of what it is in the whole run. As that holds on all ranks, gathering the
        parts gives the whole, and the module may go on from there.
        """
        right: list[bool] = []
        found: Points = {}

        def positions(tensor: Tensor) -> Tensor:
            return tensor.chunk(num_ranks, dim=1)[rank]

        def enter(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
            def gathering(*args: Any, **kwargs: Any) -> Any:
                taken = _by_key(args, kwargs)
                for key, value in taken.items():
                    whole = self.given[name][key]
                    if isinstance(value, Tensor) and value.shape != whole.shape:
                        right.append(_equal(value, positions(whole)))
                        found[name] = (*found.get(name, ()), key)
                        taken[key] = whole
                return forward(*(taken[n] for n in range(len(args))), **{key: taken[key] for key in kwargs})

            return gathering

        def row(name: str) -> Callable[[Tensor], Tensor]:
            def forward(x: Tensor) -> Tensor:
                right.append(_equal(x, self.inputs[name].chunk(num_ranks, dim=-1)[rank]))
                return positions(self.results[name])

            return forward

        replaced: dict[str, Callable[..., Any]] = {pair.rows: row(pair.rows) for pair in pairs}
        replaced |= {name: self._part(name, rank, num_ranks) for pair in pairs for name in pair.columns}
        replaced |= {name: enter(name, replaced.get(name, self.modules[name].forward)) for name in points}
        output = self._run(replaced, (positions(self.args[0]), *self.args[1:]))
        is_right = all(right) and _equal(tensors_of(output)[0], positions(tensors_of(self.output)[0]))
        return found if is_right and set(found) == points else None


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Real tensors, gradients on, and the process's random numbers left alone."""
    with fakes.outside_fakes(), torch.enable_grad(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
        yield


def _random_state(block: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for name, parameter in block.named_parameters():
        fan_in = parameter.shape[-1] if parameter.dim() > 1 else 1
        if parameter.numel() > _PERIOD and parameter.is_floating_point() and parameter.dim() > 1:
            tensors[name] = _shifted(parameter.shape, fan_in**-0.5, generator)
        else:
            tensors[name] = _random(parameter, parameter.shape, generator, True).div_(max(1, fan_in) ** 0.5)
        if parameter.is_floating_point():
            tensors[name].requires_grad_()
    for name, buffer in block.named_buffers():
        has_data = not buffer.is_meta and type(buffer).__name__ != "FakeTensor"
        real = buffer.detach().cpu() if has_data else _random(buffer, buffer.shape, generator, True)
        # Positive, as a running variance is.
        tensors[name] = (real if has_data else real.abs()).float() if real.is_floating_point() else real
    return tensors


def _random_inputs(call: Call, length: int, num_ranks: int, flag: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs of the recorded shapes; with `length`, of a small batch and a short sequence where that can be told."""
    generator = torch.Generator().manual_seed(1)
    given = tensors_of((call.args, call.kwargs))
    sizes = dict.fromkeys((given[0].shape[0],), _SHORT_BATCH) if length and given and given[0].dim() > 1 else {}
    if sizes and given[0].dim() == 3:
        longest = given[0].shape[1]
        sizes[longest] = min(length, longest // num_ranks * num_ranks or longest)

    def shorten(shape: Sequence[int]) -> list[int]:
        # The last dimension counts features, unless the one before is as long: a mask of positions by positions.
        is_mask = len(shape) >= 2 and shape[-1] == shape[-2] and len(shape) != 3
        kept = 0 if is_mask or len(shape) == 1 else 1
        head = [min(size, sizes.get(size, size)) for size in shape[: len(shape) - kept]]
        return [*head, *shape[len(shape) - kept :]]

    first = next((t for t in given if t.is_floating_point()), None)

    def real(leaf: Tensor) -> Tensor:
        tensor = _random(leaf, shorten(leaf.shape), generator, flag)
        return tensor.requires_grad_() if leaf.requires_grad or leaf is first else tensor

    def fresh(value: Any) -> Any:
        # A cache of keys and values would hold tensors of the rehearsal; training needs none.
        return None if type(value).__name__.endswith("Cache") else tree_map_only(Tensor, real, value)

    return tuple(fresh(value) for value in call.args), {key: fresh(value) for key, value in call.kwargs.items()}


def _random(like: Tensor, shape: Sequence[int], generator: torch.Generator, flag: bool) -> Tensor:
    if like.is_complex():
        return torch.randn(tuple(shape), generator=generator, dtype=torch.complex64)
    if like.is_floating_point():
        size = math.prod(shape)
        few = torch.randn(min(size, _PERIOD), generator=generator, dtype=torch.float32)
        return few.repeat(-(-size // _PERIOD) or 1)[:size].reshape(tuple(shape))
    return torch.full(tuple(shape), flag, dtype=like.dtype)  # of numbers: 1 is a place in any table, and no mask


def _shifted(shape: Sequence[int], scale: float, generator: torch.Generator) -> Tensor:
    """A large weight whose rows overlap in memory."""
    *head, columns = shape
    strides = [_SHIFT * math.prod(head[place + 1 :]) for place in range(len(head))]
    numbers = torch.randn(_SHIFT * (math.prod(head) - 1) + columns, generator=generator) * scale
    return numbers.as_strided(tuple(shape), (*strides, 1))


def _by_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int | str, Any]:
    taken: dict[int | str, Any] = dict(enumerate(args))
    taken.update(kwargs)
    return taken


def _gradients(loss: Tensor, sources: list[Tensor]) -> list[Tensor | None]:
    if not loss.requires_grad:
        return [None] * len(sources)
    found = torch.autograd.grad(loss, sources, allow_unused=True)
    return [gradient if gradient is not None and bool(gradient.any()) else None for gradient in found]


def _equal(left: Any, right: Any) -> bool:
    ours, theirs = tensors_of(left), tensors_of(right)
    if [t.shape for t in ours] != [t.shape for t in theirs]:
        return False
    return all(
        torch.equal(a, b) if not a.is_floating_point() else bool((a - b).abs().max() <= 1e-4 * (1 + b.abs().max()))
        for a, b in zip(ours, theirs, strict=True)
        if a.numel()
    )
