"""The `rung explain` command: prints an explanation as text, tables and a chart of letters.

It starts no process and needs no device, so that a job of any size can be explained on any machine.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rung.errors import ConfigError
from rung.planner.explain.explanation import Explanation, Slot, explain
from rung.planner.explain.svg import draw
from rung.planner.explain.tables import (
    STATES,
    MessageRow,
    describe_batch,
    describe_cut,
    describe_idle,
    describe_model,
    describe_stages,
    fold_stage_notes,
    groups_of,
    human_shape,
    message_rows,
    most_held,
    parameter_rows,
)
from rung.spec.abilities import describe_layout
from rung.spec.compatibility import validate_config
from rung.spec.config import count_range, resolve
from rung.spec.strategy import default_name, parse, required_num_ranks
from rung.spec.task import load_task
from rung.system.disk import check_file, writing
from rung.system.units import human_bytes, plural
from rung.train.sample_order import with_fullest_batch

_MOST_ROWS = 40  # of parameters
_MOST_RANKS = 16  # of the chart
_MOST_CELLS = 6  # of the chart for one unit of time
_STYLES = {"F": "cyan", "B": "yellow", "I": "yellow", "W": "green", ".": "dim"}
# For the first stage of a rank and for its second, if stages are interleaved.
_MARKS = {"F": ">»", "B": "<«", "I": "<«", "W": "ww"}

Cell = tuple[str, str]  # a letter, and the kind of action that it stands for


def explain_command(
    path: str,
    *,
    config_file: str | None,
    flags: Mapping[str, Any],
    assignments: Mapping[str, str],
    out: str | None,
    as_json: bool,
) -> int:
    """Run the command. Returns the exit code."""
    if out is not None:
        if Path(out).suffix.lower() != ".svg":
            raise ConfigError(f"--out {out}: the picture is an SVG. Use {Path(out).with_suffix('.svg')}.")
        if not Path(out).resolve().parent.exists():
            raise ConfigError(f"--out {out}: there is no directory {Path(out).parent}.")
        check_file(out, "--out")
    task = load_task(path)
    resolved = resolve(task, file=config_file, flags=flags, assignments=assignments)
    config = resolved.config
    num_ranks = count_range(config.nproc)[1] if config.nproc is not None else None
    if num_ranks is None and config.strategy is not None:
        num_ranks = required_num_ranks(config.strategy)
        if num_ranks is None:
            raise ConfigError(
                f"{config.strategy!r} takes any number of processes. Give one, as in --nproc 8; none is started."
            )
    num_ranks = num_ranks or 1
    layout = parse(config.strategy or default_name(num_ranks), num_ranks, num_ranks, config.schedule)
    validate_config(config, layout)
    task, config = with_fullest_batch(task.bind(resolved.arguments), config)
    messages = Console(file=sys.stderr, markup=False)
    with messages.status("explaining") as shown:
        explanation = explain(
            task,
            layout,
            config,
            progress=lambda text: shown.update(Text(f"explaining {task.name} under {layout.name}: {text}")),
        )
    if out is not None:
        with writing(out, "--out"):
            Path(out).write_text(draw(explanation), encoding="utf-8")
    if as_json:
        sys.stdout.write(json.dumps(explanation.as_json(), indent=2) + "\n")
        return 0
    console = Console(file=sys.stdout, highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 100
    show(explanation, console)
    if out is not None:
        console.print(f"drawn: {out}", soft_wrap=True)
    return 0


def show(explanation: Explanation, console: Console) -> None:
    """Print the explanation, from the strategy down to single messages."""
    layout = explanation.layout
    title = f"{explanation.task}, {describe_layout(layout)} on {plural(layout.num_ranks, 'rank')}"
    console.print(Text(title, style="bold"))
    mesh = " x ".join(f"{axis} {size}" for axis, size in layout.axes.items() if size > 1)
    console.print(f"  model: {describe_model(explanation)}" + (f"; mesh: {mesh}" if mesh else ""))
    console.print(f"  batch: {describe_batch(explanation)}")
    for note in fold_stage_notes(explanation.notes):
        console.print(Padding(Text(note, style="dim"), (0, 0, 0, 2), expand=False))
    _heading(console, "Parameters")
    console.print(_parameter_table(explanation))
    _heading(console, "Kept by a rank", "between steps, and the gradients before the update")
    console.print(_kept_table(explanation))
    _heading(console, "Sent in a step", "bytes of the whole tensor that a collective makes or a stage hands on")
    for group in groups_of(explanation, lambda view: view.messages):
        rows = message_rows(group.views[0].messages)
        size, calls = sum(row.total_bytes for row in rows), sum(row.times for row in rows)
        total = f"{human_bytes(size)} in {plural(calls, 'call')}" if rows else "nothing"
        console.print(f"{group.label}: {total}")
        if rows:
            console.print(_message_table(rows))
    if explanation.chart:
        _heading(console, "Schedule", f"{layout.schedule}, lengths by arithmetic, messages cost nothing")
        for line in chart_lines(explanation, console.width):
            console.print(line, no_wrap=True, crop=True)
        console.print(describe_idle(explanation))


def _heading(console: Console, title: str, explained: str = "") -> None:
    console.print()
    console.print(Text.assemble((title, "bold underline"), ("  " + explained if explained else "", "dim")))


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        name = column.strip("<>")
        table.add_column(name, justify="right" if column.startswith(">") else "left", overflow="fold")
    return table


def _parameter_table(explanation: Explanation) -> Table:
    has_stages = explanation.layout.num_stages > 1
    table = _table("parameter", ">", "whole", "on a rank", "cut: dimension", *(["stage"] if has_stages else []))
    rows = parameter_rows(explanation)
    for row in rows[:_MOST_ROWS]:
        name = row.name if row.place.is_trained else f"{row.name} (frozen)"
        cells = [
            name,
            f"x{row.count}" if row.count > 1 else "",
            human_shape(row.place.shape),
            human_shape(row.place.local_shape),
            describe_cut(row.place),
        ]
        table.add_row(*cells, *([describe_stages(row)] if has_stages else []))
    if len(rows) > _MOST_ROWS:
        table.add_row(f"... and {len(rows) - _MOST_ROWS} more rows; --json has them all")
    return table


def _kept_table(explanation: Explanation) -> Table:
    groups = groups_of(explanation, lambda view: view.state_bytes)
    kinds = [kind for kind in STATES if any(group.views[0].state_bytes.get(kind) for group in groups)]
    table = _table("", *(f">{kind}" for kind in kinds), ">sum")
    for group in groups:
        kept = [group.views[0].state_bytes.get(kind, 0) for kind in kinds]
        table.add_row(group.label, *(human_bytes(count) for count in kept), human_bytes(sum(kept)))
    return table


def _message_table(rows: Sequence[MessageRow]) -> Table:
    table = _table("  phase", "operation", "over", ">times", ">each", ">in all")
    for column, width in zip(table.columns, (11, 14, 17, 7, 20, 10), strict=True):
        column.min_width = width  # aligns the tables of all stages
    for row in rows:
        table.add_row(
            f"  {row.phase}", row.operation, row.over, f"{row.times:,}", row.each, human_bytes(row.total_bytes)
        )
    return table


# -- the schedule as letters ---------------------------------------------------------------------------------------


def chart_lines(explanation: Explanation, width: int) -> list[Text]:
    """One line per pipeline rank. A long chart is broken once; of a longer one the middle is left out."""
    views = explanation.ranks
    labels = [f"stage{'s' * (len(view.stages) > 1)} {'+'.join(map(str, view.stages))}" for view in views]
    margin = max(map(len, labels)) + 2
    rows = chart_cells(explanation.chart, len(views), width - margin)
    length = max(map(len, rows))
    bands = chart_bands(length, width - margin)
    shown = list(range(len(views)))
    if len(shown) > _MOST_RANKS:
        shown = [*shown[: _MOST_RANKS // 2], *shown[-(_MOST_RANKS // 2) :]]
    lines: list[Text] = []
    for number, (start, stop) in enumerate(bands):
        if number and start > bands[number - 1][1]:
            left_out = (start - bands[number - 1][1]) / length
            lines.append(
                Text(f"{'':{margin}}... {left_out:.0%} of the step left out, which repeats this pattern", style="dim")
            )
        elif number:
            lines.append(Text(f"{'':{margin}}continued", style="dim"))
        for place, rank in enumerate(shown):
            if place and rank > shown[place - 1] + 1:
                lines.append(Text(f"... {rank - shown[place - 1] - 1} stages left out", style="dim"))
            line = Text(f"{labels[rank]:<{margin}}")
            for letter, kind in rows[rank][start:stop]:
                line.append(letter, style=_STYLES[kind])
            lines.append(line)
    lines.append(_legend(explanation))
    held = [str(most_held(view)) for view in views]
    if len(set(held)) == 1:
        held = held[:1]
    elif len(held) > 8:
        held[6:-1] = ["..."]
    lines.append(Text(f"micro-batches whose activations a rank holds at a time, at most: {', '.join(held)}"))
    return lines


def chart_cells(chart: Sequence[Slot], num_ranks: int, width: int) -> list[list[Cell]]:
    """The chart as rows of letters: '3>>' is a forward of micro-batch 3, '3<<' its backward, '3ww' the weights' part.

    A unit of time is at least as wide as a number, and wider if there is room.
    """
    length = max(slot.stop for slot in chart)
    least = len(str(max(slot.chunk for slot in chart))) + 1
    unit = max(least, min(_MOST_CELLS, int(width / length)))
    rows: list[list[Cell]] = [[("·", ".")] * max(1, round(length * unit)) for _ in range(num_ranks)]
    first_stages = [min(slot.stage for slot in chart if slot.rank == rank) for rank in range(num_ranks)]
    for slot in sorted(chart, key=lambda slot: slot.start):
        start, stop = round(slot.start * unit), round(slot.stop * unit)
        mark = _MARKS[slot.kind][slot.stage != first_stages[slot.rank]]
        size, label = stop - start, str(slot.chunk)
        body = mark * (size - len(label)) if size > len(label) else mark * size
        if size > len(label):
            body = label + body
        rows[slot.rank][start:stop] = [(letter, slot.kind) for letter in body]
    return rows


def chart_bands(length: int, width: int) -> list[tuple[int, int]]:
    """The (start, stop) columns of the parts of the chart that are shown, one below the other."""
    if length <= 2 * width:
        return [(start, min(start + width, length)) for start in range(0, length, width)]
    return [(0, width), (length - width, length)]


def _legend(explanation: Explanation) -> Text:
    kinds = {slot.kind for slot in explanation.chart}
    legend = Text()
    for kind, sample, meaning in (
        ("F", "0>>", "forward of micro-batch 0"),
        ("B", "0<<", "backward"),
        ("I", "0<<", "the inputs' gradients"),
        ("W", "0ww", "the weights' gradients"),
    ):
        if kind in kinds and not (kind == "I" and "B" in kinds):
            legend.append(sample, style=_STYLES[kind]).append(f" {meaning}   ")
    if explanation.layout.stages_per_rank > 1:
        legend.append("0»» 0««", style="none").append(" a rank's second stage   ")
    return legend.append("·", style="dim").append(" idle")
