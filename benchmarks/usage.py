"""What a process and those below it take from the machine, read from /proc, and what lies in a folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Usage:
    """Of one process at one moment."""

    pss_bytes: int  # resident; a page that n processes share counts as one n-th: for sums
    own_bytes: int  # resident and of no file, whether or not a parent still shares it: what a leak adds to
    descriptors: int  # without those of batches on their way from a loader process
    threads: int


def usage_of(pid: int) -> Usage | None:
    """None for a process that has ended, also while it was looked at."""
    root = Path("/proc", str(pid))
    try:
        rows = [line.split() for line in (root / "smaps_rollup").read_text().splitlines()[1:]]
        kilobytes = {row[0].rstrip(":"): int(row[1]) for row in rows}
        status = (root / "status").read_text()
        own = int(status.partition("RssAnon:")[2].split()[0])
        descriptors, threads = _num_descriptors(root / "fd"), len(os.listdir(root / "task"))
    except (OSError, ValueError, IndexError):
        return None
    if "Pss" not in kilobytes:  # a zombie has no memory
        return None
    return Usage(kilobytes["Pss"] * 1024, own * 1024, descriptors, threads)


def _num_descriptors(folder: Path) -> int:
    count = 0
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            count += not os.readlink(folder / name).startswith("/dev/shm/torch_")
    return count


def descendants(pid: int) -> Iterator[tuple[int, int]]:
    """Every process below one, each with its parent."""
    for child in _children(pid):
        yield child, pid
        yield from descendants(child)


def _children(pid: int) -> list[int]:
    """Of all threads: a process that a thread has started is listed with that thread."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # it has ended meanwhile
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


def content_of(folder: Path) -> tuple[int, int]:
    """Bytes and number of the files below a folder."""
    num_bytes, count = 0, 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                num_bytes += os.lstat(os.path.join(place, name)).st_size
                count += 1
            except FileNotFoundError:
                continue
    return num_bytes, count
