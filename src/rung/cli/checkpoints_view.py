"""`rung checkpoints` and `rung export`: list and check the checkpoints of a run, and export its weights."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rung.checkpoint.stored_copy import stored_copy, stored_output
from rung.checkpoint.survey import CheckpointLocation, CheckpointStatus, best_whole, locate, newest_whole, survey
from rung.errors import ConfigError
from rung.spec.best_metric import Best, figure_of
from rung.system.stored_weights import local_weights
from rung.system.units import human_size
from rung.system.untrusted import printable

_STYLES = {"whole": "green", "damaged": "red", "unfinished": "yellow"}
_KINDS = {"checkpoints": "", "rescue": " (rescued)", "memory": " (in memory)"}


def checkpoints_command(run: str, *, as_json: bool, quick: bool) -> int:
    """List the checkpoints of a run. Returns the exit code: 1 if any is damaged."""
    with stored_copy(run) as copy, Console(file=sys.stderr, markup=False).status("listing checkpoints") as shown:
        name: Callable[[object], str] = copy.name if copy is not None else str
        if copy is not None:
            copy.list_steps()
        location = copy.location() if copy is not None else locate(Path(run))

        def on_check(path: Path) -> None:
            shown.update(_text(f"checking {name(path)}"))
            if copy is not None:
                copy.fetch_one_at_a_time(path, thorough=not quick)

        found = [
            replace(status, problem=name(status.problem) if status.problem is not None else None)
            for status in survey(location, thorough=not quick, on_check=on_check)
        ]
    taken = newest_whole(found)
    kept, best = best_whole(found)
    if as_json:
        content = {
            "run": run,
            "checked": "sizes" if quick else "digests",
            "checkpoints": [{**_record(status), "path": name(status.path)} for status in found],
            "resume": name(taken.path) if taken is not None else None,
            "best": {**best.as_json(), "path": name(kept.path) if kept is not None else None} if best else None,
        }
        sys.stdout.write(json.dumps(content, indent=2) + "\n")
    else:
        _show(location, found, taken, best, name, quick=quick)
    return int(any(status.state == "damaged" for status in found))


def _show(
    location: CheckpointLocation,
    found: list[CheckpointStatus],
    taken: CheckpointStatus | None,
    best: Best | None,
    name: Callable[[object], str],
    *,
    quick: bool,
) -> None:
    console = Console(file=sys.stdout, highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 120
    if not found:
        nothing = f"there are no checkpoints in {name(location.given)}; --checkpoint-every N writes them."
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
        console.print(_text(f"--resume goes on after step {taken.step}: {name(taken.path)}{how}"), soft_wrap=True)
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
    form: str = "file",
    average: bool = False,
    merge: bool = False,
    base: str | None = None,
) -> int:
    """Write the weights of a run in a format that needs no Rung to read. Returns the exit code."""
    # Imported here because it needs torch, which `rung checkpoints` does not.
    from rung.checkpoint.adapters import ADAPTERS, as_peft, merged, write_peft_config
    from rung.checkpoint.export import check_output, export, find_best_source, find_source, parse_size
    from rung.checkpoint.hf_folder import WEIGHTS, copy_beside, folder_like, initial_of

    console = Console(file=sys.stdout, highlight=False, markup=False)
    if best and step is not None:
        raise ConfigError(f"--best and --step {step} select two checkpoints. Leave one out.")
    shard_bytes = parse_size(max_shard_size) if max_shard_size is not None else None
    if like is not None and form != "hf":
        raise ConfigError("--like is for --format hf.")
    if form == "peft" and (merge or shard_bytes is not None):
        raise ConfigError(
            "--format peft writes the adapters alone, in one file: leave out --merge and --max-shard-size."
        )
    with ExitStack() as stack:
        target, shown_as = stack.enter_context(stored_output(output, is_folder=form != "file", force=force))
        copy = stack.enter_context(stored_copy(run))
        location = copy.location() if copy is not None else locate(Path(run))
        folder = folder_like(like, location.given) if form == "hf" else None
        file = Path(target) / {"hf": WEIGHTS, "peft": ADAPTERS}[form] if form != "file" else Path(target)
        check_output(file, shard_bytes=shard_bytes, force=force)
        with Console(file=sys.stderr, markup=False).status("checking"):
            if copy is not None:
                location = copy.with_weights(step, best=best, average=average)
            source = (
                find_best_source(location, average=average) if best else find_source(location, step, average=average)
            )
        given = base if base is not None else initial_of(location.given)
        described = source
        if form == "peft":
            source = as_peft(source)
        elif merge or (form == "hf" and source.adapters is not None):
            own = str(location.weights) if location.weights else None
            source = merged(source, str(local_weights(given, "--base")) if given is not None else own)
        elif base is not None:
            raise ConfigError("--base is for --merge, --format hf and --format peft.")
        elif source.base:
            source.notes.append(
                "the adapters alone, as the checkpoint has them; --merge adds them to the weights beside them."
            )
        name: Callable[[object], str] = copy.name if copy is not None else str
        for note in source.notes:
            console.print(_text(name(note), "yellow"), soft_wrap=True)
        with Console(file=sys.stderr, markup=False).status(_text(f"writing {output}")):
            files = export(source, file, shard_bytes=shard_bytes, force=force)
            copied = copy_beside(folder, Path(target), source.floating_type) if folder is not None else []
            if form == "peft":
                write_peft_config(described, Path(target), given)
        figures = f"{len(source.entries):,} tensors, {human_size(source.num_bytes)}"
        written = f"{files[-1]} and {len(files) - 1} files it names" if len(files) > 1 else str(files[0])
        console.print(_text(f"exported {source.label}: {shown_as(written)} ({figures})"), soft_wrap=True)
        if copied:
            console.print(_text(f"copied from {folder}: {', '.join(copied)}"), soft_wrap=True)
    return 0
