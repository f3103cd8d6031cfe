"""Reads runs of `rung train` and files of `rung compare` into one comparison; a note lists what runs do not record."""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from rung.compare.report.data import FORMAT, number, read_comparison
from rung.compare.report.marks import plural, rate, times
from rung.compare.variants import REFERENCE
from rung.errors import ReportError
from rung.spec.logged import TAKEN
from rung.spec.version import VERSION
from rung.system.untrusted import lines_of, open_regular, parse_json, read_json, read_regular, refuse_extremes

WHOLE_FILE, ROW_FILE = "comparison.json", "comparison-row.json"  # file names that `rung compare` writes
_SETTINGS = ("batch_size", "precision", "seed")
_MAX_COMPARISON, _MAX_SETTINGS = 2**26, 2**20  # bytes
_START_EVENTS = ("start", "resume")
_MOST_STEPS = 20_000  # kept of a run: a curve shows hundreds, and quantiles need no more
_MOST_POINTS = 600  # of a figure that the task logs
_NOT_RECORDED = (
    "A run records no peak memory by kind, no messages and no timeline: `rung compare` measures them and makes the "
    "predictions."
)


def read_all(paths: Sequence[Path]) -> dict[str, Any]:
    """Read the paths into one document: a single comparison unchanged, runs or several comparisons merged."""
    sources = [(path, _read(path)) for path in map(_comparison_file, paths)]
    if len(sources) == 1 and sources[0][0].is_file():
        return sources[0][1]
    try:
        return _merge(sources)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        reason = f"{type(error).__name__} {error}"
        raise ReportError(f"These measurements cannot be shown together: {reason}. Name one at a time.") from error


def _comparison_file(path: Path) -> Path:
    """The comparison in a directory that `rung compare` wrote; any other path unchanged."""
    whole = path / WHOLE_FILE
    return whole if whole.is_file() else path


def _name_of(path: Path) -> str:
    if path.is_file() and path.name not in (WHOLE_FILE, ROW_FILE):
        return path.stem
    return (path.parent if path.is_file() else path).resolve().name


