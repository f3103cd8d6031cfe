"""The comparison in the terminal: a table with bars, what was slow or failed, and the verdict."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rung.compare.verdict import fullest
from rung.sizes import human_bytes, human_seconds, human_size

_BAR = 10  # characters
_WIDE = 120
_EIGHTHS = " ▏▎▍▌▋▊▉"
# Name, justification, and whether it is left out where there is little room.
_COLUMNS: tuple[tuple[str, str, bool], ...] = (
    ("strategy", "left", False),
    ("ranks", "right", False),
    ("step", "right", False),
    ("10-90 %", "right", True),
    ("samples/s", "right", False),
    ("", "left", True),
    ("speed-up", "right", False),
    ("memory", "right", False),
    ("", "left", True),
    ("sent", "right", False),
    ("exposed", "right", True),
    ("data wait", "right", True),
    ("first step", "right", True),
    ("loss off by", "right", False),
    ("predicted", "right", True),
)


def show(document: dict[str, Any], console: Console) -> None:
    """All of it, for a person."""
    settings = document["settings"]
    console.print(
        Text(
            f"{document['task']}: {settings['steps']} steps of {settings['batch_size']} samples in "
            f"{settings['precision']}, {settings['repeats']} times each, the first {settings['warmup']} left out",
            style="bold",
        )
    )
    console.print(f"on {document['machine']['device_name']}", style="dim")
    console.print()
    console.print(_table(document, is_wide=console.width >= _WIDE))
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


def _table(document: dict[str, Any], *, is_wide: bool) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    kept = [number for number, (_, _, may_go) in enumerate(_COLUMNS) if is_wide or not may_go]
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
        human_size(sent) if sent else "-",
        f"{100 * communication['exposed_share']:.0f} %" if communication["seconds"] else "-",
        human_seconds(row["data_wait_seconds"]),
        human_seconds(row["first_step_seconds"]),
        f"{difference:.1e}" if difference is not None else "-",
        _predicted(row),
    ]


def _predicted(row: dict[str, Any]) -> str:
    """The planner's time of a step, and by how much it is off."""
    seconds = (row["predicted"] or {}).get("step_seconds")
    if seconds is None:
        return "-"
    return f"{human_seconds(seconds)} ({100 * (seconds / row['step_seconds']['median'] - 1):+.0f} %)"


def bar(share: float) -> str:
    """Blocks, in eighths of a character."""
    eighths = round(max(0.0, min(1.0, share)) * _BAR * 8)
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")
