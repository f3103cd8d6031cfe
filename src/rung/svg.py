"""A picture as one SVG file, written by hand, without scripts, style sheets or fonts of its own.

The colours are Okabe and Ito's, which people with any kind of colour vision tell apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape, quoteattr

WIDTH, MARGIN = 1000, 28  # of the page, and of its edge
INK, GREY, LINE, PANEL = "#1c2733", "#5d6b78", "#d5dbe1", "#f3f5f7"
BLUE, SKY, GREEN, ORANGE, RED, PURPLE = "#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00", "#cc79a7"
_SANS, _MONO = "Helvetica, Arial, 'Liberation Sans', sans-serif", "Menlo, monospace"


@dataclass
class Page:
    """Elements from the top to the bottom; `y` is where the next one goes."""

    y: float = MARGIN
    elements: list[str] = field(default_factory=list)

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
        anchor: str = "start",
    ) -> None:
        family = f" font-family={quoteattr(_MONO)}" if mono else ""
        weight = ' font-weight="bold"' if bold else ""
        place = f' text-anchor="{anchor}"' if anchor != "start" else ""
        self.elements.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" fill="{fill}"{family}{weight}{place}>'
            f"{escape(words)}</text>"
        )

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
        stroke = f' stroke="{line}"' if line else ""
        corner = f' rx="{round:g}"' if round else ""
        shape = f'<rect x="{x:.2f}" y="{y:.1f}" width="{max(0.0, width):.2f}" height="{height:.1f}" fill="{fill}"'
        end = f"><title>{escape(tip)}</title></rect>" if tip else "/>"
        self.elements.append(f"{shape}{stroke}{corner}{end}")

    def line(self, points: Sequence[tuple[float, float]], stroke: str, *, width: float = 1, dash: str = "") -> None:
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.elements.append(
            f'<polyline points="{places}" fill="none" stroke="{stroke}" stroke-width="{width:g}"{dashes}/>'
        )

    def dot(self, x: float, y: float, radius: float, fill: str, *, tip: str = "") -> None:
        end = f"><title>{escape(tip)}</title></circle>" if tip else "/>"
        self.elements.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{fill}"{end}')

    def render(self, title: str) -> str:
        height = self.y + MARGIN
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
                f'height="{height:.0f}" font-family={quoteattr(_SANS)} role="img">',
                f"<title>{escape(title)}</title>",
                '<rect width="100%" height="100%" fill="#ffffff"/>',
                *self.elements,
                "</svg>\n",
            ]
        )
