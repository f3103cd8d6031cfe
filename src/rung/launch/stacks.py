"""Where a process stands: the Python stack of its main thread, taken from outside and whatever it is busy with.

A rank writes its stack when it gets a signal, from a handler in C: that works while its Python waits inside a
collective, sleeps, or does not let go of the interpreter. The processes that a rank forks, for its data, do so, too.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

SIGNAL = signal.SIGUSR2
_ANSWER_SECONDS = 1.0  # for a stack to be written
_QUIET_SECONDS = 0.02  # without a new line: it is whole
_BUSY_SECONDS = 0.1  # over which a process is looked at to see whether it computes
_MAX_WORKERS = 16
_HAS_PROC = Path("/proc/self/stat").exists()
_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_MAIN = ("rank_main", "_worker_loop")  # what the main thread of a rank, or of a data worker, began with


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str


@dataclass(frozen=True)
class Stand:
    """What could be found out of a process. The frames are the main thread's, the innermost first."""

    state: str  # as the kernel calls it: R runs, S sleeps, T stopped, D waits for a device, X is gone
    is_busy: bool = False  # it has computed all the while it was looked at
    frames: tuple[Frame, ...] = ()
    workers: tuple[tuple[str, Stand], ...] = ()  # of its data loader, by name


def answer_with_stack(state: Path, rank: int) -> None:
    """Called by a rank. The file stays open for as long as the process lives, in its forks as well."""
    faulthandler.register(SIGNAL, file=_path(state, rank).open("w"), all_threads=True, chain=False)


def take_stands(state: Path, pids: dict[int, int], *, is_urgent: bool = False) -> dict[int, Stand]:
    """Where the processes of these ranks stand. `state` is the folder in which they answer. What is urgent is not
    looked at for long."""
    paths = {rank: _path(state, rank) for rank in pids}
    ticks = {rank: _cpu_ticks(pid) for rank, pid in pids.items()}
    started = time.monotonic()
    texts = _ask({rank: (pid, paths[rank]) for rank, pid in pids.items()})
    if is_urgent:
        return {rank: Stand(s := _state(pid), s == "R", parse_stack(texts.get(rank, ""))) for rank, pid in pids.items()}
    time.sleep(max(0.0, started + _BUSY_SECONDS - time.monotonic()))
    least = 0.7 * (time.monotonic() - started) * os.sysconf("SC_CLK_TCK")
    found = {}
    for rank, pid in pids.items():
        busy = _cpu_ticks(pid) - ticks[rank] >= max(1.0, least)
        workers = tuple(_look_at_workers(pid, paths[rank]))
        found[rank] = Stand(_state(pid), busy, parse_stack(texts.get(rank, "")), workers)
    return found


def _path(state: Path, rank: int) -> Path:
    return state / f"stack-{rank}"


def parse_stack(text: str) -> tuple[Frame, ...]:
    """The main thread's frames out of what `faulthandler` wrote; of several threads, the one that began the work."""
    threads: list[tuple[bool, list[Frame]]] = []
    for line in text.splitlines():
        if head := _THREAD.match(line):
            threads.append((head.group(1) == "Current thread", []))
        elif threads and (frame := _FRAME.match(line)):
            threads[-1][1].append(Frame(frame.group(1), int(frame.group(2)), frame.group(3)))
    for _, frames in threads:
        if any(frame.function in _MAIN for frame in frames):
            return tuple(frames)
    # A deep recursion is cut before its beginning. The signal comes to the main thread, if it can.
    known = sorted(((not is_current, frames) for is_current, frames in threads if frames), key=lambda pair: pair[0])
    return tuple(known[0][1]) if known else ()


def _look_at_workers(pid: int, path: Path) -> list[tuple[str, Stand]]:
    """The processes forked by a rank, one after the other: they answer into the rank's own file."""
    found = []
    for child in _children(pid)[:_MAX_WORKERS]:
        text = _ask({0: (child, path)}).get(0, "")
        found.append((_name(child), Stand(_state(child), frames=parse_stack(text))))
    return found


def _ask(whom: dict[int, tuple[int, Path]]) -> dict[int, str]:
    """Send the signal to processes that listen to it, and read what they write."""
    before: dict[int, int] = {}
    for key, (pid, path) in whom.items():
        if _state(pid) not in "TtXZ" and _listens(pid):
            before[key] = path.stat().st_size if path.exists() else 0
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, SIGNAL)
    texts = dict.fromkeys(before, "")
    changed = dict.fromkeys(before, time.monotonic())
    deadline = time.monotonic() + _ANSWER_SECONDS
    pending = set(before)
    while pending and time.monotonic() < deadline:
        time.sleep(_QUIET_SECONDS / 4)
        for key in list(pending):
            with contextlib.suppress(OSError), whom[key][1].open("rb") as file:
                file.seek(before[key])
                text = file.read().decode(errors="replace")
                if text != texts[key]:
                    texts[key], changed[key] = text, time.monotonic()
            if texts[key] and time.monotonic() > changed[key] + _QUIET_SECONDS:
                pending.discard(key)
    return texts


# -- what the kernel knows -------------------------------------------------------------------------------------------


def _state(pid: int) -> str:
    fields = _stat(pid)
    return fields[0] if fields else ("X" if _HAS_PROC else "?")


def _cpu_ticks(pid: int) -> int:
    """Clock ticks that the main thread has computed."""
    fields = _stat(pid, f"task/{pid}/stat")
    return int(fields[11]) + int(fields[12]) if fields else 0


def _stat(pid: int, name: str = "stat") -> list[str]:
    """The fields after the process's name, which may hold spaces."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _listens(pid: int) -> bool:
    """Whether a process has a handler for the signal. Without, it would end by it."""
    if not _HAS_PROC:
        return True
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return caught is not None and bool(int(caught.group(1), 16) >> (SIGNAL - 1) & 1)


def _children(pid: int) -> list[int]:
    if not _HAS_PROC:
        return []
    entries = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return sorted(child for child in entries if (fields := _stat(child)) and int(fields[1]) == pid)


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
