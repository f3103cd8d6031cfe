"""Partition a model into pipeline stages: the calls of each stage, its parameters, and the tensors it receives.

The model's forward is a sequence of calls of its parts (blocks, embeddings, norms, a head), and a stage is a contiguous
range of these calls. A trace on fake tensors (`rung.parallel.forward_trace`) gives the results that later stages need;
a skip connection across a cut is one more result to send.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from rung.errors import ConfigError, ModelError, StrategyError, nearest
from rung.parallel.blocks import find_list_of_blocks
from rung.parallel.forward_trace import ForwardTrace, Source, is_random

Result = tuple[int, int]  # a call, and the index of a tensor in its output


@dataclass(frozen=True)
class Stages:
    """A model cut into stages. Stage s runs the calls bounds[s] to bounds[s + 1] - 1."""

    calls: tuple[str, ...]
    bounds: tuple[int, ...]
    holders: dict[str, tuple[int, ...]]  # parameter -> the stages that use it; more than one if it is tied across a cut
    flops: tuple[int, ...]  # of each call, for the example batch

    @property
    def num_stages(self) -> int:
        return len(self.bounds) - 1

    def modules_of(self, stage: int) -> list[str]:
        """The distinct names of the modules that a stage calls."""
        return list(dict.fromkeys(self.calls[self.bounds[stage] : self.bounds[stage + 1]]))

    def stages_of_module(self, name: str) -> set[int]:
        return self._stages_of_modules.get(name, set())

    @functools.cached_property
    def _stages_of_modules(self) -> dict[str, set[int]]:
        found: dict[str, set[int]] = {}
        for stage in range(self.num_stages):
            for name in self.modules_of(stage):
                found.setdefault(name, set()).add(stage)
        return found

    def shared(self) -> dict[str, tuple[int, ...]]:
        """Parameters that more than one stage uses."""
        return {name: stages for name, stages in self.holders.items() if len(stages) > 1}

    def describe(self) -> list[str]:
        """One line for each stage: its calls and its share of the FLOPs."""
        total = max(1, sum(self.flops))
        lines = []
        for stage in range(self.num_stages):
            own = range(self.bounds[stage], self.bounds[stage + 1])
            share = sum(self.flops[i] for i in own) / total
            names = [self.calls[i] for i in own]
            shown = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
            lines.append(f"stage {stage}: {shown} ({share:.0%} of the arithmetic)")
        return lines


def lies_in(name: str, parts: Collection[str]) -> bool:
    """Whether `name` is one of the modules `parts` or inside one. For many names, `parts` should be a set."""
    return name in parts or any(outer in parts for outer in _outer_names(name))


def _outer_names(name: str) -> list[str]:
    """The names of the enclosing modules, without the model itself: for a.b.c, a and a.b."""
    return [name[:dot] for dot, letter in enumerate(name) if letter == "."]


def parts_of(model: nn.Module, blocks: str | None) -> Callable[[str, nn.Module], bool]:
    """A predicate for the modules that a stage runs as a whole: blocks, and modules with parameters but no blocks.

    A container (Sequential, ModuleList) that is not itself a block is replaced by its children.
    """
    block_names = {name for name, _ in find_list_of_blocks(model, blocks)}
    around_blocks = {outer for block in block_names for outer in _outer_names(block)}
    chosen: set[str] = set()

    def visit(name: str, module: nn.Module) -> None:
        has_parameters = next(module.parameters(), None) is not None
        if not has_parameters:
            return
        is_container = isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)
        if name in block_names or (name and name not in around_blocks and not is_container):
            chosen.add(name)
            return
        for key, child in module.named_children():
            visit(f"{name}.{key}" if name else key, child)

    visit("", model)
    return lambda name, module: name in chosen


def cut(model: nn.Module, forward_trace: ForwardTrace, num_stages: int, split: str | None = None) -> Stages:
    """Choose the stages by `split`, or so that the most expensive stage is as cheap as possible."""
    calls = [call.name for call in forward_trace.calls]
    if len(calls) < num_stages:
        raise StrategyError(
            f"the model cannot be cut into {num_stages} stages: its forward calls {len(calls)} parts "
            f"({', '.join(calls[:6])}{', ...' if len(calls) > 6 else ''}). Use at most {max(1, len(calls))} stages, or "
            "name its blocks in the task (blocks = ...)."
        )
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    costs = [_cost(call.flops, call.output_tensors(), call.parameters, sizes) for call in forward_trace.calls]
    starts = _requested_starts(split, calls, num_stages) if split is not None else balance(costs, num_stages)
    bounds = (0, *starts, len(calls))
    _check_stage_boundaries(forward_trace, bounds)
    holders: dict[str, set[int]] = {}
    for stage in range(num_stages):
        for call in forward_trace.calls[bounds[stage] : bounds[stage + 1]]:
            loose = {source for source in call.needs if isinstance(source, str) and not is_random(source)}
            for name in call.parameters | loose:
                holders.setdefault(name, set()).add(stage)
    for source in forward_trace.needs:
        if isinstance(source, str) and not is_random(source):
            holders.setdefault(source, set()).add(num_stages - 1)
    stage_of = {
        call: stage for stage in reversed(range(num_stages)) for call in calls[bounds[stage] : bounds[stage + 1]]
    }
    for name in forward_trace.unused:  # no stage uses it, but one must hold and save it: that of the part it is in
        inside = next((stage for call, stage in stage_of.items() if lies_in(name, {call})), 0)
        holders.setdefault(name, set()).add(inside)
    ordered = {name: tuple(sorted(holders.get(name, {0}))) for name in sizes}
    return Stages(tuple(calls), bounds, ordered, tuple(call.flops for call in forward_trace.calls))


def crossing(stages: Stages, forward_trace: ForwardTrace) -> list[list[Result]]:
    """For each stage, the results that it receives: those of earlier stages that it or a later stage needs."""
    if tuple(call.name for call in forward_trace.calls) != stages.calls:
        different = [
            f"{new} instead of {old}"
            for old, new in itertools.zip_longest(stages.calls, (call.name for call in forward_trace.calls))
            if old != new
        ]
        raise ModelError(
            f"for this batch the model's forward calls other parts than for the first ({different[0]}). "
            "A pipeline needs the same calls in every step."
        )
    received: list[list[Result]] = []
    for stage in range(stages.num_stages):
        start = stages.bounds[stage]
        needed: set[Result] = set()
        for call in forward_trace.calls[start:]:
            needed |= {source for source in call.needs if not isinstance(source, str) and source[0] < start}
        needed |= {source for source in forward_trace.needs if not isinstance(source, str) and source[0] < start}
        received.append(sorted(needed))
    return received


def _check_stage_boundaries(forward_trace: ForwardTrace, bounds: tuple[int, ...]) -> None:
    """Raise if a value would pass from stage to stage other than as the result of a part."""

    def stage_of(call: int) -> int:
        return bisect.bisect_right(bounds, call) - 1

    for index, line in forward_trace.leaks.items():
        raise ModelError(
            f"{line}\nthis line uses a tensor that {forward_trace.calls[index].name} made or changed but did not "
            "return. Stages send only the results of parts. Return the tensor, or use a strategy without stages."
        )
    users: dict[Source, set[int]] = {}
    for call in forward_trace.calls:
        for source in call.needs:
            users.setdefault(source, set()).add(call.index)
    for source in forward_trace.needs:
        users.setdefault(source, set()).add(len(forward_trace.calls) - 1)
    for source, calls in users.items():
        if is_random(source) and len({stage_of(call) for call in calls}) > 1:
            names = ", ".join(forward_trace.calls[call].name for call in sorted(calls)[:3])
            raise ModelError(
                f"forward draws random numbers outside of its parts, and parts of several stages use them ({names}); "
                "each stage would draw its own. Draw them in a part and return them, or cut elsewhere with --split."
            )
    for call in forward_trace.calls:
        for source in call.changes:
            if isinstance(source, str) or source[0] == call.index:
                continue
            reach = {stage_of(source[0]), *(stage_of(user) for user in users.get(source, set()))}
            if len(reach) > 1 and len(users.get(source, set())) > 1:
                raise ModelError(
                    f"{call.name} changes the result of {forward_trace.calls[source[0]].name} in place, and another "
                    "stage uses that result too. Avoid the in-place operation (no inplace=True), or cut elsewhere with "
                    "--split."
                )
    for name, changers in forward_trace.buffers.items():
        if -1 in changers or len({stage_of(call) for call in changers}) > 1:
            where = "outside of its parts" if -1 in changers else "in several stages"
            raise ModelError(
                f"forward changes the buffer {name} {where}; every stage would have its own. Change it inside one "
                "part, or use a strategy without stages."
            )


def balance(costs: Sequence[float], num_parts: int) -> list[int]:
    """Partition `costs` into contiguous ranges with the smallest maximum sum; returns all starts but the first, 0."""
    count = len(costs)
    sums = [0.0, *itertools.accumulate(costs)]
    # best[k][i]: the smallest maximum sum of the first i costs in k ranges, and the start of the last range.
    best = [[(0.0, 0) if i == 0 else (float("inf"), 0) for i in range(count + 1)]]
    for parts in range(1, num_parts + 1):
        row = [(float("inf"), 0)] * (count + 1)
        for stop in range(parts, count + 1):
            row[stop] = _best_start(best[parts - 1], sums, range(parts - 1, stop), sums[stop])
        best.append(row)
    starts: list[int] = []
    stop = count
    for parts in range(num_parts, 1, -1):
        stop = best[parts][stop][1]
        starts.append(stop)
    return starts[::-1]


def _best_start(
    before: Sequence[tuple[float, int]], sums: Sequence[float], starts: range, end: float
) -> tuple[float, int]:
    """The smallest maximum sum if the last range ends at the sum `end`, and the first start that gives it.

    With a later start the last range shrinks and the ranges before it grow, so the optimum is where the two meet.
    """
    meet = bisect.bisect_left(starts, True, key=lambda start: before[start][0] >= end - sums[start])
    found = [(max(before[start][0], end - sums[start]), start) for start in starts[max(0, meet - 1) : meet + 1]]
    least = min(found)[0]
    # Calls of cost 0 before the start can be in either range: take the earliest start.
    first = bisect.bisect_left(starts, True, key=lambda start: end - sums[start] <= least)
    return least, starts[first]


def _cost(flops: int, outputs: list[Tensor], parameters: set[str], sizes: Mapping[str, int]) -> float:
    """FLOPs, plus a small term for memory traffic, so that parts without matrix products count too."""
    traffic = sum(tensor.numel() for tensor in outputs) + sum(sizes.get(name, 0) for name in parameters)
    return flops + 4.0 * traffic


def _requested_starts(split: str, calls: list[str], num_stages: int) -> list[int]:
    names = [name.strip() for name in split.split(",") if name.strip()]
    if len(names) != num_stages - 1:
        raise ConfigError(
            f"--split {split} has {len(names)} names, but {num_stages} stages need {num_stages - 1}: the first part of "
            f"every stage but the first. The parts are, in order: {', '.join(calls)}."
        )
    starts = []
    for name in names:
        if name not in calls:
            raise ConfigError(
                f"--split: {name!r} is not a part of the model that can start a stage.{nearest(name, calls)} "
                f"The parts are, in order: {', '.join(calls)}."
            )
        starts.append(calls.index(name))
    if starts != sorted(set(starts)) or starts[0] == 0:
        raise ConfigError(f"--split {split}: the names must follow the order of the parts: {', '.join(calls)}.")
    return starts
