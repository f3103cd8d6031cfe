"""The JSON of a comparison as records. A value that is absent or not a finite number is None; charts omit it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rung.errors import ReportError
from rung.spec.expert_rows import LayerRows, read_layers

FORMAT = "rung-compare 1"
KINDS = ("parameters", "gradients", "optimizer", "activations", "other")
_MOST, _LEAST = 1e30, 1e-30  # of a measurement; beyond them, computing a chart's scale would overflow a float
_MOST_ROWS, _MOST_RANKS, _MOST_ENTRIES, _MOST_KINDS = 1000, 10**6, 1000, 32
Points = tuple[tuple[int, float], ...]  # (step, value)
PHASES = ("data", "forward", "backward", "communication", "update")


@dataclass(frozen=True)
class Quantiles:
    """The median of many measurements, and the range from the 10th to the 90th percentile."""

    median: float
    low: float
    high: float
    runs: tuple[float, ...] = ()  # the median of each repetition


@dataclass(frozen=True)
class RankMemory:
    rank: int
    kinds: dict[str, float]  # bytes; they add up to the total
    total_bytes: float  # at the peak of a step, or between steps
    process_bytes: float | None


@dataclass(frozen=True)
class MessageCount:
    """The calls of one collective over one axis in one phase of a step."""

    collective: str
    axis: str
    phase: str
    calls: float
    num_bytes: float


@dataclass(frozen=True)
class ReportSpan:
    what: str
    start: float
    end: float
    micro_batch: int | None


@dataclass(frozen=True)
class Lane:
    rank: int
    spans: tuple[ReportSpan, ...]


@dataclass(frozen=True)
class Timeline:
    step: int
    seconds: float
    lanes: tuple[Lane, ...]

    @property
    def has_micro_batches(self) -> bool:
        return any(span.micro_batch is not None for lane in self.lanes for span in lane.spans)


@dataclass(frozen=True)
class ReportStraggler:
    rank: int
    phase: str
    seconds: float
    others_seconds: float


@dataclass(frozen=True)
class Predicted:
    step_seconds: float | None
    peak_bytes: float | None
    bytes_per_step: float | None


@dataclass(frozen=True)
class ReportRow:
    """One strategy."""

    strategy: str
    ranks: int
    failure: str | None = None
    step_seconds: Quantiles | None = None
    samples_per_second: Quantiles | None = None
    speedup: float | None = None
    first_step_seconds: float | None = None
    data_wait_seconds: float | None = None
    memory: tuple[RankMemory, ...] = ()
    is_peak: bool = True  # whether `memory` is the peak of a step; if not, the memory held between steps
    process_bytes: float | None = None  # of the largest process
    device_bytes: float | None = None  # of tensors on the fullest rank, for runs without memory by kind
    messages: tuple[MessageCount, ...] = ()
    bytes_per_step: float | None = None
    communication_seconds: float | None = None
    exposed_seconds: float | None = None  # of a step, waiting for messages
    losses: Points = ()
    logged: Mapping[str, Points] = field(default_factory=dict)  # by the task
    experts: tuple[tuple[int, tuple[LayerRows, ...]], ...] = ()  # step and layers, of the first and of the last
    loss_difference: float | None = None
    parameter_difference: float | None = None
    timeline: Timeline | None = None
    slow: tuple[ReportStraggler, ...] = ()
    predicted: Predicted | None = None
    not_predicted: str | None = None

    @property
    def peak_bytes(self) -> float | None:
        """The peak of the fullest rank."""
        found = [memory.total_bytes for memory in self.memory] if self.is_peak else []
        return max(found, default=self.device_bytes)


@dataclass(frozen=True)
class Comparison:
    task: str
    reference: str
    rows: tuple[ReportRow, ...]
    sentence: str
    recommendation: str
    chosen: str | None
    machine: dict[str, Any]
    settings: dict[str, Any]
    made: str
    versions: dict[str, str]  # of rung and torch
    notes: tuple[str, ...]  # on missing data

    @property
    def not_predicted(self) -> dict[str, list[str]]:
        """Strategies without a full prediction, by the reason."""
        found: dict[str, list[str]] = {}
        for row in self.finished:
            reason = row.not_predicted or ("no prediction" if row.predicted is None else "")
            if reason:
                found.setdefault(reason, []).append(row.strategy)
        return found

    @property
    def finished(self) -> tuple[ReportRow, ...]:
        return tuple(row for row in self.rows if row.failure is None)


def read_comparison(data: Mapping[str, Any]) -> Comparison:
    if data.get("format") != FORMAT:
        raise ReportError(
            f"This is not a comparison: its format is {data.get('format')!r:.60}, not {FORMAT!r}. "
            "`rung compare TASK --out report.html` makes one."
        )
    try:
        verdict = data.get("verdict") or {}
        return Comparison(
            task=str(data.get("task", "")),
            reference=str(data.get("reference") or ""),
            rows=tuple(_row(row) for row in _few(data["rows"], _MOST_ROWS)),
            sentence=str(verdict.get("sentence") or ""),
            recommendation=str(verdict.get("recommendation") or ""),
            chosen=str(verdict["strategy"]) if verdict.get("strategy") is not None else None,
            machine=_plain(data.get("machine") or {}, numbers=("cores", "memory_bytes")),
            settings=_plain(data.get("settings") or {}, numbers=("nproc", "steps", "repeats", "batch_size")),
            made=str(data.get("made") or ""),
            versions={name: str(data[name]) for name in ("rung", "torch") if data.get(name)},
            notes=tuple(map(str, _few(data.get("notes") or (), _MOST_ENTRIES))),
        )
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ReportError(
            f"The comparison is damaged: {type(error).__name__} {error}. Make it again with `rung compare`."
        ) from None


def _few(values: Any, most: int) -> Any:
    """Check the length of a list: the time of some charts grows with its square."""
    if not isinstance(values, list | tuple | dict) or len(values) > most:
        raise ValueError(f"expected a list of at most {most} entries")
    return values


def _plain(values: Mapping[str, Any], numbers: tuple[str, ...]) -> dict[str, Any]:
    """The entries that are strings or numbers; those named in `numbers` must be nonzero numbers."""

    def is_plain(key: str, value: Any) -> bool:
        return key not in numbers if isinstance(value, str) else isinstance(value, int | float)

    return {
        key: value for key, value in values.items() if is_plain(key, value) and (key not in numbers or number(value))
    }


def number(value: Any) -> float | None:
    """A finite float; None for nan and infinity, which the JSON holds as strings and no chart can show."""
    if value is None or isinstance(value, bool):
        return None
    found = float(value)
    if not math.isfinite(found) or abs(found) > _MOST:
        return None
    return found if abs(found) >= _LEAST else 0.0


def _count(value: Any, most: int = 2**53) -> int:
    """A whole number, also one that JSON holds as a float (2.0)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most or value != int(value):
        raise ValueError(f"{value!r:.60} is not a whole number up to {most}")
    return int(value)


