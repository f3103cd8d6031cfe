"""Writes SVG: elements as text, and self-contained pictures without scripts, style sheets or fonts.

The colours are Okabe and Ito's, which are distinguishable with any kind of colour vision.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape, quoteattr

from rung.system.untrusted import printable

WIDTH, MARGIN = 1000, 28  # of the page, and of its edge
INK, GREY, LINE, PANEL = "#1c2733", "#5d6b78", "#d5dbe1", "#f3f5f7"
BLUE, SKY, GREEN, ORANGE, RED, PURPLE = "#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00", "#cc79a7"
_KEPT = "\n\t"  # control characters that are allowed
_SANS, _MONO = "Helvetica, Arial, 'Liberation Sans', sans-serif", "Menlo, monospace"


def element(kind: str, content: str = "", **attributes: object) -> str:
    """One element; `content` is markup. Attributes without a value are left out; `class_` stands for class, and
    `font_size` for font-size."""
    given = ""
    for name, value in attributes.items():
        if value not in ("", None):
            given += f" {name.rstrip('_').replace('_', '-')}={quoteattr(printable(value, keep=_KEPT))}"
    return f"<{kind}{given}>{content}</{kind}>" if content else f"<{kind}{given}/>"


def title(words: str) -> str:
    """The tooltip of the enclosing element."""
    return element("title", escape(printable(words, keep=_KEPT))) if words else ""


@dataclass
class Page:
    """Elements from the top to the bottom; `y` is where the next one goes."""

    y: float = MARGIN
    elements: list[str] = field(default_factory=list)

    def add(self, kind: str, content: str = "", **attributes: object) -> None:
        self.elements.append(element(kind, content, **attributes))

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 12,
        fill: str = INK,
        bold: bool = False,
        mono: bool = False,
        anchor: str = "",
    ) -> None:
        place = {"x": f"{x:.1f}", "y": f"{y:.1f}", "font_size": f"{size:g}", "fill": fill}
        family, weight = _MONO if mono else "", "bold" if bold else ""
        self.add("text", escape(words), **place, font_family=family, font_weight=weight, text_anchor=anchor)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        *,
        line: str = "",
        round: float = 0,
        tip: str = "",
    ) -> None:
        size = {"width": f"{max(0.0, width):.2f}", "height": f"{height:.1f}"}
        corner = f"{round:g}" if round else ""
        self.add("rect", title(tip), x=f"{x:.2f}", y=f"{y:.1f}", **size, fill=fill, stroke=line, rx=corner)

    def line(self, points: Sequence[tuple[float, float]], stroke: str, *, width: float = 1, dash: str = "") -> None:
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        stroked = {"stroke": stroke, "stroke_width": f"{width:g}", "stroke_dasharray": dash}
        self.add("polyline", points=places, fill="none", **stroked)

    def dot(self, x: float, y: float, radius: float, fill: str, *, tip: str = "") -> None:
        self.add("circle", title(tip), cx=f"{x:.1f}", cy=f"{y:.1f}", r=f"{radius:g}", fill=fill)

    def legend(self, x: float, entries: Iterable[tuple[str, str]], *, letter: float) -> None:
        """A row of (words, colour) entries; `letter` is the width of a letter."""
        for words, fill in entries:
            self.box(x, self.y, 12, 12, fill, round=2)
            self.text(x + 17, self.y + 10, words, size=11.5, fill=GREY)
            x += 17 + letter * len(words) + 20

    def render(self, name: str) -> str:
        height = f"{self.y + MARGIN:.0f}"
        size = {"viewBox": f"0 0 {WIDTH} {height}", "width": WIDTH, "height": height}
        ground = element("rect", width="100%", height="100%", fill="#ffffff")
        content = "\n".join(["", title(name), ground, *self.elements, ""])
        return element("svg", content, xmlns="http://www.w3.org/2000/svg", **size, font_family=_SANS, role="img") + "\n"
