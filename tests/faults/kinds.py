"""The faults, as data: how each is injected, what the job owes afterwards, in which phases of which jobs it is tried.

A function that injects one is called when the job is in the phase that was asked for. It sets `fault.started`, and
returns when what it disturbs has been repaired.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.faults.harness import Launched
from tests.faults.hosts import possible
from tests.faults.plans import ALL_PHASES, NUM_STEPS
from tests.faults.scene import Fault, Scene, mount, unmount

# What a job owes after a fault.
CONTINUE = "goes on with the same ranks"
RESTART = "starts its ranks again by itself"
EITHER = "goes on, or ends with an error and goes on when the same command is given again"
AGAIN = "goes on when the same command is given again"

_RUNNING = ("step", "evaluation", "save", "end")
_ALONE = ("local", "replicated")


class Missed(Exception):
    """The job was over, or its rank gone, before the fault could strike: it does not count."""


@dataclass(frozen=True)
class Kind:
    name: str
    inject: Callable[[Scene, Fault], None]
    owed: str
    phases: tuple[str, ...]
    settings: tuple[str, ...] = (*_ALONE, "async")
    needs: str = ""  # root, network or shim
    by_task: bool = False  # the task itself fails, where the phase says; nobody has to wait for the phase
    loses_rows: bool = False  # lines of the metrics may be lost with it
    weight: int = 1  # how often it is drawn beside others


# -- ranks -----------------------------------------------------------------------------------------------------------


def _signal_rank(number: signal.Signals) -> Callable[[Scene, Fault], None]:
    def inject(scene: Scene, fault: Fault) -> None:
        pid = _pid(scene, fault)
        fault.started = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    return inject


def _pid(scene: Scene, fault: Fault) -> int:
    status = scene.statuses().get(fault.rank)
    if status is None:
        raise Missed
    return status.pid


def _order(kind: str) -> Callable[[Scene, Fault], None]:
    """Let the task fail by itself, in the phase that was asked for."""

    def inject(scene: Scene, fault: Fault) -> None:
        number = len(list(scene.job.orders.glob("taken-*")))
        struck = scene.job.orders / f"struck-{number}"
        scene.job.order(fault.rank, kind, fault.phase if fault.phase != "resume" else "building", number)
        deadline = time.monotonic() + 30
        while not struck.exists():
            is_past = fault.phase == "building" and scene.done() > 0
            if scene.over() or is_past or time.monotonic() > deadline:
                (scene.job.orders / f"rank-{fault.rank}").unlink(missing_ok=True)
                raise Missed
            time.sleep(0.002)
        fault.started = float(struck.read_text())

    return inject


def _stop_rank(scene: Scene, fault: Fault) -> None:
    _stop(_pid(scene, fault), scene.chance.uniform(0.3, 2.0), fault)


def _stop_launcher(scene: Scene, fault: Fault) -> None:
    _stop(scene.job.process.pid, scene.chance.uniform(0.3, 2.0), fault)


def _stop(pid: int, seconds: float, fault: Fault) -> None:
    """Counted from its end: nobody can do a step while a rank stands still."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        fault.started = time.monotonic()
        os.kill(pid, signal.SIGCONT)
    fault.started = fault.started or time.monotonic()


def _kill_reader(scene: Scene, fault: Fault) -> None:
    """A loader process of a rank, as the kernel may choose it when memory runs out."""
    pid, deadline = _pid(scene, fault), time.monotonic() + 5
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            children = [int(word) for path in Path(f"/proc/{pid}/task").glob("*/children") for word in _words(path)]
            if children:
                scene.killed.append(scene.chance.choice(children))
                fault.started = time.monotonic()
                os.kill(scene.killed[-1], signal.SIGKILL)
                return
        time.sleep(0.002)
    raise Missed


def _words(path: Path) -> list[str]:
    return path.read_text().split()


def _corrupt(scene: Scene, fault: Fault) -> None:
    """A byte of the newest checkpoint, and a rank with it, so that the checkpoint before it has to do."""
    checkpoints = scene.job.run_dir / "checkpoints"
    whole = sorted(path for path in checkpoints.glob("step-*") if (path / "manifest.json").exists())
    if len(whole) < 2:
        raise Missed
    pid = _pid(scene, fault)
    with contextlib.suppress(OSError):
        victim = scene.chance.choice(sorted(whole[-1].iterdir()))
        content = bytearray(victim.read_bytes())
        content[scene.chance.randrange(len(content))] ^= 1 << scene.chance.randrange(8)
        victim.write_bytes(bytes(content))
    fault.started = time.monotonic()
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