def _finite(value: Any) -> float:
    found = number(value)
    if found is None:
        raise ValueError(f"{value!r:.60} is not a number")
    return found


def _row(raw: Mapping[str, Any]) -> ReportRow:
    strategy, ranks = str(raw["strategy"]), _count(raw["ranks"], _MOST_RANKS)
    if raw.get("status", "ok") != "ok":
        return ReportRow(strategy, ranks, failure=str(raw.get("reason") or "no reason was given"))
    communication, difference = raw.get("communication") or {}, raw.get("largest_difference") or {}
    kept = raw.get("kept") or ()
    memory = tuple(_memory(entry) for entry in (raw.get("memory") or kept))
    timeline, predicted = raw.get("timeline"), raw.get("predicted")
    return ReportRow(
        strategy,
        ranks,
        step_seconds=_spread(raw.get("step_seconds")),
        samples_per_second=_spread(raw.get("samples_per_second")),
        speedup=number(raw.get("speedup")),
        first_step_seconds=number(raw.get("first_step_seconds")),
        data_wait_seconds=number(raw.get("data_wait_seconds")),
        memory=memory,
        is_peak=not kept,
        process_bytes=number(raw.get("process_bytes")) or _largest_process(memory),
        device_bytes=number(raw.get("device_bytes")),
        messages=tuple(_message(entry) for entry in _few(raw.get("messages") or (), _MOST_ENTRIES)),
        bytes_per_step=number(raw.get("bytes_per_step")),
        communication_seconds=number(communication.get("seconds")),
        exposed_seconds=number(communication.get("exposed_seconds")),
        losses=_points(raw.get("losses") or ()),
        logged={str(name): _points(points) for name, points in _few(raw.get("logged") or {}, _MOST_ENTRIES).items()},
        experts=tuple(
            (_count(one["step"]), tuple(read_layers(one.get("layers")))) for one in _few(raw.get("experts") or (), 2)
        ),
        loss_difference=number(difference.get("loss")),
        parameter_difference=number(difference.get("parameters")),
        timeline=_timeline(timeline) if timeline else None,
        slow=tuple(_slow(entry) for entry in raw.get("slow") or ()),
        predicted=_predicted(predicted) if predicted else None,
        not_predicted=str(raw["not_predicted"]) if raw.get("not_predicted") else None,
    )


