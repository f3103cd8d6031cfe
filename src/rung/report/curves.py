"""Loss curves over each other. They should coincide, so each has dashes where the others have gaps: all are seen."""

from __future__ import annotations

from collections.abc import Sequence

from rung.report.data import Comparison, Row
from rung.report.marks import difference, figure, figures, line, percent, rows_with_index, text, ticks, words_at

_HEIGHT = 260.0
_STYLES = 8  # of lines in page.css
_DASH = 13.0  # the length of one, in pixels
_LONGEST_NAME = 18  # characters
_LABEL = 16.0  # between two names at the right edge
_MOST_POINTS = 600


def draw_losses(comparison: Comparison) -> str:
    rows = [(index, row) for index, row in rows_with_index(comparison.rows) if row.losses]
    if not rows:
        return ""
    steps = [step for _, row in rows for step, _ in row.losses]
    losses = [loss for _, row in rows for _, loss in row.losses]
    first, last, low, high = min(steps), max(steps), min(losses), max(losses)
    room = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
    scale = _Scale(first, last, low - room, high + room)
    labels = _spread_labels([scale.y(row.losses[-1][1]) for _, row in rows])
    height = max(_HEIGHT, max(labels) + 10)
    curves = [_Curve(index, place, row, scale) for place, (index, row) in enumerate(rows)]
    marks = [*_axes(scale), *(curve.draw() for curve in curves)]
    marks += [curve.draw_dashes(len(curves), labels[place]) for place, curve in enumerate(curves)]
    told = ", ".join(f"{row.strategy} from {row.losses[0][1]:.4g} to {row.losses[-1][1]:.4g}" for _, row in rows)
    names = _room([row for _, row in rows])
    drawing = (
        f'<svg class="picture plot" style="--names: {names}px" height="{height + 26:g}" role="img" '
        f'aria-label="Loss over steps: {text(told)}">{"".join(marks)}</svg>'
    )
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
    return figure("losses", "Loss", _caption(rows, comparison), drawing + table)


class _Scale:
    def __init__(self, first: int, last: int, low: float, high: float) -> None:
        self.first, self.last, self.low, self.high = first, last, low, high

    def x(self, step: float) -> float:
        return (step - self.first) / (self.last - self.first) if self.last > self.first else 0.5

    def y(self, loss: float) -> float:
        return _HEIGHT * (self.high - loss) / (self.high - self.low)


def _caption(rows: Sequence[tuple[int, Row]], comparison: Comparison) -> str:
    told = "Loss of each step; where curves coincide, their colours take turns"
    others = [
        row.loss_difference
        for _, row in rows
        if row.loss_difference is not None and row.strategy != comparison.reference
    ]
    if not others:
        return told + "."
    most = max(others)
    return told + f": none is further than {most:.1e} from one process." if most else told + ": all are equal."


def _axes(scale: _Scale) -> list[str]:
    marks = []
    for value in ticks(scale.low, scale.high, 4):
        marks.append(line(0, 1, scale.y(value), scale.y(value), "grid"))
        marks.append(words_at(0, scale.y(value) + 4, f"{value:.4g}", anchor="end", dx=-8))
    whole = [step for step in ticks(scale.first, scale.last, 4) if step == int(step)]
    steps = sorted({float(scale.first), float(scale.last), *whole})
    kept = [
        step for step in steps
        if step in (scale.first, scale.last) or 0.2 < scale.x(step) < 0.85
    ]  # fmt: skip
    for step in kept:
        told = f"step {step:g}" if step == scale.first else f"{step:g}"
        marks.append(words_at(scale.x(step), _HEIGHT + 20, told, anchor="middle"))
    return [*marks, line(0, 1, _HEIGHT, _HEIGHT, "axis")]


class _Curve:
    """A thin line, and over all lines the dashes of each."""

    def __init__(self, index: int, place: int, row: Row, scale: _Scale) -> None:
        self._index, self._place, self._row = index, place, row
        self._style = f"s-{place % _STYLES}"
        every = -(-len(row.losses) // _MOST_POINTS)
        shown = list(row.losses[::every])
        if shown[-1] != row.losses[-1]:
            shown.append(row.losses[-1])
        self._points = " ".join(f"{1000 * scale.x(step):.2f},{scale.y(loss):.2f}" for step, loss in shown)
        self._end = scale.x(row.losses[-1][0]), scale.y(row.losses[-1][1])

    def draw(self) -> str:
        return f'<g class="curve" data-row="{self._index}">{self._line("mark line")}</g>'

    def draw_dashes(self, count: int, label: float) -> str:
        x, y = self._end
        gap = _DASH * (count - 1)
        dashes = f' stroke-dasharray="{_DASH:g} {gap:g}" stroke-dashoffset="{-_DASH * self._place:g}"' if gap else ""
        return (
            f'<g class="curve dashes" data-row="{self._index}">{self._line("line", dashes)}'
            f"{line(x, 1, y, y, 'leader') if x < 1 else ''}"
            f'<circle class="dot {self._style}" cx="{percent(x)}" cy="{y:.1f}" r="3"/>'
            f'<svg class="place" x="100%"><path class="leader" d="M5 {y:.1f}L18 {label:.1f}"/>'
            f'<circle class="dot {self._style}" cx="24" cy="{label:.1f}" r="4.5"/>'
            f'<text class="small label" x="33" y="{label + 4:.1f}">{text(_short(self._row.strategy))}'
            f"<title>{text(self._row.strategy)}</title></text></svg></g>"
        )

    def _line(self, style: str, dashes: str = "") -> str:
        shape = f'<polyline class="{style} {self._style}" points="{self._points}"{dashes}/>'
        return (
            f'<svg class="place" width="100%" height="{_HEIGHT:g}" viewBox="0 0 1000 {_HEIGHT:g}" '
            f'preserveAspectRatio="none">{shape}</svg>'
        )


def _short(name: str) -> str:
    """As much of a name as a phone has room for beside the curves."""
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"


def _room(rows: Sequence[Row]) -> int:
    """Pixels that the names take, with their dots."""
    return 36 + 7 * max(len(_short(row.strategy)) for row in rows)


def _spread_labels(places: Sequence[float]) -> list[float]:
    """Where names go, so that none lies on another: near the ends of their curves, from the top to the bottom."""
    order = sorted(range(len(places)), key=lambda index: round(places[index]))
    found = [0.0] * len(places)
    free = 6.0
    for index in order:
        found[index] = max(free, places[index])
        free = found[index] + _LABEL
    over = max(found, default=0.0) - _HEIGHT
    limit = _HEIGHT
    for index in reversed(order):  # what hangs over the lower edge moves up as far as there is room
        if over > 0:
            found[index] = max(min(found[index], limit), 6.0 + _LABEL * order.index(index))
            limit = found[index] - _LABEL
    return found
