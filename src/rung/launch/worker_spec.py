"""What the launcher tells a rank about the world that it belongs to."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class WorkerSpec:
    """The world that a rank belongs to; the same for all ranks of this machine."""

    state: str  # the folder of the status board and of failure records
    size: int  # processes of the job
    used: int  # processes that train; ranks from here on are spares
    local_used: int
    attempt: int
    interface: str | None  # the network between the machines of the job
    key: str = field(repr=False)  # with which the ranks of this world sign messages
