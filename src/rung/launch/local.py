"""Starts this machine's part of a job, by torch's elastic agent over processes forked from a warm server."""

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

from rung.environment import ignored_interfaces
from rung.errors import JobFailed
from rung.launch.console import JobConsole
from rung.launch.elastic import Terms, announce, retire
from rung.launch.signals import Interrupted, Signals
from rung.processes import refuse_few_files

if TYPE_CHECKING:  # torch is imported later, while the server that `warm_up` starts imports it, too
    from rung.launch.agent import RankAgent
    from rung.launch.meeting import Meeting
    from rung.loop import Summary
    from rung.train import Job


class Stopped(Exception):
    """The job was asked to leave, and did. It can be resumed."""

    def __init__(self, step: int, *, is_saved: bool, why: str = "") -> None:
        super().__init__(why or f"stopped in step {step}")
        self.step, self.is_saved, self.why = step, is_saved, why


def launch(
    job: Job,
    num_ranks: int,
    *,
    console: Console,
    quiet: bool = False,
    terms: Terms | None = None,
    meeting: Meeting | None = None,
) -> tuple[Summary | None, JobConsole]:
    """Run a job to its end, with `num_ranks` processes or on other terms.

    Raises JobFailed with the report of a failure, Stopped where it was asked to leave, and Interrupted. The summary is
    known on the machine of rank 0 only.
    """
    from rung.launch.meeting import meet_here

    assert job.run_dir is not None
    terms = terms or Terms((num_ranks, num_ranks))
    refuse_few_files(terms.processes[1] * terms.nodes[1], terms.processes[1], job.config.workers)
    folder = Path(job.run_dir)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    view = JobConsole(folder, console, quiet=quiet)
    meeting = meeting or meet_here()
    state = _state_folder(folder, meeting)
    announce(state, terms)
    agent: RankAgent | None = None
    if (ignored := ignored_interfaces(meeting.interface)) is not None:
        view.say(ignored)
    with view, Signals(polite=terms.is_polite) as signals:
        try:
            agent = _make_agent(job, terms, meeting, signals, view, state)
            _run_agent(job, agent)
        except Interrupted as error:
            raise Interrupted(error.signal_number, agent.step if agent is not None else 0) from None
        finally:
            signals.ignore()
            ends = [agent.end] if agent is not None else []
            _clean_up([*ends, meeting.leave, lambda: retire(state)], view.say)
    summary = _read_summary(state)
    if not meeting.is_alone:
        shutil.rmtree(state, ignore_errors=True)
    outcome = agent.outcome
    if outcome.kind != "finished" and (outcome.kind == "stopped" or signals.asked is not None):
        raise Stopped(agent.step, is_saved=outcome.kind == "stopped", why=outcome.headline)
    if outcome.kind == "failed":
        raise JobFailed(outcome.report, is_mistake=outcome.is_mistake)
    return summary, view


def _clean_up(actions: Iterable[Callable[[], None]], say: Callable[[str], None]) -> None:
    """All of them, whatever becomes of one: an error here must not hide how the job ended, which is told next."""
    for action in actions:
        try:
            action()
        except Exception as error:
            say(f"after the job's end: {type(error).__name__}: {error}")


def _read_summary(state: Path) -> Summary | None:
    from rung.loop import Summary

    path = state / "summary"
    return Summary.from_json(json.loads(path.read_text())) if path.exists() else None


def _state_folder(folder: Path, meeting: Meeting) -> Path:
    """Where the launcher and its ranks exchange what nobody else needs. Machines may share the run's directory."""
    state = folder / ".state"
    if not meeting.is_alone:
        state = state / f"{meeting.address}-{os.getpid()}"
    state.mkdir(parents=True, exist_ok=True)
    return state


def _make_agent(job: Job, terms: Terms, meeting: Meeting, signals: Signals, view: JobConsole, state: Path) -> RankAgent:
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    from rung.launch.agent import RankAgent
    from rung.launch.rank import rank_main

    _silence_agent()
    # No log directory of the agent's: it would stay behind in /tmp, and the ranks write their own.
    nowhere = DefaultLogsSpecs(log_dir=os.devnull)
    defaults = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1, logs_specs=nowhere)
    spec = WorkerSpec(
        role="rank",
        local_world_size=terms.processes[1],
        entrypoint=rank_main,
        rdzv_handler=meeting.handler,
        max_restarts=0,
        monitor_interval=0.05,
        local_addr=meeting.address,
        numa_options=defaults.numa_options,
    )
    return RankAgent(job, terms, meeting, signals, view, state, spec, logs_specs=nowhere, start_method="forkserver")


def _run_agent(job: Job, agent: RankAgent) -> None:
    agent.run()


def _silence_agent() -> None:
    """Its account of a failure is longer than a screen, and names the wrong rank as often as the right one."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)


def new_run_name(task: str, strategy: str) -> str:
    """runs/<task>-<strategy>-<time>"""
    return f"runs/{task}-{strategy.replace(',', '-')}-{time.strftime('%Y%m%d-%H%M%S')}"


def new_run_dir(task: str, strategy: str, out: str | None) -> Path:
    """runs/<task>-<strategy>-<time>, or what --out says. Two jobs of the same second get two directories."""
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
