"""Facts about a model that a tensor plan needs: which modules are called, and where pairs of layers may be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rung.distributed.torch_private import forward_hooks_of, tree_leaves
from rung.parallel.blocks import describe, find_blocks, num_parameters
from rung.parallel.experts.validate import ExpertCall
from rung.parallel.forward_trace import Call, ForwardTrace, trace_forward
from rung.parallel.linear_layers import is_linear
from rung.parallel.tensor.validate import Pair, ShardingCheck

_LARGEST_CHECK_BYTES = 8 << 30  # for layers outside blocks; blocks are checked at any size


def _has_hooks_inside(module: nn.Module) -> bool:
    return any(any(forward_hooks_of(inner)) for inner in module.modules() if inner is not module)


def _takes_numbers(call: Call) -> bool:
    """Whether a module is called with numbers, by which a caller that branches on values may tell it what to do."""
    return any(isinstance(leaf, int | float) for leaf in tree_leaves((call.args, call.kwargs)))


@dataclass
class Survey:
    """The model, and the traces of its leaf modules and of its blocks."""

    model: nn.Module
    num_ranks: int
    run: Callable[[], Any]
    device: torch.device
    mode: Any
    pattern: str | None
    # Modules whose forward may read values of tensors; all ranks of a tensor group read the same ones.
    may_decide: Callable[[str, nn.Module], bool] = lambda name, module: False
    # How modules with experts are called, or why their experts cannot be shared out; they run as `without_experts`.
    experts: Mapping[str, ExpertCall | str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.modules = dict(self.model.named_modules())
        self.blocks = find_blocks(self.model, self.pattern)
        self.leaves = self._trace_forward(lambda name, module: not any(True for _ in module.children()))
        self.in_blocks = self._trace_forward(lambda name, module: any(module is block for _, block in self.blocks))
        self.called = list(dict.fromkeys(call.name for call in self.leaves.calls))
        users: dict[int, int] = {}
        for module in self.modules.values():
            for parameter in module.parameters(recurse=False):
                users[id(parameter)] = users.get(id(parameter), 0) + 1
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        self.shared = {names[key] for key, count in users.items() if count > 1}
        # Parameters that code outside their module reads stay whole: that code expects the full tensor.
        sources = set().union(self.leaves.needs, *(call.needs for call in self.leaves.calls))
        used_outside = {source for source in sources if isinstance(source, str)}
        self.parameter_names = {
            name: [names[id(p)] for p in module.parameters(recurse=False)] for name, module in self.modules.items()
        }
        self.used_directly = {name for name, own in self.parameter_names.items() if used_outside & set(own)}
        self._last_check: tuple[Any, ShardingCheck] | None = None

    def _trace_forward(self, is_watched: Callable[[str, nn.Module], bool]) -> ForwardTrace:
        def run() -> Any:
            # With gradients on, `requires_grad` of an argument separates activations from masks.
            with torch.enable_grad():
                for parameter in self.model.parameters():
                    parameter.requires_grad_(parameter.is_floating_point())
                return self.run()

        return trace_forward(
            self.model, run, is_watched, device=self.device, mode=self.mode, may_decide=self.may_decide
        )

    def linears(self) -> list[str]:
        """The linear layers that can be sharded, in call order."""
        return [n for n in self.called if is_linear(self.modules[n]) and n not in self.used_directly]

    def is_router(self, name: str, num_outputs: int) -> bool:
        """Whether a linear layer has an output for each expert beside it: cut, it would cost more than it saves."""
        parent = name.rpartition(".")[0]
        for around in filter(None, (parent, parent.rpartition(".")[0])):
            for key, child in self.modules[around].named_children():
                experts = self.experts.get(f"{around}.{key}")
                if isinstance(experts, ExpertCall) and experts.num_experts == num_outputs:
                    return True
                if isinstance(child, nn.ModuleList) and len(child) == num_outputs > 1:
                    return True
        return False

    def regions(self, names: Sequence[str]) -> Iterator[tuple[str, Call, list[str]]]:
        """The modules in which to look for pairs among `names`: blocks, then the parents of the remaining layers.

        None of them branches on values: ranks could branch differently on their parts, and a check runs one branch.
        """
        remaining = list(names)
        calls = {call.name: call for call in reversed(self.in_blocks.calls)}
        for name, block in self.blocks:
            inside = [n for n in remaining if n.startswith(f"{name}.") and self.is_called_within(n, name)]
            leaks = any(call.index in self.in_blocks.leaks for call in self.all_calls(name))
            # Other code uses a tensor of the block, which must stay whole; a check cannot see that.
            if leaks or _has_hooks_inside(block):
                remaining = [n for n in remaining if n not in inside]
            elif name in calls and len(inside) > 1 and not self.deciding_line(name):
                remaining = [n for n in remaining if n not in inside]
                yield name, calls[name], inside
        parents: dict[str, list[str]] = {}
        for name in remaining:
            parents.setdefault(name.rpartition(".")[0], []).append(name)
        wanted = {
            name: inside
            for name, inside in parents.items()
            if len(inside) > 1
            and 4 * num_parameters(self.modules[name]) <= _LARGEST_CHECK_BYTES
            and not _has_hooks_inside(self.modules[name])
        }
        found = self._first_calls(set(wanted))
        for name, inside in wanted.items():
            call = found.get(name)
            if call is not None and not call.reads_values and not (self.deciding_line(name) and _takes_numbers(call)):
                yield name, call, inside

    def _first_calls(self, names: set[str]) -> dict[str, Call]:
        """The first call of each module, by as few traces as possible: one records no calls inside another."""
        found: dict[str, Call] = {}
        while names:
            outermost = {n for n in names if not any(n[:end] in names for end, letter in enumerate(n) if letter == ".")}
            outermost = outermost - {""} or outermost
            for call in self._trace_forward(lambda name, _, chosen=outermost: name in chosen).calls:  # type: ignore[misc]
                found.setdefault(call.name, call)
            names = names - outermost
        return found

    def deciding_line(self, name: str) -> str:
        """The line of the block around a module, or of the block itself, that branches on values; empty if none."""
        inside = (c for c in self.in_blocks.calls if name == c.name or name.startswith(f"{c.name}."))
        return next((call.reads_values for call in inside if call.reads_values), "")

    def is_called_within(self, name: str, block: str) -> bool:
        """Whether a layer is called as often as its block."""
        times = sum(call.name == name for call in self.leaves.calls)
        return times == sum(call.name == block for call in self.in_blocks.calls)

    def check(self, call: Call, *, training: bool = True) -> ShardingCheck:
        """A check of one block. Identical blocks reuse the random weights of the last check, which may be large."""
        key = describe(call.module)
        known = self._last_check[1].tensors if self._last_check is not None and self._last_check[0] == key else None
        if known is None:
            self._last_check = None
        check = ShardingCheck(call.module, call, self.num_ranks, training=training, tensors=known)
        self._last_check = (key, check)
        return check

    def still_holds(self, call: Call, pairs: Sequence[Pair], *, on: int | None = 0) -> bool:
        """Whether pairs found in an identical block are also valid in this call, in training and in eval mode."""
        for training in (True, False):
            check = self.check(call, training=training)
            if any(check.prove(pair.columns, pair.rows, self.num_ranks, on=on) is None for pair in pairs):
                return False
        return True

    def all_calls(self, name: str) -> list[Call]:
        return [call for call in self.in_blocks.calls if call.name == name]
