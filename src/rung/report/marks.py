"""The pieces that charts are made of: HTML and SVG as text, with places in percent, so that a chart takes any width.

Colours and patterns are classes of `page.css`. Everything that comes from data passes through `text`.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rung.report.data import KINDS, PHASES, Row
from rung.sizes import human_bytes, human_seconds
from rung.untrusted import printable


def text(words: object) -> str:
    """As a part of HTML, also between quotes."""
    return html.escape(printable(words, keep="\n\t"), quote=True)


def prose(words: object) -> str:
    """As `text`, with what stands between backticks as code."""
    return re.sub(r"`([^`<>]+)`", r"<code>\1</code>", text(words))


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
    """A bar from the share `x` of the width on; a mark stands for something in the data."""
    told = f"<title>{text(tip)}</title>" if tip else ""
    return (
        f'<rect class="{"mark " if mark else ""}{style}" x="{percent(x)}" y="{y:g}" width="{percent(width)}" '
        f'height="{height:g}">{told}</rect>'
    )


def line(x1: float, x2: float, y1: float, y2: float, style: str) -> str:
    return f'<line class="{style}" x1="{percent(x1)}" x2="{percent(x2)}" y1="{y1:g}" y2="{y2:g}"/>'


def words_at(x: float, y: float, words: str, *, style: str = "small", anchor: str = "start", dx: float = 0) -> str:
    moved = f' dx="{dx:g}"' if dx else ""
    return f'<text class="{style}" x="{percent(x)}" y="{y:g}"{moved} text-anchor="{anchor}">{text(words)}</text>'


def picture(
    marks: Iterable[str], height: float, told: str, *, style: str = "", size: float | None = None, of: float = 1.0
) -> str:
    """One SVG, as wide as its place or, with a `size`, that share `of` the largest beside it: a script can set another
    largest. `told` is what a screen reader says of it."""
    part = f' data-size="{size!r}" style="--share:{size / (of or 1.0):.4f}"' if size is not None else ""
    return (
        f'<svg class="picture {style}" height="{height:g}" role="img" aria-label="{text(told)}"{part}>'
        f"{''.join(marks)}</svg>"
    )


@dataclass(frozen=True)
class Strip:
    """What a chart shows of one strategy: its name, its figures in words, and a picture."""

    index: int  # of the row in the comparison, by which the page sorts and hides
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
    """(words, class) with the pattern that the class has."""
    items = "".join(
        f'<li><svg class="swatch" width="14" height="14" aria-hidden="true"><rect class="{style}" width="14" '
        f'height="14" rx="2"/></svg>{text(words)}</li>'
        for words, style in entries
    )
    return f'<ul class="legend">{items}</ul>'


def figures(caption: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """The numbers of a chart as a table, folded away."""
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


def figure(name: str, title: str, told: str, body: str, *, wide: bool = False) -> str:
    """A chart with its title and the one line that says what it shows."""
    return (
        f'<figure id="{name}" class="{"wide" if wide else "half"}" aria-labelledby="{name}-title"><figcaption>'
        f'<h2 id="{name}-title">{text(title)}</h2><p>{text(told)}</p></figcaption>{body}</figure>'
    )


def strips(entries: Sequence[Strip], *, style: str = "") -> str:
    return f'<div class="strips {style}">{"".join(entry.render() for entry in entries)}</div>'


def nice_step(span: float, parts: int = 5) -> float:
    """A round distance of ticks: 1, 2 or 5 times a power of ten."""
    if span <= 0:
        return 1.0
    rough = span / parts
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)


def ticks(low: float, high: float, parts: int = 5) -> list[float]:
    step = nice_step(high - low, parts)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def told_bytes(value: float | None) -> str:
    return "-" if value is None else human_bytes(value)


def told_seconds(value: float | None) -> str:
    return "-" if value is None else human_seconds(value)


def rows_with_index(rows: Iterable[Row]) -> list[tuple[int, Row]]:
    """Those that finished, with their place in the comparison."""
    return [(index, row) for index, row in enumerate(rows) if row.failure is None]
