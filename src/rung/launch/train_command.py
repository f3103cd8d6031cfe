"""`rung train`: from flags to a finished run directory."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console

from rung.checkpoint.places import refuse_escapes
from rung.distributed.job_key import shared_key
from rung.errors import RESUME_EXIT_CODE, ConfigError, JobFailed
from rung.launch import resume as old_run
from rung.launch.fork_server import start_fork_server
from rung.launch.launcher import Stopped, launch, new_run_dir, new_run_name
from rung.launch.prepare import PreparedJob, prepare
from rung.launch.rendezvous.elastic import BEGINS, SETTINGS, Unconfirmed, running_launcher
from rung.launch.rendezvous.topology import rank_of_command
from rung.launch.signals import Interrupted, leaving_at_once
from rung.launch.stored_run import FolderMirror, StoredRun, find_stored_run, refuse_local_part, send_result
from rung.spec.abilities import describe_layout
from rung.spec.config import RunConfig, read_toml, resolve
from rung.spec.expert_rows import end_words, read_layers
from rung.spec.task import load_task
from rung.spec.version import VERSION
from rung.system.disk import check_folder, writing
from rung.system.launcher_env import LauncherRank
from rung.system.store import check_address, is_store, masked
from rung.system.stored_weights import local_weights
from rung.system.untrusted import printable
from rung.train.job import RankJob
from rung.train.records import Summary

# Functions here import modules that load torch themselves, for the reason given in prepare.py.
if TYPE_CHECKING:
    from rung.launch.external import ExternalJob
    from rung.launch.rendezvous.rendezvous import Rendezvous

# Settings that may differ between the machines of a job.
_OWN = ("nproc", "out", "rdzv", "rdzv_key", "workers", "keep", "keep_every")
_WEIGHTS = "model.safetensors"
_RESULTS = ("metrics.jsonl", _WEIGHTS, "average.safetensors", "checkpoints", "tensorboard", "logs", "config.toml")
_MAX_FORMINGS = 3  # a stranger who restores an old job's values each time ends this one


@dataclass(frozen=True)
class TrainEnd:
    """How the command ended, and the run's directory."""

    exit_code: int
    folder: Path


def train(
    path: str | Path,
    *,
    config_file: str | None,
    flags: Mapping[str, Any],
    assignments: Mapping[str, str],
    resume: str | bool | None = None,
    resume_if_there: bool = False,
) -> TrainEnd:
    """Run the command.

    `resume` names the run to continue; True takes the newest one. `resume_if_there` continues the run in --out if there
    is one, and begins it otherwise: a scheduler can then start the same command again and again.
    """
    file = read_toml(config_file) if config_file is not None else {}
    place = rank_of_command({**file, **{k: v for k, v in {**flags, **assignments}.items() if v is not None}})
    with leaving_at_once(resumable=True):
        if place is None:
            start_fork_server()
        # Messages of torch's C++ code do not help a user here; those of the ranks go to their logs.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        console = Console(file=sys.stdout, markup=False) if place is None else _open_console(place)
        stored, external_job = None, None
        asked = _stored_address(flags, assignments, file, resume=resume, resume_if_there=resume_if_there)
        if asked is not None and place is not None:
            known = resolve(load_task(path), file=config_file, flags=flags, assignments=assignments).config
            external_job = _open_external_job(place, known)
            stored = _find_as_rank(external_job, asked)
        elif asked is not None:
            stored = find_stored_run(asked.address, asked.flag, is_new=asked.is_new)
            stored.fetch()
        if stored is not None:  # all that follows happens in its local folder
            flags = {**flags, "out": str(stored.folder)}
            assignments = {key: value for key, value in assignments.items() if key != "out"}
            resume = str(stored.folder) if resume is not None else None
        run = None
        if resume_if_there:
            run = old_run.run_if_there(load_task(path), resume, flags.get("out"))
        elif resume is not None:
            run = old_run.find_run(load_task(path), resume, flags.get("out"))
        if stored is None:
            refuse_local_part(run)
        plan = prepare(
            path,
            config_file=config_file,
            flags=flags,
            assignments=assignments,
            run=run,
            place=place,
            asks_cluster=True,
        )
        if stored is None and is_store(plan.config.out):
            raise ConfigError(f"out = {masked(plan.config.out)} is a place in a store. Name that with --out.")
        if is_store(plan.config.init):
            check_address(str(plan.config.init), "--init")
        if plan.environment_note:
            _say(console, plan.environment_note)
        if run is not None and _is_done(plan, run, console):
            if stored is not None and (place is None or place.is_main):
                # An earlier end of it may not have reached the store.
                mirror = FolderMirror(stored.folder, stored.url, patience=plan.config.store_timeout)
                send_result(mirror, stored.url, stored.folder)
            if external_job is not None:
                external_job.finish(lambda: None)
            return TrainEnd(0, run)
        # Checked before machines wait for each other; `writing` reports what fails later.
        check_folder(plan.config.out if plan.config.out is not None else run or "runs", "--out")
        from rung.launch.half_precision import half_precision_warning

        warning = half_precision_warning(plan.config)
        if warning:
            console.print(f"warning: {warning}", style="yellow", highlight=False, soft_wrap=True, markup=False)
        if place is not None:
            _run_as_rank(path, plan, external_job or _open_external_job(place, plan.config), run, stored)
        for attempt in range(1, _MAX_FORMINGS + 1):
            rendezvous, folder, is_new = _join_machines(plan, path, run, console, may_begin=resume_if_there)
            if stored is not None:
                stored.begin()
            job = _job(path, plan, folder, is_resumed=not is_new, stored=stored)
            try:
                code = _run(path, plan, job, folder, rendezvous, console)
                return TrainEnd(code, folder)
            except Unconfirmed:
                if attempt == _MAX_FORMINGS:
                    raise
            _say(console, f"the machines that began the job at {plan.policy.rdzv} are gone; the others meet anew")
            if resume_if_there:
                run = old_run.run_if_there(plan.task, resume, flags.get("out"))
        raise AssertionError("the last attempt returns or raises")


