"""Reads the environment that a launcher sets: this process's rank, and settings of the cluster. Imports no torch.

No other module reads these variables. Rung's own launcher and torchrun set torch's (RANK, WORLD_SIZE, MASTER_ADDR,
...), MPI's launchers and Slurm's srun their own. Code that runs later in the same process, RPC and torch included,
reads torch's: `describe` sets them. For a process that starts ranks itself, a cluster may still set the number of
machines and processes and the rendezvous endpoint.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rung.errors import ConfigError

# Rank, size, local rank and local size. A family counts only with all four: Slurm sets two of the last one for every
# job, whatever starts the processes.
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
)
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# Variables that identify a job among those of one machine, the most specific first.
_JOB_NAMES = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID")
# Variables that srun sets in the tasks of a step only: batch scripts and salloc's shell have those of the job.
_SLURM = (
    "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST",
)  # fmt: skip
# The variables of torchrun's settings, by the name of Rung's setting.
_PET = {
    "nnodes": "PET_NNODES",
    "nproc": "PET_NPROC_PER_NODE",
    "rdzv": "PET_RDZV_ENDPOINT",
    "max_restarts": "PET_MAX_RESTARTS",
}
KEY_VARIABLE = "RUNG_RDZV_KEY"  # the secret that the processes of a user's jobs share
STORE_CACHE_VARIABLE = "RUNG_STORE_CACHE"  # the folder for the local parts of runs that are in a store
WORLD_KEY_VARIABLE = "RUNG_WORLD_KEY"  # the secret of the ranks of one world, invalid in another
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_LOOPBACK = "lo"
_SLURM_PORTS = range(15000, 25000)  # below the ports that systems assign automatically


@dataclass(frozen=True)
class LauncherRank:
    """The rank of this process in a job that another program than Rung has started."""

    launcher: str  # mpirun, torchrun, srun
    rank: int
    size: int
    local_rank: int
    local_size: int
    job: str = ""  # the name of the job on this machine
    node: str = ""  # the launcher's name of this machine, if it sets one

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_one_machine(self) -> bool:
        return self.local_size == self.size


@dataclass(frozen=True)
class SlurmStep:
    """The Slurm job step of this process, one of its tasks."""

    place: LauncherRank
    tasks: tuple[int, ...]  # on each of its machines
    head: str  # Slurm's name of the machine of task 0
    port: int  # the same for all tasks of the step, and most likely another in other jobs

    @property
    def num_nodes(self) -> int:
        return len(self.tasks)


@dataclass(frozen=True)
class EnvSetting:
    """A setting from the environment, for a process that starts ranks itself."""

    setting: str
    value: str
    variable: str


def is_in_environment(name: str) -> bool:
    """Whether a variable is set that belongs to another program."""
    return name in os.environ


def external_rank() -> LauncherRank | None:
    """The rank of this process if torchrun, mpirun or srun started it as one of several, else None."""
    if "TORCHELASTIC_RUN_ID" in os.environ and has_store() and (numbers := _numbers(_TORCHRUN)) is not None:
        return LauncherRank("torchrun", *numbers, os.environ["TORCHELASTIC_RUN_ID"])
    return mpi_or_slurm_rank()


def mpi_or_slurm_rank() -> LauncherRank | None:
    """Rank info from MPI or Slurm variables. MPI's come first, since mpirun may use srun to reach its machines."""
    place = mpi_rank()
    if place is None and (step := slurm_step()) is not None:
        place = step.place
    return place


def mpi_rank() -> LauncherRank | None:
    """Rank info from MPI's variables."""
    for names in _MPI:
        if (numbers := _numbers(names)) is not None:
            # Without a name, the common parent of the job's processes on this machine identifies it.
            job = next((os.environ[name] for name in _JOB_NAMES if name in os.environ), f"parent-{os.getppid()}")
            return LauncherRank("mpirun", *numbers, job)
    return None


