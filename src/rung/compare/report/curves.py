"""Curves over steps on common axes: the loss, and figures that the task logs.

Curves should coincide, so each one's dashes fall into the others' gaps: all show.
"""

from __future__ import annotations

from collections.abc import Sequence

from rung.compare.report.data import Comparison, Points, ReportRow
from rung.compare.report.marks import difference, figure, figures, line, percent, rows_with_index, text, text_at, ticks
from rung.system.svg import element, title

_HEIGHT = 260.0
_NUM_STYLES = 8  # page.css has the line classes s-0 to s-7
_DASH = 13.0  # pixels
_LONGEST_NAME = 18  # characters
_LABEL_DISTANCE = 16.0  # pixels between two names at the right edge
_MOST_POINTS = 600
_EXPERT_LOADS = {
    "expert_load_max": "Rows of the busiest expert over those of an even choice, in the most uneven layer.",
    "expert_rank_load_max": "Rows of the busiest rank over those of an even choice, in the most uneven layer.",
}
_MOST_FIGURES = 24  # that the task logs, on a page


def draw_losses(comparison: Comparison) -> str:
    rows = [(index, row) for index, row in rows_with_index(comparison.rows) if row.losses]
    if not rows:
        return ""
    table = figures(
        "losses",
        ("strategy", "first", "last", "loss differs", "parameters differ"),
        [
            (
                row.strategy,
                f"{row.losses[0][1]:.6g}",
                f"{row.losses[-1][1]:.6g}",
                "-" if row.loss_difference is None else difference(row.loss_difference),
                "-" if row.parameter_difference is None else difference(row.parameter_difference),
            )
            for _, row in rows
        ],
    )
    curves = [(index, row.strategy, row.losses) for index, row in rows]
    return figure("losses", "Loss", _caption(rows, comparison), _draw_curves(curves, "Loss") + table)


def draw_logged(comparison: Comparison) -> str:
    """The figures that the task logs itself, and the loads of experts, each in a chart of its own."""
    rows = rows_with_index(comparison.rows)
    names = sorted({name for _, row in rows for name, points in row.logged.items() if points})
    charts = []
    for number, name in enumerate(names[:_MOST_FIGURES]):
        curves = [(index, row.strategy, row.logged[name]) for index, row in rows if row.logged.get(name)]
        ends = [(strategy, f"{points[0][1]:.6g}", f"{points[-1][1]:.6g}") for _, strategy, points in curves]
        body = _draw_curves(curves, name) + figures(name, ("strategy", "first", "last"), ends)
        caption = _EXPERT_LOADS.get(name, "Logged by the task.")
        charts.append(figure(f"logged-{number}", name, caption, body, wide=True))
    if len(names) > _MOST_FIGURES:
        rest = ", ".join(names[_MOST_FIGURES:])
        charts.append(
            f'<p class="nothing">{text(f"More figures that the task logs are in metrics.jsonl: {rest}.")}</p>'
        )
    return "".join(charts)


def _draw_curves(curves: Sequence[tuple[int, str, Points]], what: str) -> str:
    """Curves on common axes, each of a row by its index and name."""
    steps = [step for *_, points in curves for step, _ in points]
    values = [value for *_, points in curves for _, value in points]
    first, last, low, high = min(steps), max(steps), min(values), max(values)
    margin = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
    scale = _Scale(first, last, low - margin, high + margin)
    labels = _spread_labels([scale.y(points[-1][1]) for *_, points in curves])
    height = max(_HEIGHT, max(labels) + 10)
    drawn = [_Curve(index, number, name, points, scale) for number, (index, name, points) in enumerate(curves)]
    marks = [*_axes(scale), *(curve.draw() for curve in drawn)]
    marks += [curve.draw_dashes(len(drawn), labels[number]) for number, curve in enumerate(drawn)]
    summary = ", ".join(f"{name} from {points[0][1]:.4g} to {points[-1][1]:.4g}" for _, name, points in curves)
    width = 36 + 7 * max(len(_short(name)) for _, name, _ in curves)  # pixels that the names and their dots take
    attrs = {"class_": "picture plot", "style": f"--names: {width}px", "height": f"{height + 26:g}", "role": "img"}
    return element("svg", "".join(marks), **attrs, aria_label=f"{what} over steps: {summary}")


class _Scale:
    def __init__(self, first: int, last: int, low: float, high: float) -> None:
        self.first, self.last, self.low, self.high = first, last, low, high

    def x(self, step: float) -> float:
        return (step - self.first) / (self.last - self.first) if self.last > self.first else 0.5

    def y(self, value: float) -> float:
        return _HEIGHT * (self.high - value) / (self.high - self.low)


