"""One step of each rank over time: what it does, what is under way meanwhile, and a pipeline's micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

from rung.report.data import PHASES, Comparison, Lane, Row, Span, Timeline
from rung.report.marks import (
    Strip,
    figure,
    figures,
    legend,
    line,
    nice_step,
    percent,
    phase_class,
    picture,
    rect,
    rows_with_index,
    share,
    strips,
    text,
    words_at,
)
from rung.sizes import human_seconds

_LANE, _MESSAGES, _GAP = 15.0, 6.0, 6.0  # heights: of what a rank computes, of its messages below, and between ranks
_BOX = 24.0  # of a micro-batch
_NUMBERED = 0.018  # the share of the width from which on a number fits


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
    told = "What each rank does during one step, all on one scale; messages run below what they overlap with."
    body = f'<div class="bar">{legend(entries)}{button}</div>{_scrolled("timelines", strips(drawn))}{table}'
    return figure("timeline", "One step", told, body, wide=True)


def draw_micro_batches(comparison: Comparison) -> str:
    """For pipelines: which micro-batch each rank works on, and when it has none."""
    rows = [
        (index, row, row.timeline)
        for index, row in rows_with_index(comparison.rows)
        if row.timeline and row.timeline.has_micro_batches
    ]
    if not rows:
        return ""
    drawn = [_schedule(index, row, timeline) for index, row, timeline in rows]
    told = "Which micro-batch a rank works on, by number; the bare ground is the time in which it has none."
    entries = legend([("forward", "t-forward"), ("backward", "t-backward"), ("without a micro-batch", "idle")])
    return figure(
        "micro-batches", "Micro-batches", told, entries + _scrolled("micro-batches", strips(drawn)), wide=True
    )


def _scrolled(name: str, body: str) -> str:
    inner = f'<div class="broad">{body}</div>'
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{text(name)}">{inner}</div>'


def _total(lane: Lane, what: str) -> float:
    return sum(span.end - span.start for span in lane.spans if span.what == what)


def _strip(index: int, row: Row, timeline: Timeline, longest: float) -> Strip:
    marks = [_grid(timeline, longest)]
    for place, lane in enumerate(timeline.lanes):
        marks += _lane(lane, place * (_LANE + _MESSAGES + _GAP), timeline.seconds)
    height = len(timeline.lanes) * (_LANE + _MESSAGES + _GAP) + 12
    told = "; ".join(f"rank {lane.rank}: {_tell(lane)}" for lane in timeline.lanes)
    drawing = picture(
        marks, height, f"{row.strategy}, step {timeline.step}: {told}", style="lanes", size=timeline.seconds, of=longest
    )
    return Strip(index, row.strategy, f"{human_seconds(timeline.seconds)}, step {timeline.step}", drawing)


def _tell(lane: Lane) -> str:
    return ", ".join(f"{what} {human_seconds(_total(lane, what))}" for what in PHASES if _total(lane, what) > 0)


def _grid(timeline: Timeline, longest: float) -> str:
    height, step = len(timeline.lanes) * (_LANE + _MESSAGES + _GAP) - _GAP, nice_step(longest, 6)
    found = []
    for place in range(int(timeline.seconds / step) + 1):
        x = place * step / timeline.seconds if timeline.seconds else 0.0
        found.append(line(x, x, 0, height + 3, "grid"))
        found.append(
            words_at(x, height + 15, human_seconds(place * step) if place else "0", style="tiny", anchor="middle")
        )
    return "".join(found)


def _lane(lane: Lane, y: float, seconds: float) -> list[str]:
    marks = [words_at(0, y + 12, f"rank {lane.rank}", anchor="end", dx=-8), rect(0, 1, y, _LANE, "idle", mark=False)]
    for span in sorted(lane.spans, key=lambda span: span.start):
        is_message = span.what == "communication"
        top, height = (y + _LANE + 1, _MESSAGES) if is_message else (y, _LANE)
        tip = f"rank {lane.rank}: {span.what}{_of(span)}, {human_seconds(span.end - span.start)}"
        marks.append(rect(*_between(span, seconds), top, height, phase_class(span.what), tip=tip))
    return marks


def _of(span: Span) -> str:
    return "" if span.micro_batch is None else f" of micro-batch {span.micro_batch}"


def _between(span: Span, seconds: float) -> tuple[float, float]:
    start = max(0.0, span.start)
    return (start / seconds, max(0.0, span.end - start) / seconds) if seconds else (0.0, 0.0)


def _schedule(index: int, row: Row, timeline: Timeline) -> Strip:
    marks: list[str] = []
    for place, lane in enumerate(timeline.lanes):
        y = place * (_BOX + 4)
        marks.append(words_at(0, y + 16, f"rank {lane.rank}", anchor="end", dx=-8))
        marks.append(rect(0, 1, y, _BOX, "idle", mark=False))
        for span in _numbered(lane):
            x, width = _between(span, timeline.seconds)
            tip = f"rank {lane.rank}: {span.what}{_of(span)}, {human_seconds(span.end - span.start)}"
            marks.append(rect(x, width, y, _BOX, f"{phase_class(span.what)} box", tip=tip))
            if width >= _NUMBERED:
                marks.append(
                    f'<text class="number" x="{percent(x + width / 2)}" y="{y + 16:g}" text-anchor="middle">'
                    f"{text(span.micro_batch)}</text>"
                )
    seconds = timeline.seconds or 1.0
    idle = {lane.rank: 1 - _covered(_numbered(lane)) / seconds for lane in timeline.lanes}
    mean = sum(idle.values()) / len(idle)
    told = "; ".join(f"rank {rank} {share(part)}" for rank, part in idle.items())
    drawing = picture(marks, len(idle) * (_BOX + 4), f"{row.strategy}, without a micro-batch: {told}", style="lanes")
    return Strip(index, row.strategy, f"{share(mean)} of the step without a micro-batch", drawing)


def _numbered(lane: Lane) -> list[Span]:
    """What a rank computes; messages of a micro-batch are not its work."""
    return [span for span in lane.spans if span.micro_batch is not None and span.what != "communication"]


def _covered(spans: Sequence[Span]) -> float:
    """The time in which at least one is under way."""
    total, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return total
