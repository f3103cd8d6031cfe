"""Draw an explanation as an SVG picture."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape

from rung.planner.explain.explanation import Explanation, RankView
from rung.planner.explain.tables import (
    describe_batch,
    describe_cut,
    describe_idle,
    describe_model,
    describe_stages,
    fold_stage_notes,
    groups_of,
    human_shape,
    message_rows,
    parameter_rows,
)
from rung.spec.abilities import describe_layout
from rung.system.svg import GREY, INK, LINE, MARGIN, PANEL, WIDTH, Page, element
from rung.system.units import human_bytes, plural

_LABEL = 150  # width of the labels at the left of rows
_STATES = {"parameters": "#56b4e9", "gradients": "#d55e00", "optimizer": "#8a949e"}
# Kind -> (meaning, color of a rank's first stage, color of its second).
_ACTIONS = {
    "F": ("forward", "#0072b2", "#56b4e9"),
    "B": ("backward", "#e69f00", "#f7d37f"),
    "I": ("gradients of the inputs", "#f0e442", "#f8f3a6"),
    "W": ("gradients of the weights", "#009e73", "#7fceb9"),
}
_PHASES = {"forward": "#0072b2", "backward": "#e69f00", "update": "#009e73"}
_MOST_COLUMNS, _MOST_ROWS, _MOST_PARAMETERS = 8, 8, 40


class _Page(Page):
    """A page with headings, paragraphs and table rows."""

    def heading(self, title: str, explained: str = "") -> None:
        self.y += 34
        bold = {"font_size": 15, "font_weight": "bold", "fill": INK}
        plain = {"font_size": 11.5, "font_weight": "normal", "fill": GREY}
        subtitle = element("tspan", escape(explained), dx=10, **plain) if explained else ""
        self.add("text", escape(title) + subtitle, x=MARGIN, y=f"{self.y:.1f}", **bold)
        self.y += 12

    def paragraph(self, words: str, *, size: float = 12, fill: str = GREY) -> None:
        for line in textwrap.wrap(words, int((WIDTH - 2 * MARGIN) / (0.5 * size))):
            self.y += size * 1.45
            self.text(MARGIN, self.y, line, size=size, fill=fill)

    def key(self, entries: Iterable[tuple[str, str]]) -> None:
        self.y += 14
        self.legend(MARGIN + _LABEL, entries, letter=6.1)
        self.y += 16

    def row(self, cells: Sequence[tuple[float, str]], *, head: bool = False) -> None:
        """Add a table row of (x, text) cells, right-aligned at -x if x is negative."""
        self.y += 17
        for x, words in cells:
            self.text(abs(x), self.y, words, size=11.5, bold=head, mono=not head, anchor="end" if x < 0 else "")
        if head:
            self.box(MARGIN, self.y + 5, WIDTH - 2 * MARGIN, 1, LINE)
            self.y += 4


def draw(explanation: Explanation) -> str:
    """The picture as the text of an SVG file."""
    layout = explanation.layout
    page = _Page()
    page.y += 14
    title = f"{explanation.task} under {layout.name} on {plural(layout.num_ranks, 'rank')}"
    page.text(MARGIN, page.y, title, size=21, bold=True)
    page.y += 4
    page.paragraph(
        f"{describe_layout(layout)}; {describe_model(explanation)}; {describe_batch(explanation)}", size=13, fill=INK
    )
    page.y += 2
    for note in fold_stage_notes(explanation.notes):
        page.paragraph(note)
    _ranks(page, explanation)
    if explanation.chart:
        _schedule(page, explanation)
    _messages(page, explanation)
    _parameters(page, explanation)
    return page.render(title)


def _ranks(page: _Page, explanation: Explanation) -> None:
    """Draw the mesh: a row for each stage or replica, a card for each rank with its state."""
    layout = explanation.layout
    page.heading("Who keeps what", "between steps, and the gradients before the update")
    columns = layout.dp_shard * layout.tp
    if columns == 1:  # replicas alone: side by side
        columns = layout.dp_replicate
    rows = layout.num_ranks // columns
    per_stage = rows // layout.pp
    shown = list(range(rows)) if rows <= _MOST_ROWS else [*range(_MOST_ROWS - 2), rows - 1]
    largest = max(view.state_bytes[kind] for view in explanation.ranks for kind in _STATES)
    width = (WIDTH - 2 * MARGIN - _LABEL + 10) / min(_MOST_COLUMNS, max(columns, 2)) - 10
    page.key(_STATES.items())
    page.y += 5
    for place, row in enumerate(shown):
        if place and row > shown[place - 1] + 1:
            page.text(MARGIN, page.y + 12, f"... {row - shown[place - 1] - 1} rows of ranks like these", fill=GREY)
            page.y += 22
        view = explanation.ranks[row // per_stage]
        names = (
            [f"stage{'s' * (len(view.stages) > 1)} {', '.join(map(str, view.stages))}"] if layout.num_stages > 1 else []
        )
        names += [f"replica {row % per_stage}"] if per_stage > 1 else []
        for line, name in enumerate(names or ["all ranks alike"]):
            page.text(MARGIN, page.y + 20 + 16 * line, name, bold=not line)
        fitting = columns if columns <= _MOST_COLUMNS else _MOST_COLUMNS - 1
        for column in range(fitting):
            rank = row * columns + column
            _card(page, MARGIN + _LABEL + column * (width + 10), width, rank, view, explanation, largest)
        if fitting < columns:
            x = MARGIN + _LABEL + fitting * (width + 10)
            page.text(x, page.y + 44, f"... {columns - fitting:,} more", fill=GREY)
        page.y += 82


def _card(
    page: _Page, x: float, width: float, rank: int, view: RankView, explanation: Explanation, largest: int
) -> None:
    at, axes = explanation.layout.coordinates(rank), explanation.layout.axes
    words = {"dp_shard": "shard", "tp": "tp"}
    where = " ".join(f"{word} {at[axis]}" for axis, word in words.items() if axes[axis] > 1)
    page.box(x, page.y, width, 72, PANEL, line=LINE, round=5)
    page.text(x + 8, page.y + 16, f"rank {rank}", bold=True)
    if width > 100:
        page.text(x + width - 8, page.y + 16, where, size=10.5, fill=GREY, anchor="end")
    for line, (kind, fill) in enumerate(_STATES.items()):
        count, y = view.state_bytes[kind], page.y + 24 + 15 * line
        longest = width - 16 - 54
        page.box(x + 8, y + 1, longest * count / max(1, largest), 10, fill, tip=f"rank {rank}: {kind} {count:,} bytes")
        page.text(x + width - 8, y + 10, human_bytes(count), size=10, fill=GREY, anchor="end")


def _schedule(page: _Page, explanation: Explanation) -> None:
    layout, chart = explanation.layout, explanation.chart
    page.heading(
        "Schedule", f"{layout.schedule}: micro-batches over time; lengths by arithmetic, messages cost nothing"
    )
    length = max(slot.stop for slot in chart)
    scale = (WIDTH - 2 * MARGIN - _LABEL) / length
    height = 26 if layout.pp <= 12 else 14
    left, top = MARGIN + _LABEL, page.y + 6
    for view in explanation.ranks:
        y = top + view.stage * (height + 4)
        stages = ", ".join(map(str, view.stages))
        page.text(MARGIN, y + height / 2 + 4, f"stage{'s' * (len(view.stages) > 1)} {stages}", bold=True)
        page.box(left, y, length * scale, height, "#e9edf0")
    for slot in chart:
        y, width = top + slot.rank * (height + 4), (slot.stop - slot.start) * scale
        meaning, *fills = _ACTIONS[slot.kind]
        is_later = slot.stage != explanation.ranks[slot.rank].stages[0]
        tip = f"{meaning} of micro-batch {slot.chunk}, stage {slot.stage}"
        gap = min(1.0, width / 6)
        page.box(left + slot.start * scale, y, width - gap, height, fills[is_later], tip=tip)
        if width >= 7.5 * len(str(slot.chunk)) + 2 and height >= 14:
            ink = "#ffffff" if fills[is_later] in ("#0072b2", "#009e73") else INK
            x = left + slot.start * scale + (width - gap) / 2
            page.text(x, y + height / 2 + 4, str(slot.chunk), size=11, fill=ink, anchor="middle")
    page.y = top + layout.pp * (height + 4) - 6
    kinds = {slot.kind for slot in chart}
    entries = [(words, first) for kind, (words, first, _) in _ACTIONS.items() if kind in kinds]
    if layout.stages_per_rank > 1:
        entries += [(f"{w}, second stage", second) for k, (w, _, second) in _ACTIONS.items() if k in kinds]
    page.key([*entries, ("idle", "#e9edf0")])
    page.paragraph(describe_idle(explanation), fill=INK)


def _messages(page: _Page, explanation: Explanation) -> None:
    page.heading("Sent in a step", "bytes of the whole tensor that a collective makes or a stage hands on")
    columns = (MARGIN, 112, 232, -410, -560, -650)
    groups = groups_of(explanation, lambda view: view.messages)
    tables = [message_rows(group.views[0].messages) for group in groups]
    largest = max((row.total_bytes for rows in tables for row in rows), default=1)
    head = ("phase", "operation", "over", "times", "each", "in all")
    page.row(list(zip(columns, head, strict=True)), head=True)
    for group, rows in zip(groups, tables, strict=True):
        total = human_bytes(sum(row.total_bytes for row in rows)) if rows else "nothing"
        page.y += 22
        page.text(MARGIN, page.y, f"{group.label}: {total}", bold=True, fill=GREY)
        for row in rows:
            cells = (row.phase, row.operation, row.over, f"{row.times:,}", row.each, human_bytes(row.total_bytes))
            page.row(list(zip(columns, cells, strict=True)))
            length = (WIDTH - MARGIN - 670) * row.total_bytes / max(1, largest)
            page.box(670, page.y - 9, max(1.0, length), 10, _PHASES.get(row.phase, GREY))


def _parameters(page: _Page, explanation: Explanation) -> None:
    page.heading("Parameters", "a star stands for the number of a block")
    has_stages = explanation.layout.num_stages > 1
    columns = (MARGIN, -408, 425, 565, 705, 872)
    head = ("parameter", "", "whole", "on a rank", "cut: dimension", "stage" if has_stages else "")
    page.row(list(zip(columns, head, strict=True)), head=True)
    rows = parameter_rows(explanation)
    for row in rows[:_MOST_PARAMETERS]:
        name = row.name if row.place.is_trained else f"{row.name} (frozen)"
        cells = (
            name if len(name) <= 47 else f"...{name[-44:]}",
            f"x{row.count}" if row.count > 1 else "",
            human_shape(row.place.shape),
            human_shape(row.place.local_shape),
            describe_cut(row.place),
            describe_stages(row) if has_stages else "",
        )
        page.row(list(zip(columns, cells, strict=True)))
    if len(rows) > _MOST_PARAMETERS:
        page.paragraph(f"... and {len(rows) - _MOST_PARAMETERS} more rows")
