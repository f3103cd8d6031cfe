"""The processes of this machine."""

from __future__ import annotations

import os
from pathlib import Path


def processes_of(word: str) -> list[int]:
    """Processes of this machine with a word in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if word in words and int(path.parent.name) != os.getpid():
            found.append(int(path.parent.name))
    return sorted(found)
