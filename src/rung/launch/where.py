"""Whether a command starts ranks or is one of those that are there, and what the cluster says of their number."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rung.config import SETTINGS, Resolved, RunConfig, check, count_range
from rung.environment import Place, Step, Told, outside_place, slurm_step, stray_ranks, told_settings
from rung.errors import ConfigError
from rung.network import slurm_address, split_endpoint
from rung.processes import share_of_cores

_MACHINES = ("nproc", "nnodes", "rdzv")


def place_of_command(given: Mapping[str, Any]) -> Place | None:
    """Where this process stands in the job of torchrun, mpirun or srun; None if it is to start ranks itself.

    srun may have started either: tasks that are ranks, or a launcher on each machine, which the settings that are
    `given` tell apart.
    """
    place, step = outside_place(), slurm_step()
    _refuse_stray_ranks(given)
    if place is None or step is None or place != step.place:
        return place
    nproc, nnodes, rdzv = (given.get(name) for name in _MACHINES)
    nodes = count_range(str(nnodes or 1), "nnodes")
    only_one_each = set(step.tasks) == {1}
    if nodes[1] == 1 and rdzv is None and (nproc is None or str(nproc) == str(place.local_size) or not only_one_each):
        return place
    if not only_one_each:
        raise ConfigError(_several_tasks(step, given))
    return None


def _refuse_stray_ranks(given: Mapping[str, Any]) -> None:
    """Without a word of several machines, each of the processes would train a model of its own."""
    found = stray_ranks()
    if found is None or any(given.get(name) is not None for name in ("nnodes", "rdzv")) or told_settings():
        return
    at = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    raise ConfigError(
        f"{found} are in the environment, and neither torchrun nor mpirun nor srun has set them. Start one launcher on "
        f"each machine, `rung train --nnodes N --rdzv {at} ...`, or each process by torchrun, or unset them."
    )


def _several_tasks(step: Step, given: Mapping[str, Any]) -> str:
    asked = " ".join(f"--{name} {given[name]}" for name in ("nnodes", "rdzv") if given.get(name) is not None)
    machines = f"{step.num_nodes} machines" if step.num_nodes > 1 else "one machine"
    return (
        f"{asked} is for one launcher on each machine, and srun has started {step.place.size} tasks on {machines}. "
        "Start one on each, `srun --ntasks-per-node=1 rung train --nproc N ...`, or leave the flags out: each task "
        "is a rank then."
    )


def take_told(resolved: Resolved, only: Collection[str] = tuple(SETTINGS)) -> tuple[Resolved, str]:
    """The settings of a launcher with what the cluster says, which flags may repeat, and a line that tells of it.

    What the task or an old run says of machines gives way: neither knows where it is started.
    """
    config, origins, taken = resolved.config, dict(resolved.origins), list[str]()
    for told in _useful(resolved):
        if told.setting not in only:
            continue
        given, origin = getattr(config, told.setting), origins.get(told.setting, "default")
        value = _read(told)
        if origin in ("default", "task", "run"):
            config = replace(config, **{told.setting: value})
            origins[told.setting] = f"environment {told.variable}"
            taken.append(f"--{told.setting.replace('_', '-')} {value} ({told.variable})")
        elif not _agrees(told, str(given), str(value)):
            raise ConfigError(_contradiction(told, given, origin))
    line = f"from the environment: {', '.join(taken)}" if taken else ""
    return replace(resolved, config=config, origins=origins), line


def _useful(resolved: Resolved) -> list[Told]:
    """What the cluster says; the place to meet only if there are several machines to meet."""
    found = told_settings()
    nodes = next((_read(told) for told in found if told.setting == "nnodes"), resolved.config.nnodes)
    is_alone = count_range(nodes, "nnodes")[1] == 1
    return [told for told in found if told.setting != "rdzv" or not is_alone]


def _read(told: Told) -> Any:
    """The value of a setting. Slurm's names of machines become such that the network knows."""
    text = told.value
    if told.variable == "SLURM_STEP_NODELIST":
        host, port = split_endpoint(text)
        text = f"{slurm_address(host)}:{port}"
    try:
        return check(told.setting, text)
    except ConfigError as error:
        raise ConfigError(f"{told.variable}={text} is in the environment: {error}") from None


def _agrees(told: Told, given: str, value: str) -> bool:
    """A range agrees with a number in it. Machines may meet elsewhere than at the first one, if only all do."""
    if told.variable in ("PET_MASTER_ADDR", "SLURM_STEP_NODELIST") or given == value:
        return True
    if told.setting in ("nnodes", "nproc") and value.isdigit():
        least, most = count_range(given, told.setting)
        return least <= int(value) <= most
    return False


def _contradiction(told: Told, given: Any, origin: str) -> str:
    flag = f"--{told.setting.replace('_', '-')}"
    asked = f"{flag} {given}" if origin == "flag" else f"{told.setting} = {given} ({origin})"
    if told.variable.startswith("SLURM"):
        return (
            f"{asked} contradicts srun, which has started this command on {told.value} machines ({told.variable}). "
            f"Leave it out, or use srun --nodes {given}."
        )
    return (
        f"{asked} contradicts {told.variable}={told.value}, which whoever started this process has put into its "
        f"environment. Leave {flag} out, or unset {told.variable}."
    )


# -- commands beside `rung train` ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machines:
    """The job of a command: its place in one of another launcher, or the ranks that it is to start."""

    place: Place | None
    nproc: int | None
    nnodes: int
    rdzv: str | None
    line: str = ""  # tells what was taken from the environment


def find_machines(nproc: int | None, nnodes: int, rdzv: str | None) -> Machines:
    """What flags and environment say together. Refuses flags that contradict it or each other."""
    if nproc is not None and nproc < 1:
        raise ConfigError(f"--nproc {nproc}: at least one process is needed.")
    place = place_of_command({"nproc": nproc, "nnodes": nnodes, "rdzv": rdzv})
    if place is not None and (nproc not in (None, place.local_size) or nnodes > 1):
        raise ConfigError(
            f"{place.launcher} has started {place.size} processes, {place.local_size} of them here: leave out --nproc, "
            "--nnodes and --rdzv."
        )
    found = Machines(place, nproc, nnodes, rdzv) if place is not None else _with_told(nproc, nnodes, rdzv)
    if (found.nnodes > 1) != (found.rdzv is not None) or nnodes < 1:
        raise ConfigError("several machines need both --nnodes N and --rdzv HOST:PORT, the same on each.")
    return found


def _with_told(nproc: int | None, nnodes: int, rdzv: str | None) -> Machines:
    asked = RunConfig(nproc=str(nproc) if nproc is not None else None, nnodes=str(nnodes), rdzv=rdzv)
    origins = {name: "flag" for name in _MACHINES if getattr(asked, name) != SETTINGS[name].default}
    resolved, line = take_told(Resolved(asked, origins=origins), only=_MACHINES)
    config = resolved.config
    processes = count_range(config.nproc)[1] if config.nproc is not None else None
    return Machines(None, processes, count_range(config.nnodes, "nnodes")[1], config.rdzv, line)


def take_share_of_cores(place: Place) -> None:
    """mpirun leaves each process with a thread for every core of the machine."""
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(share_of_cores(place.local_size))
