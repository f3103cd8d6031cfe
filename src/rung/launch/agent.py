"""The elastic agent of one machine: forms a world, starts this machine's ranks, monitors them, and starts over.

It uses torch's rendezvous and not torch's agent, which would hang on a rank that leaves early with exit code 0, wait
half a minute for one that ignores SIGTERM, not know which of several dead ranks was the first, and kill ranks that
could have saved their state.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path

from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousStateError,
)

from rung.checkpoint.places import state_folders
from rung.checkpoint.survey import CheckpointLocation, find_newest
from rung.distributed.status_board import StatusBoard
from rung.errors import EnvironmentProblem
from rung.launch.console import JobConsole
from rung.launch.rendezvous.elastic import ElasticPolicy, Restarts
from rung.launch.rendezvous.job_store import LauncherLost
from rung.launch.rendezvous.rendezvous import Rendezvous
from rung.launch.rendezvous.round import LauncherResult, Round
from rung.launch.run_folder import RunFolder
from rung.launch.signals import Signals, StopRequested
from rung.launch.worker_monitor import Outcome, WorkerMonitor
from rung.launch.worker_processes import LEAVE_SECONDS, WorkerProcesses, run_rank
from rung.launch.worker_spec import WorkerSpec
from rung.spec.abilities import optional_ranks
from rung.spec.strategy import parse
from rung.train.job import RankJob

_STORE_SECONDS = 20.0  # that the store may be unreachable before the job gives up
# Variables that the fork server may lack, because the launcher set them after it had started.
_PASSED_ON = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")


class RankAgent:
    """Runs the ranks of this machine, in one world after the other as the elastic policy allows."""

    def __init__(
        self,
        job: RankJob,
        policy: ElasticPolicy,
        rendezvous: Rendezvous,
        signals: Signals,
        view: JobConsole,
        state: Path,
    ) -> None:
        assert job.run_dir is not None
        self._job, self._policy, self._rendezvous, self._signals, self._view = job, policy, rendezvous, signals, view
        self._folder = RunFolder(Path(job.run_dir), state, policy, view.say)
        self._num_local = policy.processes[1]
        self._restarts = Restarts(policy.max_restarts)
        self._ranks: WorkerProcesses | None = None
        self._round: Round | None = None
        self._micro_batch: int | None = None  # that is left of the one asked for, after running out of memory
        self._reason = ""  # why the world is about to be formed again
        self._step, self._last_kind = 0, "failed"

    @property
    def step(self) -> int:
        """The last step that the job has begun."""
        return max(self._step, self._ranks.step() if self._ranks is not None else 0)

    def end(self) -> None:
        """Kill every process that is left."""
        if self._ranks is not None:
            self._ranks.end()

    # -- the loop ----------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Run worlds until the job has ended, and return how it did."""
        while True:
            try:
                round_ = self._form()
            except StopRequested:
                outcome = Outcome("stopped", self._step)
            except (RendezvousClosedError, RendezvousGracefulExitError):
                outcome = self._ended_elsewhere()
            except _StoreLost as error:
                # A job whose ranks saved and stopped before can still be resumed.
                outcome = Outcome(self._last_kind, self._step, str(error), is_final=True)
            else:
                outcome = self._end_round(round_, self._play(round_))
                self._step, self._last_kind = max(self._step, outcome.step), outcome.kind
            if not self._goes_on(outcome):
                return outcome

    def _play(self, round_: Round) -> Outcome:
        """One world on this machine, from the start of its ranks to their end."""
        try:
            monitor = self._start(round_)
        except (EOFError, ConnectionError):
            # Not tried again in this world: ranks that were started already have left their addresses in its store.
            return Outcome(
                "failed", self._step, "the process that ranks are forked from was killed while they started."
            )
        return monitor.wait()

    def _goes_on(self, outcome: Outcome) -> bool:
        """Whether to form another world, for `_reason`. If not, leave the rendezvous, or close it for all machines."""
        self._num_local = outcome.wanted or self._num_local
        if outcome.kind == "finished":
            self._rendezvous.close("finished", "")
            return False
        if self._signals.asked is not None:
            self._rendezvous.leave()  # the others go on
            return False
        if outcome.kind == "stopped":
            if outcome.is_final or not self._policy.restarts:
                if outcome.report:
                    self._view.say(outcome.report)
                self._rendezvous.leave()
                return False
            self._reason = outcome.reason or self._who_stopped()
            return True
        if outcome.smaller is not None:
            self._micro_batch = outcome.smaller
            unit = "sample" if self._job.config.batch_tokens is None else "token"
            samples = f"{outcome.smaller} {unit}{'s' if outcome.smaller > 1 else ''}"
            # What follows in torch's text is given better by `memory`.
            short = outcome.headline.partition(" GPU ")[0].rstrip(". ")
            self._reason = f"{short}; {outcome.memory}; now in micro-batches of {samples}"
            self._folder.keep_report(outcome.report)
            return True
        if outcome.is_final or not self._restarts.after_failure(outcome.step):
            self._rendezvous.close("failed", outcome.headline)
            return False
        self._reason = f"{outcome.headline} ({self._folder.keep_report(outcome.report)})"
        least, most = self._policy.processes
        if least < most and outcome.culprits < self._num_local:  # if all failed, more than a bad device is the cause
            self._num_local = max(least, self._num_local - outcome.culprits)
        return True

    def _who_stopped(self) -> str:
        """Why the ranks stopped, if this machine did not ask them to."""
        deadline = time.monotonic() + 1.0
        while not self._rendezvous.is_alone and time.monotonic() < deadline:
            left = [result.address for result in self._rendezvous.peers().results.values() if result.kind == "left"]
            if left:
                return f"{' and '.join(left)} left"
            time.sleep(0.05)
        return "a rank was asked to stop"

    # -- forming a world ---------------------------------------------------------------------------------------------

    def _form(self) -> Round:
        policy, job = self._policy, self._job
        resume = job.resume or self._round is not None

        def join() -> Round:
            return self._rendezvous.form(self._num_local, job.strategy, job.config, resume, self._micro_batch)

        def say() -> None:
            if self._reason:
                self._view.say(self._reason)
            self._reason = ""
            least, most = policy.nodes
            wanted = f"{least} to {most}" if least < most else f"{most}"
            self._view.say(f"waiting at {policy.rdzv} for a place in the job, which is for {wanted} machines")

        deadline = time.monotonic() + _STORE_SECONDS
        while True:
            try:
                round_ = self._signals.aside(join, say)
                break
            except (StopRequested, RendezvousClosedError, RendezvousGracefulExitError):
                raise
            except (EnvironmentProblem, RendezvousStateError):  # forged, or of another version: a retry would not help
                raise
            except LauncherLost:
                time.sleep(0.1)
            except Exception as error:
                if self._rendezvous.is_alone:
                    raise
                if self._signals.aside(self._rendezvous.is_reachable, lambda: None):
                    deadline = time.monotonic() + _STORE_SECONDS
                elif time.monotonic() > deadline:
                    raise _StoreLost(_lost_store(policy)) from error
                self._signals.aside(self._rendezvous.reconnect, lambda: None)
        self._say_formed(round_)
        self._reason = ""
        self._round = round_
        return round_

    def _say_formed(self, round_: Round) -> None:
        if round_.attempt > 1:
            others = f" on {round_.num_hosts} machines" if round_.num_hosts > 1 else ""
            verb = "going on" if self._round is not None else "joining a job that goes on"
            line = f"{verb} with {round_.used} rank{'s' if round_.used != 1 else ''}{others}{self._where_from()}"
            self._view.say(f"{self._reason}; {line}" if self._reason else line)
        if round_.num_spares and round_.host == 0:
            names = ", ".join(map(str, range(round_.used, round_.size)))
            spare = f"rank {names} waits as a spare" if round_.num_spares == 1 else f"ranks {names} wait as spares"
            if not round_.used:
                spare = "all of them wait for more to come"
            self._view.say(
                f"{round_.size} process{'es' * (round_.size > 1)}: {self._job.strategy} uses {round_.used}, {spare}"
            )

    def _where_from(self) -> str:
        """The step to continue from, on one machine only: others may have a newer state."""
        if not self._rendezvous.is_alone:
            return ""
        found = find_newest(CheckpointLocation(self._folder.path, state_folders(self._folder.path)), thorough=False)
        return f" from step {found.step}" if found is not None else " from the first step"

    def _start(self, round_: Round) -> WorkerMonitor:
        """Start this machine's ranks of a world."""
        self._folder.restore()
        state = self._folder.state
        for old in [*state.glob("rank-*.json"), state / "summary", state / "status"]:
            old.unlink(missing_ok=True)
        board = StatusBoard(state / "status", round_.size, create=True)
        if self._signals.asked is not None:
            board.request("stop")
        layout = parse(round_.strategy, round_.used, servers=self._job.config.servers) if round_.used else None
        self._ranks = WorkerProcesses(board, optional_ranks(layout) if layout is not None else ())
        self._view.follow(board, round_.ranks)
        local_used = len([rank for rank in round_.ranks if rank < round_.used])
        spec = WorkerSpec(
            str(state),
            round_.size,
            round_.used,
            max(1, local_used),
            round_.attempt,
            self._rendezvous.interface,
            self._rendezvous.key_of(round_),
        )
        self._micro_batch = round_.micro_batch
        config = self._job.config
        if round_.micro_batch is not None:
            config = replace(config, micro_batch=round_.micro_batch)
        restarted = self._round is not None and round_.attempt > 1
        job = replace(self._job, strategy=round_.strategy, config=config, resume=round_.resume, restarted=restarted)
        run_id = self._rendezvous.job.handler.run_id
        context = multiprocessing.get_context("forkserver")
        processes: dict[int, BaseProcess] = {
            rank: context.Process(target=run_rank, args=(_environment(round_, local, run_id), job, spec))
            for local, rank in enumerate(round_.ranks)
        }
        with self._signals.held():  # else a rank that is half started would not be in the list of processes to end
            for process in processes.values():
                process.start()
            self._ranks.started(processes)
        return WorkerMonitor(
            round_,
            self._ranks,
            rendezvous=self._rendezvous,
            signals=self._signals,
            policy=self._policy,
            folder=self._folder,
            timeout=self._job.config.timeout,
            reached=self._step,
            say=self._view.say,
        )

    # -- ending it ---------------------------------------------------------------------------------------------------

    def _end_round(self, round_: Round, outcome: Outcome) -> Outcome:
        """End what is left of the world on this machine, and report to the others how it ended."""
        self.end()
        kind = "left" if outcome.kind == "stopped" and self._signals.asked is not None else outcome.kind
        self._rendezvous.report(LauncherResult(kind, self._rendezvous.address, outcome.step, outcome.headline))
        if outcome.kind == "finished" and round_.num_hosts > 1:
            return self._wait_for_others(round_, outcome)
        return outcome

    def _wait_for_others(self, round_: Round, outcome: Outcome) -> Outcome:
        """All machines have to finish: if one fails at the end, all repeat the last steps with it."""
        deadline = time.monotonic() + LEAVE_SECONDS
        while time.monotonic() < deadline and self._signals.asked is None:
            peers = self._rendezvous.peers()
            failed = [result for result in peers.results.values() if result.kind == "failed"]
            if failed:
                return Outcome("failed", outcome.step, f"on {failed[0].address}: {failed[0].headline}")
            if len(peers.results) == round_.num_hosts - 1 or peers.lost:
                break
            time.sleep(0.05)
        return outcome

    def _ended_elsewhere(self) -> Outcome:
        """The outcome of a job that ended in a world without this machine."""
        kind, headline = self._rendezvous.ending()
        if kind == "finished":
            return Outcome("finished", self._step)
        return Outcome("failed", self._step, f"the job failed: {headline}", is_final=True)


def _environment(round_: Round, local_rank: int, run_id: str) -> dict[str, str]:
    """The variables that torchrun sets for a rank. Tasks and libraries read them, also those for elastic jobs."""
    rank, size = str(round_.first_rank + local_rank), str(round_.size)
    return {
        "RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(round_.host),
        "ROLE_RANK": rank,
        "ROLE_NAME": "rank",
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": str(round_.num_local),
        "GROUP_WORLD_SIZE": str(round_.num_hosts),
        "ROLE_WORLD_SIZE": size,
        "MASTER_ADDR": round_.address,
        "MASTER_PORT": str(round_.port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        **{name: os.environ[name] for name in _PASSED_ON if name in os.environ},
    }


class _StoreLost(Exception):
    """The store of the rendezvous does not answer."""


def _lost_store(policy: ElasticPolicy) -> str:
    port = str(policy.rdzv).rpartition(":")[2]
    return (
        f"no process answers at {policy.rdzv} any more, where the machines of this job meet. With `rung rdzv {port}` "
        "in a process of its own there, the job outlives the loss of any of its machines."
    )
