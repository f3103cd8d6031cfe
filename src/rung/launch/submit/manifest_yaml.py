"""Writes manifests as YAML that `kubectl` parses to the same values, and people can read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

_PLAIN = re.compile(r"-{0,2}[A-Za-z/][\w./,=+@-]*(:[\w./,=+@-]+)*", re.ASCII)
_BOOLEANS = ("y", "n")  # for kubectl, besides those that PyYAML knows


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    def represent_str(self, text: str) -> Any:
        """Quote all but words and paths: PyYAML would leave y and 1e3 plain, which kubectl takes for a boolean and a
        number. Text of several lines is a literal block, unless it has unprintable characters, which need quotes."""
        is_plain = _PLAIN.fullmatch(text) and text.lower() not in _BOOLEANS
        lines = text.rstrip("\n").split("\n")
        is_block = len(lines) > 1 and all(line.replace("\t", " ").isprintable() for line in lines)
        return self.represent_scalar("tag:yaml.org,2002:str", text, "|" if is_block else None if is_plain else '"')

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> Any:
        return super().increase_indent(flow, indentless=False)  # indent lists below their key

    def ignore_aliases(self, data: Any) -> bool:
        return True  # no anchors for values that occur twice


_Dumper.add_representer(str, _Dumper.represent_str)


def write_documents(documents: Iterable[Mapping[str, Any]], comments: Iterable[str] = ()) -> str:
    """All documents as one text, below comments of a line each."""
    text: str = yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=float("inf"))
    return "".join(f"# {comment}\n" for comment in comments) + text
