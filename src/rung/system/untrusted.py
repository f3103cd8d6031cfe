"""Reads files that another user may have made: a run directory, a checkpoint or a comparison that was sent.

Reading executes nothing, does not block and takes bounded memory: only regular files are opened, whole files up to a
size, JSON up to a depth. Text from them passes through `printable` before it is printed. Before anything is written
into such a directory, `find_escapes` finds links that lead out of it. Errors are OSError and ValueError with a reason
in words; the caller adds the file and its purpose. Imports nothing of Rung.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO

# Of nested values. Python's limit is 1000 calls, and a recursive walk needs several for each level.
_MAX_DEPTH = 100
_MAX_INTEGER = 2**1000  # a float can hold it
_LONE_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
MAX_LINE = 2**20


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. A FIFO would block, and a device such as /dev/zero has no end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path, most: int) -> bytes:
    """The content of a regular file of at most `most` bytes."""
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it is larger than {most:,} bytes", str(path))
    return content


def read_json(path: Path, most: int) -> Any:
    return parse_json(read_regular(path, most))


def parse_json(content: bytes) -> Any:
    """A JSON value that is safe to walk, convert and write again. Raises ValueError with the reason if it is not."""
    try:
        text = content.decode("utf-8")
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    except ValueError as error:  # also raised for a number of thousands of digits
        raise ValueError(f"it is not JSON ({error})") from None
    refuse_extremes(value)
    if _LONE_SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError("it holds half a character") from None
    return value


def refuse_extremes(value: Any) -> None:
    """Raise ValueError for values nested too deeply for recursion, and for integers that no float can hold."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inner += one.values()
            elif isinstance(one, list):
                inner += one
            elif isinstance(one, int) and not -_MAX_INTEGER < one < _MAX_INTEGER:
                raise ValueError("it holds a number of hundreds of digits")
        level = inner
        if not level:
            return
    raise ValueError("it is nested too deeply")


def lines_of(file: BinaryIO, most: int = MAX_LINE) -> Iterator[bytes]:
    """The lines of a file, skipping those longer than any that a run writes. The last may lack a line end."""
    while line := file.readline(most):
        if len(line) == most and not line.endswith(b"\n"):
            while (rest := file.readline(most)) and not rest.endswith(b"\n"):
                pass
            continue
        yield line


LAYOUT = "\n\t"  # for `keep`, in reports of several lines


def printable(text: object, keep: str = "") -> str:
    """Text for a terminal or a page: control characters, escape sequences among them, marks that reverse the direction
    of writing, and lone surrogates are spelled out. `keep` lists characters that stay, such as line ends."""
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in shown)


def find_escapes(root: Path, names: Collection[str]) -> list[str]:
    """Entries of a directory that lead out of it or are not files: links to elsewhere, FIFOs, devices. Writing or
    deleting there would affect another place, or block. The directory itself may be a link.

    Checks the entries that begin with one of `names`, everything below them and the targets of links between them. A
    leading dot, which partly written files have, is ignored.
    """
    top, found, visited = root.resolve(), [], set[str]()
    pending = [e.path for e in os.scandir(root) if e.name.lstrip(".").startswith(tuple(names))] if root.is_dir() else []
    while pending:
        path = pending.pop()
        target = os.path.realpath(path) if os.path.islink(path) else path
        if target != path and not Path(target).is_relative_to(top):
            found.append(f"{path} is a link to {target}")
        elif os.path.isdir(target):
            if (real := os.path.realpath(target)) not in visited:  # links may form a circle
                visited.add(real)
                pending += [entry.path for entry in os.scandir(target)]
        elif os.path.lexists(target) and not os.path.isfile(target):
            found.append(f"{path} is neither a file nor a directory")
    return sorted(found)
