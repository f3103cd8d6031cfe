"""Takes the Python stack of another process's main thread, whatever that process does.

A rank writes its stack when it gets a signal, from a handler in C: that works while it waits inside a collective,
sleeps, or holds the GIL. The data workers that a rank forks inherit the handler.
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
_BUSY_SECONDS = 0.1  # over which a process's CPU time is measured
_MAX_WORKERS = 16
_HAS_PROC = Path("/proc/self/stat").exists()
# One thread's dump has the first form; a crash's, of all threads, the others.
_THREAD = re.compile(r"^(Stack|Current thread|Thread)( 0x[0-9a-f]+.*)? \(most recent call first\):")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_MAIN = ("rank_main", "_worker_loop")  # the outermost functions of a rank's and a data worker's main thread


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str


@dataclass(frozen=True)
class ThreadStack:
    """The state of a process, and the frames of its main thread, the innermost first."""

    state: str  # the kernel's letter: R runs, S sleeps, T stopped, D waits for a device, X is gone
    is_busy: bool = False  # it computed all the time while it was measured
    frames: tuple[Frame, ...] = ()
    workers: tuple[tuple[str, ThreadStack], ...] = ()  # of its data loader, by name


def answer_with_stack(state: Path, rank: int) -> None:
    """Install the handler that writes the stack. The file stays open in this process and in its forks."""
    # Of the main thread alone, to which the kernel delivers the signal if it can. The frames of other threads change
    # while they are read, which ends the process (seen with a thread that polls MPI).
    faulthandler.register(SIGNAL, file=_path(state, rank).open("w"), all_threads=False, chain=False)


def take_stacks(state: Path, pids: dict[int, int], *, is_urgent: bool = False) -> dict[int, ThreadStack]:
    """Take the stacks of these ranks, which write them into the folder `state`. With `is_urgent`, neither CPU time is
    measured nor data workers are examined."""
    paths = {rank: _path(state, rank) for rank in pids}
    ticks = {rank: _cpu_ticks(pid) for rank, pid in pids.items()}
    started = time.monotonic()
    texts = _request_stacks({rank: (pid, paths[rank]) for rank, pid in pids.items()})
    if is_urgent:
        return {
            rank: ThreadStack(s := _state(pid), s == "R", parse_stack(texts.get(rank, "")))
            for rank, pid in pids.items()
        }
    time.sleep(max(0.0, started + _BUSY_SECONDS - time.monotonic()))
    least = 0.7 * (time.monotonic() - started) * os.sysconf("SC_CLK_TCK")
    found = {}
    for rank, pid in pids.items():
        busy = _cpu_ticks(pid) - ticks[rank] >= max(1.0, least)
        workers = tuple(_worker_stacks(pid, paths[rank]))
        found[rank] = ThreadStack(_state(pid), busy, parse_stack(texts.get(rank, "")), workers)
    return found


def _path(state: Path, rank: int) -> Path:
    return state / f"stack-{rank}"


def parse_stack(text: str) -> tuple[Frame, ...]:
    """The main thread's frames in a dump of `faulthandler`, the innermost first."""
    threads: list[tuple[bool, list[Frame]]] = []
    for line in text.splitlines():
        if head := _THREAD.match(line):
            threads.append((head.group(1) != "Thread", []))
        elif threads and (frame := _FRAME.match(line)):
            threads[-1][1].append(Frame(frame.group(1), int(frame.group(2)), frame.group(3)))
    for _, frames in threads:
        if any(frame.function in _MAIN for frame in frames):
            return tuple(frames)
    # A deep recursion is cut before the outermost frame.
    known = sorted(((not is_current, frames) for is_current, frames in threads if frames), key=lambda pair: pair[0])
    return tuple(known[0][1]) if known else ()


def _worker_stacks(pid: int, path: Path) -> list[tuple[str, ThreadStack]]:
    """The stacks of a rank's data workers, one after the other because all write into the rank's file."""
    found = []
    for child in _children(pid)[:_MAX_WORKERS]:
        text = _request_stacks({0: (child, path)}).get(0, "")
        found.append((_name(child), ThreadStack(_state(child), frames=parse_stack(text))))
    return found


def _request_stacks(processes: dict[int, tuple[int, Path]]) -> dict[int, str]:
    """Send the signal to the processes that handle it, and read what each writes into its file."""
    before: dict[int, int] = {}
    for key, (pid, path) in processes.items():
        if _state(pid) not in "TtXZ" and _handles_signal(pid):
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
            with contextlib.suppress(OSError), processes[key][1].open("rb") as file:
                file.seek(before[key])
                text = file.read().decode(errors="replace")
                if text != texts[key]:
                    texts[key], changed[key] = text, time.monotonic()
            if texts[key] and time.monotonic() > changed[key] + _QUIET_SECONDS:
                pending.discard(key)
    return texts


# -- /proc -----------------------------------------------------------------------------------------------------------


def _state(pid: int) -> str:
    fields = _stat(pid)
    return fields[0] if fields else ("X" if _HAS_PROC else "?")


def _cpu_ticks(pid: int) -> int:
    """User and system time of the main thread in clock ticks."""
    fields = _stat(pid, f"task/{pid}/stat")
    return int(fields[11]) + int(fields[12]) if fields else 0


def _stat(pid: int, name: str = "stat") -> list[str]:
    """The fields after the process's name, which may contain spaces."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _handles_signal(pid: int) -> bool:
    """Whether a process has a handler for the signal, which would otherwise kill it."""
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
