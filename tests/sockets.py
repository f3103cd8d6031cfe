"""Which sockets a process and its children listen at, as the kernel tells."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

_LISTEN = "0A"


@dataclass(frozen=True, order=True)
class Listener:
    address: str
    port: int
    pid: int


def family_of(pid: int) -> set[int]:
    """A process and all that descend from it. One whose parent has ended is found by its session or process group."""
    parents, groups = {}, {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                parents[int(entry)], groups[int(entry)] = int(words[1]), int(words[3])
    found, session = {pid}, groups.get(pid)
    while True:
        more = {child for child, parent in parents.items() if parent in found} - found
        if not more:
            return found | {one for one, group in groups.items() if group == session == pid}
        found |= more


def listeners(pids: set[int]) -> set[Listener]:
    """Where these processes listen over TCP."""
    owners = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    owners[os.readlink(f"/proc/{pid}/fd/{name}")] = pid
    found = set()
    for pid in list(pids)[:1]:
        for name in ("tcp", "tcp6"):
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
                    words = line.split()
                    owner = owners.get(f"socket:[{words[9]}]")
                    if words[3] == _LISTEN and owner is not None:
                        host, port = words[1].split(":")
                        found.add(Listener(_address(host), int(port, 16), owner))
    return found


def _address(text: str) -> str:
    words = [int(text[start : start + 8], 16) for start in range(0, len(text), 8)]
    packed = b"".join(struct.pack("<I", word) for word in words)
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)
