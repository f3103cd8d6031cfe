"""For commands beside `rung train` that need ranks: whether to start them, or to be one of those that are there."""

from __future__ import annotations

import os

from rung.environment import Place, outside_place
from rung.errors import ConfigError
from rung.processes import share_of_cores


def place_for(nproc: int | None, nnodes: int, rdzv: str | None) -> Place | None:
    """Where this process stands in the job of torchrun or mpirun; None if ranks are to be started. Refuses flags that
    contradict it or each other."""
    if nproc is not None and nproc < 1:
        raise ConfigError(f"--nproc {nproc}: at least one process is needed.")
    if (nnodes > 1) != (rdzv is not None) or nnodes < 1:
        raise ConfigError("several machines need both --nnodes N and --rdzv HOST:PORT, the same on each.")
    place = outside_place()
    if place is not None and (nproc not in (None, place.local_size) or nnodes > 1):
        raise ConfigError(
            f"{place.launcher} has started {place.size} processes, {place.local_size} of them here: leave out --nproc, "
            "--nnodes and --rdzv."
        )
    return place


def take_share_of_cores(place: Place) -> None:
    """mpirun leaves each process with a thread for every core of the machine."""
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(share_of_cores(place.local_size))
