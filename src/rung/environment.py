"""What the program that started this process says of its place in the job. The one place that asks; imports no torch.

Rung's own launcher and torchrun speak the language of torch (RANK, WORLD_SIZE, MASTER_ADDR, ...), MPI's launchers each
their own. Code that runs later in the same process, RPC and torch included, reads torch's: `describe` translates.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

# Rank, size, and the same on this machine. A family counts when all four are there: Slurm sets two of the last one's
# for every job, whoever then starts processes.
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
)
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# What names a job among those of one machine, the most telling first.
_JOB_NAMES = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID")


@dataclass(frozen=True)
class Place:
    """The place of this process in a job whose processes were started by another program than Rung."""

    launcher: str  # mpirun, torchrun
    rank: int
    size: int
    local_rank: int
    local_size: int
    job: str = ""  # what the job is called on this machine

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_one_machine(self) -> bool:
        return self.local_size == self.size


def is_in_environment(name: str) -> bool:
    """Whether the user has set a variable of another program's."""
    return name in os.environ


def outside_place() -> Place | None:
    """Where this process stands if torchrun or mpirun started it as one of several; None if nobody did."""
    if "TORCHELASTIC_RUN_ID" in os.environ and has_store() and (numbers := _numbers(_TORCHRUN)) is not None:
        return Place("torchrun", *numbers, os.environ["TORCHELASTIC_RUN_ID"])
    return mpi_place()


def mpi_place() -> Place | None:
    """The same for MPI's launchers alone."""
    for names in _MPI:
        if (numbers := _numbers(names)) is not None:
            # Where nothing names the job, its processes on this machine have one parent.
            job = next((os.environ[name] for name in _JOB_NAMES if name in os.environ), f"parent-{os.getppid()}")
            return Place("mpirun", *numbers, job)
    return None


def _numbers(names: tuple[str, str, str, str]) -> tuple[int, int, int, int] | None:
    if not all(name in os.environ for name in names):
        return None
    rank, size, local_rank, local_size = (int(os.environ[name]) for name in names)
    return rank, size, local_rank, local_size


def environment_size() -> int:
    """How many ranks the launcher of this process says there are."""
    place = _untold_place()
    return place.size if place is not None else int(os.environ.get("WORLD_SIZE", "1"))


def environment_rank() -> int:
    place = _untold_place()
    return place.rank if place is not None else int(os.environ.get("RANK", "0"))


def environment_local_size() -> int:
    place = _untold_place()
    return place.local_size if place is not None else int(os.environ.get("LOCAL_WORLD_SIZE", environment_size()))


def environment_local_rank() -> int:
    place = _untold_place()
    return place.local_rank if place is not None else int(os.environ.get("LOCAL_RANK", environment_rank()))


def _untold_place() -> Place | None:
    """The place that MPI's launcher speaks of, unless torch's words say where this process stands."""
    return None if "WORLD_SIZE" in os.environ else mpi_place()


def set_environment_sizes(size: int, local_size: int) -> None:
    """Correct what the launcher's environment says, where not every process that it started takes part."""
    os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"] = str(size), str(local_size)


def has_store() -> bool:
    """Whether the environment says where the ranks' store is."""
    return "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ


def describe(place: Place, host: str, port: int) -> None:
    """Say in torch's own words where this process stands and where the store listens, which is open already."""
    values = (place.rank, place.size, place.local_rank, place.local_size)
    os.environ.update({name: str(value) for name, value in zip(_TORCHRUN, values, strict=True)})
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")


def outside_attempt() -> int:
    """How often torchrun has started this job before."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def store_address() -> tuple[str, int, bool]:
    """Host and port of the ranks' store, and whether somebody else than rank 0 keeps it."""
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), kept
