"""A map of the experts: layers from the top to the bottom, and the share of each expert in the rows of its layer."""

from __future__ import annotations

from collections.abc import Sequence

from rung.compare.report.data import Comparison
from rung.compare.report.marks import figure, figures, picture, rows_with_index, scrolled, share, text, text_at
from rung.spec.expert_rows import LayerRows
from rung.system.svg import element, title

_HEIGHT, _GAP = 16.0, 3.0  # of a layer
_MOST_LAYERS, _MOST_CELLS = 64, 256  # of a map
_LONGEST_NAME = 28  # characters
_FULLEST = 2.0  # at least so many even shares have the full colour

Layers = tuple[LayerRows, ...]


def draw_experts(comparison: Comparison) -> str:
    """One map for all strategies that have the same counts, which is all of them if the numbers agree."""
    groups: dict[tuple[int, Layers], list[str]] = {}
    first: dict[tuple[int, Layers], tuple[int, Layers]] = {}
    for _, row in rows_with_index(comparison.rows):
        if row.experts and any(layer.total for layer in row.experts[-1][1]):
            groups.setdefault(row.experts[-1], []).append(row.strategy)
            first[row.experts[-1]] = row.experts[0]
    if not groups:
        return ""
    body = "".join(
        f'<h3>{text(", ".join(names))}<span class="value">step {step}</span></h3>' + _map(names, step, layers)
        for (step, layers), names in groups.items()
    )
    table = figures(
        "rows of experts",
        ("layer", "strategies", "step", "rows", "busiest", "least", "dropped or empty"),
        [
            (layer.name, ", ".join(names), step, f"{layer.total:,}", *_ends(layer), layer.lost() or "none known")
            for key, names in groups.items()
            for step, layers in dict.fromkeys((first[key], key))
            for layer in layers
        ],
    )
    caption = (
        "The rows of each expert: the stronger its colour, the more of its layer's rows. An even choice colours all "
        "cells alike, and an expert without rows has none."
    )
    return figure("experts", "Experts", caption, scrolled("experts", body) + table, wide=True)


def _ends(layer: LayerRows) -> tuple[str, str]:
    shares = [layer.share(expert) for expert in range(len(layer.rows))]
    return share(max(shares)), share(min(shares))


def _map(names: Sequence[str], step: int, layers: Layers) -> str:
    known = [layer for layer in layers if layer.total]
    worst = sorted(known, key=lambda layer: -layer.unevenness)[:_MOST_LAYERS]
    shown = [layer for layer in known if layer in worst]
    fullest = max([_FULLEST, *(layer.unevenness for layer in shown)])
    marks: list[str] = []
    for number, layer in enumerate(shown):
        y = number * (_HEIGHT + _GAP)
        name = layer.name if len(layer.name) <= _LONGEST_NAME else f"...{layer.name[3 - _LONGEST_NAME :]}"
        marks.append(text_at(0, y + 12, name, anchor="end", dx=-8))
        marks += _cells(layer, y, fullest)
        marks.append(text_at(1, y + 12, layer.spread(), style="tiny", dx=8))
    height = len(shown) * (_HEIGHT + _GAP)
    label = f"{', '.join(names)}, step {step}: " + "; ".join(f"{layer.name}: {layer.spread()}" for layer in shown)
    left_out = len(known) - len(shown)
    more = f'<p class="nothing">{left_out} more layers are more even.</p>' if left_out else ""
    return picture(marks, height, label, style="experts") + more


def _cells(layer: LayerRows, y: float, fullest: float) -> list[str]:
    each = -(-len(layer.rows) // _MOST_CELLS)
    starts = range(0, len(layer.rows), each)
    marks = []
    for place, start in enumerate(starts):
        own = layer.rows[start : start + each]
        evenly = sum(own) * len(layer.rows) / (layer.total * len(own))
        which = f"expert {start}" if len(own) == 1 else f"experts {start} to {start + len(own) - 1}"
        tip = f"{layer.name}, {which}: {sum(own):,} rows, {share(sum(own) / layer.total)}, {evenly:.2f} x an even share"
        x, width = f"{100 * place / len(starts):.3f}%", f"{100 / len(starts):.3f}%"
        style = {"class_": "mark box heat", "fill_opacity": f"{min(1.0, evenly / fullest):.3f}"}
        marks.append(element("rect", title(tip), x=x, y=f"{y:g}", width=width, height=_HEIGHT, **style))
    return marks
