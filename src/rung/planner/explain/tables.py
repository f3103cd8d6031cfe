"""Fold an explanation into table rows, for the console and for the picture.

Repeated blocks become one row, equal neighbouring stages one group. This module formats text; others print and draw it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rung.planner.explain.explanation import Explanation, ParameterPlace, RankView, idle_share, lay_out
from rung.planner.recorder import Message
from rung.system.units import human_bytes, plural

PHASES = ("forward", "backward", "update")
STATES = ("parameters", "gradients", "optimizer", "compression", "buffers")
_MOST_SIZES = 3  # of one kind of message; more are shown as a range


@dataclass(frozen=True)
class ParameterRow:
    """Parameters whose names differ only in the block number."""

    name: str
    count: int
    place: ParameterPlace  # of the first
    stages: tuple[int, ...]

    @property
    def is_tied(self) -> bool:
        """Whether two stages hold the same parameter."""
        return len(self.place.stages) > 1


@dataclass(frozen=True)
class MessageRow:
    """Messages of one kind in a step."""

    phase: str
    operation: str
    axis: str
    num_ranks: int
    times: int
    smallest_bytes: int
    largest_bytes: int
    total_bytes: int

    @property
    def over(self) -> str:
        if self.operation in ("send", "receive"):
            return f"{self.axis} neighbour"
        return f"{self.axis} {self.num_ranks}"

    @property
    def each(self) -> str:
        smallest, largest = human_bytes(self.smallest_bytes), human_bytes(self.largest_bytes)
        return largest if smallest == largest else f"{smallest} - {largest}"


@dataclass(frozen=True)
class Group:
    """Neighbouring stages with equal rows."""

    views: list[RankView]
    label: str


def parameter_rows(explanation: Explanation) -> list[ParameterRow]:
    """The parameters in model order, folded over repeated blocks."""
    places = {place.name: place for view in explanation.ranks for place in view.parameters}
    groups: dict[Any, list[ParameterPlace]] = {}
    for place in places.values():
        tied = place.stages if len(place.stages) > 1 else ()
        properties = (place.shape, place.local_shape, place.dtype, tuple(place.cut.items()), place.is_trained, tied)
        groups.setdefault((_starred(place.name), *properties), []).append(place)
    rows = []
    for group in groups.values():
        stages = tuple(sorted({stage for place in group for stage in place.stages}))
        rows.append(ParameterRow(fold_names([place.name for place in group]), len(group), group[0], stages))
    return rows


def fold_names(names: Sequence[str]) -> str:
    """One name for several, with a star where they differ."""
    words = [name.split(".") for name in names]
    return ".".join(parts[0] if len(set(parts)) == 1 else "*" for parts in zip(*words, strict=True))


def _starred(name: str) -> str:
    return ".".join("*" if word.isdigit() else word for word in name.split("."))


def message_rows(messages: Counter[Message]) -> list[MessageRow]:
    """Messages by phase. A kind of message with more than `_MOST_SIZES` sizes is one row."""
    kinds: dict[tuple[str, str, str, int], Counter[int]] = {}
    for message, times in messages.items():
        kind = (message.phase, message.operation, message.axis, message.num_ranks)
        kinds.setdefault(kind, Counter())[message.num_bytes] += times
    rows = []
    for kind, sizes in kinds.items():
        parts = [Counter({size: sizes[size]}) for size in sorted(sizes, reverse=True)]
        for part in parts if len(parts) <= _MOST_SIZES else [sizes]:
            total = sum(size * times for size, times in part.items())
            rows.append(MessageRow(*kind, part.total(), min(part), max(part), total))
    return sorted(rows, key=lambda row: PHASES.index(row.phase) if row.phase in PHASES else len(PHASES))


def groups_of(explanation: Explanation, key: Callable[[RankView], Any]) -> list[Group]:
    """Group neighbouring stages with equal `key`."""
    groups: list[list[RankView]] = []
    for view in explanation.ranks:
        if groups and key(groups[-1][0]) == key(view):
            groups[-1].append(view)
        else:
            groups.append([view])
    return [Group(views, _label(views, explanation)) for views in groups]


def _label(views: list[RankView], explanation: Explanation) -> str:
    layout = explanation.layout
    if layout.num_ranks == 1:
        return "the process"
    if layout.num_stages == 1:
        return f"each of {layout.num_ranks} ranks"
    stages = sorted(stage for view in views for stage in view.stages)
    each = layout.num_ranks // layout.pp
    ranks = [rank for view in views for rank in range(view.rank, view.rank + each)]
    return f"stage{'s'[: len(stages) > 1]} {ranges(stages)} (rank{'s'[: len(ranks) > 1]} {ranges(ranks)})"


def describe_batch(explanation: Explanation) -> str:
    ranks, samples, micro = explanation.layout.num_data_ranks, explanation.micro_batch, explanation.num_micro_batches
    ragged = "up to " if ranks * samples * micro > explanation.batch_size else ""
    return (
        f"a step is {plural(explanation.batch_size, 'sample')} = {plural(ranks, 'data rank')} x "
        f"{ragged}{plural(samples, 'sample')} x {plural(micro, 'micro-batch')}, {explanation.precision}"
    )


def describe_model(explanation: Explanation) -> str:
    places = {place.name: place for view in explanation.ranks for place in view.parameters}
    count = sum(math.prod(place.shape) for place in places.values())
    frozen = sum(math.prod(place.shape) for place in places.values() if not place.is_trained)
    return f"{count:,} parameters" + (f" ({frozen:,} frozen)" if frozen else "")


def describe_cut(place: ParameterPlace) -> str:
    """The dimensions and the axes that shard them: '0 by dp_shard, 1 by tp', or 'whole ones by ep'."""
    by_dim: dict[int, list[str]] = {}
    for axis, dim in place.cut.items():
        by_dim.setdefault(dim, []).append(axis)
    words = {dim: "whole ones" if dim < 0 else str(dim) for dim in by_dim}
    return ", ".join(f"{words[dim]} by {' and '.join(axes)}" for dim, axes in sorted(by_dim.items())) or "-"


def describe_stages(row: ParameterRow) -> str:
    return f"{' and '.join(map(str, row.stages))}, tied" if row.is_tied else ranges(row.stages)


def textbook_idle(explanation: Explanation) -> tuple[str, float]:
    """The formula and value of the idle share that the literature gives for the schedule with equal stages."""
    p, m, v = explanation.layout.pp, explanation.num_micro_batches, explanation.layout.stages_per_rank
    if any(kind == "W" for view in explanation.ranks for kind, _, _ in view.actions):
        return "(p-1) / (3m+p-1)", (p - 1) / (3 * m + p - 1)
    formula = "(p-1) / (m+p-1)" if v == 1 else f"(p-1) / ({v}m+p-1)"
    return formula, (p - 1) / (v * m + p - 1)


def describe_idle(explanation: Explanation) -> str:
    formula, figure = textbook_idle(explanation)
    p, m = explanation.layout.pp, explanation.num_micro_batches
    orders = [view.actions for view in explanation.ranks]
    even = idle_share(lay_out(orders, [1] * explanation.layout.num_stages), p)
    return (
        f"idle {explanation.bubble:.1%}; if all stages cost the same {even:.1%}; "
        f"textbook {formula} = {figure:.1%}, p = {p}, m = {m}"
    )


def fold_stage_notes(notes: Sequence[str], most: int = 8) -> list[str]:
    """Notes with the middle of a long list of stages left out."""
    stages = [note for note in notes if re.match(r"stage \d+: ", note)]
    if len(stages) <= most:
        return list(notes)
    left_out = stages[most - 2 : -1]
    kept = [note if note != left_out[0] else f"... {len(left_out)} stages between" for note in notes]
    return [note for note in kept if note not in left_out]


def most_held(view: RankView) -> int:
    """The largest number of micro-batches whose activations a rank holds at once, over all of its stages."""
    taken_apart = {(stage, chunk) for kind, stage, chunk in view.actions if kind == "W"}
    held = most = 0
    for kind, stage, chunk in view.actions:
        if kind == "F":
            held += 1
        elif kind in ("B", "W") or (kind == "I" and (stage, chunk) not in taken_apart):
            held -= 1
        most = max(most, held)
    return most


def ranges(numbers: Sequence[int]) -> str:
    """'0-3, 7' of 0, 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def human_shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) if shape else "scalar"
