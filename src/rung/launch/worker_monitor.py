"""The launcher monitors the ranks of one world on this machine until the world ends: finished, stopped or failed."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from rung import errors
from rung.launch.diagnostics.failure import FailureRecord, describe_end, first_to_fail, read_failures, report
from rung.launch.diagnostics.hang import HangMonitor
from rung.launch.rendezvous.elastic import ElasticPolicy, wanted_processes
from rung.launch.rendezvous.rendezvous import Rendezvous
from rung.launch.rendezvous.round import LauncherResult, PeerStatus, Round
from rung.launch.run_folder import RunFolder
from rung.launch.signals import Signals
from rung.launch.worker_processes import LEAVE_SECONDS, WorkerProcesses

_POLL_SECONDS = 0.05
# After one rank dies, the others get this long to fail by themselves: a rank that lost its connection to the dead one
# logs that, and the system may report two deaths out of order.
_SETTLE_SECONDS = 0.25
_HANG_UP_SECONDS = 1.0  # the same, after ranks were asked to close their connections
_FAR_SECONDS = 2.0  # the same, where the dead rank is on another machine
# Ranks that may have lost a machine get this long to save. Ranks that still can are quick; the others would wait.
_LOST_SECONDS = 2.0
_LOST = "a machine was lost"
# Errors that a restart would only repeat.
_FINAL = tuple(
    kind.__name__
    for kind in (
        errors.TaskError,
        errors.ConfigError,
        errors.StrategyError,
        errors.DataError,
        errors.ModelError,
        errors.CheckpointError,
    )
)


@dataclass(frozen=True)
class Outcome:
    """How a world ended on this machine."""

    kind: str  # finished, stopped, failed
    step: int
    report: str = ""
    reason: str = ""  # why the launcher asked the ranks to stop, if it did
    wanted: int | None = None  # number of processes for the next world on this machine
    culprits: int = 0  # ranks of this machine that failed by themselves
    is_final: bool = False  # a restart would only repeat the failure
    is_mistake: bool = False  # ranks found an error in the settings or the task before they trained
    memory: str = ""  # what filled the memory, if a rank ran out of it
    smaller: int | None = None  # the micro-batch for the next world, if a rank ran out of memory

    @property
    def headline(self) -> str:
        """The report's first line, without its advice."""
        first = self.report.partition("\n")[0]
        return re.sub(r"\.( The kernel .*)?$", "", first)


