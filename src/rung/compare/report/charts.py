"""Bar charts by strategy or rank: throughput, memory, messages, predictions, slow ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rung.compare.report.data import KINDS, Comparison, MessageCount, Predicted, RankMemory, ReportRow
from rung.compare.report.marks import (
    Strip,
    figure,
    figures,
    kind_class,
    legend,
    line,
    percent,
    picture,
    prose,
    rate,
    rect,
    rows_with_index,
    signed_share,
    strips,
    text,
    text_at,
    times,
)
from rung.system.svg import element, title
from rung.system.units import human_bytes, human_seconds

_BAR = 16.0  # height of a bar
_NUM_STYLES = 6  # page.css has the classes c-0 to c-5


def draw_throughput(comparison: Comparison) -> str:
    rows = [(index, row) for index, row in rows_with_index(comparison.rows) if row.samples_per_second]
    if not rows:
        return ""
    most = max(row.samples_per_second.high for _, row in rows if row.samples_per_second)
    reference = next((row for _, row in rows if row.strategy == comparison.reference), None)
    baseline = reference.samples_per_second.median if reference and reference.samples_per_second else None
    drawn = [_speed_strip(index, row, most, baseline, comparison) for index, row in rows]
    caption = "Samples per second over all ranks: the bar is the median, the bracket holds 8 of 10 steps"
    caption += ", the dashed line is one process." if baseline is not None and len(rows) > 1 else "."
    table = figures(
        "samples per second",
        ("strategy", "median", "low", "high", "speed-up"),
        [
            (row.strategy, rate(s.median), rate(s.low), rate(s.high), times(row.speedup) if row.speedup else "-")
            for _, row in rows
            if (s := row.samples_per_second)
        ],
    )
    return figure("throughput", "Speed", caption, strips(drawn) + table)


def _speed_strip(index: int, row: ReportRow, most: float, baseline: float | None, comparison: Comparison) -> Strip:
    spread = row.samples_per_second
    assert spread is not None
    # The value at the strip's right edge. Marks are shares of it: page.js widens a strip without redrawing its marks.
    full = max(spread.high, spread.median) or 1.0
    low, high = spread.low / full, spread.high / full
    tip = f"{row.strategy}: {rate(spread.median)} samples/s, {rate(spread.low)} to {rate(spread.high)}"
    is_chosen = row.strategy == comparison.chosen
    middle = 2 + _BAR / 2
    marks = [
        rect(0, spread.median / full, 2, _BAR, "speed chosen" if is_chosen else "speed", tip=tip),
        line(low, high, middle, middle, "spread"),
        line(low, low, middle - 4, middle + 4, "spread"),
        line(high, high, middle - 4, middle + 4, "spread"),
    ]
    if baseline is not None:
        marks.append(line(baseline / full, baseline / full, 0, _BAR + 4, "against"))
    faster = f"  ({times(row.speedup)})" if row.speedup is not None and row.strategy != comparison.reference else ""
    drawing = picture(marks, _BAR + 4, tip, size=full, of=most)
    return Strip(index, row.strategy, f"{rate(spread.median)} samples/s{faster}", drawing)


def draw_memory(comparison: Comparison) -> str:
    """Peak memory by kind; for runs of `rung train`, which record no peak by kind, the memory held between steps."""
    rows = [(index, row) for index, row in rows_with_index(comparison.rows) if row.memory]
    return "".join(_memory_figure(rows, is_peak) for is_peak in (True, False))


def _memory_figure(rows: Sequence[tuple[int, ReportRow]], is_peak: bool) -> str:
    rows = [(index, row) for index, row in rows if row.is_peak == is_peak]
    if not rows:
        return ""
    most = max(1.0, *(memory.total_bytes for _, row in rows for memory in row.memory))
    present = {kind for _, row in rows for memory in row.memory for kind, count in memory.kinds.items() if count}
    order = [kind for kind in KINDS if kind in present] + sorted(present - set(KINDS))
    drawn = [_memory_strip(index, row, order, most) for index, row in rows]
    cells = [
        (row.strategy, m.rank, human_bytes(m.total_bytes), *(human_bytes(m.kinds.get(kind, 0)) for kind in order))
        for _, row in rows
        for m in row.memory
    ]
    body = legend([(kind, kind_class(kind)) for kind in order]) + strips(drawn)
    if is_peak:
        table = figures("peak memory by kind and rank", ("strategy", "rank", "peak", *order), cells)
        caption = "Tensor memory of each rank at the peak of a step, by kind; one bar per rank."
        return figure("memory", "Memory", caption, body + table)
    table = figures("memory kept between steps", ("strategy", "rank", "in all", *order), cells)
    caption = "Memory that each rank holds between steps, by kind; one bar per rank. A run does not record its peak."
    return figure("kept", "Memory between steps", caption, body + table)


def _memory_strip(index: int, row: ReportRow, order: Sequence[str], most: float) -> Strip:
    full = max(memory.total_bytes for memory in row.memory)
    marks = [mark for number, m in enumerate(row.memory) for mark in _memory_bar(number, m, order, full or 1.0)]
    label = f"{row.strategy}: " + "; ".join(_describe_memory(memory, order) for memory in row.memory)
    drawing = picture(marks, len(row.memory) * (_BAR + 3) + 1, label, style="gutter", size=full, of=most)
    where = "on the fullest rank" if len(row.memory) > 1 else "on one rank"
    return Strip(index, row.strategy, f"{human_bytes(full)} {where}", drawing)


def _memory_bar(number: int, memory: RankMemory, order: Sequence[str], full: float) -> list[str]:
    x, y = 0.0, number * (_BAR + 3)
    marks = [text_at(0, y + 12, str(memory.rank), anchor="end", dx=-7)]
    for kind in order:
        width = memory.kinds.get(kind, 0) / full
        if width > 0:
            tip = f"rank {memory.rank}: {kind} {human_bytes(memory.kinds[kind])} of {human_bytes(memory.total_bytes)}"
            marks.append(rect(x, width, y, _BAR, kind_class(kind), tip=tip))
        x += width
    return marks


def _describe_memory(memory: RankMemory, order: Sequence[str]) -> str:
    kinds = ", ".join(f"{kind} {human_bytes(memory.kinds[kind])}" for kind in order if memory.kinds.get(kind))
    return f"rank {memory.rank} {human_bytes(memory.total_bytes)}, of these {kinds}"


def draw_messages(comparison: Comparison) -> str:
    """Size of rank 0's messages in a step, by collective."""
    rows = [(index, row) for index, row in rows_with_index(comparison.rows) if row.bytes_per_step is not None]
    if not any(row.messages for _, row in rows):
        return ""
    totals = {index: _by_collective(row.messages) for index, row in rows}
    most = max(1.0, *(sum(found.values()) for found in totals.values()))
    names = sorted({name for found in totals.values() for name in found})
    styles = {name: f"c-{number % _NUM_STYLES}" for number, name in enumerate(names)}
    drawn = [_message_strip(index, row, totals[index], styles, most) for index, row in rows]
    table = figures(
        "messages of rank 0 in a step",
        ("strategy", "collective", "phase", "over", "calls", "bytes"),
        [
            (row.strategy, m.collective, m.phase, m.axis, f"{m.calls:,.4g}", human_bytes(m.num_bytes))
            for _, row in rows
            for m in row.messages
        ],
    )
    caption = "Size of rank 0's messages in a step; a collective counts its whole result."
    return figure("messages", "Messages", caption, strips(drawn) + table)


