"""From flags and files to a job that can start: task, settings, strategy, layout, device, and every check on them."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rung.errors import StrategyError
from rung.launch import resume as old_run
from rung.launch.external_settings import fit_to_launcher, resolve_external_layout
from rung.launch.rendezvous.elastic import ElasticPolicy, elastic_policy
from rung.launch.rendezvous.topology import apply_cluster_env
from rung.launch.signals import leaving_at_once
from rung.spec.abilities import can, runs_threads
from rung.spec.compatibility import refuse_best_without_evaluation, refuse_task, validate_config
from rung.spec.config import Resolved, RunConfig, count_range, resolve
from rung.spec.observability import refuse_missing_trackers, tracker_names
from rung.spec.strategy import Layout, default_name, fit, parse, required_num_ranks
from rung.spec.task import Task, load_task
from rung.system.launcher_env import LauncherRank
from rung.system.processes import importing

# Functions here import modules that load torch themselves: after the task was found, and after the fork server has
# started, which loads it at the same time.


@dataclass(frozen=True)
class PreparedJob:
    """A job that has passed every check that needs no process. Nothing has started yet."""

    task: Task
    resolved: Resolved
    layout: Layout  # of the largest world that it may have
    strategy: str
    policy: ElasticPolicy
    environment_note: str = ""  # which settings come from the environment

    @property
    def config(self) -> RunConfig:
        return self.resolved.config


def prepare(
    path: str | Path,
    *,
    config_file: str | None = None,
    flags: Mapping[str, Any] | None = None,
    assignments: Mapping[str, str] | None = None,
    run: Path | None = None,
    place: LauncherRank | None = None,
    asks_cluster: bool = False,
) -> PreparedJob:
    """Read task and settings, choose layout and device, and refuse what cannot work, before any process starts.

    `run` is the directory of a run to resume; every other source of settings overrides its own. `place` is given where
    another launcher started this process as a rank. With `asks_cluster`, the scheduler's environment names machines.
    """
    with leaving_at_once():
        task = load_task(path)
        _load_torch(is_launcher=place is None)
    given = {key for key, value in {**(flags or {}), **(assignments or {})}.items() if value is not None}
    base = old_run.settings_of(run, given) if run is not None else None
    resolved = resolve(task, file=config_file, flags=flags, assignments=assignments, base=base)
    note = ""
    if asks_cluster and place is None:
        resolved, note = apply_cluster_env(resolved)
    if run is not None and base is not None:
        old_run.refuse_differences(task, resolved, base, run)
        if place is None and "strategy" in given and "nproc" not in given and not _fits(resolved.config):
            resolved = replace(resolved, config=replace(resolved.config, nproc=None))
    resolved, strategy, layout, policy = _place_ranks(resolved, place)
    if run is not None:
        resolved = old_run.fit_to_layout(resolved, layout)
    _refuse_settings(task, resolved, layout)
    _refuse_devices(resolved.config, layout, policy)
    return PreparedJob(task, resolved, layout, strategy, policy, note)


def _load_torch(*, is_launcher: bool) -> None:
    """Import what needs torch now, which takes seconds, while a signal still ends the process at once."""
    names = ["rung.launch.agent", "rung.launch.rendezvous.rendezvous"] if is_launcher else ["rung.launch.external"]
    with importing():
        for name in names:
            importlib.import_module(name)


def _place_ranks(resolved: Resolved, place: LauncherRank | None) -> tuple[Resolved, str, Layout, ElasticPolicy]:
    """Strategy, layout and elastic policy: from the settings, or from the launcher that started this rank."""
    if place is None:
        return resolved, *resolve_layout(resolved.config)
    resolved = fit_to_launcher(resolved, place)
    return resolved, *resolve_external_layout(resolved.config, place)


def _refuse_settings(task: Task, resolved: Resolved, layout: Layout) -> None:
    """Refuse settings that contradict each other or the task."""
    config = resolved.config
    validate_config(config, layout)
    refuse_missing_trackers(tracker_names(config.log) if config.log is not None else ())
    if can(layout, "remote_modules"):
        task.remote_patterns()
    task.bind(resolved.arguments)
    refuse_task(task, layout)
    refuse_best_without_evaluation(task, config)


def _refuse_devices(config: RunConfig, layout: Layout, policy: ElasticPolicy) -> None:
    """Refuse devices and backends that this machine does not have."""
    from rung.distributed.devices import choose_backend, choose_device, choose_devices

    device = choose_device(config.device, config.backend, 0, policy.processes[1])
    if layout.is_distributed:
        choose_backend(config.backend, device, layout)
    if runs_threads(layout):
        choose_devices(layout, config.device, config.backend)


def resolve_layout(config: RunConfig) -> tuple[str, Layout, ElasticPolicy]:
    """The strategy, its layout in the largest world that the job may have, and the elastic policy."""
    nodes = count_range(config.nnodes, "nnodes")[1]
    per_host = count_range(config.nproc)[1] if config.nproc is not None else None
    if per_host is None and config.strategy is not None:
        natural = required_num_ranks(config.strategy)
        per_host = -(-natural // nodes) if natural is not None else None
    if per_host is None:
        per_host = _num_gpus() if config.device != "cpu" else 0
    per_host = per_host or 1
    policy = elastic_policy(config, per_host)
    strategy = config.strategy or default_name(per_host * nodes)
    if not policy.is_elastic:
        try:
            return strategy, parse(strategy, per_host * nodes, per_host, config.schedule, config.servers), policy
        except StrategyError as error:
            raise StrategyError(_for_machines(str(error), nodes)) from None
    if nodes == 1:
        # Refuses a strategy that could not continue with the fewest processes.
        fit(strategy, policy.processes[0], policy.processes[0], config.schedule, config.servers)
    return strategy, fit(strategy, per_host * nodes, per_host, config.schedule, config.servers)[0], policy


def _for_machines(text: str, nodes: int) -> str:
    """Change the advice of an error, `--nproc N`, to processes on each of several machines."""
    advised = re.search(r"Use --nproc (\d+)", text)
    if nodes == 1 or advised is None:
        return text
    each, rest = divmod(int(advised.group(1)), nodes)
    advice = f"Use --nproc {each} on each of {nodes} machines"
    if rest or not each:
        advice = f"{advised.group(1)} do not divide among {nodes} machines; use another number of machines"
    return text.replace(advised.group(0), advice)


def _fits(config: RunConfig) -> bool:
    try:
        resolve_layout(config)
    except StrategyError:
        return False
    return True


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
