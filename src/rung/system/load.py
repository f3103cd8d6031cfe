"""How much of the machine's processors other programs used while a job ran. Standard library only."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_FULL = 0.9  # of the cores: from here on, programs wait for each other
_NOTICEABLE = 0.1  # of the cores: less is what any idle machine does


@dataclass(frozen=True)
class ProcessorTime:
    """A reading: seconds since the start of the machine."""

    at: float
    machine: float  # seconds of all cores in use, or taken away by the host of a virtual machine
    own: float  # of this process and all below it, also those that have ended


def processor_time() -> ProcessorTime | None:
    """None where the system does not tell: only Linux does."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        ticks = os.sysconf("SC_CLK_TCK")
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(
            int, (_PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]
        )
        machine = user + nice + system + irq + softirq + steal
        return ProcessorTime(time.monotonic(), machine / ticks, _own_ticks() / ticks)
    return None


def other_cores(before: ProcessorTime | None, after: ProcessorTime | None) -> float | None:
    """How many cores other programs kept busy between two readings, if they can have slowed this one down; else 0.

    They cannot where cores were left over. None without readings.
    """
    if before is None or after is None:
        return None
    seconds = max(after.at - before.at, 1e-9)
    all_used, own = (after.machine - before.machine) / seconds, (after.own - before.own) / seconds
    cores = os.cpu_count() or 1
    others = all_used - own
    return others if all_used > _FULL * cores and others > _NOTICEABLE * cores else 0.0


def _own_ticks() -> int:
    """The ticks of this process's tree. A process that has ended is in its parent's count of children."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for folder in _PROC.iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended since
                # After the last ")": the command's name may hold spaces and parentheses. See proc(5) for the fields.
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                parents[int(folder.name)] = int(fields[1])
                ticks[int(folder.name)] = sum(map(int, fields[11:15]))
    return sum(count for pid, count in ticks.items() if _is_below(os.getpid(), pid, parents))


def _is_below(root: int, pid: int, parents: dict[int, int]) -> bool:
    while pid != root and pid in parents:
        pid = parents[pid]
    return pid == root