def _open_console(place: LauncherRank) -> Console:
    from rung.launch.external import open_console

    return open_console(place, sys.stdout)


def _run(
    path: str | Path,
    plan: PreparedJob,
    job: RankJob,
    folder: Path,
    rendezvous: Rendezvous | None,
    console: Console,
) -> int:
    started = time.monotonic()
    try:
        summary, _ = launch(job, plan.layout.num_ranks, console=console, policy=plan.policy, rendezvous=rendezvous)
    except Interrupted as error:
        _say(console, f"{error}; what was written lies in {folder}")
        return 128 + int(error.signal_number) if error.signal_number != signal.SIGINT else 130
    except Stopped as stopped:
        _say(console, _stop_message(stopped, path, job.store or folder))
        return RESUME_EXIT_CODE
    if summary is None:
        _say(console, f"done in {time.monotonic() - started:.1f} s; the results are on the machine of rank 0")
        return 0
    if plan.config.save_weights and not (folder / _WEIGHTS).exists():
        raise JobFailed(
            f"all {summary.steps} steps are done, but {folder / _WEIGHTS} is not there any more: it was removed, "
            "perhaps with the whole directory, while the run came to its end."
        )
    _say_done(console, summary, folder, time.monotonic() - started)
    if job.store is not None:
        _say(console, f"all of it is in {job.store}/")
    return 0


def _open_external_job(place: LauncherRank, config: RunConfig) -> ExternalJob:
    from rung.distributed.mpi.backend import leaving_on_error
    from rung.launch.external import ExternalJob

    with leaving_on_error():
        return ExternalJob(place, config.backend, shared_key(config.rdzv_key))


