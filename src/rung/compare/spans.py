"""A rank's step as spans of time: its phases, its micro-batches, and its waits for messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

_SHORTEST = 1e-7  # seconds; cutting waits out of a span can leave empty pieces


@dataclass(frozen=True)
class Span:
    """`what` is data, forward, backward, communication or update. Times are perf_counter's."""

    what: str
    start: float
    end: float
    micro_batch: int | None = None

    def as_json(self, zero: float) -> dict[str, Any]:
        return {
            "what": self.what,
            "start": self.start - zero,
            "end": self.end - zero,
            "micro_batch": self.micro_batch,
        }


def spans_of_step(
    log: Sequence[tuple[str, float, float]], actions: Sequence[tuple[str, int, float, float]], data_seconds: float
) -> list[Span]:
    """Build the spans from the phase clock's log of a step and, for a pipeline, from its stages' actions (kind,
    micro-batch, start, end). Waits are cut out of the spans that they interrupt."""
    waits = _merged(sorted((start, end) for what, start, end in log if what == "wait"))
    phases = [Span(what, start, end) for what, start, end in log if what != "wait"]
    if actions:
        busy = [
            Span("forward" if kind == "F" else "backward", start, end, chunk) for kind, chunk, start, end in actions
        ]
        busy += [span for span in phases if span.what not in ("forward", "backward")]
    else:
        busy = _numbered(phases)
    found = [piece for span in busy for piece in _without(span, waits)]
    found += [Span("communication", start, end) for start, end in waits]
    begin = min((span.start for span in phases), default=0.0)
    if data_seconds > 0:
        found.append(Span("data", begin - data_seconds, begin))
    return sorted((span for span in found if span.end - span.start > _SHORTEST), key=lambda span: span.start)


def _numbered(phases: Sequence[Span]) -> list[Span]:
    """Merge neighbours of one kind; if several forwards remain, number them as micro-batches."""
    merged: list[Span] = []
    for span in phases:
        if merged and merged[-1].what == span.what:
            merged[-1] = replace(merged[-1], end=span.end)
        else:
            merged.append(span)
    if sum(span.what == "forward" for span in merged) < 2:
        return merged
    counts = {"forward": -1, "backward": -1}
    found = []
    for span in merged:
        if span.what in counts:
            counts[span.what] += 1
            span = replace(span, micro_batch=counts[span.what])
        found.append(span)
    return found


def _merged(pairs: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for start, end in pairs:
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def _without(span: Span, holes: Sequence[tuple[float, float]]) -> list[Span]:
    pieces, start = [], span.start
    for begin, end in holes:
        if end <= start or begin >= span.end:
            continue
        pieces.append(replace(span, start=start, end=max(start, begin)))
        start = max(start, min(end, span.end))
    return [*pieces, replace(span, start=start)]


def seconds_outside(intervals: Iterable[tuple[float, float]], holes: Iterable[tuple[float, float]]) -> float:
    """The length of the union of `intervals`, without the parts in `holes`."""
    merged = _merged(sorted(holes))
    return sum(
        piece.end - piece.start
        for start, end in _merged(sorted(intervals))
        for piece in _without(Span("communication", start, end), merged)
    )
