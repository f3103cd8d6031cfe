"""Summarises the log of a rank that ended without a failure record, as after a crash in C++."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, field
from pathlib import Path

from rung.launch.console import ATTEMPT_MARK, CRASH_MARKS
from rung.launch.diagnostics.stack_analysis import is_foreign, location_of
from rung.launch.diagnostics.stacks import parse_stack

_MAX_LINES = 8
_LOG_BYTES = 64 * 1024
# gloo aborts the process when a message does not have the expected size.
_MISMATCH = re.compile(r"op\.preamble\.length <= op\.nbytes|collective mismatch|CollectiveFingerPrint")
_NOISE = re.compile(r"\[enforce fail at [^\]]*\] ")


@dataclass(frozen=True)
class CrashSummary:
    lines: list[str] = field(default_factory=list)
    place: str = ""  # the operation that it waited in, if any, and the line
    is_mismatch: bool = False  # ranks called different collectives, or with different sizes


def read_crash_summary(log: Path, rank: int, exit_code: int | None) -> CrashSummary:
    """Summarise the end of a rank's log, without lines that the console has shown already."""
    if exit_code == -signal.SIGKILL:
        return CrashSummary()  # it could not write anything
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LOG_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return CrashSummary()
    lines = [line for line in text.rpartition(ATTEMPT_MARK)[2].splitlines() if line.strip()]
    crash = next((i for i, line in enumerate(lines) if line.startswith(CRASH_MARKS)), None)
    if crash is None:
        return CrashSummary([] if rank == 0 else lines[-_MAX_LINES:])  # the console shows rank 0's lines
    return _summarise(lines[crash:])


def _summarise(lines: list[str]) -> CrashSummary:
    frames = parse_stack("\n".join(lines))
    first = next((i for i, line in enumerate(lines) if "(most recent call first)" in line), len(lines))
    message = [_NOISE.sub("", line) for line in lines[:first]]
    shown = message[:3]
    if frames:
        own = [frame for frame in frames if not is_foreign(frame)] or list(frames)
        shown.append("Python stack (most recent call first):")
        shown += [f'  File "{frame.file}", line {frame.line} in {frame.function}' for frame in own]
    elif first < len(lines):
        # `parse_stack` does not know the format: show the lines of the thread that crashed.
        current = next((i for i, line in enumerate(lines) if line.startswith("Current thread")), first)
        shown += lines[current:]
    place = ""
    if frames:
        location = location_of(frames)
        place = f"in {location.operation} at {location.where}" if location.operation else f"at {location.where}"
    return CrashSummary(shown[:_MAX_LINES], place, bool(_MISMATCH.search("\n".join(message))))
