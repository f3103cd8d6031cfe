"""Running out of memory: telling it from other errors, and saying what filled the memory."""

from __future__ import annotations

import re
import resource
from pathlib import Path

import torch

from rung.runtime.base import Runtime
from rung.world import World

_MESSAGES = re.compile(r"can't allocate memory|out of memory|DefaultCPUAllocator|Cannot allocate memory", re.IGNORECASE)


def is_out_of_memory(error: BaseException) -> bool:
    """Of the device, or of the host where it says so before the kernel ends the process."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError | OSError) and bool(_MESSAGES.search(str(error)))


def memory_lines(runtime: Runtime, world: World) -> list[str]:
    """What the memory of this rank holds, largest first, and how much there is."""
    kept = {name: count for name, count in runtime.state_bytes().items() if count}
    if world.device.type == "cuda":
        used, what = torch.cuda.max_memory_allocated(world.device), "at its peak"
        free, whole = torch.cuda.mem_get_info(world.device)
        reserved = torch.cuda.memory_reserved(world.device)
        idle = reserved - torch.cuda.memory_allocated(world.device)
        others = max(0, whole - free - reserved)
        around = [f"{_size(whole)} on the device, {_size(free)} free, {_size(idle)} held by torch without use"]
        if others > 2**28:
            around.append(f"{_size(others)} used by other processes and libraries")
    else:
        used, what = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "resident at its peak"
        around = [f"{_size(_host_bytes())} in this machine"]
    rest = max(0, used - sum(kept.values()))
    parts = sorted([*kept.items(), ("activations and everything else", rest)], key=lambda item: -item[1])
    told = ", ".join(f"{name} {_size(count)}" for name, count in parts)
    return [f"memory of rank {world.rank}: {_size(used)} {what}: {told}", *around]


def _host_bytes() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemTotal:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
