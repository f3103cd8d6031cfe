"""`rung train`: from flags to a finished run directory."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from rung.agreement import refuse_best_without_evaluation, refuse_contradictions
from rung.checkpoint.places import refuse_escapes
from rung.config import Resolved, RunConfig, count_range, read_toml, resolve
from rung.disk import check_folder, writing
from rung.environment import Place
from rung.errors import RESUME_EXIT_CODE, ConfigError, StrategyError
from rung.job_key import shared_key
from rung.launch import resume as old_run
from rung.launch.elastic import Terms, running_launcher, terms_of
from rung.launch.local import Stopped, launch, new_run_dir, new_run_name
from rung.launch.server import warm_up
from rung.launch.signals import Interrupted, leaving_at_once
from rung.launch.where import place_of_command, take_told
from rung.looking import refuse_missing_trackers, tracker_names
from rung.strategy import Layout, default_name, fit, natural_num_ranks, parse
from rung.task import Task, load_task
from rung.untrusted import printable
from rung.version import VERSION

if TYPE_CHECKING:
    from rung.launch.meeting import Meeting
    from rung.launch.outside import Gathering
    from rung.loop import Summary
    from rung.train import Job

# What each machine of a job may have for itself.
_OWN = ("nproc", "out", "rdzv", "rdzv_key", "workers", "keep", "keep_every")


@dataclass(frozen=True)
class Plan:
    """A checked job: nothing has started yet, and what can be wrong beforehand is not."""

    task: Task
    resolved: Resolved
    layout: Layout  # of the largest world that it may have
    strategy: str
    terms: Terms
    told: str = ""  # what was taken from the environment

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
    place: Place | None = None,
    asks_cluster: bool = False,
) -> Plan:
    """Read task and settings, choose layout and device, and refuse what cannot be, before any process starts.

    `run` is the directory of a run that is to go on; its settings stand below all others. `place` is that of this
    process where others have started it as a rank. With `asks_cluster`, what its environment says of machines counts.
    """
    with leaving_at_once():
        task = load_task(path)
        if place is None:
            for name in (
                "rung.launch.agent",
                "rung.launch.meeting",
                "rung.launch.rank",
            ):  # what `launch` needs of torch
                importlib.import_module(name)
        from rung.launch import outside
        from rung.world import choose_backend, choose_device, choose_devices
    given = {key for key, value in {**(flags or {}), **(assignments or {})}.items() if value is not None}
    base = old_run.settings_of(run, given) if run is not None else None
    resolved = resolve(task, file=config_file, flags=flags, assignments=assignments, base=base)
    told = ""
    if asks_cluster and place is None:
        resolved, told = take_told(resolved)
    if run is not None and base is not None:
        old_run.refuse_differences(task, resolved, base, run)
        if place is None and "strategy" in given and "nproc" not in given and not _fits(resolved.config):
            resolved = replace(resolved, config=replace(resolved.config, nproc=None))
    if place is None:
        strategy, layout, terms = spread(resolved.config)
    else:
        resolved = outside.fit_to_place(resolved, place)
        strategy, layout, terms = outside.spread(resolved.config, place)
    if run is not None:
        resolved = old_run.fit_to_layout(resolved, layout)
    config = resolved.config
    refuse_contradictions(config, layout)
    outside.refuse_over_mpi(config, layout)
    refuse_missing_trackers(tracker_names(config.log) if config.log is not None else ())
    if layout.kind == "ddp+ps":
        task.remote_patterns()
    task.bind(resolved.arguments)
    refuse_best_without_evaluation(task, config)
    device = choose_device(config.device, config.backend, 0, terms.processes[1])
    if layout.is_distributed:
        choose_backend(config.backend, device, layout)
    if layout.kind == "dp":
        choose_devices(layout, config.device, config.backend)
    return Plan(task, resolved, layout, strategy, terms, told)


def spread(config: RunConfig) -> tuple[str, Layout, Terms]:
    """The strategy, its layout in the largest world that the job may have, and the terms."""
    nodes = count_range(config.nnodes, "nnodes")[1]
    per_host = count_range(config.nproc)[1] if config.nproc is not None else None
    if per_host is None and config.strategy is not None:
        natural = natural_num_ranks(config.strategy)
        per_host = -(-natural // nodes) if natural is not None else None
    if per_host is None:
        per_host = _num_gpus() if config.device != "cpu" else 0
    per_host = per_host or 1
    terms = terms_of(config, per_host)
    strategy = config.strategy or default_name(per_host * nodes)
    if not terms.is_elastic:
        try:
            return strategy, parse(strategy, per_host * nodes, per_host, config.schedule, config.servers), terms
        except StrategyError as error:
            raise StrategyError(_for_machines(str(error), nodes)) from None
    if nodes == 1:
        fit(
            strategy, terms.processes[0], terms.processes[0], config.schedule, config.servers
        )  # refuses what could not go on
    return strategy, fit(strategy, per_host * nodes, per_host, config.schedule, config.servers)[0], terms


def _for_machines(text: str, nodes: int) -> str:
    """An error that advises a number of processes, where that number is one for each of several machines."""
    advised = re.search(r"Use --nproc (\d+)", text)
    if nodes == 1 or advised is None:
        return text
    each, rest = divmod(int(advised.group(1)), nodes)
    told = f"Use --nproc {each} on each of {nodes} machines"
    if rest or not each:
        told = f"{advised.group(1)} do not divide among {nodes} machines; use another number of machines"
    return text.replace(advised.group(0), told)


def _fits(config: RunConfig) -> bool:
    try:
        spread(config)
    except StrategyError:
        return False
    return True


def train(
    path: str | Path,
    *,
    config_file: str | None,
    flags: Mapping[str, Any],
    assignments: Mapping[str, str],
    resume: str | bool | None = None,
    resume_if_there: bool = False,
) -> int:
    """The command. Returns the exit code.

    `resume` names a run to go on with; True takes the newest one. `resume_if_there` goes on with that of --out if
    there is one, and begins it otherwise: the same command then serves every start by a scheduler.
    """
    file = read_toml(config_file) if config_file is not None else {}
    place = place_of_command({**file, **{k: v for k, v in {**flags, **assignments}.items() if v is not None}})
    with leaving_at_once(resumable=True):
        if place is None:
            warm_up()
        # C++ in this process has nothing to say to a user; that of the ranks writes to their logs.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        console = Console(file=sys.stdout, markup=False) if place is None else _open_console(place)
        run = None
        if resume_if_there:
            run = old_run.run_if_there(load_task(path), resume, flags.get("out"))
        elif resume is not None:
            run = old_run.find_run(load_task(path), resume, flags.get("out"))
        plan = prepare(
            path,
            config_file=config_file,
            flags=flags,
            assignments=assignments,
            run=run,
            place=place,
            asks_cluster=True,
        )
        if plan.told:
            _say(console, plan.told)
        if run is not None and _says_that_all_is_done(plan, run, console):
            return 0
        # Said before machines wait for each other; `writing` says what comes up later.
        check_folder(plan.config.out if plan.config.out is not None else run or "runs", "--out")
        from rung.launch.precision import half_precision_warning

        warning = half_precision_warning(plan.config)
        if warning:
            console.print(f"warning: {warning}", style="yellow", highlight=False, soft_wrap=True, markup=False)
        if place is not None:
            return _take_part(path, plan, place, run)
        meeting, folder, is_new = _go_to_meeting(plan, path, run, console, may_begin=resume_if_there)
        return _run(path, plan, folder, meeting, console, is_resumed=not is_new)


def _open_console(place: Place) -> Console:
    from rung.launch.outside import open_console

    return open_console(place, sys.stdout)


def _run(
    path: str | Path, plan: Plan, folder: Path, meeting: Meeting | None, console: Console, *, is_resumed: bool
) -> int:
    job = _job(path, plan, folder, is_resumed=is_resumed)
    started = time.monotonic()
    try:
        summary, _ = launch(job, plan.layout.num_ranks, console=console, terms=plan.terms, meeting=meeting)
    except Interrupted as error:
        _say(console, f"{error}; what was written lies in {folder}")
        return 128 + int(error.signal_number) if error.signal_number != signal.SIGINT else 130
    except Stopped as stopped:
        _say(console, _farewell(stopped, path, folder))
        return RESUME_EXIT_CODE
    if summary is None:
        _say(console, f"done in {time.monotonic() - started:.1f} s; the results are on the machine of rank 0")
        return 0
    _say_done(console, summary, folder, time.monotonic() - started)
    return 0


def _take_part(path: str | Path, plan: Plan, place: Place, run: Path | None) -> int:
    """Train in this process, which is one rank of several."""
    from rung.launch.outside import Gathering, run_rank
    from rung.mpi.library import leaving_on_error

    with leaving_on_error():
        gathering = Gathering(place, plan.config.backend, shared_key(plan.config.rdzv_key))
        folder, is_new = _agree_on_folder(path, plan, gathering, run)
        started = time.monotonic()

        def farewell(summary: Summary, console: Console) -> None:
            if summary.stopped:
                _say(console, _farewell(Stopped(summary.steps, is_saved=True), path, folder))
            else:
                _say_done(console, summary, folder, time.monotonic() - started)

        run_rank(_job(path, plan, folder, is_resumed=not is_new), gathering, plan.terms, farewell)


def _agree_on_folder(path: str | Path, plan: Plan, gathering: Gathering, run: Path | None) -> tuple[Path, bool]:
    """The run's directory and whether it is new, as rank 0 says."""
    place = gathering.place
    _compare_settings(
        plan, path, lambda own: gathering.from_main("settings", lambda: own), f"rank {place.rank}", "rank 0"
    )
    out = str(run) if run is not None else plan.config.out
    folder = Path(gathering.from_main("folder", lambda: str(new_run_dir(plan.task.name, plan.layout.name, out))))
    if run is not None and folder != run:
        raise ConfigError(f"rank 0 goes on with {folder}, and rank {place.rank} with {run}. Name it: --resume RUN.")
    is_new = gathering.from_main("begins", lambda: str(run is None)) == str(True)
    if place.is_main:
        _take_folder(plan, folder, lambda own: gathering.from_main("run", lambda: own), is_new=is_new)
    elif place.local_rank == 0:  # its machine may have a disk of its own
        agreed = gathering.from_main("run", str)
        _take_folder(plan, folder, lambda _: agreed, is_new=is_new)
    return folder, is_new


