"""Watches one world on this machine until it ends: in good order, by a failure, or because it is to be formed anew."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rung import errors
from rung.launch.elastic import Terms, wanted_processes
from rung.launch.failure import FailureRecord, fate_of, first_to_fail, read_failures, report
from rung.launch.hang import HangWatch
from rung.launch.meeting import Meeting
from rung.launch.ranks import LEAVE_SECONDS, Ranks
from rung.launch.rounds import Fate, News, Round
from rung.launch.signals import Signals

_POLL_SECONDS = 0.05
# How long after a death the others may still fall by themselves: a rank that lost its connection to the dead one says
# so in its log, and two deaths that the system reports out of order are both seen.
_SETTLE_SECONDS = 0.25
_HANG_UP_SECONDS = 1.0  # the same, after they were asked to hang up
# The same, where the dead rank is on another machine.
_FAR_SECONDS = 2.0
# How long ranks that may have lost a machine have to save. Those that can do it are quick; those that cannot wait.
_LOST_SECONDS = 2.0
_LOST = "a machine was lost"
# What a rank says when starting it again would only bring the same.
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
    reason: str = ""  # why the ranks were asked to stop, if the launcher did
    wanted: int | None = None  # processes that this machine is to go on with
    culprits: int = 0  # ranks of this machine that fell by themselves
    is_final: bool = False  # to start again would only bring the same
    is_mistake: bool = False  # in what was asked, which ranks found before they trained
    memory: str = ""  # what filled it, if a rank ran out
    smaller: int | None = None  # the micro-batch to go on with then

    @property
    def headline(self) -> str:
        """The report's first line, without its advice."""
        first = self.report.partition("\n")[0]
        return re.sub(r"\.( The kernel .*)?$", "", first)


