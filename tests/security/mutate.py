"""Hostile variants of files that a run writes: values of the wrong type and size, structures with parts missing,
doubled or exchanged, and damaged bytes. Everything follows from the generator that is passed in."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

# A page or a terminal that shows these as they are has been taken over. `fuzz` looks for them in what comes out.
MARKUP = '"><xss onxss="1"></script><xss>`|\\|<xss>'
ESCAPE = "\x1b]0;xss\x07\x1b[31m\r\x9b2J\u202e"
_WORDS = (
    "", " ", "x", "nan", "inf", "-inf", "1e999", "true", "step", "event", "start", "resume", "end", MARKUP, ESCAPE,
    "[/red]", "[bold", "{}", "%s%n", "../../etc/passwd", "/dev/zero", "a/b", "\0", "\ud800", "\u2028",
    "\N{SUPERSCRIPT TWO}", "9" * 400, "x" * 5000,
)  # fmt: skip
_NUMBERS = (
    0, 1, -1, 2, 3, 7, 63, 64, 255, 2**16, 2**31 - 1, 2**31, 2**32, 2**47, 2**48, 2**53, 2**63, 2**64, -(2**63),
    10**320, 0.0, -0.0, 0.5, -1.5, 1e-320, 1e16, 1e30, 1.7e308, -1.7e308, float("inf"), float("-inf"), float("nan"),
)  # fmt: skip

Path = tuple[Any, ...]


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def hostile_value(draw: random.Random) -> Any:
    kind = draw.randrange(10)
    if kind < 4:
        return draw.choice(_NUMBERS)
    if kind < 7:
        return draw.choice(_WORDS)
    choices: list[Callable[[], Any]] = [
        lambda: None,
        lambda: draw.random() < 0.5,
        list,
        dict,
        lambda: [draw.choice(_NUMBERS) for _ in range(draw.randrange(1, 5))],
        lambda: {draw.choice(_WORDS): draw.choice(_NUMBERS)},
        lambda: nested(draw.choice((2, 50, 120, 600))),
        lambda: [[]] * draw.choice((2, 2000)),
    ]
    return draw.choice(choices)()


def paths_of(value: Any, path: Path = ()) -> list[Path]:
    """Where every part of a value is, itself first."""
    found = [path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += paths_of(inner, (*path, key))
    return found


def at(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


def change(value: Any, draw: random.Random, times: int | None = None) -> Any:
    """A copy of a JSON value in which a few things are not as they were."""
    changed = copy.deepcopy(value)
    for _ in range(times or draw.choice((1, 1, 1, 2, 4))):
        try:
            changed = _change_once(changed, draw)
        except RecursionError:  # what was put in before is too deep to be copied
            break
    return changed


def _change_once(value: Any, draw: random.Random) -> Any:
    places = paths_of(value)
    path = draw.choice(places)
    if not path:
        return hostile_value(draw) if draw.random() < 0.05 else value
    owner, key = at(value, path[:-1]), path[-1]
    kind, old = draw.randrange(12), owner[key]
    if kind < 4:
        owner[key] = hostile_value(draw)
    elif kind < 6 and isinstance(old, int | float):
        owner[key] = draw.choice((old + 1, old - 1, -old, 2 * old, old // 2 if old == old and abs(old) < 1e300 else 0))
    elif kind == 6:
        del owner[key]
    elif kind == 7:
        owner[key] = copy.deepcopy(at(value, draw.choice(places)))
    elif kind == 8 and isinstance(owner, dict):
        owner[draw.choice(_WORDS)] = owner.pop(key)
    elif kind == 9 and isinstance(owner, list):
        owner.insert(draw.randrange(len(owner) + 1), copy.deepcopy(draw.choice(owner)))
    elif kind == 10 and isinstance(old, list):
        draw.shuffle(old)
    elif isinstance(old, str):
        owner[key] = draw.choice((old + draw.choice(_WORDS), old[: len(old) // 2], draw.choice(_WORDS)))
    return value


def as_json(value: Any) -> bytes:
    """As Python writes it, with NaN and Infinity, which it also reads. What is too deep for it is written by hand."""
    try:
        return json.dumps(value).encode()
    except RecursionError:
        return b"[" * 2000 + b"]" * 2000


def damage(content: bytes, draw: random.Random) -> bytes:
    """Bytes that are flipped, cut out, doubled or put in."""
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 3))):
        place = draw.randrange(len(changed) + 1)
        kind = draw.randrange(5)
        if kind == 0 and changed:
            changed[place % len(changed)] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del changed[place : place + draw.choice((1, 8, 1000))]
        elif kind == 2:
            changed[place:place] = draw.choice(
                (b"\xff", b"\0", b"\n", b"9" * 4400, b"[" * 3000, b"\x1b[2J", b'"', b"}")
            )
        elif kind == 3:
            changed[place:place] = changed[place : place + 40]
        else:
            del changed[place:]
    return bytes(changed)
