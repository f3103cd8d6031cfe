"""The comparison as Markdown, for a README or an issue."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rung.report.data import Comparison, Row, read_comparison
from rung.report.marks import signed_share, told_bytes, told_seconds
from rung.report.table import Column, best_of, known_columns
from rung.sizes import human_bytes, human_seconds
from rung.untrusted import printable


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
    """Where and with what it was measured, in one line."""
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
        [f"`{_code(row.strategy)}`", *map(_cell, columns, bests, [row] * len(columns))] for row in comparison.finished
    ]
    return _table(["strategy", *(column.title for column in columns)], rows) if rows else "No strategy finished."


def _cell(column: Column, best: float | None, row: Row) -> str:
    value = column.value(row)
    if value is None:
        return ""
    return f"**{column.show(value)}**" if value == best else column.show(value)


def _predictions(rows: Sequence[Row]) -> str:
    body = []
    for row in rows:
        said, seconds = row.predicted, row.step_seconds.median if row.step_seconds else None
        if said is None:
            continue
        pairs = (
            (told_seconds(said.step_seconds), told_seconds(seconds), _off(said.step_seconds, seconds)),
            (told_bytes(said.peak_bytes), told_bytes(row.peak_bytes), _off(said.peak_bytes, row.peak_bytes)),
            (
                told_bytes(said.bytes_per_step),
                told_bytes(row.bytes_per_step),
                _off(said.bytes_per_step, row.bytes_per_step),
            ),
        )
        body.append([f"`{_code(row.strategy)}`", *(f"{before} / {after}{off}" for before, after, off in pairs)])
    return _table(["strategy", "step", "peak memory", "sent"], body)


def _off(said: float | None, was: float | None) -> str:
    return f" ({signed_share(said / was - 1)})" if said is not None and was else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


def _plain(words: object) -> str:
    """On one line, with nothing that Markdown or HTML would take for its own."""
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", printable(" ".join(str(words).split())))


def _code(words: str) -> str:
    """Between backticks, in a cell of a table. A bar would end the cell, and with it the code, if a backslash of the
    data stands before the one that escapes it; what follows would then be HTML."""
    return printable(" ".join(words.split())).replace("`", "'").replace("|", "\N{BROKEN BAR}")