def slurm_step() -> SlurmStep | None:
    """The step that srun started this process in; None without srun or with a single task."""
    if not all(name in os.environ for name in _SLURM):
        return None
    job, step, rank, local_rank, node, size = map(_number, _SLURM[:6])
    tasks = tuple(_tasks_per_node(os.environ["SLURM_STEP_TASKS_PER_NODE"]))
    if sum(tasks) != size:
        raise ConfigError(
            f"SLURM_STEP_TASKS_PER_NODE={os.environ['SLURM_STEP_TASKS_PER_NODE']} in the environment adds up to "
            f"{sum(tasks)} tasks, but SLURM_STEP_NUM_TASKS={size}. Slurm sets both; correct or unset them."
        )
    if size == 1 or node >= len(tasks):
        return None
    name = os.environ.get("SLURMD_NODENAME", "")
    place = LauncherRank("srun", rank, size, local_rank, tasks[node], f"{job}.{step}", name)
    head = os.environ.get("MASTER_ADDR") or _first_host(os.environ["SLURM_STEP_NODELIST"])
    port = (
        _number("MASTER_PORT") if os.environ.get("MASTER_PORT") else _SLURM_PORTS[(31 * job + step) % len(_SLURM_PORTS)]
    )
    return SlurmStep(place, tasks, head, port)


def _tasks_per_node(text: str) -> Iterator[int]:
    """2(x3),1 is 2, 2, 2, 1."""
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        yield from [int(count)] * int(times or 1)


def _first_host(text: str) -> str:
    """gpu003 of gpu[003-004,7],cpu1."""
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", text).partition(",")[0]


def contradiction(place: LauncherRank) -> str | None:
    """An error message if exported RANK or WORLD_SIZE differ from the launcher's values."""
    for name, value in (("WORLD_SIZE", place.size), ("RANK", place.rank)):
        if os.environ.get(name, str(value)) != str(value):
            return (
                f"{name}={os.environ[name]} is in the environment, but {place.launcher} started this process as rank "
                f"{place.rank} of {place.size}. Do not export {name}: it follows from {place.launcher}."
            )
    return None


def unmanaged_rank_env() -> str | None:
    """The variables of torch's `env://`, if they are set for one of several processes without a launcher that Rung
    supports: by an older operator of Kubernetes, or a script."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if not all(name in os.environ for name in names) or external_rank() is not None or _number("WORLD_SIZE") == 1:
        return None
    return " ".join(f"{name}={os.environ[name]}" for name in names)


def env_settings() -> list[EnvSetting]:
    """The cluster's settings for a process that starts ranks: from torchrun's variables, which Kubeflow sets, and from
    those of a Slurm step with a task on each machine."""
    torch, slurm = ({each.setting: each for each in found} for found in (_torchrun_settings(), _slurm_settings()))
    if "nnodes" in torch and "nnodes" in slurm and not _holds(torch["nnodes"].value, slurm["nnodes"].value):
        raise ConfigError(
            f"PET_NNODES={torch['nnodes'].value} is in the environment, but srun has started this command on "
            f"{slurm['nnodes'].value} machines. Unset PET_NNODES, or use srun --nodes {torch['nnodes'].value}."
        )
    return list({**slurm, **torch}.values())


def _holds(text: str, number: str) -> bool:
    """Whether a number equals N or is within MIN:MAX. True for malformed text, which the setting's parser refuses."""
    least, _, most = text.partition(":")
    if not (least.isdecimal() and (most or least).isdecimal()):
        return True
    return int(least) <= int(number) <= int(most or least)


def _torchrun_settings() -> list[EnvSetting]:
    found = {key: EnvSetting(key, os.environ[name], name) for key, name in _PET.items() if os.environ.get(name)}
    if "nproc" in found and found["nproc"].value in ("auto", "gpu"):
        del found["nproc"]  # Rung's default, too: one process for each GPU
    elif "nproc" in found and found["nproc"].value == "cpu":
        found["nproc"] = replace(found["nproc"], value=str(os.cpu_count() or 1))
    if "rdzv" not in found and os.environ.get("PET_MASTER_ADDR"):
        port = os.environ.get("PET_MASTER_PORT") or "29500"  # torchrun's default
        found["rdzv"] = EnvSetting("rdzv", f"{os.environ['PET_MASTER_ADDR']}:{port}", "PET_MASTER_ADDR")
    backend = os.environ.get("PET_RDZV_BACKEND", "c10d")
    if "rdzv" in found and backend not in ("c10d", "static"):
        raise ConfigError(
            f"PET_RDZV_BACKEND={backend} is in the environment, but Rung's rendezvous is c10d: use that, with one of "
            "the machines and a free port as PET_RDZV_ENDPOINT, or unset it."
        )
    return list(found.values())


def _slurm_settings() -> list[EnvSetting]:
    step = slurm_step()
    if step is None:
        return []
    nodes = EnvSetting("nnodes", str(step.num_nodes), "SLURM_STEP_NUM_NODES")
    return [nodes, EnvSetting("rdzv", f"{step.head}:{step.port}", "SLURM_STEP_NODELIST")]