# -- the launcher ----------------------------------------------------------------------------------------------------


def _preempt(scene: Scene, fault: Fault) -> None:
    fault.started = time.monotonic()
    os.kill(_launcher(scene).process.pid, scene.chance.choice([signal.SIGTERM, signal.SIGUSR1]))


def _kill_launcher(scene: Scene, fault: Fault) -> None:
    """As a scheduler starts it again: when all that belonged to it is gone."""
    job = _launcher(scene)
    job.may_fail += 1
    job.is_held_back = True
    fault.started = time.monotonic()
    os.kill(job.process.pid, signal.SIGKILL)
    job.process.wait()
    left = job.left_after(5)
    if left:
        raise AssertionError(f"processes outlived their launcher: {left}")
    job.is_held_back = False


def _launcher(scene: Scene) -> Launched:
    """One that runs: a launcher that has just ended is about to be started again."""
    job = scene.jobs[scene.chance.randrange(len(scene.jobs))]
    if job.process.poll() is not None:
        raise Missed
    return job


def _kill_server(scene: Scene, fault: Fault) -> None:
    """The process that ranks are forked from."""
    status = scene.statuses().get(fault.rank)
    if status is None:
        raise Missed
    server = int(Path(f"/proc/{status.pid}/stat").read_text().rpartition(")")[2].split()[1])
    if server in (1, scene.job.process.pid):
        raise Missed
    fault.started = time.monotonic()
    os.kill(server, signal.SIGKILL)


# -- disks -----------------------------------------------------------------------------------------------------------


def _fill_disk(scene: Scene, fault: Fault) -> None:
    filler = scene.disk / "filler"
    _hold_back(scene)
    fault.started = time.monotonic()
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        for size in (2**20, 2**12):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"\0" * size)
    time.sleep(scene.chance.uniform(0.3, 1.0))
    filler.unlink()
    _let_go(scene)


def _make_read_only(scene: Scene, fault: Fault) -> None:
    """A second mount of the run's directory over itself, for reading alone: files that are open stay as they are."""
    folder = scene.job.run_dir
    if not folder.is_dir():
        raise Missed
    _hold_back(scene)
    fault.started = time.monotonic()
    mount("--bind", str(folder), str(folder))
    try:
        mount("-o", "remount,bind,ro", str(folder))
        time.sleep(scene.chance.uniform(0.3, 1.0))
    finally:
        unmount(folder)
        _let_go(scene)


def _slow_disk(scene: Scene, fault: Fault) -> None:
    fault.started = time.monotonic()
    scene.job.disturb(write=scene.chance.uniform(0.05, 0.3))
    time.sleep(scene.chance.uniform(0.5, 1.5))
    scene.job.disturb()


def _delete_checkpoints(scene: Scene, fault: Fault) -> None:
    if scene.done() >= NUM_STEPS:  # nobody writes another one
        raise Missed
    fault.started = time.monotonic()
    _delete(scene.job.run_dir / "checkpoints")


def _delete_run(scene: Scene, fault: Fault) -> None:
    if not scene.job.run_dir.is_dir():
        raise Missed
    scene.job.may_fail += 1
    fault.started = time.monotonic()
    _delete(scene.job.run_dir)


def _delete(folder: Path) -> None:
    for _ in range(5):  # the job may write into it meanwhile
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return


def _hold_back(scene: Scene) -> None:
    for job in scene.jobs:
        job.may_fail += 1
        job.is_held_back = True


def _let_go(scene: Scene) -> None:
    for job in scene.jobs:
        job.is_held_back = False


# -- clocks ----------------------------------------------------------------------------------------------------------


def _jump(chance: random.Random) -> float:
    return chance.choice([-1, 1]) * chance.choice([7.0, 90.0, 3600.0, 86400.0])


def _move_clock(scene: Scene, fault: Fault) -> None:
    fault.started = time.monotonic()
    _launcher(scene).disturb(clock=_jump(scene.chance))


# -- machines --------------------------------------------------------------------------------------------------------


