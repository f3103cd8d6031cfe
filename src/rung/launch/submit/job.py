"""A job for a scheduler: what to train, and on which nodes. Independent of the scheduler.

Everything that `rung train` would refuse is refused here, before the job waits in a queue: the task loads, the settings
resolve, the strategy fits the processes. The machine that submits need not have the job's GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rung.errors import ConfigError, StrategyError
from rung.launch import resume as old_run
from rung.launch.launcher import new_run_name
from rung.launch.prepare import resolve_layout
from rung.launch.rendezvous.elastic import ElasticPolicy
from rung.spec.abilities import can, runs_threads
from rung.spec.best_metric import parse_best
from rung.spec.compatibility import refuse_best_without_evaluation, refuse_task, validate_config
from rung.spec.config import RunConfig, count_range, resolve
from rung.spec.observability import refuse_missing_trackers, tracker_names
from rung.spec.strategy import Layout, fit, required_num_ranks
from rung.spec.task import load_task
from rung.system.store import check_address, is_store, local_folder, masked

# A placeholder: the address of the rendezvous is known when the job starts.
_SOMEWHERE = "head:29400"
# Settings that `SubmittedJob.own_words` renders, or that each start of the job sets.
_OWN = ("strategy", "nproc", "nnodes", "rdzv", "rdzv_key", "out")


@dataclass(frozen=True)
class SubmitOptions:
    """The options of `rung submit` that all schedulers share."""

    task: str
    flags: Mapping[str, Any]  # those of `rung train`, by setting; None if not given
    assignments: Mapping[str, str]
    config_file: str | None = None
    nodes: str | None = None  # N or MIN:MAX
    gpus: int = 0  # on each node
    name: str | None = None
    resume: str | None = None
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class SubmittedJob:
    """A validated job."""

    name: str  # lower-case letters, digits and hyphens
    task: str  # a path
    strategy: str
    nodes: tuple[int, int]  # minimum and maximum
    processes: str  # on each node, as --nproc takes it
    gpus: int  # on each node
    out: str  # the directory of the run
    settings: tuple[str, ...]  # further words of `rung train`
    environment: tuple[tuple[str, str], ...]
    workers: int  # data-loading processes of each rank
    grace_seconds: int  # that saving may take when the job is stopped
    notes: tuple[str, ...] = ()  # for the user

    @property
    def num_processes(self) -> int:
        """The maximum on one node."""
        return count_range(self.processes)[1]

    @property
    def local_out(self) -> str:
        """The directory of the run on a node: its local part, if the run is in a store."""
        return str(local_folder(self.out.rstrip("/"))) if is_store(self.out) else self.out

    @property
    def nnodes(self) -> str:
        """The number of nodes as --nnodes takes it."""
        least, most = self.nodes
        return str(most) if least == most else f"{least}:{most}"

    def own_words(self, rdzv: str | None = None) -> list[str]:
        """The flags of `rung train` for layout and directory. `rdzv` is the rendezvous endpoint of several nodes."""
        rendezvous = ["--rdzv", rdzv] if rdzv is not None else []
        layout = ["--strategy", self.strategy, "--nnodes", self.nnodes, "--nproc", self.processes]
        return [*layout, *rendezvous, "--out", self.out]

    def words(self, rdzv: str | None = None) -> list[str]:
        """The arguments of `rung` on every node, the same at every start of the job."""
        return ["train", self.task, *self.own_words(rdzv), "--resume-if-there", *self.settings]


def describe(
    options: SubmitOptions, *, may_shrink: bool = False, is_installed: bool = False, is_elsewhere: bool = False
) -> SubmittedJob:
    """Validate the options and describe the job.

    With `may_shrink`, a strategy that names its size takes as few nodes as it needs. `is_installed`: the nodes run this
    very installation, so packages missing here are missing there. `is_elsewhere`: the run's directory is not on this
    machine.
    """
    task = load_task(options.task)
    if is_store(options.resume):
        raise ConfigError(
            f"--resume {masked(options.resume)}: a job goes on with the run that is in --out already. Use --out, and "
            "the same command begins the run or resumes it."
        )
    for flag, address in {"--out": options.flags.get("out"), "--init": options.flags.get("init")}.items():
        if is_store(address):
            check_address(str(address), flag)
    if options.gpus < 0:
        raise ConfigError(f"--gpus-per-node {options.gpus}: must be 0 or more.")
    for key, what in {"rdzv": "the address of the rendezvous", "rdzv_key": "the key of the job's launchers"}.items():
        if key in options.assignments:
            raise ConfigError(f"{what} is set when the job starts. Leave out --set {key}.")
    if options.nodes is not None:
        count_range(options.nodes, "nodes")
    flags = {**options.flags, "nnodes": options.nodes}
    run = old_run.find_run(task, options.resume, options.flags.get("out")) if options.resume else None
    given = {key for key, value in {**flags, **options.assignments}.items() if value is not None}
    base = old_run.settings_of(run, given) if run is not None else None
    resolved = resolve(task, file=options.config_file, flags=flags, assignments=options.assignments, base=base)
    if run is not None and base is not None:
        old_run.refuse_differences(task, resolved, base, run)
        if resolved.origins["nproc"] == "run" and (options.gpus or "strategy" in given):
            resolved = replace(resolved, config=replace(resolved.config, nproc=None))
    config = _with_processes(resolved.config, options.gpus, may_shrink=may_shrink)
    if config.backend == "mpi":
        raise ConfigError(
            "--backend mpi needs mpirun to start the ranks, but a submitted job starts them itself. Use gloo or nccl."
        )
    nodes = count_range(config.nnodes, "nnodes")
    strategy, layout, policy = resolve_layout(replace(config, rdzv=_SOMEWHERE if nodes[1] > 1 else None))
    validate_config(config, layout)
    _refuse_devices(config, layout, policy.processes[1], options.gpus)
    if is_installed and config.log is not None:
        refuse_missing_trackers(tracker_names(config.log))
    if can(layout, "remote_modules"):
        task.remote_patterns()
    task.bind(resolved.arguments)
    refuse_task(task, layout)
    refuse_best_without_evaluation(task, config)
    out = str(run) if run is not None else config.out or new_run_name(task.name, layout.name)
    if Path(out).name in ("", ".."):
        raise ConfigError(f"--out {out} names no directory for the run. Name one, as in --out runs/first.")
    if run is None and not is_elsewhere and (Path(out) / old_run.CONFIG).exists():
        raise ConfigError(f"{out} holds a run already. Resume it with --resume {out}, or choose another --out.")
    return SubmittedJob(
        name=_label(options.name or f"{task.name}-{strategy}"),
        task=as_word(options.task),
        strategy=strategy,
        nodes=nodes,
        processes=config.nproc or "1",
        gpus=options.gpus,
        out=as_word(out),
        settings=_settings(options),
        environment=options.environment,
        workers=_num_workers(config),
        grace_seconds=config.grace_seconds,
        notes=_notes(config, strategy, layout, policy, options.gpus),
    )


def _num_workers(config: RunConfig) -> int:
    if isinstance(config.workers, int):
        return config.workers
    raise ConfigError(
        "workers=auto: a job must ask for the cores of its processes. Say how many, as in --set workers=4."
    )


def describe_each(
    options: SubmitOptions, strategies: Sequence[str], *, is_installed: bool = False
) -> list[SubmittedJob]:
    """Describe the same job under several strategies, each with its own directory below --out."""
    for flag, value in {"--strategy": options.flags.get("strategy"), "--resume": options.resume}.items():
        if value is not None:
            raise ConfigError(f"--strategies starts a new run for each, but {flag} {value} is for one. Keep one flag.")
    if len(set(strategies)) != len(strategies):
        raise ConfigError(f"--strategies {' '.join(strategies)}: name each of them once.")
    task = load_task(options.task).name
    folder = options.flags.get("out") or new_run_name(task, "strategies")
    jobs = []
    for strategy in strategies:
        flags = {**options.flags, "strategy": strategy, "out": f"{folder}/{re.sub('[,:]', '-', strategy)}"}
        one = replace(options, flags=flags, name=options.name or f"{task}-strategies")
        jobs.append(describe(one, may_shrink=True, is_installed=is_installed))
    return jobs


def _with_processes(config: RunConfig, gpus: int, *, may_shrink: bool) -> RunConfig:
    """Fill in the number of processes: what the strategy's sizes require, or one for each GPU, or one."""
    nodes = count_range(config.nnodes, "nnodes")[1]
    if config.strategy == "auto":
        raise ConfigError(
            "--strategy auto plans for the machine that it runs on, but the job will run on others. Name a strategy; "
            "`rung plan TASK --cluster ...` recommends one."
        )
    ranks = required_num_ranks(config.strategy) if config.strategy is not None else None
    if ranks is not None and may_shrink and (config.nproc is None or ranks < nodes * count_range(config.nproc)[1]):
        limit = gpus or (count_range(config.nproc)[1] if config.nproc is not None else -(-ranks // nodes))
        needed = min(nodes, -(-ranks // limit))
        return replace(config, nproc=str(-(-ranks // needed)), nnodes=str(needed))
    if config.nproc is not None:
        return config
    return replace(config, nproc=str(-(-ranks // nodes) if ranks is not None else gpus or 1))


def _refuse_devices(config: RunConfig, layout: Layout, processes: int, gpus: int) -> None:
    """Refuse what `rung train` would refuse on a node with this number of GPUs."""
    if gpus == 0:
        for key, value in {"device": "cuda", "backend": "nccl"}.items():
            if getattr(config, key) == value:
                raise ConfigError(
                    f"{key}={value} needs GPUs, but the job requests none. Request them with --gpus-per-node N."
                )
        return
    if config.device == "cpu":
        raise ConfigError(
            f"device=cpu would leave the {gpus} GPUs of each node idle. Leave out --gpus-per-node, or device=cpu."
        )
    if processes > gpus and config.backend != "gloo":
        raise ConfigError(
            f"{processes} processes on nodes of {gpus} GPU{'s' * (gpus > 1)}: NCCL takes one process a GPU. Use "
            f"--nproc {gpus}, or --backend gloo to let processes share a GPU."
        )
    if runs_threads(layout) and (layout.devices or 0) > gpus and config.backend != "gloo":
        raise ConfigError(f"{layout.name} asks for more GPUs than the {gpus} of a node. Use --strategy dp{gpus}.")


def _notes(config: RunConfig, strategy: str, layout: Layout, policy: ElasticPolicy, gpus: int) -> tuple[str, ...]:
    found = []
    used = (layout.devices or gpus) if runs_threads(layout) else policy.processes[1]
    if used < gpus:
        found.append(f"{layout.name} uses {used} of the {gpus} GPUs of each node")
    least, most = (nodes * processes for nodes, processes in zip(policy.nodes, policy.processes, strict=True))
    if layout.num_ranks < most:
        found.append(f"with all nodes, {strategy} uses {layout.num_ranks} of {most} processes; the others are spares")
    try:
        fit(strategy, least, policy.processes[0], config.schedule, config.servers)
    except StrategyError:
        found.append(f"--nodes {config.nnodes}: {strategy} does not fit the fewest of them, and waits for more")
    if config.checkpoint_every is None and parse_best(config.keep_best) is None:
        found.append("without --checkpoint-every, the failure of a machine costs all steps since the last start")
    return tuple(found)


def _settings(options: SubmitOptions) -> tuple[str, ...]:
    """The given flags as arguments of `rung train`, without those of `_OWN`."""
    words: list[str] = []
    for name, value in options.flags.items():
        flag = name.replace("_", "-")
        if value is None or name in _OWN:
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif str(value).startswith("-"):  # argparse would take it for a flag
            words.append(f"--{flag}={value}")
        else:
            words += [f"--{flag}", str(value)]
    if options.config_file is not None:
        words += ["--config", as_word(options.config_file)]
    for key, text in options.assignments.items():
        if key not in _OWN:
            words += ["--set", f"{key}={text}"]
    return tuple(words)


def as_word(path: str) -> str:
    """A path as an argument: one that begins with a hyphen would be taken for a flag."""
    return f"./{path}" if path.startswith("-") else path


def _label(text: str) -> str:
    """A name that every scheduler accepts."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:50].rstrip("-")
    if not name:
        raise ConfigError(f"--name {text!r} has no letter and no digit.")
    return name
