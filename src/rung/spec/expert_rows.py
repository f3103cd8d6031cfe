"""The rows of each expert in one step, as `metrics.jsonl` has them: read with care, and put into words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MOST_LAYERS, _MOST_EXPERTS = 1000, 10_000  # that are read: the file may be damaged


@dataclass(frozen=True)
class LayerRows:
    """One layer of experts in one step, over all ranks."""

    name: str
    rows: tuple[int, ...]  # of each expert
    choices: int | None = None  # that its router has made, where experts are called with their numbers
    dropped: int | None = None  # of these, those of weight 0, or whose number is no expert's
    rows_in: int | None = None  # with which the module that calls a list of experts was called
    empty: int | None = None  # rows of zeros alone among those of a list: places of a capacity that nothing has taken

    @property
    def total(self) -> int:
        return sum(self.rows)

    @property
    def unevenness(self) -> float:
        """The rows of the busiest expert over those of an even choice."""
        return max(self.rows) * len(self.rows) / self.total if self.total else 0.0

    def share(self, expert: int) -> float:
        return self.rows[expert] / self.total if self.total else 0.0

    def spread(self) -> str:
        shares = sorted(map(self.share, range(len(self.rows))))
        return f"busiest {_percent(shares[-1])}, least {_percent(shares[0])}"

    def lost(self) -> str:
        """What is known of choices that reached no expert; empty if none is lost."""
        if self.choices:
            return f"{_percent(self.dropped / self.choices)} of choices dropped" if self.dropped else ""
        if self.empty:
            rows = f"{self.total / self.rows_in:.2f} experts a row, " if self.rows_in else ""
            return f"{rows}{_percent(self.empty / (self.total + self.empty))} of places empty"
        return ""


def read_layers(raw: Any) -> list[LayerRows]:
    """The layers of a line of `metrics.jsonl` or of a comparison; what is damaged is left out."""
    if not isinstance(raw, Mapping) or len(raw) > _MOST_LAYERS:
        return []
    return [layer for name, entry in raw.items() if (layer := _layer(str(name), entry)) is not None]


def _layer(name: str, entry: Any) -> LayerRows | None:
    rows = entry.get("rows") if isinstance(entry, Mapping) else None
    if not isinstance(rows, list) or not 0 < len(rows) <= _MOST_EXPERTS or not all(map(_is_count, rows)):
        return None
    keys = ("choices", "dropped", "rows_in", "empty")
    return LayerRows(name, tuple(rows), **{key: found for key in keys if _is_count(found := entry.get(key))})


def end_words(layers: Sequence[LayerRows]) -> str:
    """A line for the end of a run: its most uneven layer, and the one that loses most."""
    known = [layer for layer in layers if layer.total]
    if not known:
        return ""
    worst = max(known, key=lambda layer: layer.unevenness)
    among = f", the most uneven of {len(known)} layers" if len(known) > 1 else ""
    words = f"rows of experts: {worst.spread()} in {worst.name}{among}"
    lossy = max(known, key=lambda layer: (layer.dropped or 0) / layer.choices if layer.choices else 0.0)
    return f"{words}; {lossy.lost()} in {lossy.name}" if lossy.dropped else words


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.2g} %"
