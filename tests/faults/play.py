"""Plays one job: starts it, lets the planned faults strike, waits for its end, and judges what it has left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from safetensors.torch import load_file

from tests.faults.harness import (
    Launched,
    arguments_for,
    checkpoints_damaged,
    done,
    reference_run,
    steps_missing,
    weights_differ,
)
from tests.faults.kinds import CONTINUE, EITHER, KINDS, RESTART, Kind, Missed
from tests.faults.plans import NUM_EPOCHS, NUM_STEPS, SETTINGS, JobPlan, PlannedFault, Row
from tests.faults.scene import Event, Fault, Scene, opened
from tests.launcher import WarmLauncher
from tests.metrics_file import committed

_FAULT_SECONDS = 60.0  # to recover from one
_JOB_SECONDS = 90.0  # to come to the end after the last one


@dataclass
class Result:
    """One job with its faults, and all that is wrong with it."""

    plan: JobPlan
    folder: Path
    faults: list[Fault] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def play(plan: JobPlan, base: Path, kept: Path | None = None, launcher: WarmLauncher | None = None) -> Result:
    """The files of a job that failed go to `kept`. The run without faults is left to the launcher, if there is one."""
    folder = base / f"job-{plan.number}"
    row = plan.row
    known = _reference(row, base, launcher)
    pause = f"model.pause={SETTINGS[row.setting].pause}"
    arguments = arguments_for(row.strategy, row.num_ranks, *row.arguments, "--set", pause)
    result = Result(plan, folder)
    with opened(plan, folder, base, arguments) as scene:
        try:
            for planned in plan.faults:
                try:
                    fault = _strike(scene, planned)
                except Missed:
                    continue
                result.faults.append(fault)
                _await_recovery(scene, fault, _owed(scene, fault))
                if not fault.recovered:
                    result.problems.append(f"no recovery from {fault.kind} ({fault.phase}) after step {fault.step}")
                    break
                if fault.restarted and _owed(scene, fault) == CONTINUE:
                    result.problems.append(f"{fault.kind} ({fault.phase}) after step {fault.step} made it start again")
            deadline = time.monotonic() + (_JOB_SECONDS if not result.problems else 5.0)
            while not scene.over() and time.monotonic() < deadline:
                time.sleep(0.02)
        except AssertionError as error:
            result.problems.append(str(error))
        result.problems += judge(scene, result.faults, known)
        if result.problems and kept is not None:
            scene.copy_to(kept / folder.name)
    return result


def _reference(row: Row, base: Path, launcher: WarmLauncher | None) -> Path:
    """The run without faults: on the same topology, or in one process where the topology changes."""
    if row.num_hosts > 1:
        row = Row("single", 1, row.setting)
    timeout_free = [word for word in row.arguments if word != "--replicate-state"]
    return reference_run(base, row.strategy, row.num_ranks, *timeout_free, launcher=launcher)


# -- striking --------------------------------------------------------------------------------------------------------


def _strike(scene: Scene, planned: PlannedFault) -> Fault:
    kind = KINDS[planned.kind]
    if planned.phase == "resume":
        _let_restart(scene)
    elif planned.phase not in ("building", "end"):
        _wait(scene, lambda: scene.done() >= planned.step)
    fault = Fault(planned.kind, planned.phase, _choose_rank(scene, planned, kind), 0)
    if not kind.by_task:
        is_past = (lambda: scene.done() > 0) if planned.phase == "building" else (lambda: False)
        _wait(scene, lambda: _is_in_phase(scene, planned.phase, fault.rank), is_past)
        if planned.phase == "step":
            time.sleep(scene.chance.random() * 0.05)
    fault.step, fault.world = scene.done(), len(scene.statuses())
    try:
        kind.inject(scene, fault)
    except ProcessLookupError:  # what was to be hit has ended by itself
        raise Missed from None
    fault.over = time.monotonic()
    return fault


def _choose_rank(scene: Scene, planned: PlannedFault, kind: Kind) -> int:
    """A rank that can be hit: servers update and trainers compute, and a trainer that is gone stays so."""
    row = scene.plan.row
    ranks = list(range(row.num_ranks))
    if kind.by_task and planned.phase not in ("building", "resume"):
        ranks = list(row.updating if planned.phase == "update" else row.computing)
    alive = [rank for rank in ranks if rank in scene.statuses()]
    return scene.chance.choice(alive or ranks)


def _let_restart(scene: Scene) -> None:
    """Kill a rank that the job cannot do without, so that the ranks are started again."""
    before = scene.statuses()
    if 0 not in before:
        raise Missed
    pids = {status.pid for status in before.values()}
    os.kill(before[0].pid, signal.SIGKILL)
    _wait(scene, lambda: any(status.pid not in pids for status in scene.statuses().values()))


def _is_in_phase(scene: Scene, phase: str, rank: int) -> bool:
    if phase == "save":
        return scene.is_saving()
    statuses = scene.statuses()
    if phase == "end":
        return any(s.step >= NUM_STEPS and s.phase in ("logging", "saving", "evaluating") for s in statuses.values())
    status = statuses.get(rank)
    if status is None:
        return False
    if phase in ("building", "resume"):
        return status.phase in ("starting", "building")
    if phase == "update":
        return status.phase == "update"
    if phase == "evaluation":
        return any(other.phase == "evaluating" for other in statuses.values())
    return True


def _wait(scene: Scene, condition: Callable[[], bool], is_past: Callable[[], bool] = lambda: False) -> None:
    deadline = time.monotonic() + _FAULT_SECONDS
    while not condition():
        if scene.over() or is_past() or time.monotonic() > deadline:
            raise Missed
        time.sleep(0.002)


# -- recovering ------------------------------------------------------------------------------------------------------


def _owed(scene: Scene, fault: Fault) -> str:
    owed, row = KINDS[fault.kind].owed, scene.plan.row
    if owed == RESTART and row.setting == "async" and fault.rank in row.computing:
        return EITHER  # the others go on without a trainer, until the last one is gone
    if fault.kind == "machine-off":
        return RESTART if fault.world > 1 else EITHER
    if owed == CONTINUE and row.setting == "machines" and fault.world < row.num_ranks:
        return EITHER  # a machine that was away may have been about to come back
    return owed


def _await_recovery(scene: Scene, fault: Fault, owed: str) -> None:
    """The next step, or what is left to do at the end of a run, with the ranks that the fault has left or new ones."""
    deadline = time.monotonic() + _FAULT_SECONDS
    while time.monotonic() < deadline:
        is_over = scene.over()
        events = list(scene.events)
        after = [event for event in events if event.seconds > fault.started]
        starts = [event for event in after if event.is_start]
        since = max(fault.over, starts[-1].seconds if starts else 0.0)
        progress = [event for event in after if event.is_progress and event.seconds >= since]
        # Where the same ranks go on, the first step to be finished may have been all but finished before the fault.
        needed = 1 if starts or any(event.row["event"] == "end" for event in progress) else 2
        if len(progress) >= needed and (starts or owed in (CONTINUE, EITHER)):
            _note_recovery(fault, events, starts, after)
            return
        if is_over:
            fault.recovered = all(job.process.returncode == 0 for job in scene.jobs)  # it was about to end anyway
            return
        time.sleep(0.01)


def _note_recovery(fault: Fault, events: list[Event], starts: list[Event], after: list[Event]) -> None:
    # A job that is hit while it is built has its own start still to come.
    fault.recovered, fault.restarted = True, len(starts) > int(fault.phase in ("building", "resume"))
    if starts:
        before = [event for event in events if event.seconds < starts[0].seconds]
        reached = done([event.row for event in before])
        # A machine that comes back when the others have ended without it does the rest alone, on its own disk.
        is_late = any(event.row["event"] == "end" for event in before)
        fault.lost = 0 if is_late else max(0, reached - starts[-1].row.get("step", 0))
        after = [event for event in after if event.seconds >= starts[-1].seconds]
    steps = [event for event in after if event.row["event"] == "step"][0 if starts else 1 :]
    fault.seconds = steps[0].seconds - fault.started if steps else None


# -- judging ---------------------------------------------------------------------------------------------------------


def judge(scene: Scene, faults: list[Fault], known: Path) -> list[str]:
    """All that is wrong with a job that should be over."""
    problems = []
    for job in scene.jobs:
        code = job.process.poll()
        if code != 0:
            told = "it does not end" if code is None else f"exit code {code}"
            problems.append(f"{told}: {job.output()[-1500:]}")
    if problems:
        return problems
    left = [pid for job in scene.jobs for pid in job.left_after(3)]
    problems += [f"processes left: {left}"] if left else []
    problems += scene.left_behind()
    ended = {job.run_dir: job for job in scene.jobs if (job.run_dir / "model.safetensors").exists()}
    if not ended:
        return [*problems, "no machine has the weights"]
    tolerance = SETTINGS[scene.plan.row.setting].tolerance
    weights = dict(load_file(known / "model.safetensors"))
    for run_dir, job in ended.items():
        problems += weights_differ(run_dir, weights, tolerance, NUM_EPOCHS)
        problems += checkpoints_damaged(run_dir)
        problems += [] if any((run_dir / "checkpoints").glob("step-*")) else ["the run has no checkpoint"]
        is_whole = scene.plan.row.num_hosts == 1 and not any(KINDS[fault.kind].loses_rows for fault in faults)
        problems += steps_missing(job, NUM_EPOCHS) if is_whole else []
        problems += _judge_async(job, known) if scene.plan.row.setting == "async" else []
    if scene.plan.row.setting == "replicated":
        problems += [f"{f.kind} ({f.phase}) cost {f.lost} steps" for f in faults if f.kind == "kill" and f.lost > 1]
    return problems


def _judge_async(job: Launched, known: Path) -> list[str]:
    """Updates come in another order each time: what is bounded, and where the loss gets to, is compared."""
    rows = committed(job.run_dir / "metrics.jsonl")
    late = max((row.get("staleness", 0) for row in rows if row["event"] == "step"), default=0)
    losses = [row["loss"] for row in rows if row["event"] == "eval"]
    expected = [row["loss"] for row in committed(known / "metrics.jsonl") if row["event"] == "eval"]
    problems = [f"an update was {late} steps late, and 3 are allowed"] if late > 3 else []
    if not losses or abs(losses[-1] - expected[-1]) > 0.1 * abs(expected[0] - expected[-1]):
        problems.append(f"the loss falls to {losses[-1:]}, and to {expected[-1]} without faults")
    return problems
