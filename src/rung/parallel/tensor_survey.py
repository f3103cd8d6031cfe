"""A model as a run of it shows it: what is called, what is used by other code, and where pairs of layers may lie."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rung.parallel.blocks import describe, find_blocks, num_parameters
from rung.parallel.rehearsal import Call, Rehearsal, rehearse
from rung.parallel.tensor_layers import is_linear
from rung.parallel.tensor_proof import Pair, Trial

_LARGEST_TRIAL_BYTES = 8 << 30  # of a whole model; blocks are tried at any size


def fold(names: Iterable[str]) -> list[str]:
    """Names with their numbers turned into `*`, each once."""
    return list(dict.fromkeys(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name) for name in names))


@dataclass
class Survey:
    """The model, and what a run of it showed."""

    model: nn.Module
    num_ranks: int
    run: Callable[[], Any]
    device: torch.device
    mode: Any
    pattern: str | None
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.modules = dict(self.model.named_modules())
        self.blocks = find_blocks(self.model, self.pattern)
        self.leaves = self._rehearse(lambda name, module: not any(True for _ in module.children()))
        self.in_blocks = self._rehearse(lambda name, module: any(module is block for _, block in self.blocks))
        self.called = list(dict.fromkeys(call.name for call in self.leaves.calls))
        users: dict[int, int] = {}
        for module in self.modules.values():
            for parameter in module.parameters(recurse=False):
                users[id(parameter)] = users.get(id(parameter), 0) + 1
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        self.shared = {names[key] for key, count in users.items() if count > 1}
        # Used by other code than their module's: whole, because that code knows nothing of the cut.
        sources = set().union(self.leaves.needs, *(call.needs for call in self.leaves.calls))
        loose = {source for source in sources if isinstance(source, str)}
        self.parameter_names = {
            name: [names[id(p)] for p in module.parameters(recurse=False)] for name, module in self.modules.items()
        }
        self.used_directly = {name for name, own in self.parameter_names.items() if loose & set(own)}
        self._trial: tuple[Any, Trial] | None = None

    def _rehearse(self, is_watched: Callable[[str, nn.Module], bool]) -> Rehearsal:
        def run() -> Any:
            # With gradients, so that a module's arguments tell whether they have one: a mask has none.
            with torch.enable_grad():
                for parameter in self.model.parameters():
                    parameter.requires_grad_(parameter.is_floating_point())
                return self.run()

        return rehearse(self.model, run, is_watched, device=self.device, mode=self.mode)

    def linears(self) -> list[str]:
        """The linear layers that can be cut at all, in the order in which they were called."""
        return [n for n in self.called if is_linear(self.modules[n]) and n not in self.used_directly]

    def regions(self, names: Sequence[str]) -> Iterator[tuple[str, Call, list[str]]]:
        """The parts of the model inside which some layers may be pairs: blocks, else the layers' parents."""
        left = list(names)
        calls = {call.name: call for call in reversed(self.in_blocks.calls)}
        for name, _ in self.blocks:
            inside = [n for n in left if n.startswith(f"{name}.") and self.is_called_within(n, name)]
            leaks = any(call.index in self.in_blocks.leaks for call in self.all_calls(name))
            if leaks:  # what other code takes out of a block must be whole, and a trial does not see it
                left = [n for n in left if n not in inside]
            elif name in calls and len(inside) > 1:
                left = [n for n in left if n not in inside]
                yield name, calls[name], inside
        parents: dict[str, list[str]] = {}
        for name in left:
            parents.setdefault(name.rpartition(".")[0], []).append(name)
        for name, inside in parents.items():
            parent = self.modules[name]
            if len(inside) > 1 and 4 * num_parameters(parent) <= _LARGEST_TRIAL_BYTES:
                found = self._rehearse(lambda _, module, parent=parent: module is parent).calls  # type: ignore[misc]
                if found:
                    yield name, found[0], inside

    def is_called_within(self, name: str, block: str) -> bool:
        """Whether a layer runs once whenever its block does, and at no other time."""
        times = sum(call.name == name for call in self.leaves.calls)
        return times == sum(call.name == block for call in self.in_blocks.calls)

    def trial(self, call: Call, *, training: bool = True) -> Trial:
        """A block on random numbers. Blocks that are alike share the numbers of the last: they may be large."""
        key = describe(call.module)
        known = self._trial[1].tensors if self._trial is not None and self._trial[0] == key else None
        if known is None:
            self._trial = None
        trial = Trial(call.module, call, self.num_ranks, training=training, tensors=known)
        self._trial = (key, trial)
        return trial

    def still_holds(self, call: Call, pairs: Sequence[Pair], *, on: int | None = 0) -> bool:
        """Whether pairs that hold for a block like this one hold here, too, in training and in evaluation."""
        for training in (True, False):
            trial = self.trial(call, training=training)
            if any(trial.prove(pair.columns, pair.rows, self.num_ranks, on=on) is None for pair in pairs):
                return False
        return True

    def all_calls(self, name: str) -> list[Call]:
        return [call for call in self.in_blocks.calls if call.name == name]