def _caption(rows: Sequence[tuple[int, ReportRow]], comparison: Comparison) -> str:
    caption = "Loss of each step; where curves coincide, their colours alternate"
    others = [row for _, row in rows if row.strategy != comparison.reference]
    known = [row.loss_difference for row in others if row.loss_difference is not None]
    unknown = [row.strategy for row in others if row.loss_difference is None]
    if not known:
        return caption + "."
    most, few = max(known), "of the others, none" if unknown else "none"
    lost = f" {', '.join(unknown)} cannot be compared: losses are missing or no numbers." if unknown else ""
    return caption + (f": {few} is further than {most:.1e} from one process." if most else ": all are equal.") + lost


def _axes(scale: _Scale) -> list[str]:
    marks = []
    for value in ticks(scale.low, scale.high, 4):
        marks.append(line(0, 1, scale.y(value), scale.y(value), "grid"))
        marks.append(text_at(0, scale.y(value) + 4, f"{value:.4g}", anchor="end", dx=-8))
    whole = [step for step in ticks(scale.first, scale.last, 4) if step == int(step)]
    ends = (float(scale.first), float(scale.last))
    # The first and last step always have labels; labels near them would overlap theirs.
    for step in sorted({*ends, *(step for step in whole if 0.2 < scale.x(step) < 0.85)}):
        label = f"step {step:g}" if step == scale.first else f"{step:g}"
        marks.append(text_at(scale.x(step), _HEIGHT + 20, label, anchor="middle"))
    return [*marks, line(0, 1, _HEIGHT, _HEIGHT, "axis")]


class _Curve:
    """One curve: a thin line, and the dashes that are drawn over the lines of all curves."""

    def __init__(self, index: int, number: int, name: str, points: Points, scale: _Scale) -> None:
        self._index, self._number, self._name = index, number, name
        self._style = f"s-{number % _NUM_STYLES}"
        every = -(-len(points) // _MOST_POINTS)
        shown = list(points[::every])
        if shown[-1] != points[-1]:
            shown.append(points[-1])
        self._points = " ".join(f"{1000 * scale.x(step):.2f},{scale.y(value):.2f}" for step, value in shown)
        self._end = scale.x(points[-1][0]), scale.y(points[-1][1])

    def draw(self) -> str:
        return element("g", self._line("mark line"), class_="curve", data_row=self._index)

    def draw_dashes(self, count: int, label: float) -> str:
        x, y = self._end
        gap = _DASH * (count - 1)
        dashes = {"stroke_dasharray": f"{_DASH:g} {gap:g}", "stroke_dashoffset": f"{-_DASH * self._number:g}"}
        dot, name = f"dot {self._style}", self._name
        beside = element("path", class_="leader", d=f"M5 {y:.1f}L18 {label:.1f}")
        beside += element("circle", class_=dot, cx=24, cy=f"{label:.1f}", r=4.5)
        beside += element("text", text(_short(name)) + title(name), class_="small label", x=33, y=f"{label + 4:.1f}")
        shown = self._line("line", **dashes if gap else {}) + (line(x, 1, y, y, "leader") if x < 1 else "")
        shown += element("circle", class_=dot, cx=percent(x), cy=f"{y:.1f}", r=3)
        shown += element("svg", beside, class_="place", x="100%")
        return element("g", shown, class_="curve dashes", data_row=self._index)

    def _line(self, style: str, **dashes: str) -> str:
        shape = element("polyline", class_=f"{style} {self._style}", points=self._points, **dashes)
        size = {"width": "100%", "height": f"{_HEIGHT:g}", "viewBox": f"0 0 1000 {_HEIGHT:g}"}
        return element("svg", shape, class_="place", **size, preserveAspectRatio="none")


def _short(name: str) -> str:
    """Cut a name to what fits beside the curves on a phone."""
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"


def _spread_labels(ends: Sequence[float]) -> list[float]:
    """Heights of the names, near the ends of their curves and at least `_LABEL_DISTANCE` apart."""
    order = sorted(range(len(ends)), key=lambda index: round(ends[index]))
    found = [0.0] * len(ends)
    free = 6.0
    for index in order:
        found[index] = max(free, ends[index])
        free = found[index] + _LABEL_DISTANCE
    over = max(found, default=0.0) - _HEIGHT
    limit = _HEIGHT
    for index in reversed(order):  # move names below the lower edge up, as far as there is room
        if over > 0:
            found[index] = max(min(found[index], limit), 6.0 + _LABEL_DISTANCE * order.index(index))
            limit = found[index] - _LABEL_DISTANCE
    return found