class WorkerMonitor:
    """Polls the ranks of one world and decides how the world ended."""

    def __init__(
        self,
        round_: Round,
        ranks: WorkerProcesses,
        *,
        rendezvous: Rendezvous,
        signals: Signals,
        policy: ElasticPolicy,
        folder: RunFolder,
        timeout: float,
        reached: int = 0,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`reached` is the last step of the worlds before this one."""
        self._round, self._ranks, self._policy = round_, ranks, policy
        self._rendezvous, self._signals, self._folder = rendezvous, signals, folder
        self._state, self._logs = folder.state, folder.logs
        self._hangs = HangMonitor(ranks.board, round_.ranks, folder.state, timeout, folder.logs)
        self._reached, self._say, self._missed = reached, say, set[int]()

    def wait(self) -> Outcome:
        ranks = self._ranks
        stopping = Outcome("stopped", 0)  # with the reason, once there is one
        stop_by: float | None = None
        while True:
            time.sleep(_POLL_SECONDS)
            ranks.look()
            self._folder.restore_if_removed()
            self._report_missed()
            peers = self._rendezvous.peers()
            found = self._outcome(peers)
            if found is not None:
                return replace(found, reason=stopping.reason, wanted=stopping.wanted)
            if stop_by is None:
                stop_by, stopping = self._reason_to_stop(peers)
                if stop_by is not None:
                    ranks.board.request("stop")
            elif time.monotonic() > stop_by:
                where = [f"rank {rank}: {text}" for rank, text in self._hangs.places().items()]
                reason = stopping.reason or "the ranks did not save their state in time"
                lines = [f"{reason}, in step {ranks.step()}", *where, f"logs: {self._logs}"]
                self._await_exits()
                return replace(stopping, kind="failed", step=ranks.step(), report="\n".join(lines))

    def _report_missed(self) -> None:
        """Print a line for each optional rank that died; the job continues without it."""
        for rank in set(self._ranks.missed()) - self._missed:
            self._missed.add(rank)
            code, status = self._ranks.exit_codes().get(rank), self._ranks.board.read(rank)
            cause = describe_end(rank, self._state, status, code)
            self._say(f"rank {rank}, a trainer, {cause}; the others go on")

    def _outcome(self, peers: PeerStatus) -> Outcome | None:
        """The outcome, if the world has ended."""
        ranks = self._ranks
        if ranks.lost():
            self._await_exits()
            return self._failed()
        if ranks.all_left():
            self._wait_until(lambda: not ranks.may_still_leave(), LEAVE_SECONDS)
            if not all(status.finished for status in ranks.workers()):
                return Outcome("stopped", ranks.step())
            has_summary = 0 not in self._round.ranks or (self._state / "summary").exists()
            return Outcome("finished", ranks.step()) if has_summary else self._failed()
        hang = self._hangs.check()
        if hang is not None:
            self._await_exits()
            return Outcome("failed", ranks.step(), hang.text, culprits=len(hang.missing))
        kinds = {result.kind for result in peers.results.values()}
        if "failed" in kinds:
            self._wait_until(lambda: ranks.lost() or ranks.only_spares(), _FAR_SECONDS)
            self._await_exits()
            return self._failed()
        if kinds and ranks.only_spares():
            return Outcome("finished" if "finished" in kinds else "stopped", ranks.step())
        return None

    def _reason_to_stop(self, peers: PeerStatus) -> tuple[float | None, Outcome]:
        """If the world should stop and a new one be formed: the deadline, and the outcome with the reason."""
        now, grace = time.monotonic(), float(self._policy.grace_seconds)
        stopped = Outcome("stopped", 0)
        if self._signals.asked is not None:
            return now + grace, stopped
        wanted = wanted_processes(self._state)
        if wanted is not None and wanted != self._round.num_local:
            reason = f"scaled from {self._round.num_local} to {wanted} processes"
            return now + grace, replace(stopped, reason=reason, wanted=wanted)
        if peers.lost:
            return now + min(grace, _LOST_SECONDS), replace(stopped, reason=_LOST)
        if peers.waiting:
            joins = f"{peers.waiting} more machine{'s' if peers.waiting > 1 else ''}"
            return now + grace, replace(stopped, reason=joins)
        return None, stopped

    def _await_exits(self) -> None:
        """After a failure: wait until the other ranks have failed by themselves, and saved their state if they can.

        Ranks that still wait in a collective are then asked to close their connections, unless the job is stopping.
        """
        ranks, started = self._ranks, time.monotonic()
        changed, seen, patience = started, -1, _SETTLE_SECONDS
        while not ranks.all_gone() and time.monotonic() < started + self._policy.grace_seconds:
            reported = {int(path.stem.partition("-")[2]) for path in self._state.glob("rank-*.json")}
            if len(reported) + len(ranks.deaths) != seen:
                seen, changed = len(reported) + len(ranks.deaths), time.monotonic()
            # A rank that has reported its failure and is still alive is saving its state.
            is_saving = bool((reported & set(ranks.local)) - set(ranks.deaths))
            if not is_saving and time.monotonic() > changed + patience:
                if patience == _HANG_UP_SECONDS or not self._policy.restarts or self._signals.asked is not None:
                    return
                ranks.board.request("hang up")
                changed, patience = time.monotonic(), _HANG_UP_SECONDS
            time.sleep(0.01)
            ranks.look()

    def _failed(self) -> Outcome:
        ranks, round_ = self._ranks, self._round
        places = self._hangs.places()  # of the ranks that are still alive
        ranks.end()
        failures = read_failures(self._state)
        elsewhere = set(range(round_.size)) - set(round_.ranks)
        statuses = [ranks.board.read(rank) for rank in range(ranks.board.num_ranks)]
        text = report(failures, statuses, ranks.exit_codes(), ranks.deaths, self._logs, elsewhere, places)
        own = [rank for rank in ranks.deaths if not statuses[rank].left and not _lost_peer(failures.get(rank))]
        if not own and not self._rendezvous.is_alone:
            text = f"{self._cause_elsewhere()}\n\n{text}"
        first = first_to_fail(failures, statuses, ranks.deaths)
        record = failures.get(first) if first is not None else None
        # After the first step, in this world or an earlier one, the cause may be transient, and a restart will show.
        # A restarted rank is at step 0 until it has loaded its state, hence `_reached`.
        is_early = record is not None and max(record.step, self._reached) <= 1
        is_mistake = record is not None and is_early and record.summary.startswith(_FINAL)
        short = next((failure for failure in failures.values() if failure.smaller is not None), None)
        return Outcome(
            "failed",
            ranks.step(),
            text,
            culprits=len(own),
            is_final=is_mistake,
            is_mistake=is_mistake,
            memory=short.memory[0] if short is not None and short.memory else "",
            smaller=short.smaller if short is not None else None,
        )

    def _cause_elsewhere(self) -> str:
        """The cause, if no rank of this machine failed first. Another launcher may be about to publish it."""
        results: list[LauncherResult] = []
        deadline = time.monotonic() + _FAR_SECONDS
        while not results and time.monotonic() < deadline:
            results = [result for result in self._rendezvous.peers().results.values() if result.kind == "failed"]
            time.sleep(_POLL_SECONDS)
        return f"on {results[0].address}: {results[0].headline}" if results else _LOST

    def _wait_until(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.01)
            self._ranks.look()


def _lost_peer(record: FailureRecord | None) -> bool:
    return record is not None and record.lost_peer
