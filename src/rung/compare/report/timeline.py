"""Timelines of one step by rank: its phases, the messages under way, and a pipeline's micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

from rung.compare.report.data import PHASES, Comparison, Lane, ReportRow, ReportSpan, Timeline
from rung.compare.report.marks import (
    Strip,
    figure,
    figures,
    legend,
    line,
    nice_step,
    phase_class,
    picture,
    rect,
    rows_with_index,
    scrolled,
    share,
    strips,
    text_at,
)
from rung.system.units import human_seconds

_LANE, _MESSAGES, _GAP = 15.0, 6.0, 6.0  # heights: a rank's phases, its messages below them, the gap to the next rank
_BOX = 24.0  # height of a micro-batch
_MIN_NUMBER_WIDTH = 0.018  # share of the width; a narrower box has no room for its number


def draw_timelines(comparison: Comparison) -> str:
    rows = [(index, row, row.timeline) for index, row in rows_with_index(comparison.rows) if row.timeline]
    if not rows:
        return ""
    longest = max(timeline.seconds for *_, timeline in rows) or 1.0
    drawn = [_strip(index, row, timeline, longest) for index, row, timeline in rows]
    present = {span.what for *_, timeline in rows for lane in timeline.lanes for span in lane.spans}
    entries = [(phase, phase_class(phase)) for phase in PHASES if phase in present]
    button = (
        '<button type="button" id="scale" class="tool" aria-pressed="false">Each step over the whole width</button>'
    )
    table = figures(
        "the time of each phase in the step",
        ("strategy", "rank", *(name for name, _ in entries)),
        [
            (row.strategy, lane.rank, *(human_seconds(_total(lane, name)) for name, _ in entries))
            for _, row, timeline in rows
            for lane in timeline.lanes
        ],
    )
    caption = "The phases of each rank in one step, all on one time scale; messages run below the work they overlap."
    body = f'<div class="bar">{legend(entries)}{button}</div>{scrolled("timelines", strips(drawn))}{table}'
    return figure("timeline", "One step", caption, body, wide=True)


def draw_micro_batches(comparison: Comparison) -> str:
    """For pipelines: the micro-batch that each rank works on over time, and its idle time."""
    rows = [
        (index, row, row.timeline)
        for index, row in rows_with_index(comparison.rows)
        if row.timeline and row.timeline.has_micro_batches
    ]
    if not rows:
        return ""
    drawn = [_schedule(index, row, timeline) for index, row, timeline in rows]
    caption = "The micro-batch that a rank works on, by number; gaps are time without one."
    entries = legend([("forward", "t-forward"), ("backward", "t-backward"), ("without a micro-batch", "idle")])
    return figure(
        "micro-batches", "Micro-batches", caption, entries + scrolled("micro-batches", strips(drawn)), wide=True
    )


def _total(lane: Lane, what: str) -> float:
    return sum(span.end - span.start for span in lane.spans if span.what == what)


def _strip(index: int, row: ReportRow, timeline: Timeline, longest: float) -> Strip:
    marks = [_grid(timeline, longest)]
    for number, lane in enumerate(timeline.lanes):
        marks += _lane(lane, number * (_LANE + _MESSAGES + _GAP), timeline.seconds)
    height = len(timeline.lanes) * (_LANE + _MESSAGES + _GAP) + 12
    ranks = "; ".join(f"rank {lane.rank}: {_phase_totals(lane)}" for lane in timeline.lanes)
    label = f"{row.strategy}, step {timeline.step}: {ranks}"
    drawing = picture(marks, height, label, style="lanes", size=timeline.seconds, of=longest)
    return Strip(index, row.strategy, f"{human_seconds(timeline.seconds)}, step {timeline.step}", drawing)


def _phase_totals(lane: Lane) -> str:
    return ", ".join(f"{what} {human_seconds(_total(lane, what))}" for what in PHASES if _total(lane, what) > 0)


def _grid(timeline: Timeline, longest: float) -> str:
    height, step = len(timeline.lanes) * (_LANE + _MESSAGES + _GAP) - _GAP, nice_step(longest, 6)
    found = []
    for tick in range(int(timeline.seconds / step) + 1):
        x = tick * step / timeline.seconds if timeline.seconds else 0.0
        found.append(line(x, x, 0, height + 3, "grid"))
        found.append(
            text_at(x, height + 15, human_seconds(tick * step) if tick else "0", style="tiny", anchor="middle")
        )
    return "".join(found)


def _lane(lane: Lane, y: float, seconds: float) -> list[str]:
    marks = [text_at(0, y + 12, f"rank {lane.rank}", anchor="end", dx=-8), rect(0, 1, y, _LANE, "idle", mark=False)]
    for span in sorted(lane.spans, key=lambda span: span.start):
        is_message = span.what == "communication"
        top, height = (y + _LANE + 1, _MESSAGES) if is_message else (y, _LANE)
        marks.append(rect(*_between(span, seconds), top, height, phase_class(span.what), tip=_tip(lane, span)))
    return marks


def _tip(lane: Lane, span: ReportSpan) -> str:
    of = "" if span.micro_batch is None else f" of micro-batch {span.micro_batch}"
    return f"rank {lane.rank}: {span.what}{of}, {human_seconds(span.end - span.start)}"


def _between(span: ReportSpan, seconds: float) -> tuple[float, float]:
    start = max(0.0, span.start)
    return (start / seconds, max(0.0, span.end - start) / seconds) if seconds else (0.0, 0.0)


def _schedule(index: int, row: ReportRow, timeline: Timeline) -> Strip:
    marks: list[str] = []
    for number, lane in enumerate(timeline.lanes):
        y = number * (_BOX + 4)
        marks.append(text_at(0, y + 16, f"rank {lane.rank}", anchor="end", dx=-8))
        marks.append(rect(0, 1, y, _BOX, "idle", mark=False))
        for span in _compute_spans(lane):
            x, width = _between(span, timeline.seconds)
            marks.append(rect(x, width, y, _BOX, f"{phase_class(span.what)} box", tip=_tip(lane, span)))
            if width >= _MIN_NUMBER_WIDTH:
                marks.append(text_at(x + width / 2, y + 16, str(span.micro_batch), style="number", anchor="middle"))
    seconds = timeline.seconds or 1.0
    idle = {lane.rank: 1 - _covered(_compute_spans(lane)) / seconds for lane in timeline.lanes}
    mean = sum(idle.values()) / len(idle)
    label = "; ".join(f"rank {rank} {share(part)}" for rank, part in idle.items())
    drawing = picture(marks, len(idle) * (_BOX + 4), f"{row.strategy}, without a micro-batch: {label}", style="lanes")
    return Strip(index, row.strategy, f"{share(mean)} of the step without a micro-batch", drawing)


def _compute_spans(lane: Lane) -> list[ReportSpan]:
    """The spans in which a rank computes a micro-batch; its messages do not count as work."""
    return [span for span in lane.spans if span.micro_batch is not None and span.what != "communication"]


def _covered(spans: Sequence[ReportSpan]) -> float:
    """Seconds covered by at least one span."""
    total, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return total