def _job(path: str | Path, plan: Plan, folder: Path, *, is_resumed: bool) -> Job:
    from rung.train import Job

    arguments = plan.resolved.arguments
    return Job(str(Path(path).resolve()), plan.strategy, plan.config, arguments, str(folder), resume=is_resumed)


def _say(console: Console, text: str) -> None:
    console.print(printable(text, keep="\n"), highlight=False, soft_wrap=True, markup=False)


def _say_done(console: Console, summary: Summary, folder: Path, seconds: float) -> None:
    figures = [f"{summary.steps} steps in {seconds:.1f} s"]
    if summary.last is not None:
        figures.append(f"loss {summary.last.loss:.4g}")
    if summary.evaluation is not None:
        figures += [f"eval {name} {value:.4g}" for name, value in summary.evaluation.metrics.items()]
    if summary.best is not None:
        figures.append(f"best {summary.best.metric} {summary.best.value:.4g} after step {summary.best.step}")
    _say(console, "done: " + ", ".join(figures))
    _say(console, f"results: {folder}/ (metrics.jsonl, model.safetensors, tensorboard/, logs/, config.toml)")


def _farewell(stopped: Stopped, path: str | Path, folder: Path) -> str:
    again = f"go on with: rung train {shlex.quote(str(path))} --resume {shlex.quote(str(folder))}"
    if stopped.is_saved and stopped.step:
        return f"stopped in step {stopped.step} after a checkpoint; {again}"
    if stopped.is_saved:
        return f"stopped before the first step; {again}"
    return f"stopped in step {stopped.step} without a checkpoint of it ({stopped.why}); {again}"


