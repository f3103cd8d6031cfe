"""A Slurm of our own on this machine: munged, a controller and nodes on loopback, with everything in one directory.

Nothing of a Slurm that the machine may belong to is touched. Use as a context manager:

    with Slurm(tmp_path, nodes=2) as slurm:
        slurm.run("srun", "--nodes=2", "hostname")
"""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import socket
import subprocess
import time
from pathlib import Path

from tests.processes import processes_of

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel")
_PATH = f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"
# Two partitions: a job of `urgent` takes the nodes of one of `normal`, which has some time to leave and comes back.
_CONFIGURATION = """
ClusterName=rung
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0,sched_interval=2,bf_interval=2
SlurmctldTimeout=300
SlurmdTimeout=300
KillWait=20
MinJobAge=3600
ReturnToService=2
FirstJobId={first}
GresTypes=gpu
PropagateResourceLimits=NONE
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=normal Nodes=ALL Default=YES PriorityTier=1 GraceTime=20 MaxTime=UNLIMITED
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=UNLIMITED
"""

_NODE = "CPUs=4 RealMemory=1000 Gres=gpu:2"  # whatever the machine has


def is_available() -> bool:
    return all(shutil.which(program, path=_PATH) for program in _PROGRAMS)


class Slurm:
    """A cluster of `nodes` nodes, all of them on this machine."""

    def __init__(self, folder: Path, nodes: int = 2) -> None:
        self.folder = folder
        self.names = [f"n{number}" for number in range(nodes)]
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": _PATH}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Slurm:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        self.folder.chmod(0o755)  # munged wants directories that nobody else may write to
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        ports = _free_ports(len(self.names) + 1)
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} {_NODE}"
            for name, port in zip(self.names, ports[1:], strict=True)
        )
        # Ports follow from the numbers of jobs: another cluster on this machine has others.
        values = {"host": socket.gethostname(), "user": getpass.getuser(), "folder": self.folder, "first": ports[0]}
        text = _CONFIGURATION.format(**values, ports=ports, nodes=nodes)
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")  # to be counted
        (self.folder / "state").mkdir(mode=0o700)
        files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munge.log"}
        files["seed-file"] = "munge.seed"
        # As root, munged asks that the whole path above its files is root's; a temporary directory is not.
        self._daemon("munged", "--foreground", "--force", *(f"--{k}={self.folder / v}" for k, v in files.items()))
        self._wait(lambda: (self.folder / "munge.socket").exists(), "munged")
        self._daemon("slurmctld", "-D", "-c")
        for name in self.names:
            self._daemon("slurmd", "-D", "-N", name)
        self._wait(lambda: self._idle() == len(self.names), "the nodes")

    def __exit__(self, *error: object) -> None:
        if len(self._daemons) > 1:
            self._call("scancel", "--full", "--signal=KILL", "--user", getpass.getuser())
            self._call("scancel", "--user", getpass.getuser())
            self._wait(lambda: not self._call("squeue", "--noheader").stdout.strip(), "the jobs' end", required=False)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def run(self, *command: str, cwd: Path | None = None) -> str:
        """What a command of Slurm's says. It must succeed."""
        done = self._call(*command, cwd=cwd)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """What the controller knows of a job, by its names."""
        words = self.run("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, number: str, *states: str, seconds: float = 120) -> dict[str, str]:
        """Wait until a job is in one of some states, or over, which it must not be in another way."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
        deadline = time.monotonic() + seconds
        while (found := self.job(number))["JobState"] not in states:
            assert found["JobState"] not in over, f"job {number} is {found['JobState']}: {found}"
            assert time.monotonic() < deadline, f"job {number} is still {found['JobState']}: {found}"
            time.sleep(0.2)
        return found

    def release(self, number: str) -> None:
        """Let a job that was requeued start soon, and not in two minutes.

        Not at once: within the second in which a job was ended, a node takes it for the one that it ended, and ends it
        without a word. A node that was down may end it later than the job is requeued.
        """
        deadline = time.monotonic() + 60
        while processes_of(f"slurmstepd: [{number}.") and time.monotonic() < deadline:
            time.sleep(0.1)
        self._call("scontrol", "update", f"JobId={number}", "StartTime=now+3")  # it may have started meanwhile

    def _idle(self) -> int:
        return self._call("sinfo", "--noheader", "--Node", "--partition=normal", "--states=idle").stdout.count("\n")

    def _daemon(self, *command: str) -> None:
        log = (self.folder / f"{command[0]}.out").open("ab")
        with log:
            program = shutil.which(command[0], path=_PATH)
            assert program is not None
            self._daemons.append(
                subprocess.Popen([program, *command[1:]], env=self.environment, stdout=log, stderr=log)
            )

    def _call(self, *command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=120)

    def _wait(self, done: object, what: str, *, required: bool = True) -> None:
        deadline = time.monotonic() + 60
        while not done():  # type: ignore[operator]
            ended = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
            if time.monotonic() > deadline or ended:
                assert not required, f"Slurm does not come up: {what}, {ended}; its logs are in {self.folder}"
                return
            time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens at."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in sockets]
    finally:
        for listener in sockets:
            listener.close()
