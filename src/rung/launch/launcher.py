"""Runs this machine's part of a job and returns its summary."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from rung.errors import JobFailed
from rung.launch.console import JobConsole
from rung.launch.rendezvous.elastic import ElasticPolicy, announce, retire
from rung.launch.signals import Interrupted, Signals
from rung.launch.stored_run import FolderMirror, send_result
from rung.system.launcher_env import ignored_interfaces
from rung.system.processes import num_cores, refuse_few_files
from rung.train.job import RankJob
from rung.train.records import Summary

if TYPE_CHECKING:  # these import torch, which the launcher does later, at the same time as the fork server
    from rung.launch.agent import RankAgent
    from rung.launch.rendezvous.rendezvous import Rendezvous
    from rung.launch.worker_monitor import Outcome


class Stopped(Exception):
    """The job was stopped by a signal. It can be resumed."""

    def __init__(self, step: int, *, is_saved: bool, why: str = "") -> None:
        super().__init__(why or f"stopped in step {step}")
        self.step, self.is_saved, self.why = step, is_saved, why


def launch(
    job: RankJob,
    num_ranks: int,
    *,
    console: Console,
    quiet: bool = False,
    policy: ElasticPolicy | None = None,
    rendezvous: Rendezvous | None = None,
) -> tuple[Summary | None, JobConsole]:
    """Run a job to its end, with `num_ranks` processes unless `policy` says otherwise.

    Raises JobFailed with the report of a failure, Stopped after a request to stop, and Interrupted. Only the machine of
    rank 0 has the summary.
    """
    from rung.launch.rendezvous.rendezvous import local_rendezvous  # loads torch

    assert job.run_dir is not None
    policy = policy or ElasticPolicy((num_ranks, num_ranks))
    workers = job.config.workers
    most_workers = workers if isinstance(workers, int) else num_cores()
    # Without free file descriptors a job hangs, and does not fail.
    refuse_few_files(policy.processes[1] * policy.nodes[1], policy.processes[1], most_workers)
    folder = Path(job.run_dir)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    view = JobConsole(folder, console, quiet=quiet)
    rendezvous = rendezvous or local_rendezvous()
    state = _state_folder(folder, rendezvous)
    announce(state, policy)
    agent: RankAgent | None = None
    outcome: Outcome
    if (ignored := ignored_interfaces(rendezvous.interface)) is not None:
        view.say(ignored)
    mirror = None
    if job.store is not None:
        patience, only_new = job.config.store_timeout, not rendezvous.is_alone
        mirror = FolderMirror(folder, job.store, patience=patience, only_new=only_new)
    with view, Signals(polite=policy.is_polite) as signals:
        try:
            if mirror is not None:
                mirror.start(view.say)
            agent = _make_agent(job, policy, rendezvous, signals, view, state)
            outcome = _run_agent(job, agent)
        except Interrupted as error:
            raise Interrupted(error.signal_number, agent.step if agent is not None else 0) from None
        finally:
            signals.ignore()  # a further signal must not interrupt the clean-up, which kills the ranks
            ends = [agent.end] if agent is not None else []
            _clean_up([*ends, rendezvous.leave, lambda: retire(state)], view.say)
            if mirror is not None:
                mirror.stop()
    if mirror is not None and job.store is not None and outcome.kind == "finished":
        send_result(mirror, job.store, folder)
    elif mirror is not None:
        _clean_up([mirror.finish], view.say)
    summary = _read_summary(state)
    if not rendezvous.is_alone:  # the folder has this process's pid in its name, and would never be used again
        shutil.rmtree(state, ignore_errors=True)
    if outcome.kind != "finished" and (outcome.kind == "stopped" or signals.asked is not None):
        raise Stopped(agent.step, is_saved=outcome.kind == "stopped", why=outcome.headline)
    if outcome.kind == "failed":
        raise JobFailed(outcome.report, is_mistake=outcome.is_mistake)
    return summary, view


def _clean_up(actions: Iterable[Callable[[], None]], say: Callable[[str], None]) -> None:
    """Call all actions. An error of one is printed, but must not hide how the job ended, which comes next."""
    for action in actions:
        try:
            action()
        except Exception as error:
            say(f"after the job's end: {type(error).__name__}: {error}")


def _read_summary(state: Path) -> Summary | None:
    path = state / "summary"
    return Summary.from_json(json.loads(path.read_text())) if path.exists() else None


def _state_folder(folder: Path, rendezvous: Rendezvous) -> Path:
    """The folder in which the launcher and its ranks exchange files."""
    state = folder / ".state"
    if not rendezvous.is_alone:  # machines may share the run's directory
        state = state / f"{rendezvous.address}-{os.getpid()}"
    state.mkdir(parents=True, exist_ok=True)
    return state


def _make_agent(
    job: RankJob, policy: ElasticPolicy, rendezvous: Rendezvous, signals: Signals, view: JobConsole, state: Path
) -> RankAgent:
    from rung.launch.agent import RankAgent  # loads torch

    _silence_rendezvous()
    return RankAgent(job, policy, rendezvous, signals, view, state)


def _run_agent(job: RankJob, agent: RankAgent) -> Outcome:
    return agent.run()


def _silence_rendezvous() -> None:
    """Silence torch's rendezvous: it logs errors that the launcher reports itself."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)


def new_run_name(task: str, strategy: str) -> str:
    return f"runs/{task}-{strategy.replace(',', '-')}-{time.strftime('%Y%m%d-%H%M%S')}"


def new_run_dir(task: str, strategy: str, out: str | None) -> Path:
    """Create --out or runs/<task>-<strategy>-<time>. Two jobs of the same second get different directories."""
    if out is not None:
        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    stem = new_run_name(task, strategy)
    for number in range(1, 1000):
        folder = Path(stem if number == 1 else f"{stem}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise AssertionError("a thousand runs in one second")