def _read(path: Path) -> dict[str, Any]:
    if path.is_dir():
        return _read_run(path)
    if not path.exists():
        raise ReportError(f"{path} does not exist. Name a run's directory (in runs/) or a JSON file of `rung compare`.")
    try:
        data = read_json(path, _MAX_COMPARISON)
    except (ValueError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ReportError(
            f"{path} is not a JSON file: {reason}. Name a run's directory or a JSON file of `rung compare`."
        ) from None
    if not isinstance(data, dict):
        raise ReportError(f"{path} holds no comparison. `rung compare TASK --json report.json` makes one.")
    read_comparison(data)
    return data


def _read_run(folder: Path) -> dict[str, Any]:
    file = folder / "metrics.jsonl"
    if not file.exists():
        raise ReportError(f"{folder} holds no metrics.jsonl: it is not a run of `rung train`, or it never started.")
    lines = _events_and_steps(file)
    starts = [line for line in lines if line["event"] in _START_EVENTS]
    if not starts:
        raise ReportError(f"{file} has no start event: the run ended before its first step.")
    settings = _settings(folder / "config.toml")
    return {
        "format": FORMAT,
        "task": str(starts[-1].get("task", "")),
        "machine": {"device": str(starts[-1].get("device"))},
        "settings": {key: settings[key] for key in _SETTINGS if key in settings},
        "rows": [_row(starts[-1], lines)],
        "notes": _unfinished(folder.resolve().name, starts[-1], lines),
    }


def _unfinished(name: str, start: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> list[str]:
    if any(line["event"] == "end" for line in lines[lines.index(start) :]):
        return []
    last = max((line["step"] for line in lines if line["event"] == "step"), default=0)
    total = start.get("total_steps")
    of = f" of {total}" if total is not None else ""
    return [f"The run {name} has no end event: it is running, or it was stopped. Its last recorded step is {last}{of}."]


def _events_and_steps(file: Path) -> list[dict[str, Any]]:
    """The events of a run, then its steps and what hooks log; of a long run a sample of them, see `_Steps`.

    A resumed run repeats steps: only the last repetition counts. A half-written last line is ignored.
    """
    events: list[dict[str, Any]] = []
    steps, logs = _Steps(), _Steps()
    try:
        with open_regular(file) as opened:
            _read_lines(opened, events, steps, logs)
    except OSError as error:
        raise ReportError(f"{file} cannot be read: {error.strerror}.") from None
    return [*events, *steps.kept, *logs.kept]


def _read_lines(opened: BinaryIO, events: list[dict[str, Any]], steps: _Steps, logs: _Steps) -> None:
    for text in lines_of(opened):
        if text.startswith(b'{"step"'):  # almost every line; most of them need no parsing
            steps.add(text)
            continue
        line = _usable(text)
        if line is not None and line["event"] == "step":
            steps.add(text)
        if line is not None and line["event"] == "log":
            logs.add(text)
        if line is None or line["event"] not in ("start", "resume", "end", "slow", "experts"):
            continue
        steps.keep_last()
        if line["event"] == "resume":
            for lines in (steps, logs):
                lines.go_back(line["step"])
            events[:] = [o for o in events if o["event"] == "start" or _step_of(o) <= line["step"]]
        if line["event"] == "experts":  # of many steps, the first and the last are shown
            of_before = [place for place, one in enumerate(events) if one["event"] == "experts"]
            if len(of_before) > 1:
                del events[of_before[-1]]
        events.append(line)
    steps.keep_last()
    logs.keep_last()


class _Steps:
    """Steps of a run, or lines of its hooks, thinned to `_MOST_STEPS`: every third, ninth, ... and the last before each
    event.

    Every second would be biased: what a run does now and then falls on steps that 2, 5 or 10 divide.
    """

    def __init__(self) -> None:
        self.kept: list[dict[str, Any]] = []
        self._count, self._every = 0, 1
        self._last = b""  # the latest line, unless it was kept

    def add(self, text: bytes) -> None:
        self._count += 1
        self._last = text
        if self._count % self._every == 0:
            self.keep_last()
            if len(self.kept) > _MOST_STEPS:
                self.kept = self.kept[2::3]
                self._every *= 3

    def keep_last(self) -> None:
        line = _usable(self._last) if self._last else None
        if line is not None:
            self.kept.append(line)
        self._last = b""

    def go_back(self, step: int) -> None:
        """Drop the steps after `step`, which the resumed run repeats."""
        while self.kept and self.kept[-1]["step"] > step:
            self.kept.pop()


def _step_of(line: Mapping[str, Any]) -> int:
    return line["step"] if _is_count(line.get("step")) else 0


def _usable(text: bytes) -> dict[str, Any] | None:
    """Parse a line of metrics.jsonl; None if it is incomplete or lacks a field that its event needs."""
    try:
        line = parse_json(text)
    except ValueError:
        return None
    needed = _NEEDED.get(line["event"]) if isinstance(line, dict) and isinstance(line.get("event"), str) else None
    return line if needed is not None and all(check(line.get(key)) for key, check in needed.items()) else None


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**48


def _is_figure(value: Any) -> bool:
    """Whether a value is a number, or nan or infinity, which JSON lines hold as strings."""
    return value in ("nan", "inf", "-inf") if isinstance(value, str) else type(value) in (int, float)


_START: dict[str, Callable[[Any], bool]] = {
    "strategy": lambda value: isinstance(value, str),
    "ranks": _is_count,
    "total_steps": lambda value: value is None or _is_count(value),
}
# The fields that a line must hold to be shown, by event.
_NEEDED: dict[str, dict[str, Callable[[Any], bool]]] = {
    "start": _START,
    "resume": {**_START, "step": _is_count},
    "step": {
        "step": _is_count,
        "loss": _is_figure,
        "step_seconds": _is_figure,
        "samples_per_second": _is_figure,
        "data_wait_seconds": _is_figure,
        "peak_memory_bytes": _is_figure,
    },
    "slow": {
        "rank": _is_count,
        "phase": lambda value: isinstance(value, str),
        "seconds": lambda value: _is_figure(value) and number(value) is not None,
        "others_seconds": lambda value: _is_figure(value) and number(value) is not None,
    },
    "log": {"step": _is_count},
    "experts": {"step": _is_count, "layers": lambda value: isinstance(value, dict)},
    "end": {},
}


def _settings(file: Path) -> dict[str, Any]:
    try:
        found = tomllib.loads(read_regular(file, _MAX_SETTINGS).decode("utf-8"))
        refuse_extremes(found)
    except (OSError, ValueError, RecursionError):
        return {}
    return {key: value for key, value in found.items() if isinstance(value, str | int | float)}


def _row(start: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    steps = [line for line in lines if line["event"] == "step"]
    end = next((line for line in reversed(lines) if line["event"] == "end"), None)
    strategy, ranks = start["strategy"], start["ranks"]
    if not steps:
        return {"strategy": strategy, "ranks": ranks, "status": "failed", "reason": "the run has no step"}
    later = steps[min(3, len(steps) // 2) :]  # leave out warm-up
    row: dict[str, Any] = {
        "strategy": strategy,
        "ranks": ranks,
        "status": "ok",
        "reason": None,
        "step_seconds": _spread([line["step_seconds"] for line in later]),
        "samples_per_second": _spread([line["samples_per_second"] for line in later]),
        "data_wait_seconds": _mean([line["data_wait_seconds"] for line in later]),
        "losses": [[line["step"], line["loss"]] for line in steps],
        "logged": logged_points([(line["step"], line) for line in lines if line["event"] in ("step", "log")]),
        "slow": _slow_ranks(lines),
        "experts": [{"step": line["step"], "layers": line["layers"]} for line in lines if line["event"] == "experts"],
    }
    peak = max((found for line in steps if (found := number(line["peak_memory_bytes"])) is not None), default=None)
    if start.get("device") == "cuda":  # on a GPU, the peak counts tensors on the fullest rank
        row["device_bytes"] = peak
    else:
        row["process_bytes"] = peak
    if end:
        row["kept"] = [
            {"rank": rank, "kinds": _kinds(state)}
            for rank, state in enumerate(_list(end.get("state_bytes")))
            if isinstance(state, dict)
        ]
    return row


def logged_points(rows: Sequence[tuple[int, Mapping[str, Any]]]) -> dict[str, list[list[Any]]]:
    """Step and value of each figure that the task logs, as many as a curve shows."""
    found: dict[str, list[list[Any]]] = {}
    for step, figures in sorted(rows, key=lambda row: row[0]):
        for name, value in figures.items():
            if name not in TAKEN and _is_figure(value):
                found.setdefault(name, []).append([step, value])
    few: dict[str, list[list[Any]]] = {}
    for name, points in found.items():
        every = -(-len(points) // _MOST_POINTS)
        few[name] = [*points[:-1:every], points[-1]]
    return few


def _kinds(state: Mapping[str, Any]) -> dict[str, float]:
    known = {kind: found for kind, count in state.items() if _is_figure(count) and (found := number(count)) is not None}
    kinds = {kind: known.get(kind, 0) for kind in ("parameters", "gradients", "optimizer")}
    return {**kinds, "other": sum(known.values()) - sum(kinds.values())}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _mean(values: Sequence[Any]) -> float | None:
    found = [value for entry in values if (value := number(entry)) is not None]
    return statistics.fmean(found) if found else None


def _spread(values: Sequence[Any]) -> dict[str, Any] | None:
    found = sorted(value for entry in values if (value := number(entry)) is not None)
    if not found:
        return None
    return {"median": statistics.median(found), "low": _quantile(found, 0.1), "high": _quantile(found, 0.9)}


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[round(share * (len(ordered) - 1))]


def _slow_ranks(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The last 'slow' event of each rank and phase."""
    keys = ("rank", "phase", "seconds", "others_seconds")
    found = {(line["rank"], line["phase"]): line for line in lines if line["event"] == "slow"}
    return [{key: line[key] for key in keys} for line in found.values()]


def _merge(sources: Sequence[tuple[Path, dict[str, Any]]]) -> dict[str, Any]:
    rows = [(path, {"status": "ok", **row}) for path, data in sources for row in data["rows"]]
    for _, row in rows:
        row["strategy"] = str(row["strategy"])
    names = [row["strategy"] for _, row in rows]
    for path, row in rows:
        if names.count(row["strategy"]) > 1:
            row["strategy"] = f"{row['strategy']} ({_name_of(path)})"
    settings, differ = _common([_plain_facts(data.get("settings")) for _, data in sources])
    notes = [str(note) for _, data in sources for note in data.get("notes") or ()] + differ
    machine, _ = _common([_plain_facts(data.get("machine")) for _, data in sources])
    tasks = list(dict.fromkeys(str(data.get("task", "")) for _, data in sources))
    if len(tasks) > 1:
        notes.append(f"The runs are of different tasks: {', '.join(tasks)}. Speeds and losses cannot be compared.")
    reference = _compare_speed([row for _, row in rows], is_same_job=len(tasks) == 1)
    if any("timeline" not in row for _, row in rows if row["status"] == "ok"):
        notes.append(_NOT_RECORDED)
    return {
        "format": FORMAT,
        "rung": VERSION,
        "task": ", ".join(tasks),
        "machine": machine,
        "settings": settings,
        "reference": reference,
        "rows": [row for _, row in rows],
        "verdict": _verdict([row for _, row in rows], ", ".join(tasks)),
        "notes": notes,
    }


def _plain_facts(raw: Any) -> dict[str, Any]:
    facts = raw if isinstance(raw, dict) else {}
    return {key: value for key, value in facts.items() if value is None or isinstance(value, str | int | float)}


def _common(dicts: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """The entries that are equal in all, and a note on each setting that differs."""
    keys = list(dict.fromkeys(key for entry in dicts for key in entry))
    same, notes = {}, []
    for key in keys:
        values = list(dict.fromkeys(entry.get(key) for entry in dicts))  # hashable, after `_plain_facts`
        if len(values) == 1:
            same[key] = values[0]
        elif key in _SETTINGS:
            listed = ", ".join(map(str, values))
            name = key.replace("_", " ")
            notes.append(f"The runs differ in {name}: {listed}. Speeds and losses cannot be compared.")
    return same, notes


def _compare_speed(rows: Sequence[dict[str, Any]], *, is_same_job: bool) -> str:
    """Set each row's speed-up over the single-process run, and return its name; '' unless there is exactly one."""
    finished = [row for row in rows if row["status"] == "ok" and row.get("samples_per_second")]
    references = [row for row in finished if row["ranks"] == 1 and row["strategy"].split(" (")[0] == REFERENCE]
    if len(references) != 1 or not is_same_job:
        for row in finished:
            row["speedup"] = None
        return ""
    base = references[0]["samples_per_second"]["median"]
    for row in finished:
        row["speedup"] = row["samples_per_second"]["median"] / base if base else None
    return str(references[0]["strategy"])


def _verdict(rows: Sequence[Mapping[str, Any]], task: str) -> dict[str, Any]:
    known = [row for row in rows if row["status"] == "ok" and row.get("samples_per_second")]
    if not known:
        return _sentence(f"No run of {task} has a step to show.")
    best = max(known, key=lambda row: row["samples_per_second"]["median"])
    speed = f"{rate(best['samples_per_second']['median'])} samples a second"
    if len(rows) == 1:
        where = plural(best["ranks"], "process", "processes")
        return _sentence(f"{best['strategy']} on {where} trains {task} at {speed}.")
    faster = f", {times(best['speedup'])} one process" if best.get("speedup") and best["ranks"] > 1 else ""
    return _sentence(f"Of {len(rows)} runs of {task}, {best['strategy']} was the fastest: {speed}{faster}.")


def _sentence(text: str) -> dict[str, Any]:
    """A verdict that recommends no strategy."""
    return {"sentence": text, "recommendation": "", "strategy": None}
