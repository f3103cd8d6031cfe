"""What the program that started this process says of its place in the job. The one place that asks; imports no torch.

Rung's own launcher and torchrun speak the language of torch (RANK, WORLD_SIZE, MASTER_ADDR, ...), MPI's launchers and
Slurm's srun each their own. Code that runs later in the same process, RPC and torch included, reads torch's: `describe`
translates. Where this process is to start ranks itself, clusters may still say how many, and where machines meet.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rung.errors import ConfigError

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
# What srun says to each task of a step, and only there: a batch script and the shell of salloc see those of the job.
_SLURM = (
    "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST",
)  # fmt: skip
# The variables that torchrun takes its settings from, by the name of ours.
_PET = {
    "nnodes": "PET_NNODES",
    "nproc": "PET_NPROC_PER_NODE",
    "rdzv": "PET_RDZV_ENDPOINT",
    "max_restarts": "PET_MAX_RESTARTS",
}
KEY_VARIABLE = "RUNG_RDZV_KEY"  # the secret that the processes of a user's jobs share
WORLD_KEY_VARIABLE = "RUNG_WORLD_KEY"  # that of the ranks of one world, which is of no use in another
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_LOOPBACK = "lo"
_SLURM_PORTS = range(15000, 25000)  # below those that systems give away by themselves


@dataclass(frozen=True)
class Place:
    """The place of this process in a job whose processes were started by another program than Rung."""

    launcher: str  # mpirun, torchrun, srun
    rank: int
    size: int
    local_rank: int
    local_size: int
    job: str = ""  # what the job is called on this machine
    node: str = ""  # what the launcher calls this machine, if it says so

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_one_machine(self) -> bool:
        return self.local_size == self.size


@dataclass(frozen=True)
class Step:
    """A step of a Slurm job: srun has started its tasks, of which this process is one."""

    place: Place
    tasks: tuple[int, ...]  # on each of its machines
    head: str  # the machine of task 0, as Slurm calls it
    port: int  # the same for all tasks of the step, and most likely another one in other jobs

    @property
    def num_nodes(self) -> int:
        return len(self.tasks)


@dataclass(frozen=True)
class Told:
    """A setting of which the environment speaks, to a process that starts ranks itself."""

    setting: str
    value: str
    variable: str


def is_in_environment(name: str) -> bool:
    """Whether the user has set a variable of another program's."""
    return name in os.environ


def outside_place() -> Place | None:
    """Where this process stands if torchrun, mpirun or srun started it as one of several; None if nobody did."""
    if "TORCHELASTIC_RUN_ID" in os.environ and has_store() and (numbers := _numbers(_TORCHRUN)) is not None:
        return Place("torchrun", *numbers, os.environ["TORCHELASTIC_RUN_ID"])
    return silent_place()


def silent_place() -> Place | None:
    """The same for those who do not say it in torch's words. mpirun may use srun to reach its machines."""
    place = mpi_place()
    if place is None and (step := slurm_step()) is not None:
        place = step.place
    return place


def mpi_place() -> Place | None:
    """The same for MPI's launchers alone."""
    for names in _MPI:
        if (numbers := _numbers(names)) is not None:
            # Where nothing names the job, its processes on this machine have one parent.
            job = next((os.environ[name] for name in _JOB_NAMES if name in os.environ), f"parent-{os.getppid()}")
            return Place("mpirun", *numbers, job)
    return None


def slurm_step() -> Step | None:
    """What srun says of this process; None where it started no other than this one."""
    if not all(name in os.environ for name in _SLURM):
        return None
    job, step, rank, local_rank, node, size = map(_number, _SLURM[:6])
    tasks = tuple(_tasks_per_node(os.environ["SLURM_STEP_TASKS_PER_NODE"]))
    if sum(tasks) != size:
        raise ConfigError(
            f"SLURM_STEP_TASKS_PER_NODE={os.environ['SLURM_STEP_TASKS_PER_NODE']} is in the environment, which is not "
            f"SLURM_STEP_NUM_TASKS={size}. Slurm sets both; correct or unset them."
        )
    if size == 1 or node >= len(tasks):
        return None
    name = os.environ.get("SLURMD_NODENAME", "")
    place = Place("srun", rank, size, local_rank, tasks[node], f"{job}.{step}", name)
    head = os.environ.get("MASTER_ADDR") or _first_host(os.environ["SLURM_STEP_NODELIST"])
    port = (
        _number("MASTER_PORT") if os.environ.get("MASTER_PORT") else _SLURM_PORTS[(31 * job + step) % len(_SLURM_PORTS)]
    )
    return Step(place, tasks, head, port)


def _tasks_per_node(text: str) -> Iterator[int]:
    """2(x3),1 is 2, 2, 2, 1."""
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        yield from [int(count)] * int(times or 1)


def _first_host(text: str) -> str:
    """gpu003 of gpu[003-004,7],cpu1."""
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", text).partition(",")[0]


def contradiction(place: Place) -> str | None:
    """Where torch's words, which somebody has exported for all processes, do not fit what the launcher says."""
    for name, value in (("WORLD_SIZE", place.size), ("RANK", place.rank)):
        if os.environ.get(name, str(value)) != str(value):
            return (
                f"{name}={os.environ[name]} is in the environment, and {place.launcher} says that this is rank "
                f"{place.rank} of {place.size}. Do not export {name}: it follows from {place.launcher}."
            )
    return None