def _run_as_rank(
    path: str | Path, plan: PreparedJob, external_job: ExternalJob, run: Path | None, stored: StoredRun | None
) -> NoReturn:
    """Train in this process, which is one rank of several, and exit."""
    from rung.distributed.mpi.backend import leaving_on_error
    from rung.launch.external import run_rank

    with leaving_on_error():
        folder, is_new = _agree_on_folder(path, plan, external_job, run)
        started = time.monotonic()
        if stored is not None and external_job.place.is_main:
            stored.begin()
        elif stored is not None and external_job.place.local_rank == 0:
            stored.note_address()
        if is_store(plan.config.init):
            init = str(plan.config.init)
            external_job.from_leader("init", lambda: local_weights(init, "--init"))
        job = _job(path, plan, folder, is_resumed=not is_new, stored=stored)

        def print_end(summary: Summary, console: Console) -> None:
            if summary.stopped:
                _say(console, _stop_message(Stopped(summary.steps, is_saved=True), path, job.store or folder))
            else:
                _say_done(console, summary, folder, time.monotonic() - started)
                if job.store is not None:
                    _say(console, f"all of it is in {job.store}/")

        run_rank(job, external_job, plan.policy, print_end)


def _agree_on_folder(
    path: str | Path, plan: PreparedJob, external_job: ExternalJob, run: Path | None
) -> tuple[Path, bool]:
    """The run's directory and whether it is new, both decided by rank 0."""
    place = external_job.place
    _compare_settings(
        plan, path, lambda own: external_job.from_main("settings", lambda: own), f"rank {place.rank}", "rank 0"
    )
    out = str(run) if run is not None else plan.config.out
    folder = Path(external_job.from_main("folder", lambda: str(new_run_dir(plan.task.name, plan.layout.name, out))))
    if run is not None and folder != run:
        raise ConfigError(f"rank 0 goes on with {folder}, and rank {place.rank} with {run}. Name it: --resume RUN.")
    is_new = external_job.from_main("begins", lambda: str(run is None)) == str(True)
    if place.is_main:
        _take_folder(plan, folder, lambda own: external_job.from_main("run", lambda: own), is_new=is_new)
    elif place.local_rank == 0:  # its machine may have a disk of its own
        agreed = external_job.from_main("run", str)
        _take_folder(plan, folder, lambda _: agreed, is_new=is_new)
    return folder, is_new


@dataclass(frozen=True)
class _StoredAddress:
    """The place in a store that a command names, and whether a run begins there; None leaves that open."""

    address: str
    flag: str
    is_new: bool | None


def _stored_address(
    flags: Mapping[str, Any],
    assignments: Mapping[str, str],
    file: Mapping[str, Any],
    *,
    resume: str | bool | None,
    resume_if_there: bool,
) -> _StoredAddress | None:
    """Where in a store the command's run lies, if it lies in one."""
    out = flags.get("out") or assignments.get("out") or file.get("out")
    if not (is_store(resume) or (is_store(out) and not isinstance(resume, str))):
        return None
    address = str(resume) if is_store(resume) else str(out)
    if is_store(resume) and out is not None and address.rstrip("/") != str(out).rstrip("/"):
        raise ConfigError(
            f"--resume {masked(resume)} and --out {masked(out)} are two places, but a run is resumed in its own. Leave "
            "--out out."
        )
    if resume is not None:
        return _StoredAddress(address, "--resume", is_new=False)
    return _StoredAddress(address, "--out", is_new=None if resume_if_there else True)


def _find_as_rank(external_job: ExternalJob, asked: _StoredAddress) -> StoredRun:
    """What rank 0 finds at the address counts for all: it may have begun the run before another rank looks there. The
    first rank of each machine fetches what is needed."""
    from rung.distributed.mpi.backend import leaving_on_error

    def find() -> str:
        found = find_stored_run(asked.address, asked.flag, is_new=asked.is_new)
        found.fetch()
        return found.to_json()

    with leaving_on_error():
        stored = StoredRun.from_json(external_job.from_main("stored", find))
        external_job.from_leader("fetched", stored.fetch)
    return stored


def _job(
    path: str | Path, plan: PreparedJob, folder: Path, *, is_resumed: bool, stored: StoredRun | None = None
) -> RankJob:
    task, store, config = str(Path(path).resolve()), stored.url if stored is not None else None, plan.config
    if is_store(config.init):  # fetched before ranks wait for it
        config = replace(config, init=str(local_weights(str(config.init), "--init").resolve()))
    return RankJob(task, plan.strategy, config, plan.resolved.arguments, str(folder), store=store, resume=is_resumed)


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
    if summary.last is not None and (words := end_words(read_layers(summary.last.experts))):
        _say(console, words)
    there = [f"{name}/" if (folder / name).is_dir() else name for name in _RESULTS if (folder / name).exists()]
    _say(console, f"results: {folder}/ ({', '.join(there)})")


