"""The console output of `rung bench collectives`: a progress bar and the table of records."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from rung.hardware.bench.collectives import Case
from rung.hardware.collective_records import CollectiveRecord, Sweep
from rung.system.units import human_bytes, human_seconds

_STYLES = {"ok": "green", "wrong": "red", "failed": "red", "not supported": "yellow"}
_COLUMNS = ("operation", "type", "size", "time", "fastest", "algbw", "busbw", "checked")
_WIDTH = 110


@contextmanager
def progress(cases: tuple[Case, ...]) -> Iterator[Any]:
    """A progress bar, and a function that advances it by each record it is called with. Hidden without a terminal."""
    console = Console(file=sys.stderr, markup=False)
    parts = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*parts, console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task(_describe(cases, 0), total=len(cases))
        done = 0

        def advance(message: Any) -> None:
            nonlocal done
            if not isinstance(message, CollectiveRecord):  # the first message is the environment
                return
            done += 1
            shown.update(task, advance=1, description=_describe(cases, done))

        yield advance


def _describe(cases: tuple[Case, ...], number: int) -> str:
    if number >= len(cases):
        return "done"
    case = cases[number]
    size = f" {human_bytes(case.num_bytes)}" if case.num_bytes else ""
    return f"{case.op} {case.dtype}{size}".rstrip().ljust(34)


def show(sweep: Sweep, paths: list[str]) -> None:
    console = Console(file=sys.stdout, highlight=False, markup=False)
    console.width = max(console.width, _WIDTH)  # mpirun reports 80 columns for any terminal
    about = sweep.environment
    hosts = len(about["hosts"])
    threads = "/".join(map(str, about["threads_per_rank"]))
    console.print(
        f"{about['backend']}, {about['ranks']} rank{'s' * (about['ranks'] != 1)} on {hosts} "
        f"machine{'s' * (hosts != 1)}, {', '.join(about['device_names'])}, {threads} thread(s) a rank, "
        f"torch {about['torch']}",
        soft_wrap=True,
    )
    reasons = list(dict.fromkeys(record.why for record in sweep.records if record.why))
    console.print(_table(sweep.records, reasons))
    for number, reason in enumerate(reasons, 1):
        console.print(f"({number}) {reason}", soft_wrap=True, markup=False)
    counts = {state: sum(record.state == state for record in sweep.records) for state in _STYLES}
    summary = [f"{count} {'correct' if state == 'ok' else state}" for state, count in counts.items() if count]
    console.print(f"{', '.join(summary)}; every element of every result was checked; bandwidths in GB/s (1e9 bytes)")
    for path in paths:
        console.print(f"written: {path}", soft_wrap=True)


def _table(records: list[CollectiveRecord], reasons: list[str]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in _COLUMNS:
        is_text = column in ("operation", "type", "checked")
        table.add_column(column, justify="left" if is_text else "right", no_wrap=True)
    for rows in _folded(records):
        first = rows[0]
        dtype = first.dtype + (f" {first.reduction}" if first.reduction not in ("", "sum") else "")
        if first.state == "ok":
            size = human_bytes(first.bytes) if first.bytes else ""
            times = [human_seconds(first.seconds or 0.0), human_seconds(first.fastest_seconds or 0.0)]
            rates = [_rate(first.algorithm_bandwidth), _rate(first.bus_bandwidth)]
            table.add_row(first.op, dtype, size, *times, *rates, Text("ok", style=_STYLES["ok"]))
            continue
        smallest, largest = human_bytes(first.bytes), human_bytes(rows[-1].bytes)
        size = smallest if len(rows) == 1 else f"{smallest} to {largest}"
        state = Text(f"{first.state} ({reasons.index(first.why) + 1})", _STYLES[first.state])
        table.add_row(first.op, dtype, size, "", "", "", "", state)
    return table


def _folded(records: list[CollectiveRecord]) -> list[list[CollectiveRecord]]:
    """Group neighbouring failures of one operation and type with the same reason into one row."""
    rows: list[list[CollectiveRecord]] = []
    for record in records:
        about = (record.op, record.dtype, record.state, record.why)
        last = rows[-1][-1] if rows else None
        if last is not None and record.state != "ok" and about == (last.op, last.dtype, last.state, last.why):
            rows[-1].append(record)
        else:
            rows.append([record])
    return rows


def _rate(rate: float | None) -> str:
    if rate is None:
        return ""
    value = rate / 1e9
    return f"{value:.4f}" if value < 0.1 else f"{value:.3f}" if value < 100 else f"{value:.1f}"