def _points(raw: Any) -> Points:
    return tuple((_count(step), found) for step, value in raw if (found := number(value)) is not None)


def _spread(raw: Mapping[str, Any] | None) -> Quantiles | None:
    median = number(raw.get("median")) if raw else None
    if raw is None or median is None:
        return None
    low, high = number(raw.get("low")), number(raw.get("high"))
    runs = tuple(found for run in raw.get("runs") or () if (found := number(run)) is not None)
    return Quantiles(median, median if low is None else low, median if high is None else high, runs)


def _memory(raw: Mapping[str, Any]) -> RankMemory:
    kinds = {str(kind): _finite(count) for kind, count in _few(raw.get("kinds") or {}, _MOST_KINDS).items()}
    peak = number(raw.get("peak_bytes"))
    return RankMemory(
        _count(raw["rank"]), kinds, sum(kinds.values()) if peak is None else peak, number(raw.get("process_bytes"))
    )


def _largest_process(memory: tuple[RankMemory, ...]) -> float | None:
    return max((entry.process_bytes for entry in memory if entry.process_bytes is not None), default=None)


def _message(raw: Mapping[str, Any]) -> MessageCount:
    return MessageCount(
        str(raw["collective"]),
        str(raw.get("axis") or ""),
        str(raw.get("phase") or ""),
        _finite(raw.get("calls", 1)),
        _finite(raw["bytes"]),
    )


def _timeline(raw: Mapping[str, Any]) -> Timeline:
    lanes = tuple(
        Lane(
            _count(lane["rank"]),
            tuple(
                ReportSpan(
                    str(span["what"]),
                    _finite(span["start"]),
                    _finite(span["end"]),
                    _count(span["micro_batch"]) if span.get("micro_batch") is not None else None,
                )
                for span in lane["spans"]
            ),
        )
        for lane in raw["ranks"]
    )
    last = max((span.end for lane in lanes for span in lane.spans), default=0.0)
    return Timeline(_count(raw["step"]), max(_finite(raw["seconds"]), last), lanes)


def _slow(raw: Mapping[str, Any]) -> ReportStraggler:
    seconds, others = _finite(raw["seconds"]), _finite(raw["others_seconds"])
    return ReportStraggler(_count(raw["rank"]), str(raw["phase"]), seconds, others)


def _predicted(raw: Mapping[str, Any]) -> Predicted:
    return Predicted(number(raw.get("step_seconds")), number(raw.get("peak_bytes")), number(raw.get("bytes_per_step")))
