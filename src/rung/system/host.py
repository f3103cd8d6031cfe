"""Memory, cores and processor of this machine or container. Standard library only."""

from __future__ import annotations

import contextlib
import platform
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def free_host_bytes() -> int | None:
    """Memory available without swapping: of the machine, or of the container if that is less."""
    found = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        rows = Path("/proc/meminfo").read_text().splitlines()
        found += [int(row.split()[1]) * 1024 for row in rows if row.startswith("MemAvailable:")]
    with contextlib.suppress(OSError, ValueError):  # "max" where there is no limit
        limit = int((_CGROUP / "memory.max").read_text())
        found.append(max(0, limit - int((_CGROUP / "memory.current").read_text())))
    return min(found, default=None)


def core_limit() -> float | None:
    """The container's CPU quota in cores; None where there is no limit."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        return int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        quota_v1 = int((_CGROUP / "cpu/cpu.cfs_quota_us").read_text())
        return quota_v1 / int((_CGROUP / "cpu/cpu.cfs_period_us").read_text()) if quota_v1 > 0 else None
    return None


def processor_name() -> str:
    with contextlib.suppress(OSError):
        for row in Path("/proc/cpuinfo").read_text().splitlines():
            if row.startswith("model name"):
                return row.partition(":")[2].strip()
    return platform.processor() or platform.machine()
