"""The SVG chart of a sweep: bus bandwidth over size in a panel for each collective, and the times of small calls."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from rung.hardware.collective_records import OPS, CollectiveRecord, Sweep
from rung.system.svg import BLUE, GREEN, GREY, INK, LINE, MARGIN, ORANGE, PANEL, PURPLE, RED, SKY, WIDTH, Page
from rung.system.units import human_bytes, human_seconds

_COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY, INK, "#8a949e")
_COLUMNS, _GAP = 3, 22
_AXIS, _HEIGHT = 40, 150  # width of the axis left of a panel, and height of a panel
_LABEL = 120


@dataclass(frozen=True)
class _LogScale:
    """A logarithmic axis over whole powers of its base."""

    low: int
    high: int
    base: int

    @classmethod
    def over(cls, values: Iterable[float], base: int) -> _LogScale:
        logs = [math.log(value, base) for value in values if value > 0] or [0.0]
        low, high = math.floor(min(logs) + 1e-9), math.ceil(max(logs) - 1e-9)
        return cls(low, max(high, low + 1), base)

    def place(self, value: float) -> float:
        """The position of a value on the axis, from 0 to 1."""
        return (math.log(value, self.base) - self.low) / (self.high - self.low)

    @property
    def marks(self) -> list[float]:
        return [float(self.base) ** power for power in range(self.low, self.high + 1)]


def draw(sweep: Sweep) -> str:
    """The chart as SVG text."""
    about, records = sweep.environment, sweep.records
    page = Page()
    page.y += 14
    ranks, hosts = about["ranks"], len(about["hosts"])
    where = "one machine" if hosts == 1 else f"{hosts} machines"
    title = f"Collectives of {about['backend']}: {ranks} rank{'s' * (ranks != 1)} on {where}"
    page.text(MARGIN, page.y, title, size=21, bold=True)
    page.y += 22
    subtitle = [*about["device_names"], f"torch {about['torch']}", about["library"]]
    page.text(MARGIN, page.y, "; ".join(filter(None, subtitle)), fill=GREY)
    dtypes = list(dict.fromkeys(record.dtype for record in records if record.op != "barrier"))
    colours = {dtype: _COLOURS[number % len(_COLOURS)] for number, dtype in enumerate(dtypes)}
    _legend(page, colours)
    ops = [op for op in OPS if op != "barrier" and any(record.op == op for record in records)]
    _panels(page, records, ops, colours, is_alone=ranks == 1)
    _smallest(page, records, colours)
    return page.render(title)


def _legend(page: Page, colours: dict[str, str]) -> None:
    page.y += 16
    page.legend(MARGIN, colours.items(), letter=6.5)
    page.y += 12


def _panels(
    page: Page, records: list[CollectiveRecord], ops: list[str], colours: dict[str, str], *, is_alone: bool
) -> None:
    """Draw all panels with the same axes, so that collectives can be compared."""

    def rate(record: CollectiveRecord) -> float:
        """In GB/s. A single rank sends nothing over a link, so its bus bandwidth would be 0."""
        return ((record.algorithm_bandwidth if is_alone else record.bus_bandwidth) or 0.0) / 1e9

    points = [record for record in records if record.op in ops and rate(record) > 0]
    across = _LogScale.over((record.bytes for record in points), 4)
    up = _LogScale.over((rate(record) for record in points), 10)
    width = (WIDTH - 2 * MARGIN - (_COLUMNS - 1) * _GAP) / _COLUMNS - _AXIS
    page.y += 34
    kind = "Algorithm" if is_alone else "Bus"
    page.text(MARGIN, page.y, f"{kind} bandwidth, GB/s, over the size of the whole array", size=15, bold=True)
    top = page.y + 14
    for number, op in enumerate(ops):
        x = MARGIN + (number % _COLUMNS) * (width + _AXIS + _GAP) + _AXIS
        y = top + (number // _COLUMNS) * (_HEIGHT + 62) + 16
        page.text(x, y - 5, op, bold=True)
        page.box(x, y, width, _HEIGHT, PANEL)
        _grid(page, x, y, width, across, up)
        missing = []
        for dtype, colour in colours.items():
            mine = [record for record in points if record.op == op and record.dtype == dtype]
            if not mine:
                missing.append(dtype)
                continue
            places = [
                (x + across.place(record.bytes) * width, y + (1 - up.place(rate(record))) * _HEIGHT) for record in mine
            ]
            page.line(places, colour, width=1.8)
            for record, place in zip(mine, places, strict=True):
                tip = f"{op} {dtype} {human_bytes(record.bytes)}: {rate(record):.3g} GB/s, "
                page.dot(*place, 2.6, colour, tip=tip + human_seconds(record.seconds or 0.0))
        if missing:
            note = "not supported" if len(missing) == len(colours) else f"without {', '.join(missing)}"
            page.text(x + 6, y + 14, note, size=10, fill=GREY)
    page.y = top + math.ceil(len(ops) / _COLUMNS) * (_HEIGHT + 62)


def _grid(page: Page, x: float, y: float, width: float, across: _LogScale, up: _LogScale) -> None:
    for mark in up.marks:
        height = y + (1 - up.place(mark)) * _HEIGHT
        page.line([(x, height), (x + width, height)], LINE)
        page.text(x - 6, height + 4, f"{mark:g}", size=10, fill=GREY, anchor="end")
    every = max(1, math.ceil(len(across.marks) / 5))
    for number, mark in enumerate(across.marks):
        place = x + across.place(mark) * width
        page.line([(place, y), (place, y + _HEIGHT)], LINE)
        if number % every == 0:
            page.text(place, y + _HEIGHT + 14, human_bytes(mark), size=10, fill=GREY, anchor="middle")


def _smallest(page: Page, records: list[CollectiveRecord], colours: dict[str, str]) -> None:
    """Draw the time of each collective's smallest call: for small messages, latency matters, not bandwidth."""
    timed = [record for record in records if record.seconds]
    rows = []
    for op in OPS:
        mine = [record for record in timed if record.op == op]
        rows += [record for record in mine if record.bytes == min(one.bytes for one in mine)]
    if not rows:
        return
    page.y += 20
    page.text(MARGIN, page.y, "Time of the smallest call", size=15, bold=True)
    longest = max(record.seconds or 0.0 for record in rows)
    room = WIDTH - 2 * MARGIN - _LABEL - 190
    before = ""
    for record in rows:
        page.y += 17 if record.op == before else 22
        seconds = record.seconds or 0.0
        if record.op != before:
            page.text(MARGIN, page.y, record.op, bold=True)
        page.box(MARGIN + _LABEL, page.y - 10, room * seconds / longest, 12, colours.get(record.dtype, GREY), round=2)
        size = f", {human_bytes(record.bytes)} of {record.dtype}" if record.bytes else ""
        place = MARGIN + _LABEL + room * seconds / longest + 7
        page.text(place, page.y, f"{human_seconds(seconds)}{size}", size=11, fill=GREY)
        before = record.op
