"""The comparison as Markdown, for a README or an issue."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rung.compare.report.data import Comparison, ReportRow, read_comparison
from rung.compare.report.marks import signed_share
from rung.compare.report.table import Column, best_of, known_columns
from rung.system.units import human_bytes, human_seconds
from rung.system.untrusted import printable


def as_markdown(data: Mapping[str, Any]) -> str:
    comparison = read_comparison(data)
    parts = [f"## {_plain(comparison.sentence or f'{comparison.task}: strategies compared')}"]
    if comparison.recommendation:
        parts.append(_plain(comparison.recommendation))
    parts.append(_plain(describe_run(comparison)))
    parts.append(_strategies(comparison))
    failed = [f"- `{_code(row.strategy)}` failed: {_plain(row.failure)}" for row in comparison.rows if row.failure]
    slow = [
        f"- `{_code(row.strategy)}`: rank {slow.rank} took {human_seconds(slow.seconds)} in {_plain(slow.phase)}, the "
        f"others {human_seconds(slow.others_seconds)}"
        for row in comparison.finished
        for slow in row.slow
    ]
    notes = [f"- {_plain(note)}" for note in comparison.notes]
    parts += ["\n".join(lines) for lines in (failed, slow, notes) if lines]
    if any(row.predicted for row in comparison.finished):
        parts += ["### Predicted and measured", _predictions(comparison.finished)]
        reasons = comparison.not_predicted.items()
        missing = [f"- {_plain(', '.join(names))}: {_plain(reason)}" for reason, names in reasons]
        parts += ["\n".join(missing)] if missing else []
    command = comparison.settings.get("command")
    if command:
        parts.append(f"`{_code(str(command))}`")
    return "\n\n".join(parts) + "\n"


def describe_run(comparison: Comparison) -> str:
    """One line: the task, its settings, the machine and the versions."""
    settings, machine = comparison.settings, comparison.machine
    known = {
        "task": comparison.task,
        "batch": settings.get("batch_size"),
        "precision": settings.get("precision"),
        "steps": settings.get("steps"),
        "repeats": settings.get("repeats"),
        "seed": settings.get("seed"),
        "device": machine.get("device_name") or machine.get("device"),
        "cores": machine.get("cores"),
        "memory": human_bytes(machine["memory_bytes"]) if machine.get("memory_bytes") else None,
        **comparison.versions,
    }
    return ", ".join(f"{name} {value}" for name, value in known.items() if value not in (None, ""))


def _strategies(comparison: Comparison) -> str:
    columns = known_columns(comparison)
    bests = [best_of(column, comparison) for column in columns]
    rows = [
        [f"`{_code(row.strategy)}`", *(_cell(column, best, row) for column, best in zip(columns, bests, strict=True))]
        for row in comparison.finished
    ]
    return _table(["strategy", *(column.title for column in columns)], rows) if rows else "No strategy finished."


def _cell(column: Column, best: float | None, row: ReportRow) -> str:
    value = column.value(row)
    if value is None:
        return ""
    return f"**{column.show(value)}**" if value == best else column.show(value)


def _predictions(rows: Sequence[ReportRow]) -> str:
    body = []
    for row in rows:
        predicted = row.predicted
        if predicted is None:
            continue
        seconds = row.step_seconds.median if row.step_seconds else None
        pairs = (
            (human_seconds, predicted.step_seconds, seconds),
            (human_bytes, predicted.peak_bytes, row.peak_bytes),
            (human_bytes, predicted.bytes_per_step, row.bytes_per_step),
        )
        body.append([f"`{_code(row.strategy)}`", *(_pair(*pair) for pair in pairs)])
    return _table(["strategy", "step", "peak memory", "sent"], body)


def _pair(show: Callable[[float], str], predicted: float | None, measured: float | None) -> str:
    off = f" ({signed_share(predicted / measured - 1)})" if predicted is not None and measured else ""
    return " / ".join("-" if value is None else show(value) for value in (predicted, measured)) + off


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


def _plain(value: object) -> str:
    """One line of text with Markdown and HTML markup escaped."""
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", printable(" ".join(str(value).split())))


def _code(value: str) -> str:
    """The content of a code span in a table cell.

    Bars are replaced, not escaped: a backslash in the data before the escaping one would let the bar end the cell, and
    the rest would be rendered as HTML.
    """
    return printable(" ".join(value.split())).replace("`", "'").replace("|", "\N{BROKEN BAR}")