def stray_ranks() -> str | None:
    """The variables of torch's `env://`, if somebody has set them for one of several processes whom no launcher that
    Rung knows has started: an older operator of Kubernetes, or a script."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if not all(name in os.environ for name in names) or outside_place() is not None or _number("WORLD_SIZE") == 1:
        return None
    return " ".join(f"{name}={os.environ[name]}" for name in names)


def told_settings() -> list[Told]:
    """What the cluster says of machines and processes to one that starts ranks: the variables from which torchrun takes
    its own settings (Kubeflow sets them), and those of a Slurm step with a task on each machine."""
    torch, slurm = ({told.setting: told for told in found} for found in (_told_by_torch(), _told_by_slurm()))
    if "nnodes" in torch and "nnodes" in slurm and not _holds(torch["nnodes"].value, slurm["nnodes"].value):
        raise ConfigError(
            f"PET_NNODES={torch['nnodes'].value} is in the environment, and srun has started this command on "
            f"{slurm['nnodes'].value} machines. Unset PET_NNODES, or use srun --nodes {torch['nnodes'].value}."
        )
    return list({**slurm, **torch}.values())


def _holds(text: str, number: str) -> bool:
    """Whether a number is, or is within, what is said as N or MIN:MAX. Anything else is refused where it is read."""
    least, _, most = text.partition(":")
    if not (least.isdecimal() and (most or least).isdecimal()):
        return True
    return int(least) <= int(number) <= int(most or least)


def _told_by_torch() -> list[Told]:
    found = {key: Told(key, os.environ[name], name) for key, name in _PET.items() if os.environ.get(name)}
    if "nproc" in found and found["nproc"].value in ("auto", "gpu"):
        del found["nproc"]  # one process for each GPU is what happens anyway
    elif "nproc" in found and found["nproc"].value == "cpu":
        found["nproc"] = replace(found["nproc"], value=str(os.cpu_count() or 1))
    if "rdzv" not in found and os.environ.get("PET_MASTER_ADDR"):
        port = os.environ.get("PET_MASTER_PORT") or "29500"  # torchrun's, where nothing says another one
        found["rdzv"] = Told("rdzv", f"{os.environ['PET_MASTER_ADDR']}:{port}", "PET_MASTER_ADDR")
    backend = os.environ.get("PET_RDZV_BACKEND", "c10d")
    if "rdzv" in found and backend not in ("c10d", "static"):
        raise ConfigError(
            f"PET_RDZV_BACKEND={backend} is in the environment, and Rung's machines meet by c10d: put that there, with "
            "one of the machines and a free port as PET_RDZV_ENDPOINT, or unset it."
        )
    return list(found.values())


def _told_by_slurm() -> list[Told]:
    step = slurm_step()
    if step is None:
        return []
    nodes = Told("nnodes", str(step.num_nodes), "SLURM_STEP_NUM_NODES")
    return [nodes, Told("rdzv", f"{step.head}:{step.port}", "SLURM_STEP_NODELIST")]


def _numbers(names: tuple[str, str, str, str]) -> tuple[int, int, int, int] | None:
    if not all(name in os.environ for name in names):
        return None
    rank, size, local_rank, local_size = map(_number, names)
    for name, value, other, limit in ((names[0], rank, names[1], size), (names[2], local_rank, names[3], local_size)):
        if value >= limit:
            raise ConfigError(
                f"{name}={value} and {other}={limit} are in the environment: ranks are counted from 0, and there is "
                "no such one. Whoever started this process sets both, or neither."
            )
    return rank, size, local_rank, local_size


def _number(name: str) -> int:
    text = os.environ[name]
    if not text.isdecimal():
        raise ConfigError(f"{name}={text} is in the environment, where a number should be. Correct or unset it.")
    return int(text)


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
    """The place that MPI's launcher or srun speaks of, unless torch's words say where this process stands."""
    return None if "WORLD_SIZE" in os.environ else silent_place()


def set_environment_sizes(size: int, local_size: int) -> None:
    """Correct what the launcher's environment says, where not every process that it started takes part."""
    os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"] = str(size), str(local_size)


def has_store() -> bool:
    """Whether the environment says where the ranks' store is."""
    return "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ


def environment_key() -> str | None:
    """The shared key, if the user or a scheduler put one into the environment."""
    return os.environ.get(KEY_VARIABLE) or None


def environment_world_key() -> str | None:
    """The key of the world that this process is a rank of, if its launcher has made one."""
    return os.environ.get(WORLD_KEY_VARIABLE) or None


def set_environment_world_key(key: str) -> None:
    os.environ[WORLD_KEY_VARIABLE] = key


def use_interface(name: str | None) -> None:
    """Let the collectives of this process listen on one network interface alone. Between machines the user may have
    named others; a job on loopback stays there, and its launcher says so: see `ignored_interfaces`.

    Without it gloo takes the one that the machine's name resolves to, and NCCL the first that it likes. Between
    machines NCCL chooses by itself: InfiniBand may be among them.
    """
    if name == _LOOPBACK:
        os.environ.update(dict.fromkeys(_INTERFACES, name))
    elif name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def ignored_interfaces(name: str | None = _LOOPBACK) -> str | None:
    """What to tell the user where the environment names interfaces for a job that uses this one."""
    named = [f"{key}={os.environ[key]}" for key in _INTERFACES if os.environ.get(key, _LOOPBACK) != _LOOPBACK]
    if name != _LOOPBACK or not named:
        return None
    is_one = len(named) == 1
    return (
        f"{' and '.join(named)} {'is' if is_one else 'are'} in the environment, and this job stays on loopback: "
        f"{'it counts' if is_one else 'they count'} between machines, with --rdzv"
    )


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
    return os.environ["MASTER_ADDR"], _number("MASTER_PORT"), kept
