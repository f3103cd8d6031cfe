"""`rung checkpoints` and `rung export`: list and check the checkpoints of a run, and export its weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rung.checkpoint.survey import CheckpointLocation, CheckpointStatus, best_whole, locate, newest_whole, survey
from rung.errors import ConfigError
from rung.spec.best_metric import Best, figure_of
from rung.system.units import human_size
from rung.system.untrusted import printable

_STYLES = {"whole": "green", "damaged": "red", "unfinished": "yellow"}
_KINDS = {"checkpoints": "", "rescue": " (rescued)", "memory": " (in memory)"}


def checkpoints_command(run: str, *, as_json: bool, quick: bool) -> int:
    """List the checkpoints of a run. Returns the exit code: 1 if any is damaged."""
    location = locate(Path(run))
    with Console(file=sys.stderr, markup=False).status("listing checkpoints") as shown:
        found = survey(location, thorough=not quick, on_check=lambda path: shown.update(_text(f"checking {path}")))
    taken = newest_whole(found)
    kept, best = best_whole(found)
    if as_json:
        content = {
            "run": run,
            "checked": "sizes" if quick else "digests",
            "checkpoints": [_record(status) for status in found],
            "resume": str(taken.path) if taken is not None else None,
            "best": {**best.as_json(), "path": str(kept.path) if kept is not None else None} if best else None,
        }
        sys.stdout.write(json.dumps(content, indent=2) + "\n")
    else:
        _show(location, found, taken, best, quick=quick)
    return int(any(status.state == "damaged" for status in found))


def _show(
    location: CheckpointLocation,
    found: list[CheckpointStatus],
    taken: CheckpointStatus | None,
    best: Best | None,
    *,
    quick: bool,
) -> None:
    console = Console(file=sys.stdout, highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 120
    if not found:
        nothing = f"there are no checkpoints in {location.given}; --checkpoint-every N writes them."
        console.print(_text(nothing), soft_wrap=True)
    else:
        console.print(_table(found, best))
    for status in found:
        if status.problem is not None:
            console.print(_text(status.problem, _STYLES[status.state]), soft_wrap=True)
    if any(status.is_finite is False for status in found):
        console.print("not finite: the loss or the gradient norm of that step was nan or infinite", soft_wrap=True)
    if taken is not None and location.single is None:
        how = " (sizes checked, not digests)" if quick else ""
        console.print(_text(f"--resume goes on after step {taken.step}: {taken.path}{how}"), soft_wrap=True)
    elif found and location.single is None:
        console.print("none of them is whole: --resume would refuse them", soft_wrap=True)


def _table(found: list[CheckpointStatus], best: Best | None) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    metric = [printable(best.metric)] if best else []
    columns = ["step", "epoch", "sample", "saved", "strategy", "ranks", "size", *metric, "state"]
    for column in columns:
        table.add_column(column, justify="left" if column in ("saved", "strategy", "state") else "right", no_wrap=True)
    for status in found:
        state = Text(status.state + _KINDS[status.kind], style=_STYLES[status.state])
        if status.is_finite is False:
            state.append(", not finite", style="red")
        if status.checkpoint is None:
            table.add_row(str(status.step), *[""] * (len(columns) - 2), state)
            continue
        manifest = status.checkpoint.manifest
        saved = str(manifest.get("saved_at", ""))[:19].replace("T", " ")
        position = (str(status.step), str(manifest["epoch"]), str(manifest["sample"]))
        size = human_size(status.checkpoint.num_bytes)
        figures = [_figure(status, best)] if best else []
        words = printable(saved), printable(manifest["strategy"]), str(manifest["ranks"])
        table.add_row(*position, *words, size, *figures, state)
    return table


def _text(words: str, style: str = "") -> Text:
    return Text(printable(words), style=style)


def _figure(status: CheckpointStatus, best: Best) -> str:
    assert status.checkpoint is not None
    figure = figure_of(status.checkpoint.manifest, best.metric)
    if figure is None:
        return "-"
    return f"{figure:.4g} best" if status.step == best.step and status.kind == "checkpoints" else f"{figure:.4g}"


def _record(status: CheckpointStatus) -> dict[str, Any]:
    record: dict[str, Any] = {"step": status.step, "path": str(status.path), "kind": status.kind, "state": status.state}
    if status.checkpoint is not None:
        manifest = status.checkpoint.manifest
        for key in ("epoch", "sample", "samples", "saved_at", "strategy", "ranks", "device", "rung", "torch"):
            record[key] = manifest.get(key)
        record["bytes"] = status.checkpoint.num_bytes
        record["evaluation"] = manifest.get("evaluation")
        record["finite"] = manifest.get("finite")
    return {**record, "problem": status.problem}


def export_command(
    run: str,
    *,
    output: str,
    step: int | None,
    best: bool,
    max_shard_size: str | None,
    force: bool,
    like: str | None = None,
    as_hf: bool = False,
    average: bool = False,
) -> int:
    """Write the weights of a run in a format that needs no Rung to read. Returns the exit code."""
    location = locate(Path(run))
    # Imported here because it needs torch, which `rung checkpoints` does not.
    from rung.checkpoint.export import check_output, export, find_best_source, find_source, parse_size
    from rung.checkpoint.hf_folder import WEIGHTS, copy_beside, folder_like

    console = Console(file=sys.stdout, highlight=False, markup=False)
    if best and step is not None:
        raise ConfigError(f"--best and --step {step} select two checkpoints. Leave one out.")
    shard_bytes = parse_size(max_shard_size) if max_shard_size is not None else None
    if like is not None and not as_hf:
        raise ConfigError("--like is for --format hf.")
    folder = folder_like(like, Path(run)) if as_hf else None
    file = Path(output) / WEIGHTS if as_hf else Path(output)
    check_output(file, shard_bytes=shard_bytes, force=force)
    with Console(file=sys.stderr, markup=False).status("checking"):
        source = find_best_source(location, average=average) if best else find_source(location, step, average=average)
    for note in source.notes:
        console.print(_text(note, "yellow"), soft_wrap=True)
    with Console(file=sys.stderr, markup=False).status(_text(f"writing {output}")):
        files = export(source, file, shard_bytes=shard_bytes, force=force)
        copied = copy_beside(folder, Path(output), source.floating_type) if folder is not None else []
    figures = f"{len(source.entries):,} tensors, {human_size(source.num_bytes)}"
    written = f"{files[-1]} and {len(files) - 1} files it names" if len(files) > 1 else str(files[0])
    console.print(_text(f"exported {source.label}: {written} ({figures})"), soft_wrap=True)
    if copied:
        console.print(_text(f"copied from {folder}: {', '.join(copied)}"), soft_wrap=True)
    return 0