def _by_collective(messages: Sequence[MessageCount]) -> dict[str, float]:
    found: dict[str, float] = {}
    for message in messages:
        found[message.collective] = found.get(message.collective, 0.0) + message.num_bytes
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _message_strip(index: int, row: ReportRow, found: dict[str, float], styles: dict[str, str], most: float) -> Strip:
    full, x = sum(found.values()), 0.0
    marks, entries = [], []
    for name, count in found.items():
        calls = sum(message.calls for message in row.messages if message.collective == name)
        tip = f"{name}: {human_bytes(count)} in {calls:,.4g} {'call' if calls == 1 else 'calls'}"
        marks.append(rect(x, count / (full or 1.0), 0, _BAR, styles[name], tip=tip))
        entries.append((f"{name} {human_bytes(count)}", styles[name]))
        x += count / (full or 1.0)
    if not found:
        return Strip(index, row.strategy, "nothing" if row.ranks == 1 else "no collective", "")
    label = ", ".join(entry for entry, _ in entries)
    drawing = picture(marks, _BAR, f"{row.strategy}: {label}", size=full, of=most)
    return Strip(index, row.strategy, human_bytes(full), drawing, legend(entries))


@dataclass(frozen=True)
class _Quantity:
    name: str
    title: str
    measured: Callable[[ReportRow], float | None]
    predicted: Callable[[Predicted], float | None]
    show: Callable[[float], str]


