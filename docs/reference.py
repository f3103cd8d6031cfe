"""Pages of the site that are read from the code: every command with its flags, and every setting.

A part of `conf.py`: Sphinx replaces the marks below while it reads a page. `python docs/reference.py` writes the table
of settings without a flag into docs/settings.md, where it can be read without the site.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rung.cli.main import build_parser
from rung.spec.abilities import can
from rung.spec.config import SETTINGS
from rung.spec.presets import ABILITIES, PRESETS, SCHEDULES
from rung.spec.strategy import parse, required_num_ranks

_SETTINGS_PAGE = Path(__file__).parent / "settings.md"
_KINDS = {bool: "`true`, `false`", int: "whole number", float: "number", str: "text"}


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", _fill_in)
    # These follow the code, whose changes Sphinx does not see.
    app.connect("env-get-outdated", lambda *_: ["docs/api", "docs/commands", "docs/settings"])
    return {"parallel_read_safe": True}


def _fill_in(app: Any, name: str, source: list[str]) -> None:
    for mark, make in {"<!-- commands -->": commands, "<!-- settings -->": flag_settings}.items():
        if mark in source[0]:
            source[0] = source[0].replace(mark, make())


def commands() -> str:
    """Every command, as its own --help has it, in Markdown."""
    return "\n".join(line for parser in _parsers(build_parser()) for line in _command(parser))


def flag_settings() -> str:
    return settings_table(has_flag=True)


def with_settings_table(page: str) -> str:
    """The page with the table of settings that have no flag, made anew."""
    return re.sub(
        r"(<!-- settings: [^>]*-->\n).*?(\n<!-- end of settings -->)",
        lambda found: found.group(1) + settings_table(has_flag=False) + found.group(2),
        page,
        flags=re.DOTALL,
    )


def settings_table(has_flag: bool) -> str:
    """Each setting with what it does, what it takes and its default, in Markdown: those with a flag, or the others."""
    rows = ["| setting | what it does | takes | default |", "|---|---|---|---|"]
    for name, field in SETTINGS.items():
        meta = field.metadata
        if meta["flag"] == has_flag:
            shown = f"--{name.replace('_', '-')}" if has_flag else name
            takes = ", ".join(f"`{choice}`" for choice in meta["choices"]) or _KINDS[meta["kind"]]
            rows.append(f"| `{shown}` | {_cell(meta['help'])} | {takes} | {_default(field.default)} |")
    return "\n".join(rows)


def ability_table() -> str:
    """What each strategy can do, in Markdown: the table of docs/strategies.md. Strategies that can do the same share a
    column."""
    layouts = {name: parse(name, 4 if required_num_ranks(name) is None else 1) for name in PRESETS}
    layouts |= {f"pp:{name}": parse(f"pp:{name}", 4) for name, schedule in SCHEDULES.items() if schedule.refuses}
    columns: dict[tuple[bool, ...], list[str]] = {}
    for name, layout in layouts.items():
        columns.setdefault(tuple(can(layout, ability) for ability in ABILITIES), []).append(f"`{name}`")
    rows = [f"| | {' | '.join(', '.join(names) for names in columns.values())} |", "|---|" + ":-:|" * len(columns)]
    for ability, cells in zip(ABILITIES.values(), zip(*columns, strict=True), strict=True):
        rows.append(f"| {ability.title} | {' | '.join('yes' if cell else '-' for cell in cells)} |")
    return "\n".join(rows)


def _default(value: Any) -> str:
    if value is None:
        return "not set"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                below = list(_parsers(inner))
                yield from below or [inner]


def _command(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield f"## {parser.prog}\n"
    yield f"{parser.description}\n"
    usage = " ".join(parser.format_usage().split()).removeprefix("usage: ")
    yield f"```text\n{usage}\n```\n"
    for group in parser._action_groups:
        actions = [a for a in group._group_actions if a.help != argparse.SUPPRESS and "--help" not in a.option_strings]
        if not actions:
            continue
        title = {"positional arguments": "argument", "options": "flag"}.get(str(group.title), str(group.title))
        yield f"| {title} | |\n|---|---|"
        for action in actions:
            yield f"| `{_flag(action)}` | {_cell(action.help or '')} |"
        yield ""


def _flag(action: argparse.Action) -> str:
    if not action.option_strings:
        return str(action.metavar or action.dest)
    name = ", ".join(action.option_strings)
    if action.nargs == 0:
        return name
    value = str(action.metavar or "|".join(map(str, action.choices or ())) or action.dest.upper())
    many = {"?": f"[{value}]", "+": f"{value} ...", "*": f"[{value} ...]"}
    return f"{name} {many.get(str(action.nargs), value)}".replace("|", "\\|")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("%%", "%").replace("<", "&lt;")


if __name__ == "__main__":
    _SETTINGS_PAGE.write_text(with_settings_table(_SETTINGS_PAGE.read_text()))
