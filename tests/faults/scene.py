"""A job on its stage: its launchers, its disk and network, and everything that it has written to its metrics so far."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rung.distributed.status_board import RankStatus
from tests.faults.harness import Launched, compile_shim, done
from tests.faults.hosts import Hosts
from tests.faults.plans import JobPlan

_DISK = "16m"
_PORT = 29517
# Each job has a /dev/shm of its own, so that what it leaves there is known to be its own.
_OWN_MEMORY = 'mount --bind "$0" /dev/shm && exec "$@"'


@dataclass
class Fault:
    """One fault and what it cost."""

    kind: str
    phase: str
    rank: int
    step: int  # that was the last one done when it struck
    world: int = 1  # the ranks at that time
    started: float = 0.0
    over: float = 0.0  # when what it disturbed was repaired
    seconds: float | None = None  # from its start to the next step; None where the run had no further step to do
    lost: int = 0  # steps done again
    recovered: bool = False
    restarted: bool = False


@dataclass(frozen=True)
class Event:
    """A line of a metrics file, and when it was seen."""

    seconds: float
    row: dict[str, Any]

    @property
    def is_start(self) -> bool:
        return self.row["event"] in ("start", "resume")

    @property
    def is_progress(self) -> bool:
        return self.row["event"] in ("step", "end")


@dataclass
class Scene:
    plan: JobPlan
    folder: Path
    disk: Path  # a file system of its own, if we may mount one
    jobs: list[Launched]
    chance: random.Random
    hosts: Hosts | None = None
    events: list[Event] = field(default_factory=list)
    killed: list[int] = field(default_factory=list)  # by us, behind the launcher's back

    @property
    def job(self) -> Launched:
        return self.jobs[0]

    def done(self) -> int:
        """The last step that counts."""
        return done([event.row for event in list(self.events)])

    def over(self) -> bool:
        found = [job.over() for job in self.jobs]  # each is asked, since it may have to be started again
        return all(found)

    def statuses(self) -> dict[int, RankStatus]:
        return {rank: status for job in self.jobs for rank, status in job.statuses().items()}

    def is_saving(self) -> bool:
        partial = any(any((job.run_dir / "checkpoints").glob(".step-*")) for job in self.jobs)
        return partial or any(status.phase == "saving" for status in self.statuses().values())

    def copy_to(self, folder: Path) -> None:
        """Everything that the job has written, to look into."""
        shutil.copytree(self.folder, folder, symlinks=True, ignore=_special_files, ignore_dangling_symlinks=True)

    def left_behind(self) -> list[str]:
        """What is in the job's own temporary folder and shared memory."""
        found = [path for job in self.jobs for place in (job.temporary, job.memory) for path in place.iterdir()]
        run_dirs = {job.run_dir for job in self.jobs}
        found += [path for run in run_dirs for path in (*run.glob(".sites-*"), *run.glob("checkpoints/.step-*"))]
        # torch takes away the name of shared memory a moment after it is made; only its maker knows of it until then.
        # And it makes the folder of its compiler's cache when that is imported, which is there for the next job.
        own = ("torchinductor_", *(f"torch_{pid}_" for pid in self.killed))
        left = [path for path in found if not path.name.startswith(own)]
        # The C library makes a semaphore under a random name, Python gives it another and removes that at once. A kill
        # can fall in between, and nobody else knows the names; it will not do so twice in a job.
        semaphores = [path for path in left if re.fullmatch(r"sem\.(mp-\w{8}|\w{6})", path.name)]
        if len(semaphores) == 1:
            left.remove(semaphores[0])
        return [f"left behind: {path.relative_to(self.folder)}" for path in left]


def _special_files(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if not (path := Path(folder, name)).is_file() and not path.is_dir()]


@contextlib.contextmanager
def opened(plan: JobPlan, folder: Path, base: Path, arguments: list[str]) -> Iterator[Scene]:
    """Start a job with everything that faults may need; nothing of it is left afterwards."""
    disk = folder / "disk"
    disk.mkdir(parents=True)
    is_root = os.geteuid() == 0

    def own_memory(place: Path) -> list[str]:
        command = ["unshare", "--mount", "--propagation", "slave", "sh", "-c", _OWN_MEMORY, str(place / "shm")]
        return command if is_root else []

    with contextlib.ExitStack() as stack:
        if is_root:
            mount("-t", "tmpfs", "-o", f"size={_DISK}", "none", str(disk))
            stack.callback(unmount, disk)
        shim = compile_shim(base / "shim")
        if plan.row.num_hosts == 1:
            jobs = [
                Launched(
                    folder,
                    arguments,
                    num_ranks=plan.row.num_ranks,
                    prefix=own_memory(folder),
                    run_dir=disk / "run",
                    shim=shim,
                )
            ]
            hosts = None
        else:
            hosts = stack.enter_context(Hosts(plan.row.num_hosts + 1))
            stack.enter_context(_rendezvous(hosts))
            meet = f"{hosts.address(plan.row.num_hosts)}:{_PORT}"
            jobs = [
                Launched(
                    folder / f"host-{number}",
                    [*arguments, "--rdzv", meet],
                    num_ranks=plan.row.num_ranks,
                    prefix=[*hosts.prefix(number), *own_memory(folder / f"host-{number}")],
                    run_dir=disk / ("run" if plan.row.shares_disk else f"run-{number}"),
                    shim=shim,
                )
                for number in range(plan.row.num_hosts)
            ]
        scene = Scene(plan, folder, disk, jobs, random.Random(plan.salt), hosts)
        ended = threading.Event()
        watcher = threading.Thread(target=_follow, args=(scene, ended), daemon=True)
        watcher.start()
        try:
            yield scene
        finally:
            ended.set()
            watcher.join()
            for job in jobs:
                job.close()


@contextlib.contextmanager
def _rendezvous(hosts: Hosts) -> Iterator[None]:
    """The store where the machines meet, on a machine of its own."""
    command = [*hosts.prefix(len(hosts.names) - 1), sys.executable, "-m", "rung", "rdzv", str(_PORT)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _follow(scene: Scene, ended: threading.Event) -> None:
    """Note each line of the metrics when it appears. A file that was made anew is read from its beginning."""
    places: dict[Path, tuple[int, int]] = {}
    while not ended.wait(0.005):
        for path in {job.run_dir / "metrics.jsonl" for job in scene.jobs}:
            with contextlib.suppress(OSError), path.open("rb") as file:
                found = os.fstat(file.fileno())
                inode, offset = places.get(path, (found.st_ino, 0))
                if inode != found.st_ino or found.st_size < offset:
                    offset = 0
                file.seek(offset)
                text = file.read()
                whole = text[: text.rfind(b"\n") + 1]
                places[path] = (found.st_ino, offset + len(whole))
                now = time.monotonic()
                for line in whole.splitlines():
                    with contextlib.suppress(ValueError):
                        scene.events.append(Event(now, json.loads(line)))


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)


def unmount(folder: Path) -> None:
    subprocess.run(["umount", "--lazy", str(folder)], capture_output=True)


@contextlib.contextmanager
def stage() -> Iterator[Path]:
    """A folder for jobs. With root's rights it is a file system whose mounts are seen in the jobs' own namespaces."""
    base = Path(tempfile.mkdtemp(prefix="rung-chaos-"))
    is_root = os.geteuid() == 0
    if is_root:
        mount("-t", "tmpfs", "-o", "size=2g", "none", str(base))
        mount("--make-shared", str(base))
    try:
        yield base
    finally:
        if is_root:
            unmount(base)
        shutil.rmtree(base, ignore_errors=True)
