"""A job for a scheduler: what is to be trained, and on what. Knows no scheduler.

Everything that `rung train` would refuse is refused here, before the job waits in a queue: the task loads, the settings
resolve, the strategy fits the processes. The machine that submits need not have what the job needs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rung.agreement import refuse_best_without_evaluation, refuse_contradictions
from rung.best import parse_best
from rung.config import RunConfig, count_range, resolve
from rung.errors import ConfigError, StrategyError
from rung.launch import resume as old_run
from rung.launch.command import spread
from rung.launch.elastic import Terms
from rung.launch.local import new_run_name
from rung.looking import refuse_missing_trackers, tracker_names
from rung.strategy import Layout, fit, natural_num_ranks
from rung.task import load_task

# Whoever submits does not know yet where the machines will meet.
_SOMEWHERE = "head:29400"
# What a job says for itself, and every start of it anew.
_OWN = ("strategy", "nproc", "nnodes", "rdzv", "rdzv_key", "out")


@dataclass(frozen=True)
class Asked:
    """What was asked of `rung submit`, whatever the scheduler."""

    task: str
    flags: Mapping[str, Any]  # those of `rung train`, by setting; None where one was not given
    assignments: Mapping[str, str]
    config_file: str | None = None
    nodes: str | None = None  # N or MIN:MAX
    gpus: int = 0  # on each node
    name: str | None = None
    resume: str | None = None
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Job:
    """A checked job."""

    name: str  # lower-case letters, digits and hyphens
    task: str  # a path
    strategy: str
    nodes: tuple[int, int]  # the least and the most
    processes: str  # on each node, as --nproc takes it
    gpus: int  # on each node
    out: str  # the directory of the run
    settings: tuple[str, ...]  # further words of `rung train`
    environment: tuple[tuple[str, str], ...]
    workers: int  # data-loading processes of each rank
    grace_seconds: int  # that saving may take when the job is asked to leave
    notes: tuple[str, ...] = ()  # what the user should know and did not ask

    @property
    def num_processes(self) -> int:
        """The most on one node."""
        return count_range(self.processes)[1]

    @property
    def nnodes(self) -> str:
        """The number of nodes as --nnodes takes it."""
        least, most = self.nodes
        return str(most) if least == most else f"{least}:{most}"

    def own_words(self, rdzv: str | None = None) -> list[str]:
        """Flags of `rung train` that say how this job is spread and where its run is; several nodes meet at `rdzv`."""
        meeting = ["--rdzv", rdzv] if rdzv is not None else []
        spread_over = ["--strategy", self.strategy, "--nnodes", self.nnodes, "--nproc", self.processes]
        return [*spread_over, *meeting, "--out", self.out]

    def words(self, rdzv: str | None = None) -> list[str]:
        """The command that every node starts, as often as the scheduler likes, without the name of the program."""
        return ["train", self.task, *self.own_words(rdzv), "--resume-if-there", *self.settings]


def describe(asked: Asked, *, may_shrink: bool = False, is_installed: bool = False, is_elsewhere: bool = False) -> Job:
    """The job that was asked for.

    With `may_shrink`, a strategy that names its size takes as few nodes as it needs. `is_installed` says that the nodes
    run this very installation, so that what is missing here is missing there; `is_elsewhere`, that the run's directory
    is not one of this machine.
    """
    task = load_task(asked.task)
    if asked.gpus < 0:
        raise ConfigError(f"--gpus-per-node {asked.gpus}: a node has none, or some.")
    for key, what in {"rdzv": "where the nodes meet", "rdzv_key": "the key by which the nodes know each other"}.items():
        if key in asked.assignments:
            raise ConfigError(f"{what} is found when the job starts. Leave out --set {key}.")
    if asked.nodes is not None:
        count_range(asked.nodes, "nodes")
    flags = {**asked.flags, "nnodes": asked.nodes}
    run = old_run.find_run(task, asked.resume, asked.flags.get("out")) if asked.resume else None
    given = {key for key, value in {**flags, **asked.assignments}.items() if value is not None}
    base = old_run.settings_of(run, given) if run is not None else None
    resolved = resolve(task, file=asked.config_file, flags=flags, assignments=asked.assignments, base=base)
    if run is not None and base is not None:
        old_run.refuse_differences(task, resolved, base, run)
        if resolved.origins["nproc"] == "run" and (asked.gpus or "strategy" in given):
            resolved = replace(resolved, config=replace(resolved.config, nproc=None))
    config = _with_processes(resolved.config, asked.gpus, may_shrink=may_shrink)
    _refuse_launchers(config)
    nodes = count_range(config.nnodes, "nnodes")
    strategy, layout, terms = spread(replace(config, rdzv=_SOMEWHERE if nodes[1] > 1 else None))
    refuse_contradictions(config, layout)
    _refuse_devices(config, layout, terms.processes[1], asked.gpus)
    if is_installed and config.log is not None:
        refuse_missing_trackers(tracker_names(config.log))
    if layout.kind == "ddp+ps":
        task.remote_patterns()
    task.bind(resolved.arguments)
    refuse_best_without_evaluation(task, config)
    out = str(run) if run is not None else config.out or new_run_name(task.name, layout.name)
    if Path(out).name in ("", ".."):
        raise ConfigError(f"--out {out} names no directory for the run. Give it one, as in --out runs/first.")
    if run is None and not is_elsewhere and (Path(out) / old_run.CONFIG).exists():
        raise ConfigError(f"{out} holds a run already. Go on with it: --resume {out}. Or choose another --out.")
    return Job(
        name=_label(asked.name or f"{task.name}-{strategy}"),
        task=as_word(asked.task),
        strategy=strategy,
        nodes=nodes,
        processes=config.nproc or "1",
        gpus=asked.gpus,
        out=as_word(out),
        settings=_settings(asked),
        environment=asked.environment,
        workers=config.workers,
        grace_seconds=config.grace_seconds,
        notes=_notes(config, strategy, layout, terms, asked.gpus),
    )


def describe_each(asked: Asked, strategies: Sequence[str], *, is_installed: bool = False) -> list[Job]:
    """The same job under several strategies, each with a directory of its own inside that of --out."""
    for flag, value in {"--strategy": asked.flags.get("strategy"), "--resume": asked.resume}.items():
        if value is not None:
            raise ConfigError(f"--strategies makes a new run of each, and {flag} {value} is for one. Keep one of them.")
    if len(set(strategies)) != len(strategies):
        raise ConfigError(f"--strategies {' '.join(strategies)}: each of them once.")
    task = load_task(asked.task).name
    folder = asked.flags.get("out") or new_run_name(task, "strategies")
    jobs = []
    for strategy in strategies:
        flags = {**asked.flags, "strategy": strategy, "out": f"{folder}/{re.sub('[,:]', '-', strategy)}"}
        one = replace(asked, flags=flags, name=asked.name or f"{task}-strategies")
        jobs.append(describe(one, may_shrink=True, is_installed=is_installed))
    return jobs


def _with_processes(config: RunConfig, gpus: int, *, may_shrink: bool) -> RunConfig:
    """With a number of processes: that of the strategy's sizes, or one for each GPU, or one."""
    nodes = count_range(config.nnodes, "nnodes")[1]
    if config.strategy == "auto":
        raise ConfigError(
            "--strategy auto looks at the machine that it runs on, and the job will run on others. Name a strategy; "
            "`rung plan TASK --cluster ...` says which."
        )
    natural = natural_num_ranks(config.strategy) if config.strategy is not None else None
    if natural is not None and may_shrink and (config.nproc is None or natural < nodes * count_range(config.nproc)[1]):
        limit = gpus or (count_range(config.nproc)[1] if config.nproc is not None else -(-natural // nodes))
        needed = min(nodes, -(-natural // limit))
        return replace(config, nproc=str(-(-natural // needed)), nnodes=str(needed))
    if config.nproc is not None:
        return config
    return replace(config, nproc=str(-(-natural // nodes) if natural is not None else gpus or 1))


def _refuse_launchers(config: RunConfig) -> None:
    if config.backend == "mpi":
        raise ConfigError(
            "--backend mpi needs mpirun to start the ranks, and a submitted job starts them itself. Use gloo or nccl."
        )


def _refuse_devices(config: RunConfig, layout: Layout, processes: int, gpus: int) -> None:
    """What `rung train` would refuse on a node with so many GPUs."""
    if gpus == 0:
        for key, value in {"device": "cuda", "backend": "nccl"}.items():
            if getattr(config, key) == value:
                raise ConfigError(
                    f"{key}={value} needs GPUs, and the job asks for none. Say how many: --gpus-per-node N."
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
    if layout.kind == "dp" and (layout.devices or 0) > gpus and config.backend != "gloo":
        raise ConfigError(f"{layout.name} asks for more GPUs than the {gpus} of a node. Use --strategy dp{gpus}.")


def _notes(config: RunConfig, strategy: str, layout: Layout, terms: Terms, gpus: int) -> tuple[str, ...]:
    found = []
    used = (layout.devices or gpus) if layout.kind == "dp" else terms.processes[1]
    if used < gpus:
        found.append(f"{layout.name} uses {used} of the {gpus} GPUs of each node")
    least, most = (nodes * processes for nodes, processes in zip(terms.nodes, terms.processes, strict=True))
    if layout.num_ranks < most:
        found.append(f"with all nodes there, {strategy} uses {layout.num_ranks} of {most} processes; the others wait")
    try:
        fit(strategy, least, terms.processes[0], config.schedule, config.servers)
    except StrategyError:
        found.append(f"--nodes {config.nnodes}: {strategy} does not fit the fewest of them, and waits for more")
    if config.checkpoint_every is None and parse_best(config.keep_best) is None:
        found.append("without --checkpoint-every, a machine that fails costs all steps since the last start")
    return tuple(found)


def _settings(asked: Asked) -> tuple[str, ...]:
    """The flags that were given, as words again, but for those that the job has a say in."""
    words: list[str] = []
    for name, value in asked.flags.items():
        flag = name.replace("_", "-")
        if value is None or name in _OWN:
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif str(value).startswith("-"):  # would be taken for a flag
            words.append(f"--{flag}={value}")
        else:
            words += [f"--{flag}", str(value)]
    if asked.config_file is not None:
        words += ["--config", as_word(asked.config_file)]
    for key, text in asked.assignments.items():
        if key not in _OWN:
            words += ["--set", f"{key}={text}"]
    return tuple(words)


def as_word(path: str) -> str:
    """A path as a word of a command, where one that begins with a hyphen would be taken for a flag."""
    return f"./{path}" if path.startswith("-") else path


def _label(text: str) -> str:
    """A name that every scheduler takes."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:50].rstrip("-")
    if not name:
        raise ConfigError(f"--name {text!r} has no letter and no digit.")
    return name
