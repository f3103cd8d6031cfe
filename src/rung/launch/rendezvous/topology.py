"""Decides whether a command starts ranks or is a rank itself, and reads its sizes from the cluster's environment."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rung.errors import ConfigError
from rung.spec.config import SETTINGS, Resolved, RunConfig, check, count_range
from rung.system.launcher_env import (
    EnvSetting,
    LauncherRank,
    SlurmStep,
    env_settings,
    external_rank,
    slurm_step,
    unmanaged_rank_env,
)
from rung.system.network import slurm_address, split_endpoint
from rung.system.processes import share_of_cores

_MACHINES = ("nproc", "nnodes", "rdzv")


def rank_of_command(given: Mapping[str, Any]) -> LauncherRank | None:
    """The rank of this process in a job of torchrun, mpirun or srun; None if this process starts ranks itself.

    srun starts either tasks that are ranks or one launcher on each machine; the `given` settings distinguish the two.
    """
    place, step = external_rank(), slurm_step()
    _refuse_unmanaged_ranks(given)
    if place is None or step is None or place != step.place:
        return place
    nproc, nnodes, rdzv = (given.get(name) for name in _MACHINES)
    nodes = count_range(str(nnodes or 1), "nnodes")
    one_per_node = set(step.tasks) == {1}
    if nodes[1] == 1 and rdzv is None and (nproc is None or str(nproc) == str(place.local_size) or not one_per_node):
        return place
    if not one_per_node:
        raise ConfigError(_several_tasks(step, given))
    return None


def _refuse_unmanaged_ranks(given: Mapping[str, Any]) -> None:
    """Refuse env:// variables that no known launcher set: each process would train a model of its own."""
    found = unmanaged_rank_env()
    if found is None or any(given.get(name) is not None for name in ("nnodes", "rdzv")) or env_settings():
        return
    at = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    raise ConfigError(
        f"{found} are in the environment, but neither torchrun nor mpirun nor srun set them. Start one launcher on "
        f"each machine, `rung train --nnodes N --rdzv {at} ...`, or start each process by torchrun, or unset them."
    )


def _several_tasks(step: SlurmStep, given: Mapping[str, Any]) -> str:
    flags = " ".join(f"--{name} {given[name]}" for name in ("nnodes", "rdzv") if given.get(name) is not None)
    machines = f"{step.num_nodes} machines" if step.num_nodes > 1 else "one machine"
    return (
        f"{flags} is for one launcher on each machine, but srun has started {step.place.size} tasks on {machines}. "
        "Start one task on each, `srun --ntasks-per-node=1 rung train --nproc N ...`, or leave the flags out: then "
        "each task is a rank."
    )


def apply_cluster_env(resolved: Resolved, only: Collection[str] = tuple(SETTINGS)) -> tuple[Resolved, str]:
    """Fill in the settings that the cluster's environment gives. Returns them, and a line that lists what was taken.

    The environment overrides the task's defaults and those of a resumed run, which do not depend on where the job is
    started. It must agree with flags.
    """
    config, origins, taken = resolved.config, dict(resolved.origins), list[str]()
    for env in _applicable_settings(resolved):
        if env.setting not in only:
            continue
        given, origin = getattr(config, env.setting), origins.get(env.setting, "default")
        value = _parse(env)
        if origin in ("default", "task", "run"):
            config = replace(config, **{env.setting: value})
            origins[env.setting] = f"environment {env.variable}"
            taken.append(f"--{env.setting.replace('_', '-')} {value} ({env.variable})")
        elif not _agrees(env, str(given), str(value)):
            raise ConfigError(_contradiction(env, given, origin))
    line = f"from the environment: {', '.join(taken)}" if taken else ""
    return replace(resolved, config=config, origins=origins), line


