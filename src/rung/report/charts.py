"""Charts with a bar for each strategy or rank: throughput, memory, messages, predictions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rung.report.data import KINDS, Comparison, Message, RankMemory, Row
from rung.report.marks import (
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
    times,
    told_bytes,
    told_seconds,
    words_at,
)
from rung.sizes import human_bytes, human_seconds

_BAR = 16.0  # the height of a bar
_MOST_STYLES = 6  # of collectives in page.css


def draw_throughput(comparison: Comparison) -> str:
    rows = [(index, row) for index, row in rows_with_index(comparison.rows) if row.samples_per_second]
    if not rows:
        return ""
    most = max(row.samples_per_second.high for _, row in rows if row.samples_per_second)
    reference = next((row for _, row in rows if row.strategy == comparison.reference), None)
    against = reference.samples_per_second.median if reference and reference.samples_per_second else None
    drawn = [_speed_strip(index, row, most, against, comparison) for index, row in rows]
    told = "Samples of all ranks in a second: the bar is the median, the bracket holds 8 of 10 steps."
    if against is not None and len(rows) > 1:
        told = told[:-1] + ", the dashed line is one process."
    table = figures(
        "samples per second",
        ("strategy", "median", "low", "high", "speed-up"),
        [
            (row.strategy, rate(s.median), rate(s.low), rate(s.high), times(row.speedup) if row.speedup else "-")
            for _, row in rows
            if (s := row.samples_per_second)
        ],
    )
    return figure("throughput", "Speed", told, strips(drawn) + table)


def _speed_strip(index: int, row: Row, most: float, against: float | None, comparison: Comparison) -> Strip:
    spread = row.samples_per_second
    assert spread is not None
    own = max(spread.high, spread.median) or 1.0
    low, high = spread.low / own, spread.high / own
    tip = f"{row.strategy}: {rate(spread.median)} samples/s, {rate(spread.low)} to {rate(spread.high)}"
    is_chosen = row.strategy == comparison.chosen
    middle = 2 + _BAR / 2
    marks = [
        rect(0, spread.median / own, 2, _BAR, "speed chosen" if is_chosen else "speed", tip=tip),
        line(low, high, middle, middle, "spread"),
        line(low, low, middle - 4, middle + 4, "spread"),
        line(high, high, middle - 4, middle + 4, "spread"),
    ]
    if against is not None:
        marks.append(line(against / own, against / own, 0, _BAR + 4, "against"))
    faster = f"  ({times(row.speedup)})" if row.speedup is not None and row.strategy != comparison.reference else ""
    drawing = picture(marks, _BAR + 4, tip, size=own, of=most)
    return Strip(index, row.strategy, f"{rate(spread.median)} samples/s{faster}", drawing)


def draw_memory(comparison: Comparison) -> str:
    """The fullest moment by kind; of plain runs, what they keep between steps."""
    return "".join(
        _memory_figure(comparison, [pair for pair in rows_with_index(comparison.rows) if pair[1].memory], is_peak)
        for is_peak in (True, False)
    )


def _memory_figure(comparison: Comparison, rows: Sequence[tuple[int, Row]], is_peak: bool) -> str:
    rows = [(index, row) for index, row in rows if row.is_peak == is_peak]
    if not rows:
        return ""
    most = max(1.0, *(memory.peak_bytes for _, row in rows for memory in row.memory))
    present = {kind for _, row in rows for memory in row.memory for kind, count in memory.kinds.items() if count}
    order = [kind for kind in KINDS if kind in present] + sorted(present - set(KINDS))
    drawn = [_memory_strip(index, row, order, most) for index, row in rows]
    cells = [
        (row.strategy, memory.rank, told_bytes(memory.peak_bytes), *(told_bytes(memory.kinds.get(k, 0)) for k in order))
        for _, row in rows
        for memory in row.memory
    ]
    body = legend([(kind, kind_class(kind)) for kind in order]) + strips(drawn)
    if is_peak:
        table = figures("peak memory by kind and rank", ("strategy", "rank", "peak", *order), cells)
        told = "What each rank's tensors take at the fullest moment of a step, by kind; a bar is a rank."
        return figure("memory", "Memory", told, body + table)
    table = figures("memory kept between steps", ("strategy", "rank", "in all", *order), cells)
    told = "What each rank keeps between steps, by kind; a bar is a rank. A run does not record the fullest moment."
    return figure("kept", "Memory between steps", told, body + table)


def _memory_strip(index: int, row: Row, order: Sequence[str], most: float) -> Strip:
    own = max(memory.peak_bytes for memory in row.memory)
    told = "; ".join(_tell_memory(memory, order) for memory in row.memory)
    drawing = picture(
        [mark for place, memory in enumerate(row.memory) for mark in _memory_bar(place, memory, order, own or 1.0)],
        len(row.memory) * (_BAR + 3) + 1,
        f"{row.strategy}: {told}",
        style="gutter",
        size=own,
        of=most,
    )
    where = "on the fullest rank" if len(row.memory) > 1 else "on one rank"
    return Strip(index, row.strategy, f"{human_bytes(own)} {where}", drawing)


def _memory_bar(place: int, memory: RankMemory, order: Sequence[str], own: float) -> list[str]:
    y, x, marks = place * (_BAR + 3), 0.0, [words_at(0, place * (_BAR + 3) + 12, str(memory.rank), anchor="end", dx=-7)]
    for kind in order:
        width = memory.kinds.get(kind, 0) / own
        if width > 0:
            tip = f"rank {memory.rank}: {kind} {human_bytes(memory.kinds[kind])} of {human_bytes(memory.peak_bytes)}"
            marks.append(rect(x, width, y, _BAR, kind_class(kind), tip=tip))
        x += width
    return marks


def _tell_memory(memory: RankMemory, order: Sequence[str]) -> str:
    kinds = ", ".join(f"{kind} {human_bytes(memory.kinds[kind])}" for kind in order if memory.kinds.get(kind))
    return f"rank {memory.rank} {human_bytes(memory.peak_bytes)}, of these {kinds}"


def draw_messages(comparison: Comparison) -> str:
    """Bytes by collective."""
    rows = [(index, row) for index, row in rows_with_index(comparison.rows) if row.bytes_per_step is not None]
    if not any(row.messages for _, row in rows):
        return ""
    totals = {index: _by_collective(row.messages) for index, row in rows}
    most = max(1.0, *(sum(found.values()) for found in totals.values()))
    names = sorted({name for found in totals.values() for name in found})
    styles = {name: f"c-{place % _MOST_STYLES}" for place, name in enumerate(names)}
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
    told = "Bytes that rank 0 hands to each collective in a step."
    return figure("messages", "Messages", told, strips(drawn) + table)


def _by_collective(messages: Sequence[Message]) -> dict[str, float]:
    found: dict[str, float] = {}
    for message in messages:
        found[message.collective] = found.get(message.collective, 0.0) + message.num_bytes
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _message_strip(index: int, row: Row, found: dict[str, float], styles: dict[str, str], most: float) -> Strip:
    own, x = sum(found.values()), 0.0
    marks, told = [], []
    for name, count in found.items():
        calls = sum(message.calls for message in row.messages if message.collective == name)
        tip = f"{name}: {human_bytes(count)} in {calls:,.4g} {'call' if calls == 1 else 'calls'}"
        marks.append(rect(x, count / (own or 1.0), 0, _BAR, styles[name], tip=tip))
        told.append((f"{name} {human_bytes(count)}", styles[name]))
        x += count / (own or 1.0)
    if not found:
        return Strip(index, row.strategy, "nothing" if row.ranks == 1 else "no collective", "")
    words = ", ".join(words for words, _ in told)
    drawing = picture(marks, _BAR, f"{row.strategy}: {words}", size=own, of=most)
    return Strip(index, row.strategy, human_bytes(own), drawing, legend(told))


@dataclass(frozen=True)
class _Quantity:
    name: str
    title: str
    measured: Callable[[Row], float | None]
    predicted: Callable[[Row], float | None]
    show: Callable[[float | None], str]


_QUANTITIES = (
    _Quantity(
        "seconds",
        "Time of a step",
        lambda row: row.step_seconds.median if row.step_seconds else None,
        lambda row: row.predicted.step_seconds if row.predicted else None,
        told_seconds,
    ),
    _Quantity(
        "peak",
        "Peak memory",
        lambda row: row.peak_bytes,
        lambda row: row.predicted.peak_bytes if row.predicted else None,
        told_bytes,
    ),
    _Quantity(
        "sent",
        "Bytes sent in a step",
        lambda row: row.bytes_per_step,
        lambda row: row.predicted.bytes_per_step if row.predicted else None,
        told_bytes,
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
    told = "What the planner said before anything ran (diamond), and what was measured (dot)."
    return figure(
        "predictions", "Predicted and measured", told, f'<div class="panels">{panels}</div>{left_out}', wide=True
    )


def _panel(quantity: _Quantity, rows: Sequence[tuple[int, Row]]) -> str:
    pairs = [
        (index, row, measured, predicted)
        for index, row in rows
        if (measured := quantity.measured(row)) is not None and (predicted := quantity.predicted(row)) is not None
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


def _pair_strip(quantity: _Quantity, index: int, row: Row, measured: float, predicted: float, most: float) -> Strip:
    was, said, own = quantity.show(measured), quantity.show(predicted), max(measured, predicted)
    tip = f"{row.strategy}: predicted {said}, measured {was}"
    at, expected = measured / (own or 1.0), predicted / (own or 1.0)
    marks = [
        line(0, 1, 9, 9, "rail"),
        line(min(at, expected), max(at, expected), 9, 9, "gap"),
        f'<svg class="place" x="{percent(expected)}" y="9"><path class="mark predicted" '
        f'd="M0 -6.5L6.5 0L0 6.5L-6.5 0Z"><title>{text(tip)}</title></path></svg>',
        f'<circle class="mark measured" cx="{percent(at)}" cy="9" r="4.5"><title>{text(tip)}</title></circle>',
    ]
    off = f" ({signed_share((predicted - measured) / measured)})" if measured and said != was else ""
    drawing = picture(marks, 18, tip, style="inset", size=own, of=most)
    return Strip(index, row.strategy, f"said {said}, was {was}{off}", drawing)


def draw_slow(comparison: Comparison) -> str:
    """Ranks that took longer than their peers, as a list."""
    items = "".join(
        f'<li data-row="{index}"><b>{text(row.strategy)}</b>: rank {slow.rank} took {human_seconds(slow.seconds)} in '
        f"{text(slow.phase)}, the others {human_seconds(slow.others_seconds)}.</li>"
        for index, row in rows_with_index(comparison.rows)
        for slow in row.slow
    )
    if not items:
        return ""
    told = "Ranks that took clearly longer than their peers, in time of their own."
    return figure("slow", "Slow ranks", told, f'<ul class="notes">{items}</ul>', wide=True)