def _cut(scene: Scene, fault: Fault) -> None:
    """The cable of one machine, for a while. The machine alone may give up; it is then started again."""
    assert scene.hosts is not None
    number = scene.chance.randrange(len(scene.jobs))
    scene.jobs[number].may_fail += 1
    scene.jobs[number].is_held_back = True
    fault.started = time.monotonic()
    scene.hosts.cut(number)
    time.sleep(scene.chance.uniform(0.5, 8.0))
    scene.hosts.mend(number)
    scene.jobs[number].is_held_back = False


def _switch_off(scene: Scene, fault: Fault) -> None:
    """A machine goes without a word, its cable first, and comes back."""
    assert scene.hosts is not None
    number = scene.chance.randrange(len(scene.jobs))
    job = scene.jobs[number]
    job.may_fail += 1
    job.is_held_back = True
    fault.started = time.monotonic()
    scene.hosts.cut(number)
    for pid in job.left():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    time.sleep(scene.chance.uniform(0.5, 4.0))
    for folder in (job.temporary, job.memory):  # which do not outlive a machine
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    scene.hosts.mend(number)
    job.is_held_back = False


KINDS = {
    kind.name: kind
    for kind in (
        Kind("kill", _signal_rank(signal.SIGKILL), RESTART, (*ALL_PHASES, "update"), (*_ALONE, "async", "machines")),
        Kind("term", _signal_rank(signal.SIGTERM), RESTART, ALL_PHASES, _ALONE),
        Kind("stop", _stop_rank, CONTINUE, ALL_PHASES, (*_ALONE, "async", "machines")),
        Kind(
            "exception",
            _order("exception"),
            RESTART,
            ("building", "data", "step", "evaluation", "update", "resume"),
            by_task=True,
        ),
        Kind("exit", _order("exit"), RESTART, ("building", "step", "evaluation", "update"), by_task=True),
        Kind("reader", _kill_reader, RESTART, ("step", "evaluation"), _ALONE),
        Kind("oom", _order("oom"), RESTART, ("step", "evaluation", "update"), ("comparable",), by_task=True),
        Kind("rlimit", _order("rlimit"), RESTART, ("step", "evaluation"), ("comparable",), by_task=True),
        Kind("hang", _signal_rank(signal.SIGSTOP), RESTART, ("step", "evaluation", "save"), ("comparable",)),
        Kind("corrupt", _corrupt, RESTART, ("step",), ("local",)),
        Kind("preempt", _preempt, AGAIN, ALL_PHASES, (*_ALONE, "async", "machines")),
        Kind("launcher", _kill_launcher, AGAIN, ALL_PHASES),
        Kind("launcher-stop", _stop_launcher, CONTINUE, ("step", "save", "end")),
        Kind("fork-server", _kill_server, RESTART, ("building", "step", "save"), _ALONE),
        Kind("disk-full", _fill_disk, EITHER, ALL_PHASES, needs="root", loses_rows=True),
        Kind("disk-read-only", _make_read_only, EITHER, ALL_PHASES, needs="root", loses_rows=True),
        Kind("disk-slow", _slow_disk, CONTINUE, ("building", *_RUNNING), needs="shim"),
        Kind("delete-checkpoints", _delete_checkpoints, CONTINUE, ("step", "evaluation", "save")),
        Kind("delete-run", _delete_run, EITHER, ("step", "save"), ("local",), loses_rows=True),
        Kind("clock", _move_clock, CONTINUE, ALL_PHASES, (*_ALONE, "async", "machines"), needs="shim"),
        Kind("cut", _cut, EITHER, ("step", "evaluation", "save"), ("machines",), needs="network", weight=3),
        Kind(
            "machine-off", _switch_off, EITHER, ("step", "evaluation", "save"), ("machines",), needs="network", weight=3
        ),
    )
}


def available_pairs() -> dict[str, list[tuple[str, str]]]:
    """Kinds and phases by setting, without what this machine cannot do."""
    means = {"": True, "root": os.geteuid() == 0, "network": possible(), "shim": shutil.which("gcc") is not None}
    settings = sorted({setting for kind in KINDS.values() for setting in kind.settings})
    return {
        setting: [
            (kind.name, phase)
            for kind in KINDS.values()
            if setting in kind.settings and means[kind.needs]
            for phase in (kind.phases if setting != "machines" else _on_machines(kind)) * kind.weight
        ]
        for setting in settings
    }


def _on_machines(kind: Kind) -> tuple[str, ...]:
    """Two machines are slow to come together: their jobs are hit while they train."""
    return tuple(phase for phase in kind.phases if phase in ("step", "evaluation", "save"))
