"""One self-contained HTML file: the verdict, the table, the charts and the data. It loads nothing from the network."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any

from rung.compare.report.charts import draw_memory, draw_messages, draw_predictions, draw_slow, draw_throughput
from rung.compare.report.curves import draw_logged, draw_losses
from rung.compare.report.data import Comparison, read_comparison
from rung.compare.report.experts import draw_experts
from rung.compare.report.markdown import as_markdown, describe_run
from rung.compare.report.marks import plural, prose, rate, rows_with_index, text, times
from rung.compare.report.table import draw_table
from rung.compare.report.timeline import draw_micro_batches, draw_timelines
from rung.errors import ReportError
from rung.system.units import human_bytes

# Patterns distinguish kinds without colour, for greyscale prints and colour-blind readers.
_PATTERNS = """<svg width="0" height="0" class="unseen" aria-hidden="true"><defs>
<pattern id="slant" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">\
<rect width="7" height="7" class="p-green"/><rect width="2" height="7" class="p-shade"/></pattern>
<pattern id="dots" width="6" height="6" patternUnits="userSpaceOnUse"><rect width="6" height="6" class="p-grey"/>\
<circle cx="2" cy="2" r="1.1" class="p-shade"/></pattern>
<pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(-45)">\
<rect width="5" height="5" class="p-purple"/><rect width="1.6" height="5" class="p-shade"/></pattern>
<pattern id="bars" width="6" height="6" patternUnits="userSpaceOnUse"><rect width="6" height="6" class="p-orange"/>\
<rect width="1.6" height="6" class="p-shade"/></pattern>
<pattern id="rows" width="6" height="6" patternUnits="userSpaceOnUse"><rect width="6" height="6" class="p-blue"/>\
<rect width="6" height="1.6" class="p-shade"/></pattern>
</defs></svg>"""


def write_page(data: Mapping[str, Any], path: Path) -> None:
    page = as_page(data)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ReportError(f"{path} cannot be written: {error.strerror}. Name another file with --out.") from None


def as_page(data: Mapping[str, Any]) -> str:
    comparison = read_comparison(data)
    script, style = _resource("page.js"), _resource("page.css")
    # The policy permits this one script by its hash, so that markup smuggled in through data cannot run another.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:"
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">',
            f"<title>{text(comparison.task)}: strategies compared</title><style>{style}</style></head><body>",
            '<a class="skip" href="#strategies">To the table</a>',
            _PATTERNS,
            _header(comparison),
            f"<main>{_body(comparison)}</main>",
            _footer(comparison, as_markdown(data)),
            f'<script type="application/json" id="data">{_embedded(data)}</script>',
            f"<script>{script}</script></body></html>\n",
        ]
    )


def _resource(name: str) -> str:
    return resources.files("rung.compare.report").joinpath(name).read_text(encoding="utf-8")


def _embedded(data: Mapping[str, Any]) -> str:
    """JSON without < and >, which could close the script element."""
    return json.dumps(finite(data), allow_nan=False).replace("<", "\\u003c").replace(">", "\\u003e")


def finite(value: Any) -> Any:
    """Replace nan and infinity, which JSON lacks, by strings."""
    if isinstance(value, Mapping):
        return {str(key): finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _header(comparison: Comparison) -> str:
    ranks = comparison.settings.get("nproc")
    about = ["rung", comparison.task, plural(len(comparison.rows), "strategy", "strategies")]
    about += [plural(int(ranks), "process", "processes")] if ranks else []
    about += [str(name)] if (name := comparison.machine.get("device_name")) else []
    sentence = comparison.sentence or f"{comparison.task}: strategies compared"
    advice = f'<p class="advice">{prose(comparison.recommendation)}</p>' if comparison.recommendation else ""
    eyebrow = "".join(f"<span>{text(part)}</span>" for part in about if part)
    return (
        f'<header><p class="eyebrow">{eyebrow}</p><h1>{prose(sentence)}</h1>{advice}{_key_figures(comparison)}</header>'
    )


def _key_figures(comparison: Comparison) -> str:
    rows = comparison.finished
    if len(rows) < 2:
        return ""
    tiles: list[tuple[str, str, str]] = []
    by_speed = [(row.samples_per_second.median, row) for row in rows if row.samples_per_second]
    if by_speed:
        value, row = max(by_speed, key=lambda pair: pair[0])
        more = f", {times(row.speedup)} one process" if row.speedup and row.strategy != comparison.reference else ""
        tiles.append(("fastest", row.strategy, f"{rate(value)} samples/s{more}"))
    by_memory = [(row.peak_bytes, row) for row in rows if row.peak_bytes]
    if by_memory:
        least, row = min(by_memory, key=lambda pair: pair[0])
        tiles.append(("least memory", row.strategy, f"{human_bytes(least)} on the fullest rank"))
    by_bytes = [(row.bytes_per_step, row) for row in rows if row.bytes_per_step]
    if by_bytes:
        sent, row = min(by_bytes, key=lambda pair: pair[0])
        tiles.append(("least sent", row.strategy, f"{human_bytes(sent)} in a step, of those that send"))
    tiles += _loss_difference(comparison)
    items = "".join(
        f"<div><dt>{text(name)}</dt><dd><b>{text(value)}</b><span>{text(detail)}</span></dd></div>"
        for name, value, detail in tiles
    )
    return f'<dl class="tiles">{items}</dl>' if len(tiles) > 1 else ""


def _loss_difference(comparison: Comparison) -> list[tuple[str, str, str]]:
    """A tile with the largest difference of a loss from one process."""
    others = [row for row in comparison.finished if row.strategy != comparison.reference]
    found = [(row.loss_difference, row) for row in others if row.loss_difference is not None]
    if not found:
        return []
    most, row = max(found, key=lambda pair: pair[0])
    who = f"relative loss, {row.strategy}" if most else "every loss is the same"
    if len(found) < len(others):
        who += f"; {len(others) - len(found)} cannot be compared"
    elif most and len(found) > 1:
        who += "; the others are closer"
    return [("largest difference", f"{most:.1e}" if most else "none", who)]


def _body(comparison: Comparison) -> str:
    table = draw_table(comparison) if comparison.rows else '<p class="nothing">There is no strategy to show.</p>'
    charts = _columns(comparison) + "".join(
        draw(comparison)
        for draw in (draw_experts, draw_logged, draw_timelines, draw_micro_batches, draw_slow, draw_predictions)
    )
    notes = "".join(f"<li>{prose(note)}</li>" for note in comparison.notes)
    left_out = f'<ul class="notes" id="notes" aria-label="What is left out">{notes}</ul>' if notes else ""
    above = f'<h2 class="unseen">Strategies</h2>{table}{left_out}'
    if not charts:
        return f'{above}<p class="nothing">No strategy finished, so there is nothing to draw.</p>'
    return f'{above}{_choice(comparison)}<div class="charts">{charts}</div>'


def _columns(comparison: Comparison) -> str:
    """Arrange the charts in two columns, trying every split for the one with the least height."""
    rows = len(comparison.finished)
    bars = sum(len(row.memory) for row in comparison.finished)
    charts = [  # each with its rough height in pixels
        (draw_throughput(comparison), 150 + 50 * rows),
        (draw_memory(comparison), 170 + 33 * rows + 19 * bars),
        (draw_messages(comparison), 120 + 67 * rows),
        (draw_losses(comparison), 430),
    ]
    known = [(chart, height) for chart, height in charts if chart]
    best = min(product((0, 1), repeat=len(known)), key=lambda sides: _taller(sides, known))
    columns = ["".join(chart for side, (chart, _) in zip(best, known, strict=True) if side == own) for own in (0, 1)]
    return "".join(f'<div class="column">{column}</div>' for column in columns if column)


def _taller(sides: tuple[int, ...], charts: list[tuple[str, int]]) -> tuple[int, tuple[int, ...]]:
    """The sort key of a split: the height of the taller column, then the first chart on the left."""
    right = sum(height for side, (_, height) in zip(sides, charts, strict=True) if side)
    return max(right, sum(height for _, height in charts) - right), sides


def _choice(comparison: Comparison) -> str:
    """Check boxes that hide strategies in the charts. page.js reveals them; with one strategy there are none."""
    rows = rows_with_index(comparison.rows)
    if len(rows) < 2:
        return ""
    boxes = "".join(
        f'<label><input type="checkbox" checked value="{index}">{text(row.strategy)}</label>' for index, row in rows
    )
    return f'<fieldset id="choice" class="scripted"><legend>Shown in the charts</legend>{boxes}</fieldset>'


def _when(made: str) -> str:
    """An ISO time cut to the minute."""
    return made[:16].replace("T", " ") + (" UTC" if made.endswith(("Z", "+00:00", "+0000")) else "")


def _footer(comparison: Comparison, markdown: str) -> str:
    command = comparison.settings.get("command")
    origin = f"<p>Made by <code>{text(command)}</code></p>" if command else ""
    made = f"<p>{text(describe_run(comparison))}{f', {text(_when(comparison.made))}' if comparison.made else ''}</p>"
    buttons = "".join(
        f'<button type="button" class="tool" data-do="{action}" data-what="{what}">{label}</button>'
        for action, what, label in (
            ("save", "json", "Save as JSON"),
            ("copy", "json", "Copy JSON"),
            ("save", "md", "Save as Markdown"),
            ("copy", "md", "Copy Markdown"),
        )
    )
    return (
        f'<footer><h2>How it was measured</h2>{origin}{made}<div class="tools scripted">{buttons}'
        '<span id="done" role="status"></span></div><details class="figures"><summary>As Markdown</summary>'
        f'<pre id="markdown" tabindex="0">{text(markdown)}</pre></details></footer>'
    )
