"""Building blocks of the charts: functions that return HTML and SVG as strings.

Horizontal positions are percentages, so a chart scales to any width. Colours and patterns are classes of `page.css`.
Every string that comes from data must pass through `text`, which escapes it.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rung.compare.report.data import KINDS, PHASES, ReportRow
from rung.system.svg import element, title
from rung.system.untrusted import printable


def text(value: object) -> str:
    """Escape a value for HTML content and for quoted attributes."""
    return html.escape(printable(value, keep="\n\t"), quote=True)


def prose(value: object) -> str:
    """Escape like `text`, and turn `backticks` into <code>."""
    return re.sub(r"`([^`<>]+)`", r"<code>\1</code>", text(value))


def percent(share: float) -> str:
    return f"{100 * share:.3f}".rstrip("0").rstrip(".") + "%"


def kind_class(kind: str) -> str:
    return f"k-{kind}" if kind in KINDS else "k-other"


def phase_class(phase: str) -> str:
    return f"t-{phase}" if phase in PHASES else "t-data"


def rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def times(value: float) -> str:
    return f"{value:.2f}\N{MULTIPLICATION SIGN}"


def share(value: float) -> str:
    return f"{100 * value:.0f} %"


def difference(value: float) -> str:
    return f"{value:.1e}" if value else "none"


def signed_share(value: float) -> str:
    return f"{100 * value:+.0f} %".replace("-", "\N{MINUS SIGN}")


def plural(count: int, word: str, many: str = "") -> str:
    return f"{count} {word}" if count == 1 else f"{count} {many or word + 's'}"


def rect(x: float, width: float, y: float, height: float, style: str, *, tip: str = "", mark: bool = True) -> str:
    """A bar; `x` and `width` are shares of the picture's width. `mark` gives it the class of data marks."""
    size = {"width": percent(width), "height": f"{height:g}"}
    return element("rect", title(tip), class_=f"mark {style}" if mark else style, x=percent(x), y=f"{y:g}", **size)


def line(x1: float, x2: float, y1: float, y2: float, style: str) -> str:
    return element("line", class_=style, x1=percent(x1), x2=percent(x2), y1=f"{y1:g}", y2=f"{y2:g}")


def text_at(x: float, y: float, content: str, *, style: str = "small", anchor: str = "start", dx: float = 0) -> str:
    moved = f"{dx:g}" if dx else ""
    return element("text", text(content), class_=style, x=percent(x), y=f"{y:g}", dx=moved, text_anchor=anchor)


def picture(
    marks: Iterable[str], height: float, label: str, *, style: str = "", size: float | None = None, of: float = 1.0
) -> str:
    """One SVG with `label` for screen readers. It takes the full width or, given a `size`, the share `size / of`.

    The page's script rescales by `size` when the reader hides the largest strategy.
    """
    part = {"data_size": size, "style": f"--share:{size / (of or 1.0):.4f}"} if size is not None else {}
    attrs = {"class_": f"picture {style}", "height": f"{height:g}", "role": "img", "aria_label": label}
    return element("svg", "".join(marks), **attrs, **part)


@dataclass(frozen=True)
class Strip:
    """One strategy's entry in a chart: its name, its value as text, and a picture."""

    index: int  # the row's index in the comparison; the page sorts and hides strips by it
    name: str
    value: str
    drawing: str
    below: str = ""  # HTML

    def render(self) -> str:
        return (
            f'<div class="strip" data-row="{self.index}"><div class="head"><span class="name">{text(self.name)}</span>'
            f'<span class="value">{text(self.value)}</span></div>{self.drawing}{self.below}</div>'
        )


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """A list of (label, class), each with a swatch of that class."""
    items = ""
    for label, style in entries:
        square = element("rect", class_=style, width=14, height=14, rx=2)
        swatch = element("svg", square, class_="swatch", width=14, height=14, aria_hidden="true")
        items += f"<li>{swatch}{text(label)}</li>"
    return f'<ul class="legend">{items}</ul>'


def figures(caption: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A chart's numbers as a collapsed table."""
    top = "".join(f'<th scope="col">{text(cell)}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{text(cells[0])}</th>{"".join(f"<td>{text(cell)}</td>" for cell in cells[1:])}</tr>'
        for cells in rows
    )
    return (
        f'<details class="figures"><summary>As a table<span class="unseen">: {text(caption)}</span></summary>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(caption)}"><table>'
        f"<caption>{text(caption)}</caption><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div></details>"
    )


def figure(name: str, title: str, caption: str, body: str, *, wide: bool = False) -> str:
    """A chart with its title and a one-line caption."""
    return (
        f'<figure id="{name}" class="{"wide" if wide else "half"}" aria-labelledby="{name}-title"><figcaption>'
        f'<h2 id="{name}-title">{text(title)}</h2><p>{text(caption)}</p></figcaption>{body}</figure>'
    )


def scrolled(name: str, body: str) -> str:
    """A chart that keeps its width on a narrow page."""
    inner = f'<div class="broad">{body}</div>'
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{text(name)}">{inner}</div>'


def strips(entries: Sequence[Strip]) -> str:
    return f'<div class="strips">{"".join(entry.render() for entry in entries)}</div>'


def nice_step(span: float, parts: int = 5) -> float:
    """A round tick distance: 1, 2 or 5 times a power of ten."""
    if span <= 0:
        return 1.0
    rough = span / parts
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)


def ticks(low: float, high: float, parts: int = 5) -> list[float]:
    step = nice_step(high - low, parts)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def rows_with_index(rows: Iterable[ReportRow]) -> list[tuple[int, ReportRow]]:
    """The rows that finished, each with its index in the comparison."""
    return [(index, row) for index, row in enumerate(rows) if row.failure is None]