def _stop_message(stopped: Stopped, path: str | Path, folder: str | Path) -> str:
    again = f"go on with: rung train {shlex.quote(str(path))} --resume {shlex.quote(str(folder))}"
    if stopped.is_saved and stopped.step:
        return f"stopped in step {stopped.step} after a checkpoint; {again}"
    if stopped.is_saved:
        return f"stopped before the first step; {again}"
    return f"stopped in step {stopped.step} without a checkpoint of it ({stopped.why}); {again}"


def _is_done(plan: PreparedJob, run: Path, console: Console) -> bool:
    """Whether the run has finished already. Prints what differs from the last time, if it has not."""
    base = old_run.settings_of(run, set())
    lost = f"{run} has no {old_run.CONFIG} any more: the settings of this command apply" if base is None else None
    longer = old_run.new_length(base, plan.config) if base is not None else None
    if longer is None and old_run.is_finished(run, plan.config):
        _say(console, f"{run} is finished: there is nothing to go on with. More --steps or --epochs train further")
        return True
    for line in (lost, longer, old_run.machines_left_out(run, plan.config)):
        if line is not None:
            _say(console, line)
    return False


def _join_machines(
    plan: PreparedJob, path: str | Path, run: Path | None, console: Console, *, may_begin: bool
) -> tuple[Rendezvous | None, Path, bool]:
    """The rendezvous of the job's machines, the run's directory, and whether it is new; they agree on both there."""
    from rung.launch.rendezvous.rendezvous import open_rendezvous

    is_new = run is None
    out = str(run) if run is not None else plan.config.out
    policy, rendezvous = plan.policy, None
    if policy.nodes[1] > 1:

        def say(text: str) -> None:
            _say(console, text)

        assert policy.rdzv is not None
        rendezvous = open_rendezvous(policy.rdzv, shared_key(plan.config.rdzv_key), policy.nodes, say)
        agree = partial(rendezvous.agree, SETTINGS)
        _compare_settings(plan, path, agree, "this machine", f"the job at {policy.rdzv}")
        if out is None:
            out = rendezvous.agree("folder", new_run_name(plan.task.name, plan.layout.name))
        if may_begin and rendezvous.agree(BEGINS, str(is_new)) == str(True):
            is_new = True  # what this machine found in the shared directory was just written by another
    with writing(out or "runs", "--out"):
        folder = new_run_dir(plan.task.name, plan.layout.name, out)
    _take_folder(
        plan, folder, lambda own: rendezvous.agree("run", own) if rendezvous is not None else own, is_new=is_new
    )
    return rendezvous, folder, is_new


def _take_folder(plan: PreparedJob, folder: Path, agree: Callable[[str], str], *, is_new: bool) -> None:
    """Claim a directory for this run; refuse one that another launcher is running in."""
    refuse_escapes(folder)
    other = running_launcher(folder / ".state")
    if other is not None:
        raise ConfigError(f"{folder} is being run already, by process {other}. Stop it first, or wait for its end.")
    heading = f"rung {VERSION}: {plan.task.name}, {describe_layout(plan.layout)}"
    with writing(folder, "--out"):
        old_run.claim(folder, agree, is_new=is_new)
        old_run.write_settings(plan.resolved, folder, heading)


def _compare_settings(plan: PreparedJob, path: str | Path, agree: Callable[[str], str], who: str, others: str) -> None:
    """Refuse settings that differ from those of the first launcher or rank."""
    own = {key: value for key, value in asdict(plan.config).items() if key not in _OWN}
    own |= {key: repr(value) for key, value in plan.resolved.arguments.items()}
    file = Path(path, "task.py") if Path(path).is_dir() else Path(path)
    own["a task file of digest"] = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    theirs = json.loads(agree(json.dumps(own, sort_keys=True)))
    for key in sorted(set(own) | set(theirs)):
        if own.get(key) != theirs.get(key):
            raise ConfigError(
                f"{who} was started with {key} = {own.get(key)}, and {others} with {theirs.get(key)}. Start the same "
                "command everywhere."
            )