def _says_that_all_is_done(plan: Plan, run: Path, console: Console) -> bool:
    """Whether there is nothing left to do; what is new about an old run is said here, too."""
    base = old_run.settings_of(run, set())
    longer = old_run.new_length(base, plan.config)
    if longer is None and old_run.is_finished(run, plan.config):
        _say(console, f"{run} is finished: there is nothing to go on with")
        return True
    for line in (longer, old_run.machines_left_out(run, plan.config)):
        if line is not None:
            _say(console, line)
    return False


def _go_to_meeting(
    plan: Plan, path: str | Path, run: Path | None, console: Console, *, may_begin: bool
) -> tuple[Meeting | None, Path, bool]:
    """The run's directory and whether it is new, which the machines of a job agree upon where they meet."""
    from rung.launch.meeting import open_meeting

    is_new = run is None
    out = str(run) if run is not None else plan.config.out
    terms, meeting = plan.terms, None
    if terms.nodes[1] > 1:

        def say(text: str) -> None:
            _say(console, text)

        assert terms.rdzv is not None
        meeting = open_meeting(terms.rdzv, shared_key(plan.config.rdzv_key), terms.nodes, say)
        _compare_settings(plan, path, meeting.agree_on_settings, "this machine", f"the job at {terms.rdzv}")
        if out is None:
            out = meeting.agree("folder", new_run_name(plan.task.name, plan.layout.name))
        if may_begin and meeting.agree("begins", str(is_new)) == str(True):
            is_new = True  # what this machine found in the shared directory was just written by another
    with writing(out or "runs", "--out"):
        folder = new_run_dir(plan.task.name, plan.layout.name, out)
    _take_folder(plan, folder, lambda own: meeting.agree("run", own) if meeting is not None else own, is_new=is_new)
    return meeting, folder, is_new


def _take_folder(plan: Plan, folder: Path, agree: Callable[[str], str], *, is_new: bool) -> None:
    """Make a directory that of this run, if it is no other's."""
    refuse_escapes(folder)
    other = running_launcher(folder / ".state")
    if other is not None:
        raise ConfigError(f"{folder} is being run already, by process {other}. Stop it first, or wait for its end.")
    heading = f"rung {VERSION}: {plan.task.name}, {plan.layout.describe()}"
    with writing(folder, "--out"):
        old_run.claim(folder, agree, is_new=is_new)
        old_run.write_settings(plan.resolved, folder, heading)


def _compare_settings(plan: Plan, path: str | Path, agree: Callable[[str], str], who: str, others: str) -> None:
    """Hold the settings here against those of whoever came first."""
    own = {key: value for key, value in asdict(plan.config).items() if key not in _OWN}
    own |= {key: repr(value) for key, value in plan.resolved.arguments.items()}
    file = Path(path, "task.py") if Path(path).is_dir() else Path(path)
    own["a task file of digest"] = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    theirs = json.loads(agree(json.dumps(own, sort_keys=True)))
    for key in sorted(set(own) | set(theirs)):
        if own.get(key) != theirs.get(key):
            raise ConfigError(
                f"{who} was started with {key} = {own.get(key)}, and {others} with {theirs.get(key)}. All start the "
                "same command."
            )


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
