"""Pages of the site that are read from the code: every command with its flags, and every setting.

A part of `conf.py`: where a page has one of the marks below, it is replaced while the page is read.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from rung.cli import _build_parser
from rung.config import SETTINGS

_KINDS = {bool: "`true`, `false`", int: "whole number", float: "number", str: "text"}


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", _fill_in)
    # These follow the code, whose changes Sphinx does not see.
    app.connect("env-get-outdated", lambda *_: ["docs/api", "docs/commands", "docs/settings"])
    return {"parallel_read_safe": True}


def _fill_in(app: Any, name: str, source: list[str]) -> None:
    for mark, make in {"<!-- commands -->": commands, "<!-- settings -->": settings}.items():
        if mark in source[0]:
            source[0] = source[0].replace(mark, make())


def commands() -> str:
    """Every command, as its own --help has it, in Markdown."""
    return "\n".join(line for parser in _parsers(_build_parser()) for line in _command(parser))


def settings() -> str:
    """Every setting with what it takes, its default and what it does, in Markdown."""
    parts = {"With a flag": True, "Without a flag": False}
    return "\n\n".join(f"## {title}\n\n{settings_table(flag)}" for title, flag in parts.items())


def settings_table(has_flag: bool) -> str:
    """Of those that have a flag, or of the others. The latter is also the README's."""
    rows = ["| setting | what it does | takes | default |", "|---|---|---|---|"]
    for name, field in SETTINGS.items():
        meta = field.metadata
        if meta["flag"] == has_flag:
            shown = f"--{name.replace('_', '-')}" if has_flag else name
            takes = ", ".join(f"`{choice}`" for choice in meta["choices"]) or _KINDS[meta["kind"]]
            rows.append(f"| `{shown}` | {_cell(meta['help'])} | {takes} | {_default(field.default)} |")
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
