"""The settings of a job that mpirun, torchrun or srun has started.

Those that need Rung's own launcher, such as restarts or a range of processes, are refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rung.errors import ConfigError, StrategyError
from rung.launch.rendezvous.elastic import ElasticPolicy
from rung.spec.config import Resolved, RunConfig
from rung.spec.strategy import Layout, default_name, parse
from rung.system.launcher_env import LauncherRank, contradiction

_SIZE_FLAGS = {"mpirun": "mpirun -n", "torchrun": "torchrun --nproc-per-node", "srun": "srun --ntasks"}
# Settings that need Rung's own launcher, and their neutral values.
_LAUNCHERS = {"nnodes": "1", "rdzv": None, "max_restarts": None}


def fit_to_launcher(resolved: Resolved, place: LauncherRank) -> Resolved:
    """Refuse settings that contradict the external launcher, and drop those of a resumed run."""
    if (message := contradiction(place)) is not None:
        raise ConfigError(message)
    config = resolved.config
    dropped: dict[str, Any] = {}
    for name, nothing in _LAUNCHERS.items():
        value = getattr(config, name)
        if value in (nothing, 0):
            continue
        if resolved.origins.get(name) != "run":
            raise ConfigError(
                f"--{name.replace('_', '-')} {value} is for Rung's own launcher. This job was started by "
                f"{place.launcher}, which decides how many processes there are, and where. Leave it out, or start "
                f"{_own_launcher(place)}."
            )
        dropped[name] = nothing
    if config.nproc is not None and config.nproc != str(place.local_size):
        if resolved.origins.get("nproc") != "run":
            raise ConfigError(
                f"--nproc {config.nproc} and {place.launcher}'s {place.local_size} "
                f"process{'es' if place.local_size > 1 else ''} on this machine ({place.size} in all) contradict each "
                f"other. Leave --nproc out: {place.launcher} has started them."
            )
        dropped["nproc"] = None
    return replace(resolved, config=replace(config, **dropped))


def _own_launcher(place: LauncherRank) -> str:
    if place.launcher != "srun":
        return "`rung train` by itself"
    return "one `rung train` on each machine, with srun --ntasks-per-node=1, --nproc N and --nnodes N"


def resolve_external_layout(config: RunConfig, place: LauncherRank) -> tuple[str, Layout, ElasticPolicy]:
    """Strategy, layout and policy of a job whose launcher has fixed the number of ranks."""
    strategy = config.strategy or default_name(place.size)
    try:
        layout = parse(strategy, place.size, place.local_size, config.schedule, config.servers)
    except StrategyError as error:
        raise StrategyError(str(error).replace("--nproc", _SIZE_FLAGS[place.launcher])) from None
    return strategy, layout, ElasticPolicy((place.local_size, place.local_size), grace_seconds=config.grace_seconds)
