"""On which machines and processes `rung bench` and `rung doctor` run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from rung.launch.fork_server import start_fork_server
from rung.launch.rendezvous.topology import find_machines
from rung.system.launcher_env import LauncherRank


@dataclass(frozen=True)
class MachineOptions:
    """The flags that both commands have."""

    nproc: int | None = None
    nnodes: int = 1
    rdzv: str | None = None
    rdzv_key: str | None = None
    backend: str = "auto"
    device: str = "auto"


_Options = TypeVar("_Options", bound=MachineOptions)


def apply_environment(options: _Options, preload: Sequence[str]) -> tuple[_Options, LauncherRank | None]:
    """The options with what the scheduler's environment says of machines, and the rank that another launcher gave this
    process. Without one, starts the fork server, which loads the modules of `preload`."""
    machines = find_machines(options.nproc, options.nnodes, options.rdzv)
    if machines.line:
        sys.stderr.write(f"{machines.line}\n")
    if machines.place is None:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        start_fork_server([*preload, "torch.distributed.tensor"])
    return replace(options, nproc=machines.nproc, nnodes=machines.nnodes, rdzv=machines.rdzv), machines.place
