"""Writes manifests as YAML: mappings, lists, words, numbers and truth values, and nothing else of the language.

A word stands plain where every reader takes it for a word, a text of several lines as a block, and all else as JSON
writes it, which is YAML, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

_PLAIN = re.compile(r"-{0,2}[A-Za-z/][\w./,=+@-]*(:[\w./,=+@-]+)*", re.ASCII)
# What some reader, of this version of YAML or the one before, takes for something else than a word.
_RESERVED = frozenset({"true", "false", "yes", "no", "on", "off", "y", "n", "null"})


def write_documents(documents: Iterable[Mapping[str, Any]], comments: Iterable[str] = ()) -> str:
    """One text for all of them, below comments of a line each."""
    text = "---\n".join("\n".join(_lines(document)) + "\n" for document in documents)
    return "".join(f"# {comment}\n" for comment in comments) + text


def _lines(value: Mapping[str, Any] | list[Any]) -> list[str]:
    found: list[str] = []
    if isinstance(value, Mapping):
        for key, item in value.items():
            found += _entry(f"{_scalar(key)}:", item)
        return found
    for item in value:
        if isinstance(item, Mapping | list) and item:
            first, *rest = _lines(item)
            found += [f"- {first}", *_indented(rest)]
        else:
            found += _entry("-", item)
    return found


def _entry(lead: str, value: Any) -> list[str]:
    """A key or a dash with what belongs to it."""
    if isinstance(value, Mapping | list) and value:
        return [lead, *_indented(_lines(value))]
    if isinstance(value, str) and _is_block(value):
        mark = "|" if value.endswith("\n") else "|-"
        return [f"{lead} {mark}", *_indented(value.removesuffix("\n").split("\n"))]
    return [f"{lead} {_scalar(value)}"]


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _RESERVED:
        return value
    text = json.dumps(value, ensure_ascii=False)
    return "".join(character if character.isprintable() else f"\\U{ord(character):08x}" for character in text)


def _is_block(text: str) -> bool:
    lines = text.removesuffix("\n").split("\n")
    is_readable = all(line.replace("\t", " ").isprintable() for line in lines)
    return len(lines) > 1 and is_readable and lines[0][:1].strip() != "" and lines[-1].strip() != ""


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" if line else "" for line in lines]
