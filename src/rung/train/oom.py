"""Running out of memory: recognizing the error, and listing the contents of the memory."""

from __future__ import annotations

import re
import resource
from pathlib import Path

import torch

from rung.distributed.world import World
from rung.runtime.base import Runtime
from rung.system.units import human_bytes

_MESSAGES = re.compile(
    r"can't allocate memory|out of memory|DefaultCPUAllocator|Cannot allocate memory|std::bad_alloc", re.IGNORECASE
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is out-of-memory, of the device or of the host (unless the kernel kills the process first)."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError | OSError) and bool(_MESSAGES.search(str(error)))


def memory_lines(runtime: Runtime, world: World) -> list[str]:
    """The contents of this rank's memory, largest first, and its capacity."""
    kept = {name: count for name, count in runtime.state_bytes().items() if count}
    if world.device.type == "cuda":
        used, what = torch.cuda.max_memory_allocated(world.device), "at its peak"
        free, whole = torch.cuda.mem_get_info(world.device)
        reserved = torch.cuda.memory_reserved(world.device)
        idle = reserved - torch.cuda.memory_allocated(world.device)
        others = max(0, whole - free - reserved)
        unused = f"{human_bytes(idle)} held by torch without use"
        around = [f"{human_bytes(whole)} on the device, {human_bytes(free)} free, {unused}"]
        if others > 2**28:
            around.append(f"{human_bytes(others)} used by other processes and libraries")
    else:
        used, what = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "resident at its peak"
        around = [f"{human_bytes(_host_bytes())} in this machine"]
    rest = max(0, used - sum(kept.values()))
    parts = sorted([*kept.items(), ("activations and everything else", rest)], key=lambda item: -item[1])
    contents = ", ".join(f"{name} {human_bytes(count)}" for name, count in parts)
    return [f"memory of rank {world.rank}: {human_bytes(used)} {what}: {contents}", *around]


def _host_bytes() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemTotal:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
