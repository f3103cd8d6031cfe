"""`rung checkpoints` and `rung export` on the console: what there is, whether it is whole, and weights for others."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rung.best import Best, figure_of
from rung.checkpoint.survey import Found, Place, best_whole, locate, newest_whole, survey
from rung.errors import ConfigError
from rung.sizes import human_size
from rung.untrusted import printable

_STYLES = {"whole": "green", "damaged": "red", "unfinished": "yellow"}
_KINDS = {"checkpoints": "", "rescue": " (rescued)", "memory": " (in memory)"}


def checkpoints_command(run: str, *, as_json: bool, quick: bool) -> int:
    """List the checkpoints of a run. Returns the exit code: 1 if any is damaged."""
    place = locate(Path(run))
    with Console(file=sys.stderr, markup=False).status("looking") as shown:
        found = survey(place, thorough=not quick, tell=lambda path: shown.update(_text(f"checking {path}")))
    taken = newest_whole(found)
    kept, best = best_whole(found)
    if as_json:
        content = {
            "run": run,
            "checked": "sizes" if quick else "digests",
            "checkpoints": [_record(one) for one in found],
            "resume": str(taken.path) if taken is not None else None,
            "best": {**best.as_json(), "path": str(kept.path) if kept is not None else None} if best else None,
        }
        sys.stdout.write(json.dumps(content, indent=2) + "\n")
    else:
        _show(place, found, taken, best, quick=quick)
    return int(any(one.state == "damaged" for one in found))


def _show(place: Place, found: list[Found], taken: Found | None, best: Best | None, *, quick: bool) -> None:
    console = Console(file=sys.stdout, highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 120
    if not found:
        nothing = f"there are no checkpoints in {place.called}; --checkpoint-every N writes them."
        console.print(_text(nothing), soft_wrap=True)
    else:
        console.print(_table(found, best))
    for one in found:
        if one.problem is not None:
            console.print(_text(one.problem, _STYLES[one.state]), soft_wrap=True)
    if any(one.is_finite is False for one in found):
        console.print("not finite: the loss or the gradient norm of that step was nan or infinite", soft_wrap=True)
    if taken is not None and place.one is None:
        how = " (sizes checked, not digests)" if quick else ""
        console.print(_text(f"--resume goes on after step {taken.step}: {taken.path}{how}"), soft_wrap=True)
    elif found and place.one is None:
        console.print("none of them is whole: --resume would start at the first step", soft_wrap=True)


def _table(found: list[Found], best: Best | None) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    columns = [
        "step",
        "epoch",
        "sample",
        "saved",
        "strategy",
        "ranks",
        "size",
        *([printable(best.metric)] if best else []),
        "state",
    ]
    for column in columns:
        table.add_column(column, justify="left" if column in ("saved", "strategy", "state") else "right", no_wrap=True)
    for one in found:
        state = Text(one.state + _KINDS[one.kind], style=_STYLES[one.state])
        if one.is_finite is False:
            state.append(", not finite", style="red")
        if one.checkpoint is None:
            table.add_row(str(one.step), *[""] * (len(columns) - 2), state)
            continue
        told = one.checkpoint.manifest
        saved = str(told.get("saved_at", ""))[:19].replace("T", " ")
        position = (str(one.step), str(told["epoch"]), str(told["sample"]))
        size = human_size(one.checkpoint.num_bytes)
        figures = [_figure(one, best)] if best else []
        words = printable(saved), printable(told["strategy"]), str(told["ranks"])
        table.add_row(*position, *words, size, *figures, state)
    return table


def _text(words: str, style: str = "") -> Text:
    return Text(printable(words), style=style)


def _figure(one: Found, best: Best) -> str:
    assert one.checkpoint is not None
    figure = figure_of(one.checkpoint.manifest, best.metric)
    if figure is None:
        return "-"
    return f"{figure:.4g} best" if one.step == best.step and one.kind == "checkpoints" else f"{figure:.4g}"


def _record(one: Found) -> dict[str, Any]:
    record: dict[str, Any] = {"step": one.step, "path": str(one.path), "kind": one.kind, "state": one.state}
    if one.checkpoint is not None:
        told = one.checkpoint.manifest
        for key in ("epoch", "sample", "samples", "saved_at", "strategy", "ranks", "device", "rung", "torch"):
            record[key] = told.get(key)
        record["bytes"] = one.checkpoint.num_bytes
        record["evaluation"] = told.get("evaluation")
        record["finite"] = told.get("finite")
    return {**record, "problem": one.problem}


def export_command(
    run: str, *, output: str, step: int | None, best: bool, max_shard_size: str | None, force: bool
) -> int:
    """Write the weights of a run for those who do not have Rung. Returns the exit code."""
    place = locate(Path(run))
    from rung.checkpoint.export import (
        check_output,
        export,
        find_best_source,
        find_source,
        parse_size,
    )  # needs torch; the list above does not

    console = Console(file=sys.stdout, highlight=False, markup=False)
    if best and step is not None:
        raise ConfigError(f"--best and --step {step} name two checkpoints. Leave one out.")
    shard_bytes = parse_size(max_shard_size) if max_shard_size is not None else None
    check_output(Path(output), shard_bytes=shard_bytes, force=force)
    with Console(file=sys.stderr, markup=False).status("checking"):
        source = find_best_source(place) if best else find_source(place, step)
    for note in source.notes:
        console.print(_text(note, "yellow"), soft_wrap=True)
    with Console(file=sys.stderr, markup=False).status(_text(f"writing {output}")):
        files = export(source, Path(output), shard_bytes=shard_bytes, force=force)
    figures = f"{len(source.entries):,} tensors, {human_size(source.num_bytes)}"
    told = f"{files[-1]} and {len(files) - 1} files it names" if len(files) > 1 else str(files[0])
    console.print(_text(f"exported {source.called}: {told} ({figures})"), soft_wrap=True)
    return 0
