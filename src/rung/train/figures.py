"""Figures that a task logs, from numbers of all ranks: sums on each rank, which go with the others' message.

The ranks learn the names from each other once: the first message of a new name is of its own, and from then on it has
columns in the message that ranks exchange at logging points.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from rung.distributed.world import World
from rung.errors import TaskError
from rung.runtime.base import LoggedValue

# By name and reduction: the weighted sum and the weights of a mean; the sum or the maximum, and the number of values.
Sums = dict[tuple[str, str], tuple[float, float]]


class FigureColumns:
    """The columns for logged figures in the message of a rank. The same on all ranks."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._known: list[tuple[str, str]] = []

    def width(self, num_steps: int) -> int:
        return 2 * num_steps * len(self._known) + 1

    def columns(self, steps: Sequence[Sums]) -> list[float]:
        """This rank's columns for these steps, and whether it has logged under a name that the others do not know."""
        found = [number for sums in steps for key in self._known for number in sums.get(key, (0.0, 0.0))]
        return [*found, float(any(sums.keys() - set(self._known) for sums in steps))]

    def figures(self, rows: Sequence[Sequence[float]], steps: Sequence[Sums]) -> list[dict[str, float]]:
        """The figures of each step, from the columns of all ranks. Collective: `steps` are this rank's own."""
        is_new = any(row[-1] for row in rows)
        if not self._known and not is_new:
            return [{} for _ in steps]
        found: list[list[Sums]] = [[] for _ in steps]
        for row in rows:
            pairs = zip(row[:-1:2], row[1::2], strict=True)
            for step in found:
                step.append({key: next(pairs) for key in self._known})
        if is_new:
            known = set(self._known)
            numbered = [(index, *entry) for index, sums in enumerate(steps) for entry in sums.items()]
            new = [[index, *key, *pair] for index, key, pair in numbered if key not in known]
            for others in self._world.gather_objects(new):
                for index, name, reduce, total, weight in others:
                    found[index].append({(name, reduce): (total, weight)})
                    known.add((name, reduce))
            self._known = sorted(known)
        return [reduced(sums) for sums in found]


def fetch_sums(world: World, steps: Sequence[Iterable[LoggedValue]]) -> Callable[[], list[Sums]]:
    """Start to copy what this rank logged in these steps to the host. The returned call waits for it."""
    steps = [list(logged) for logged in steps]
    if not any(steps):
        return lambda: [{} for _ in steps]
    on_device = [n for logged in steps for one in logged for n in (one.value, one.weight) if isinstance(n, Tensor)]
    arrived = world.tensors.fetch(on_device)

    @functools.cache
    def sums() -> list[Sums]:
        numbers = iter(arrived())
        found: list[Sums] = []
        for logged in steps:
            found.append({})
            for one in logged:
                value, weight = (next(numbers) if isinstance(n, Tensor) else n for n in (one.value, one.weight))
                key = one.name, one.reduce
                found[-1][key] = _added(one.reduce, found[-1].get(key, (0.0, 0.0)), _pair(one.reduce, value, weight))
        return found

    return sums


def reduced(ranks: Iterable[Mapping[tuple[str, str], tuple[float, float]]]) -> dict[str, float]:
    """The figures of one step from the sums of all ranks."""
    total: Sums = {}
    for sums in ranks:
        for key, pair in sums.items():
            total[key] = _added(key[1], total.get(key, (0.0, 0.0)), pair)
    known = {key: pair for key, pair in total.items() if pair[1] > 0}
    names = [name for name, _ in known]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        ways = " and ".join(reduce for name, reduce in sorted(known) if name == twice)
        raise TaskError(f"log({twice!r}) is reduced in two ways in one step, by {ways}. Give each a name of its own.")
    return {name: value / weight if reduce == "mean" else value for (name, reduce), (value, weight) in known.items()}


def _pair(reduce: str, value: float, weight: float) -> tuple[float, float]:
    if reduce != "mean":
        return value, 1.0
    return (value * weight, weight) if weight > 0 else (0.0, 0.0)  # a part of weight 0 may have a mean of 0/0


def _added(reduce: str, one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    if one[1] == 0 or other[1] == 0:
        return one if one[1] > 0 else other
    if reduce == "max":
        is_nan = math.isnan(one[0]) or math.isnan(other[0])
        return (math.nan if is_nan else max(one[0], other[0])), one[1] + other[1]
    return one[0] + other[0], one[1] + other[1]
