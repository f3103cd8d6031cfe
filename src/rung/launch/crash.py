"""The last words of a rank that ended without a report of its own: what a crash in C++ has left in its log."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, field
from pathlib import Path

from rung.launch.console import ATTEMPT_MARK, CRASH_MARKS
from rung.launch.places import is_foreign, place_of
from rung.launch.stacks import parse_stack

_MAX_LINES = 8
_LOG_BYTES = 64 * 1024
# What gloo says before it ends the process: the message that came is not of the size that was expected.
_MISMATCH = re.compile(r"op\.preamble\.length <= op\.nbytes|collective mismatch|CollectiveFingerPrint")
_NOISE = re.compile(r"\[enforce fail at [^\]]*\] ")


@dataclass(frozen=True)
class LastWords:
    lines: list[str] = field(default_factory=list)
    place: str = ""  # the operation in which it waited, if it did, and the line
    is_mismatch: bool = False  # ranks called different collectives, or with different sizes


def read_last_words(log: Path, rank: int, exit_code: int | None) -> LastWords:
    """Out of a rank's log. Nothing that the console has shown already."""
    if exit_code == -signal.SIGKILL:
        return LastWords()  # it had no time for any
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LOG_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return LastWords()
    lines = [line for line in text.rpartition(ATTEMPT_MARK)[2].splitlines() if line.strip()]
    crash = next((i for i, line in enumerate(lines) if line.startswith(CRASH_MARKS)), None)
    if crash is None:
        return LastWords([] if rank == 0 else lines[-_MAX_LINES:])  # of rank 0 all is shown but a crash
    return _understand(lines[crash:])


def _understand(lines: list[str]) -> LastWords:
    frames = parse_stack("\n".join(lines))
    first = next((i for i, line in enumerate(lines) if "(most recent call first)" in line), len(lines))
    message = [_NOISE.sub("", line) for line in lines[:first]]
    shown = message[:3]
    if frames:
        own = [frame for frame in frames if not is_foreign(frame)] or list(frames)
        shown.append("Python stood at (most recent call first):")
        shown += [f'  File "{frame.file}", line {frame.line} in {frame.function}' for frame in own]
    elif first < len(lines):
        # A stack in a form that is not known: that of the thread that crashed.
        current = next((i for i, line in enumerate(lines) if line.startswith("Current thread")), first)
        shown += lines[current:]
    place = place_of(frames) if frames else None
    told = ""
    if place is not None:
        told = f"in {place.operation} at {place.where}" if place.operation else f"at {place.where}"
    return LastWords(shown[:_MAX_LINES], told, bool(_MISMATCH.search("\n".join(message))))