def _applicable_settings(resolved: Resolved) -> list[EnvSetting]:
    """The settings of the environment, without the rendezvous endpoint if there is only one machine."""
    found = env_settings()
    nodes = next((_parse(env) for env in found if env.setting == "nnodes"), resolved.config.nnodes)
    is_one_machine = count_range(nodes, "nnodes")[1] == 1
    return [env for env in found if env.setting != "rdzv" or not is_one_machine]


def _parse(env: EnvSetting) -> Any:
    text = env.value
    if env.variable == "SLURM_STEP_NODELIST":  # its node names need not resolve
        host, port = split_endpoint(text)
        text = f"{slurm_address(host)}:{port}"
    try:
        return check(env.setting, text)
    except ConfigError as error:
        raise ConfigError(f"{env.variable}={text} is in the environment: {error}") from None


def _agrees(env: EnvSetting, given: str, value: str) -> bool:
    """Whether a flag agrees with the environment: it has the same value, or is a range that includes it."""
    # These name the first machine as a default endpoint; any other will do if all machines use it.
    if env.variable in ("PET_MASTER_ADDR", "SLURM_STEP_NODELIST") or given == value:
        return True
    if env.setting in ("nnodes", "nproc") and value.isdigit():
        least, most = count_range(given, env.setting)
        return least <= int(value) <= most
    return False


def _contradiction(env: EnvSetting, given: Any, origin: str) -> str:
    flag = f"--{env.setting.replace('_', '-')}"
    setting = f"{flag} {given}" if origin == "flag" else f"{env.setting} = {given} ({origin})"
    if env.variable.startswith("SLURM"):
        return (
            f"{setting} contradicts srun, which has started this command on {env.value} machines ({env.variable}). "
            f"Leave it out, or use srun --nodes {given}."
        )
    return (
        f"{setting} contradicts {env.variable}={env.value} in the environment. Leave {flag} out, or unset "
        f"{env.variable}."
    )


# -- commands beside `rung train` ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machines:
    """The ranks of a command: its own rank under another launcher, or the numbers of ranks to start."""

    place: LauncherRank | None
    nproc: int | None
    nnodes: int
    rdzv: str | None
    line: str = ""  # lists what was taken from the environment


def find_machines(nproc: int | None, nnodes: int, rdzv: str | None) -> Machines:
    """Combine flags and environment. Refuses flags that contradict the environment or each other."""
    if nproc is not None and nproc < 1:
        raise ConfigError(f"--nproc {nproc}: at least one process is needed.")
    place = rank_of_command({"nproc": nproc, "nnodes": nnodes, "rdzv": rdzv})
    if place is not None and (nproc not in (None, place.local_size) or nnodes > 1):
        raise ConfigError(
            f"{place.launcher} has started {place.size} processes, {place.local_size} of them on this machine. Leave "
            "out --nproc, --nnodes and --rdzv."
        )
    found = Machines(place, nproc, nnodes, rdzv) if place is not None else _from_cluster_env(nproc, nnodes, rdzv)
    if (found.nnodes > 1) != (found.rdzv is not None) or nnodes < 1:
        raise ConfigError("several machines need both --nnodes N and --rdzv HOST:PORT, the same on each.")
    return found


def _from_cluster_env(nproc: int | None, nnodes: int, rdzv: str | None) -> Machines:
    config = RunConfig(nproc=str(nproc) if nproc is not None else None, nnodes=str(nnodes), rdzv=rdzv)
    origins = {name: "flag" for name in _MACHINES if getattr(config, name) != SETTINGS[name].default}
    resolved, line = apply_cluster_env(Resolved(config, origins=origins), only=_MACHINES)
    config = resolved.config
    processes = count_range(config.nproc)[1] if config.nproc is not None else None
    return Machines(None, processes, count_range(config.nnodes, "nnodes")[1], config.rdzv, line)


def take_share_of_cores(place: LauncherRank) -> None:
    """Limit torch's threads: under mpirun each process would start one for every core of the machine."""
    import torch  # slow to load: the rest of this module is needed without it

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(share_of_cores(place.local_size))