def _numbers(names: tuple[str, str, str, str]) -> tuple[int, int, int, int] | None:
    if not all(name in os.environ for name in names):
        return None
    rank, size, local_rank, local_size = map(_number, names)
    for name, value, other, limit in ((names[0], rank, names[1], size), (names[2], local_rank, names[3], local_size)):
        if value >= limit:
            raise ConfigError(
                f"{name}={value} and {other}={limit} are in the environment: ranks are counted from 0, so the last is "
                f"{limit - 1}. The launcher of this process has to set both, or neither."
            )
    return rank, size, local_rank, local_size


def _number(name: str) -> int:
    text = os.environ[name]
    if not text.isdecimal():
        raise ConfigError(f"{name}={text} is in the environment, but it must be a number. Correct or unset it.")
    return int(text)


def environment_size() -> int:
    """The number of ranks, by the environment of the launcher."""
    place = _rank_without_torch_env()
    return place.size if place is not None else int(os.environ.get("WORLD_SIZE", "1"))


def environment_rank() -> int:
    place = _rank_without_torch_env()
    return place.rank if place is not None else int(os.environ.get("RANK", "0"))


def environment_local_size() -> int:
    place = _rank_without_torch_env()
    return place.local_size if place is not None else int(os.environ.get("LOCAL_WORLD_SIZE", environment_size()))


def environment_local_rank() -> int:
    place = _rank_without_torch_env()
    return place.local_rank if place is not None else int(os.environ.get("LOCAL_RANK", environment_rank()))


def _rank_without_torch_env() -> LauncherRank | None:
    """Rank info from MPI or Slurm, unless torch's variables are set, which take precedence."""
    return None if "WORLD_SIZE" in os.environ else mpi_or_slurm_rank()


def set_environment_sizes(size: int, local_size: int) -> None:
    """Replace the launcher's sizes, where not every process that it started takes part."""
    os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"] = str(size), str(local_size)


def has_store() -> bool:
    """Whether the environment has the address of the ranks' store."""
    return "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ


def environment_key() -> str | None:
    """The shared key, if the user or a scheduler put one into the environment."""
    return os.environ.get(KEY_VARIABLE) or None


def environment_world_key() -> str | None:
    """The key of this rank's world, if its launcher has made one."""
    return os.environ.get(WORLD_KEY_VARIABLE) or None


def set_environment_world_key(key: str) -> None:
    os.environ[WORLD_KEY_VARIABLE] = key


def use_interface(name: str | None) -> None:
    """Restrict the collectives of this process to one network interface. Between machines, the user's own choice in
    the environment wins; on loopback it is overridden, and the launcher reports that: see `ignored_interfaces`.

    Without this, gloo listens on the interface that the machine's name resolves to, and NCCL on one of its choice.
    Between machines NCCL is left to choose: InfiniBand may be available.
    """
    if name == _LOOPBACK:
        os.environ.update(dict.fromkeys(_INTERFACES, name))
    elif name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def ignored_interfaces(name: str | None = _LOOPBACK) -> str | None:
    """A note for the user, if the environment names interfaces and the job uses loopback instead."""
    named = [f"{key}={os.environ[key]}" for key in _INTERFACES if os.environ.get(key, _LOOPBACK) != _LOOPBACK]
    if name != _LOOPBACK or not named:
        return None
    is_one = len(named) == 1
    return (
        f"{' and '.join(named)} {'is' if is_one else 'are'} in the environment, but this job uses loopback: "
        f"{'it takes' if is_one else 'they take'} effect between machines, with --rdzv"
    )


def describe(place: LauncherRank, host: str, port: int) -> None:
    """Set torch's variables to this process's rank and to the address of the store, which is open already."""
    values = (place.rank, place.size, place.local_rank, place.local_size)
    os.environ.update({name: str(value) for name, value in zip(_TORCHRUN, values, strict=True)})
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")


def external_attempt() -> int:
    """How often torchrun has restarted this job."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def store_address() -> tuple[str, int, bool]:
    """Host and port of the ranks' store, and whether the launcher serves it, not rank 0."""
    has_server = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return os.environ["MASTER_ADDR"], _number("MASTER_PORT"), has_server


def store_cache() -> str:
    """The folder on this machine for the local parts of runs and weights that are in a store."""
    return os.environ.get(STORE_CACHE_VARIABLE) or "runs"
