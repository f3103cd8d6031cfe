"""The comparison in the terminal: a table with bars, slow ranks, failures and the verdict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rung.compare.rows import prediction_error
from rung.compare.verdict import fullest
from rung.system.units import human_bytes, human_seconds

_BAR = 10  # characters
_EIGHTHS = " ▏▎▍▌▋▊▉"
# (name, justification, drop order): a narrow terminal drops the columns with the highest number first, 0 never.
_COLUMNS: tuple[tuple[str, str, int], ...] = (
    ("strategy", "left", 0),
    ("ranks", "right", 0),
    ("step", "right", 0),
    ("10-90 %", "right", 5),
    ("samples/s", "right", 0),
    ("", "left", 4),
    ("speed-up", "right", 0),
    ("memory", "right", 0),
    ("", "left", 4),
    ("sent", "right", 1),
    ("exposed", "right", 3),
    ("data wait", "right", 6),
    ("first step", "right", 7),
    ("loss off by", "right", 2),
)


def show(document: dict[str, Any], console: Console) -> None:
    """Print the whole comparison."""
    settings = document["settings"]
    length = "1 step" if settings["steps"] == 1 else f"{settings['steps']} steps"
    often = "once each" if settings["repeats"] == 1 else f"{settings['repeats']} times each"
    console.print(
        Text(
            f"{document['task']}: {length} of {settings['batch_size']} samples in "
            f"{settings['precision']}, {often}, the first {settings['warmup']} left out",
            style="bold",
        )
    )
    console.print(f"on {document['machine']['device_name']}", style="dim")
    console.print()
    console.print(_fitting_table(document, console))
    _show_predictions(document["rows"], console)
    for row in document["rows"]:
        for slow in row.get("slow") or []:
            own, others = human_seconds(slow["seconds"]), human_seconds(slow["others_seconds"])
            console.print(
                f"{row['strategy']}: rank {slow['rank']} is slow, {own} in {slow['phase']}; the others take {others}",
                style="yellow",
                soft_wrap=True,
            )
        if row["status"] == "failed":
            console.print(Text(f"{row['strategy']} failed: {row['reason']}", style="red"), soft_wrap=True)
    console.print()
    verdict = document["verdict"]
    console.print(Text(verdict["sentence"], style="bold"), soft_wrap=True)
    console.print(Text(verdict["recommendation"], style="green"), soft_wrap=True)


def _show_predictions(rows: list[dict[str, Any]], console: Console) -> None:
    """Print the planner's figures with their errors, and once for each reason the rows without a prediction."""
    predicted = [row for row in rows if row.get("predicted")]
    if predicted:
        table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
        table.add_column("predicted", no_wrap=True)
        for name in ("step", "memory", "sent"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in predicted:
            figures, errors = row["predicted"], prediction_error(row) or {}
            shown = (("step_seconds", human_seconds), ("peak_bytes", human_bytes), ("bytes_per_step", human_bytes))
            cells = [_with_error(figures.get(key), errors.get(key), show_one) for key, show_one in shown]
            table.add_row(row["strategy"], *cells)
        console.print()
        console.print(table)
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.get("not_predicted"):
            reasons.setdefault(row["not_predicted"], []).append(row["strategy"])
    for reason, names in reasons.items():
        console.print(Text(f"{', '.join(names)}: {reason}", style="dim"), soft_wrap=True)


def _with_error(predicted: float | None, error: float | None, show_one: Callable[[Any], str]) -> str:
    if predicted is None:
        return "-"
    return show_one(predicted) if error is None else f"{show_one(predicted)} ({100 * error:+.0f} %)"


def _fitting_table(document: dict[str, Any], console: Console) -> Table:
    """The table with as many columns as the console has room for."""
    for last in range(max(order for _, _, order in _COLUMNS), -1, -1):
        table = _table(document, last)
        if console.measure(table, options=console.options.update(max_width=10_000)).maximum <= console.width:
            break
    return table


def _table(document: dict[str, Any], last: int) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    kept = [number for number, (_, _, order) in enumerate(_COLUMNS) if order <= last]
    for number in kept:
        name, side, _ = _COLUMNS[number]
        table.add_column(name, justify=side, no_wrap=True)  # type: ignore[arg-type]
    done = [row for row in document["rows"] if row["status"] == "ok"]
    rate = max((row["samples_per_second"]["median"] for row in done), default=1.0)
    memory = max((fullest(row) for row in done), default=1)
    chosen = document["verdict"]["strategy"]
    for row in document["rows"]:
        cells = _cells(row, rate, memory) if row["status"] == "ok" else _failed_cells(row)
        style = "bold" if row["strategy"] == chosen else "red" if row["status"] == "failed" else None
        table.add_row(*(cells[number] for number in kept), style=style)
    return table


def _failed_cells(row: dict[str, Any]) -> list[str]:
    return [row["strategy"], str(row["ranks"]), "failed", *[""] * (len(_COLUMNS) - 3)]


def _cells(row: dict[str, Any], most_rate: float, most_memory: float) -> list[str]:
    step, rate, sent = row["step_seconds"], row["samples_per_second"]["median"], row["bytes_per_step"]
    difference = row["largest_difference"]["loss"]
    communication = row["communication"]
    return [
        row["strategy"],
        str(row["ranks"]),
        human_seconds(step["median"]),
        f"{human_seconds(step['low'])} - {human_seconds(step['high'])}",
        f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}",
        bar(rate / most_rate),
        f"{row['speedup']:.2f} x" if row["speedup"] is not None else "-",
        human_bytes(fullest(row)),
        bar(fullest(row) / most_memory),
        human_bytes(sent) if sent else "-",
        f"{100 * communication['exposed_share']:.0f} %" if communication["seconds"] else "-",
        human_seconds(row["data_wait_seconds"]),
        human_seconds(row["first_step_seconds"]),
        f"{difference:.1e}" if difference is not None else "not a number" if _is_lost(row) else "-",
    ]


def _is_lost(row: dict[str, Any]) -> bool:
    """Whether a loss is nan or infinite, so that losses cannot be compared."""
    return any(loss is None for _, loss in row["losses"])


def bar(share: float) -> str:
    """A bar of block characters, in eighths of one."""
    eighths = round(max(0.0, min(1.0, share)) * _BAR * 8)
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")