_QUANTITIES = (
    _Quantity(
        "seconds",
        "Time of a step",
        lambda row: row.step_seconds.median if row.step_seconds else None,
        lambda predicted: predicted.step_seconds,
        human_seconds,
    ),
    _Quantity("peak", "Peak memory", lambda row: row.peak_bytes, lambda predicted: predicted.peak_bytes, human_bytes),
    _Quantity(
        "sent",
        "Bytes sent in a step",
        lambda row: row.bytes_per_step,
        lambda predicted: predicted.bytes_per_step,
        human_bytes,
    ),
)


def draw_predictions(comparison: Comparison) -> str:
    rows = rows_with_index(comparison.rows)
    if not any(row.predicted for _, row in rows):
        return ""
    panels = "".join(_panel(quantity, rows) for quantity in _QUANTITIES)
    missing = "".join(
        f"<li><b>{text(', '.join(names))}</b>: {prose(reason)}</li>"
        for reason, names in comparison.not_predicted.items()
    )
    left_out = f'<ul class="notes" aria-label="Not predicted">{missing}</ul>' if missing else ""
    caption = "The planner's prediction before any run (diamond) and the measured value (dot)."
    body = f'<div class="panels">{panels}</div>{left_out}'
    return figure("predictions", "Predicted and measured", caption, body, wide=True)


def _panel(quantity: _Quantity, rows: Sequence[tuple[int, ReportRow]]) -> str:
    pairs = [
        (index, row, measured, predicted)
        for index, row in rows
        if row.predicted
        and (measured := quantity.measured(row)) is not None
        and (predicted := quantity.predicted(row.predicted)) is not None
    ]
    if not pairs:
        return ""
    most = max(max(measured, predicted) for *_, measured, predicted in pairs) or 1.0
    drawn = [_pair_strip(quantity, *pair, most) for pair in pairs]
    off = [abs(predicted - measured) / measured for *_, measured, predicted in pairs if measured]
    mean = f"{100 * sum(off) / len(off):.0f} % off on average" if off else ""
    table = figures(
        f"{quantity.title.lower()}, predicted and measured",
        ("strategy", "predicted", "measured"),
        [(row.strategy, quantity.show(predicted), quantity.show(measured)) for _, row, measured, predicted in pairs],
    )
    return (
        f'<section class="panel" id="predicted-{quantity.name}"><h3>{text(quantity.title)} '
        f'<span class="value">{mean}</span></h3>{strips(drawn)}{table}</section>'
    )


def _pair_strip(
    quantity: _Quantity, index: int, row: ReportRow, measured: float, predicted: float, most: float
) -> Strip:
    shown = f"predicted {quantity.show(predicted)}, measured {quantity.show(measured)}"
    tip = f"{row.strategy}: {shown}"
    full = max(measured, predicted)
    measured_x, predicted_x = measured / (full or 1.0), predicted / (full or 1.0)
    diamond = element("path", title(tip), class_="mark predicted", d="M0 -6.5L6.5 0L0 6.5L-6.5 0Z")
    marks = [
        line(0, 1, 9, 9, "rail"),
        line(min(measured_x, predicted_x), max(measured_x, predicted_x), 9, 9, "gap"),
        element("svg", diamond, class_="place", x=percent(predicted_x), y=9),
        element("circle", title(tip), class_="mark measured", cx=percent(measured_x), cy=9, r=4.5),
    ]
    is_off = measured and quantity.show(predicted) != quantity.show(measured)
    off = f" ({signed_share((predicted - measured) / measured)})" if is_off else ""
    drawing = picture(marks, 18, tip, style="inset", size=full, of=most)
    return Strip(index, row.strategy, f"{shown}{off}", drawing)


def draw_slow(comparison: Comparison) -> str:
    """List the ranks that took longer than their peers."""
    items = "".join(
        f'<li data-row="{index}"><b>{text(row.strategy)}</b>: rank {slow.rank} took {human_seconds(slow.seconds)} in '
        f"{text(slow.phase)}, the others {human_seconds(slow.others_seconds)}.</li>"
        for index, row in rows_with_index(comparison.rows)
        for slow in row.slow
    )
    if not items:
        return ""
    caption = "Ranks whose own work, without waiting for others, took clearly longer than that of their peers."
    return figure("slow", "Slow ranks", caption, f'<ul class="notes">{items}</ul>', wide=True)
