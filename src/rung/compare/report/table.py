"""The columns of the comparison, for the page's table and for Markdown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rung.compare.report.data import Comparison, ReportRow
from rung.compare.report.marks import difference, prose, rate, share, text, times
from rung.system.units import human_bytes, human_seconds


@dataclass(frozen=True)
class Column:
    title: str
    explained: str
    value: Callable[[ReportRow], float | None]
    show: Callable[[float], str]
    best: str = ""  # "low" or "high": which end is better


def _median_step(row: ReportRow) -> float | None:
    return row.step_seconds.median if row.step_seconds else None


def _median_rate(row: ReportRow) -> float | None:
    return row.samples_per_second.median if row.samples_per_second else None


def _sent(row: ReportRow) -> float | None:
    """None where several ranks recorded no message: RPC calls and copies within a process are not counted."""
    return row.bytes_per_step if row.messages or row.ranks == 1 else None


def _waiting(row: ReportRow) -> float | None:
    if row.exposed_seconds is None or row.step_seconds is None or not row.step_seconds.median:
        return None
    return row.exposed_seconds / row.step_seconds.median


def _exposed(row: ReportRow) -> float | None:
    if not row.communication_seconds or row.exposed_seconds is None:
        return None
    return row.exposed_seconds / row.communication_seconds


COLUMNS = (
    Column("ranks", "processes that trained", lambda row: float(row.ranks), lambda value: f"{value:.0f}"),
    Column("step", "median time of a step", _median_step, human_seconds, "low"),
    Column("samples/s", "samples of all ranks in a second", _median_rate, rate, "high"),
    Column("speed-up", "against one process", lambda row: row.speedup, times, "high"),
    Column("peak memory", "of the fullest rank", lambda row: row.peak_bytes, human_bytes, "low"),
    Column("process", "memory of the largest process", lambda row: row.process_bytes, human_bytes),
    Column("sent", "size of rank 0's messages in a step; a collective counts its whole result", _sent, human_bytes),
    Column("waiting", "share of a step spent waiting for messages", _waiting, share),
    Column("exposed", "share of communication not hidden by computation", _exposed, share),
    Column("data wait", "time of a step spent waiting for data", lambda row: row.data_wait_seconds, human_seconds),
    Column("first step", "from process start to its end", lambda row: row.first_step_seconds, human_seconds, "low"),
    Column("loss differs", "relative, from one process", lambda row: row.loss_difference, difference),
)


def known_columns(comparison: Comparison) -> list[Column]:
    """The columns that have a value in at least one row."""
    return [column for column in COLUMNS if any(column.value(row) is not None for row in comparison.finished)]


def best_of(column: Column, comparison: Comparison) -> float | None:
    """The best value of a column; None if no end is better, or if all values are equal."""
    values = [value for row in comparison.finished if (value := column.value(row)) is not None]
    if not column.best or len(values) < 2 or min(values) == max(values):
        return None
    return min(values) if column.best == "low" else max(values)


def draw_table(comparison: Comparison) -> str:
    columns = known_columns(comparison)
    heads = "".join(
        f'<th scope="col" aria-sort="none" data-first="{"descending" if column.best == "high" else "ascending"}">'
        f'<button type="button" title="{text(column.explained)}">{text(column.title)}</button></th>'
        for column in columns
    )
    bests = [best_of(column, comparison) for column in columns]
    body = "".join(_table_row(index, row, columns, bests, comparison) for index, row in enumerate(comparison.rows))
    meanings = "".join(f"<dt>{text(column.title)}</dt><dd>{text(column.explained)}</dd>" for column in columns)
    explained = f'<details class="figures"><summary>What the columns mean</summary><dl>{meanings}</dl></details>'
    return (
        '<div class="scroll" tabindex="0" role="region" aria-labelledby="table-caption"><table id="strategies">'
        '<caption id="table-caption"><span>All strategies, measured. A column\'s title sorts the table and the charts '
        "below; the best of a column is marked.</span></caption>"
        '<thead><tr><th scope="col" aria-sort="none" data-first="ascending"><button type="button">strategy</button>'
        f'</th>{heads}</tr></thead><tbody>{body}</tbody></table></div><p id="sorted" class="unseen" role="status"></p>'
        f"{explained if columns else ''}"
    )


def _table_row(
    index: int, row: ReportRow, columns: list[Column], bests: list[float | None], comparison: Comparison
) -> str:
    chosen = ' <span class="badge">recommended</span>' if row.strategy == comparison.chosen else ""
    first = f'<th scope="row" data-sort="{text(row.strategy)}">{text(row.strategy)}{chosen}</th>'
    if row.failure is not None:
        cells = (
            f'<td data-sort="{row.ranks}">{row.ranks}</td><td class="failure" colspan="{max(1, len(columns) - 1)}">'
            f"<b>failed:</b> {prose(row.failure)}</td>"
        )
        return f'<tr data-row="{index}" class="failed">{first}{cells}</tr>'
    return f'<tr data-row="{index}">{first}{"".join(map(_cell, columns, bests, [row] * len(columns)))}</tr>'


def _cell(column: Column, best: float | None, row: ReportRow) -> str:
    value = column.value(row)
    if value is None:
        return '<td><span aria-hidden="true">-</span><span class="unseen">not known</span></td>'
    shown = text(column.show(value))
    content = f'<b class="best">{shown}</b>' if value == best else shown
    return f'<td data-sort="{value!r}">{content}</td>'
