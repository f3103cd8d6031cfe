"""torch's elastic agent, with a loop of its own: form a world, watch it, and go on after what happened.

torch's loop would hang on a rank that leaves early with exit code 0, wait half a minute for one that ignores SIGTERM,
not know which of several dead ranks was the first, and kill ranks that could have saved their state. What is left of it
is how processes are started, and the rendezvous.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousStateError,
)

from rung.checkpoint.places import state_folders
from rung.checkpoint.survey import Place, find_newest
from rung.disk import reason
from rung.errors import EnvironmentProblem
from rung.launch.console import JobConsole
from rung.launch.elastic import Restarts, Terms, announce, running_launcher
from rung.launch.meeting import LauncherLost, Meeting
from rung.launch.rank import Seat
from rung.launch.ranks import LEAVE_SECONDS, Ranks
from rung.launch.resume import CONFIG
from rung.launch.rounds import Fate, Round
from rung.launch.signals import Asked, Signals
from rung.launch.watch import Outcome, Watch
from rung.status import StatusBoard
from rung.strategy import parse
from rung.train import Job

_STORE_SECONDS = 20.0  # without a store to meet at


class RankAgent(LocalElasticAgent):
    """Starts the ranks of this machine, again and again if the terms allow it. `outcome` is how the job ended."""

    outcome: Outcome

    def __init__(
        self,
        job: Job,
        terms: Terms,
        meeting: Meeting,
        signals: Signals,
        view: JobConsole,
        state: Path,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        assert job.run_dir is not None
        self._job, self._terms, self._meeting, self._signals, self._view = job, terms, meeting, signals, view
        self._folder, self._state = Path(job.run_dir), state
        self._settings = (self._folder / CONFIG).read_bytes() if (self._folder / CONFIG).exists() else None
        self._num_local = terms.processes[1]
        self._restarts = Restarts(terms.max_restarts)
        self._ranks: Ranks | None = None
        self._round: Round | None = None
        self._micro_batch: int | None = None  # that is left of the one asked for, after running out of memory
        self._reason = ""  # why the world is about to be formed again
        self._step, self._last_kind = 0, "failed"

    @property
    def step(self) -> int:
        """How far the job has come."""
        return max(self._step, self._ranks.step() if self._ranks is not None else 0)

    def end(self) -> None:
        """Leave no process behind."""
        if self._ranks is not None:
            self._ranks.end()

    # -- the loop ----------------------------------------------------------------------------------------------------

    def _invoke_run(self, role: str = "") -> RunResult:
        while True:
            try:
                round_ = self._form()
            except Asked:
                outcome = Outcome("stopped", self._step)
            except (RendezvousClosedError, RendezvousGracefulExitError):
                outcome = self._learn_how_it_ended()
            except _StoreLost as error:
                # Who left the world before in good order can still be resumed.
                outcome = Outcome(self._last_kind, self._step, str(error), is_final=True)
            else:
                outcome = self._end_round(round_, self._play(round_))
                self._step, self._last_kind = max(self._step, outcome.step), outcome.kind
            if not self._goes_on(outcome):
                self.outcome = outcome
                succeeded = outcome.kind == "finished"
                return RunResult(state=WorkerState.SUCCEEDED if succeeded else WorkerState.FAILED)

    def _play(self, round_: Round) -> Outcome:
        """One world on this machine, from the start of its ranks to their end."""
        try:
            watch = self._start(round_)
        except (EOFError, ConnectionError):
            # Not tried again in this world: ranks that were started already have left their addresses in its store.
            return Outcome(
                "failed", self._step, "the process that ranks are forked from was killed while they started."
            )
        return watch.until_the_end()

    def _goes_on(self, outcome: Outcome) -> bool:
        """Whether the world is formed again, and if so why; else what the others are told."""
        self._num_local = outcome.wanted or self._num_local
        if outcome.kind == "finished":
            self._meeting.close("finished", "")
            return False
        if self._signals.asked is not None:
            self._meeting.leave()  # the others go on
            return False
        if outcome.kind == "stopped":
            if outcome.is_final or not self._terms.restarts:
                if outcome.report:
                    self._view.say(outcome.report)
                self._meeting.leave()
                return False
            self._reason = outcome.reason or self._who_stopped()
            return True
        if outcome.smaller is not None:
            self._micro_batch = outcome.smaller
            samples = f"{outcome.smaller} sample{'s' if outcome.smaller > 1 else ''}"
            short = outcome.headline.partition(" GPU ")[0].rstrip(". ")  # torch goes on to tell what follows better
            self._reason = f"{short}; {outcome.memory}; now in micro-batches of {samples}"
            self._keep_report(outcome)
            return True
        if outcome.is_final or not self._restarts.after_failure(outcome.step):
            self._meeting.close("failed", outcome.headline)
            return False
        self._reason = f"{outcome.headline} ({self._keep_report(outcome)})"
        least, most = self._terms.processes
        if least < most and outcome.culprits < self._num_local:  # else it was not the fault of their places
            self._num_local = max(least, self._num_local - outcome.culprits)
        return True

    def _who_stopped(self) -> str:
        """Why the ranks left, if nobody here asked them."""
        deadline = time.monotonic() + 1.0
        while not self._meeting.is_alone and time.monotonic() < deadline:
            left = [fate.address for fate in self._meeting.news().fates.values() if fate.kind == "left"]
            if left:
                return f"{' and '.join(left)} left"
            time.sleep(0.05)
        return "a rank was asked to stop"

    def _keep_report(self, outcome: Outcome) -> str:
        """Where the report of a failure is, after which the job goes on."""
        folder = self._folder / "failures"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            numbers = [int(path.stem) for path in folder.glob("*.txt") if path.stem.isdecimal()]
            path = folder / f"{max(numbers, default=0) + 1:03d}.txt"
            path.write_text(f"{outcome.report}\n")
        except OSError as error:
            self._view.say(outcome.report)
            return f"its report is above and not in {folder}: {reason(error)}"
        return f"report: {path}"

    # -- forming a world ---------------------------------------------------------------------------------------------

    def _form(self) -> Round:
        terms, job = self._terms, self._job
        resume = job.resume or self._round is not None

        def meet() -> Round:
            return self._meeting.form(self._num_local, job.strategy, job.config, resume, self._micro_batch)

        def say() -> None:
            if self._reason:
                self._view.say(self._reason)
            self._reason = ""
            least, most = terms.nodes
            wanted = f"{least} to {most}" if least < most else f"{most}"
            self._view.say(f"waiting at {terms.rdzv} for a place in the job, which is for {wanted} machines")

        deadline = time.monotonic() + _STORE_SECONDS
        while True:
            try:
                round_ = self._signals.aside(meet, say)
                break
            except (Asked, RendezvousClosedError, RendezvousGracefulExitError):
                raise
            except (EnvironmentProblem, RendezvousStateError):  # forged, or of another version: no retry would mend it
                raise
            except LauncherLost:
                time.sleep(0.1)
            except Exception as error:
                if self._meeting.is_alone:
                    raise
                if self._signals.aside(self._meeting.is_reachable, lambda: None):
                    deadline = time.monotonic() + _STORE_SECONDS
                elif time.monotonic() > deadline:
                    raise _StoreLost(_lost_store(terms)) from error
                self._signals.aside(self._meeting.reconnect, lambda: None)
        self._say_formed(round_)
        self._reason = ""
        self._round = round_
        return round_

    def _say_formed(self, round_: Round) -> None:
        if round_.attempt > 1:
            others = f" on {round_.num_hosts} machines" if round_.num_hosts > 1 else ""
            verb = "going on" if self._round is not None else "joining a job that goes on"
            told = f"{verb} with {round_.used} rank{'s' if round_.used != 1 else ''}{others}{self._where_from()}"
            self._view.say(f"{self._reason}; {told}" if self._reason else told)
        if round_.num_spares and round_.host == 0:
            names = ", ".join(map(str, range(round_.used, round_.size)))
            spare = f"rank {names} waits as a spare" if round_.num_spares == 1 else f"ranks {names} wait as spares"
            if not round_.used:
                spare = "all of them wait for more to come"
            self._view.say(
                f"{round_.size} process{'es' * (round_.size > 1)}: {self._job.strategy} uses {round_.used}, {spare}"
            )

    def _where_from(self) -> str:
        """The step to go on from, where this machine can know it: others may have a newer state."""
        if not self._meeting.is_alone:
            return ""
        found = find_newest(Place(self._folder, state_folders(self._folder)), thorough=False)
        return f" from step {found.step}" if found is not None else " from the first step"

    def _start(self, round_: Round) -> Watch:
        """Start this machine's ranks of a world."""
        self._put_folder_back()
        for old in [*self._state.glob("rank-*.json"), self._state / "summary", self._state / "status"]:
            old.unlink(missing_ok=True)
        board = StatusBoard(self._state / "status", round_.size, create=True)
        if self._signals.asked is not None:
            board.request("stop")
        layout = parse(round_.strategy, round_.used, servers=self._job.config.servers) if round_.used else None
        self._ranks = Ranks(board, layout.expendable if layout is not None else ())
        self._view.follow(board, round_.ranks)
        group: Any = self._worker_group
        spec = group.spec
        local_used = len([rank for rank in round_.ranks if rank < round_.used])
        seat = Seat(
            str(self._state),
            round_.size,
            round_.used,
            max(1, local_used),
            round_.attempt,
            self._meeting.interface,
            self._meeting.key_of(round_),
        )
        self._micro_batch = round_.micro_batch
        config = self._job.config
        if round_.micro_batch is not None:
            config = replace(config, micro_batch=round_.micro_batch)
        restarted = self._round is not None and round_.attempt > 1
        job = replace(self._job, strategy=round_.strategy, config=config, resume=round_.resume, restarted=restarted)
        spec.args = (job, seat)
        spec.local_world_size = round_.num_local
        spec.rdzv_handler = self._meeting.handler
        group.store = self._meeting.handler  # asked for, and not used
        group.group_rank, group.group_world_size = round_.host, round_.num_hosts
        group.master_addr, group.master_port = round_.address, round_.port
        group.workers = [Worker(local, rank, rank, round_.size, round_.size) for local, rank in enumerate(round_.ranks)]
        self._start_workers(group)
        group.state = WorkerState.HEALTHY
        return Watch(
            round_,
            self._ranks,
            meeting=self._meeting,
            signals=self._signals,
            terms=self._terms,
            state=self._state,
            logs=self._folder / "logs",
            timeout=self._job.config.timeout,
            reached=self._step,
            say=self._view.say,
        )

    def _put_folder_back(self) -> None:
        """If the run's directory was removed meanwhile. A job needs nothing of it but a place to write to; without its
        settings there, nobody could resume it."""
        for folder in (self._state, self._folder / "logs"):
            folder.mkdir(parents=True, exist_ok=True)
        if not running_launcher(self._state):
            announce(self._state, self._terms)
        if self._settings is not None and not (self._folder / CONFIG).exists():
            (self._folder / CONFIG).write_bytes(self._settings)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        assert self._ranks is not None
        assert self._round is not None
        with self._signals.held():  # a rank that is half started would be known to nobody
            pids: dict[int, Any] = super()._start_workers(worker_group)
        # The processes themselves, for their exit codes. Neither the agent nor multiprocessing gives them out: the list
        # of active children has forgotten a rank that is dead by now.
        context: Any = self._pcontext
        self._ranks.started(dict(zip(self._round.ranks, context._pc.processes, strict=True)))
        return pids

    # -- ending it ---------------------------------------------------------------------------------------------------

    def _end_round(self, round_: Round, outcome: Outcome) -> Outcome:
        """Nothing is left of the world here, and the others know how it ended."""
        self.end()
        super()._shutdown()
        kind = "left" if outcome.kind == "stopped" and self._signals.asked is not None else outcome.kind
        self._meeting.tell(Fate(kind, self._meeting.address, outcome.step, outcome.headline))
        if outcome.kind == "finished" and round_.num_hosts > 1:
            return self._wait_for_others(round_, outcome)
        return outcome

    def _wait_for_others(self, round_: Round, outcome: Outcome) -> Outcome:
        """All machines have to come to the end; if one fails there, the others go back with it."""
        deadline = time.monotonic() + LEAVE_SECONDS
        while time.monotonic() < deadline and self._signals.asked is None:
            news = self._meeting.news()
            failed = [fate for fate in news.fates.values() if fate.kind == "failed"]
            if failed:
                return Outcome("failed", outcome.step, f"on {failed[0].address}: {failed[0].headline}")
            if len(news.fates) == round_.num_hosts - 1 or news.lost:
                break
            time.sleep(0.05)
        return outcome

    def _learn_how_it_ended(self) -> Outcome:
        """The job is over, and this machine was not part of its last world."""
        kind, headline = self._meeting.ending()
        if kind == "finished":
            return Outcome("finished", self._step)
        return Outcome("failed", self._step, f"the job failed: {headline}", is_final=True)

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:  # torch 2.11 and 2.13 differ in the arguments
        self._signals.ignore()  # a second Ctrl-C must not cut short what the first one began
        self.end()
        super()._shutdown(*args, **kwargs)

    def _record_worker_events(self, result: RunResult) -> None:
        """Nobody reads the agent's events, and each looks the host's name up: seconds, where names do not resolve."""


class _StoreLost(Exception):
    """Nobody answers where the launchers meet."""


def _lost_store(terms: Terms) -> str:
    port = str(terms.rdzv).rpartition(":")[2]
    return (
        f"nobody answers at {terms.rdzv} any more, where the machines of this job meet. With `rung rdzv {port}` in a "
        "process of its own there, the job outlives the loss of any of its machines."
    )
