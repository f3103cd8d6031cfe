"""Files that someone else may have made: a run directory, a checkpoint or a comparison that was sent.

Reading them executes nothing, waits for nothing and takes bounded memory: only regular files are opened, whole files up
to a size, JSON up to a depth. What is printed of them passes through `printable`. Before anything is written into such
a directory, `find_escapes` looks for links that lead out of it. Errors are OSError and ValueError with a reason in
words; the caller knows which file it is and what it was wanted for. Imports nothing of Rung.
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

_MAX_DEPTH = (
    100  # of values in each other; Python's own limit is 1000 calls, and who walks a value needs several a level
)
_MAX_INTEGER = 2**1000  # beyond it there is no float
_LONE_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
MAX_LINE = 2**20


def open_regular(path: Path) -> BinaryIO:
    """A regular file, open for reading. A FIFO would be waited for, and a device such as /dev/zero read for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path, most: int) -> bytes:
    """The content of a regular file of at most so many bytes."""
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it is larger than {most:,} bytes", str(path))
    return content


def read_json(path: Path, most: int) -> Any:
    return parse_json(read_regular(path, most))


def parse_json(content: bytes) -> Any:
    """A JSON value that any code here can walk, convert and write again. Raises ValueError that says why it is none."""
    try:
        text = content.decode("utf-8")
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    except ValueError as error:  # a number of thousands of digits is one, too
        raise ValueError(f"it is not JSON ({error})") from None
    refuse_extremes(value)
    if _LONE_SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError("it holds half a character") from None
    return value


def refuse_extremes(value: Any) -> None:
    """ValueError for values nested too deeply to be walked by recursion, and for integers that no float can hold."""
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
    """The lines of a file, without those that are longer than any that a run writes. The last may have no end."""
    while line := file.readline(most):
        if len(line) == most and not line.endswith(b"\n"):
            while (rest := file.readline(most)) and not rest.endswith(b"\n"):
                pass
            continue
        yield line


def printable(text: object, keep: str = "") -> str:
    """Text for a terminal or a page: escape sequences, other control characters, marks that reverse the direction of
    writing and halves of characters are spelled out. `keep` names characters that stay, such as line ends."""
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in shown)


def find_escapes(root: Path, names: Collection[str]) -> list[str]:
    """What in a directory leads out of it or is no file: links to elsewhere, FIFOs, devices. Whoever writes or deletes
    there would do so in another place, or wait for ever. The directory itself may be a link.

    Of its entries, those that begin with one of `names` are looked at, with all below them; a leading dot, which
    partly written files have, counts for nothing.
    """
    top, found = root.resolve(), []
    pending = [e for e in os.scandir(root) if e.name.lstrip(".").startswith(tuple(names))] if root.is_dir() else []
    while pending:
        entry = pending.pop()
        path = Path(entry.path)
        if entry.is_symlink():
            target = os.path.realpath(path)
            if not Path(target).is_relative_to(top):
                found.append(f"{path} is a link to {target}")
        elif entry.is_dir(follow_symlinks=False):
            pending += os.scandir(path)
        elif not entry.is_file(follow_symlinks=False):
            found.append(f"{path} is neither a file nor a directory")
    return sorted(found)