class Watch:
    """The launcher's eyes on the ranks that it has started."""

    def __init__(
        self,
        round_: Round,
        ranks: Ranks,
        *,
        meeting: Meeting,
        signals: Signals,
        terms: Terms,
        state: Path,
        logs: Path,
        timeout: float,
        reached: int = 0,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`reached` is the step that the job came to in the worlds before this one."""
        self._round, self._ranks, self._meeting, self._signals, self._terms = round_, ranks, meeting, signals, terms
        self._state, self._logs = state, logs
        self._hangs = HangWatch(ranks.board, round_.ranks, state, timeout, logs)
        self._reached, self._say, self._missed = reached, say, set[int]()

    def until_the_end(self) -> Outcome:
        ranks = self._ranks
        stopping = Outcome("stopped", 0)  # with the reason, once there is one
        stop_by: float | None = None
        while True:
            time.sleep(_POLL_SECONDS)
            ranks.look()
            self._tell_of_missed()
            news = self._meeting.news()
            found = self._look(news)
            if found is not None:
                return replace(found, reason=stopping.reason, wanted=stopping.wanted)
            if stop_by is None:
                stop_by, stopping = self._look_for_reasons(news)
                if stop_by is not None:
                    ranks.board.request("stop")
            elif time.monotonic() > stop_by:
                where = [f"rank {rank}: {text}" for rank, text in self._hangs.places().items()]
                told = stopping.reason or "the ranks did not save their state in time"
                lines = [f"{told}, in step {ranks.step()}", *where, f"logs: {self._logs}"]
                self._settle()
                return replace(stopping, kind="failed", step=ranks.step(), report="\n".join(lines))

    def _tell_of_missed(self) -> None:
        """A line for each rank that the job goes on without."""
        for rank in set(self._ranks.missed()) - self._missed:
            self._missed.add(rank)
            code, status = self._ranks.exit_codes().get(rank), self._ranks.board.read(rank)
            told = fate_of(rank, self._state, status, code)
            self._say(f"rank {rank}, a trainer, {told}; the others go on")

    def _look(self, news: News) -> Outcome | None:
        """How the world has ended, if it has."""
        ranks = self._ranks
        if ranks.lost():
            self._settle()
            return self._failed()
        if ranks.all_left():
            self._wait_until(lambda: not ranks.may_still_leave(), LEAVE_SECONDS)
            if not ranks.finished():
                return Outcome("stopped", ranks.step())
            handed_over = 0 not in self._round.ranks or (self._state / "summary").exists()
            return Outcome("finished", ranks.step()) if handed_over else self._failed()
        hang = self._hangs.look()
        if hang is not None:
            self._settle()
            return Outcome("failed", ranks.step(), hang.text, culprits=len(hang.missing))
        kinds = {fate.kind for fate in news.fates.values()}
        if "failed" in kinds:
            self._wait_until(lambda: ranks.lost() or ranks.only_spares(), _FAR_SECONDS)
            self._settle()
            return self._failed()
        if kinds and ranks.only_spares():
            return Outcome("finished" if "finished" in kinds else "stopped", ranks.step())
        return None

    def _look_for_reasons(self, news: News) -> tuple[float | None, Outcome]:
        """Why the world should stop in good order and be formed anew, if so, and by when it has to."""
        now, grace = time.monotonic(), float(self._terms.grace_seconds)
        nothing = Outcome("stopped", 0)
        if self._signals.asked is not None:
            return now + grace, nothing
        wanted = wanted_processes(self._state)
        if wanted is not None and wanted != self._round.num_local:
            reason = f"scaled from {self._round.num_local} to {wanted} processes"
            return now + grace, replace(nothing, reason=reason, wanted=wanted)
        if news.lost:
            return now + min(grace, _LOST_SECONDS), replace(nothing, reason=_LOST)
        if news.waiting:
            joins = f"{news.waiting} more machine{'s' if news.waiting > 1 else ''}"
            return now + grace, replace(nothing, reason=joins)
        return None, nothing

    def _settle(self) -> None:
        """The world is lost: let the ranks fall by themselves, and save what they have if somebody is to go on from it.

        Those that wait for others in vain are then asked to hang up, unless there is no time left for it.
        """
        ranks, started = self._ranks, time.monotonic()
        changed, seen, patience = started, -1, _SETTLE_SECONDS
        while not ranks.all_gone() and time.monotonic() < started + self._terms.grace_seconds:
            told = {int(path.stem.partition("-")[2]) for path in self._state.glob("rank-*.json")}
            if len(told) + len(ranks.deaths) != seen:
                seen, changed = len(told) + len(ranks.deaths), time.monotonic()
            # A rank that has told its failure and is still there saves its state.
            is_saving = bool((told & set(ranks.local)) - set(ranks.deaths))
            if not is_saving and time.monotonic() > changed + patience:
                if patience == _HANG_UP_SECONDS or not self._terms.restarts or self._signals.asked is not None:
                    return
                ranks.board.request("hang up")
                changed, patience = time.monotonic(), _HANG_UP_SECONDS
            time.sleep(0.01)
            ranks.look()

    def _failed(self) -> Outcome:
        ranks, round_ = self._ranks, self._round
        places = self._hangs.places()  # of those that have not fallen by themselves
        ranks.end()
        failures = read_failures(self._state)
        elsewhere = set(range(round_.size)) - set(round_.ranks)
        statuses = ranks.statuses()
        text = report(failures, statuses, ranks.exit_codes(), ranks.deaths, self._logs, elsewhere, places)
        own = [rank for rank in ranks.deaths if not statuses[rank].left and not _lost_peer(failures.get(rank))]
        if not own and not self._meeting.is_alone:
            text = f"{self._ask_elsewhere()}\n\n{text}"
        first = first_to_fail(failures, statuses, ranks.deaths)
        record = failures.get(first) if first is not None else None
        # Once steps were made, here or in a world before, it may have been the moment's fault; a restart finds out:
        # a rank that was started again is at step 0 until it has loaded its state.
        is_early = record is not None and max(record.step, self._reached) <= 1
        is_mistake = record is not None and is_early and record.summary.startswith(_FINAL)
        short = next((told for told in failures.values() if told.smaller is not None), None)
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

    def _ask_elsewhere(self) -> str:
        """What happened, when it was nobody here. The others may be about to say it."""
        fates: list[Fate] = []
        deadline = time.monotonic() + _FAR_SECONDS
        while not fates and time.monotonic() < deadline:
            fates = [fate for fate in self._meeting.news().fates.values() if fate.kind == "failed"]
            time.sleep(_POLL_SECONDS)
        return f"on {fates[0].address}: {fates[0].headline}" if fates else _LOST

    def _wait_until(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.01)
            self._ranks.look()


def _lost_peer(record: FailureRecord | None) -> bool:
    return record is not None and record.lost_peer
