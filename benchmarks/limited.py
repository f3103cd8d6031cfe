"""Two machines of our own making with a slow cable between them: network namespaces and `tc`. Needs root."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

_QUEUE = ["burst", "128kb", "latency", "50ms"]  # what may be sent at once, and how long the rest may wait


class Cable:
    """A pair of namespaces, joined. Use as a context manager: it removes what it made."""

    def __init__(self) -> None:
        mark = uuid.uuid4().hex[:5]
        self._net = f"10.{60 + os.getpid() % 40}.{int(mark, 16) % 250}"
        self._names = [f"rung-{mark}-{number}" for number in range(2)]

    def __enter__(self) -> Cable:
        for name in self._names:
            _run("ip", "netns", "add", name)
        first, second = self._names
        _run("ip", "-n", first, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", second)
        for number, name in enumerate(self._names):
            _run("ip", "-n", name, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            # Packets as a cable carries them, each with its headers; else the counters would see large ones.
            _run("ip", "-n", name, "link", "set", "eth0", "gso_max_segs", "1")
        return self

    def __exit__(self, *error: object) -> None:
        for name in self._names:
            _run("ip", "netns", "del", name, check=False)

    def address(self, number: int) -> str:
        return f"{self._net}.{number + 1}"

    def prefix(self, number: int) -> list[str]:
        """What runs a command on a machine."""
        return ["ip", "netns", "exec", self._names[number]]

    def limit_loopback(self, number: int, megabits: int) -> None:
        """What processes of a machine send to each other, all together."""
        name = self._names[number]
        _run("tc", "-n", name, "qdisc", "replace", "dev", "lo", "root", "tbf", "rate", f"{megabits}mbit", *_QUEUE)

    def run(self, module: str, *arguments: str) -> None:
        """`python -m module` on both machines, as ranks 0 and 1 of a job. Raises if one fails."""
        with tempfile.TemporaryDirectory() as folder:
            ranks = []
            for rank, name in enumerate(self._names):
                environment = {
                    **os.environ,
                    "RANK": str(rank),
                    "LOCAL_RANK": "0",
                    "WORLD_SIZE": "2",
                    "LOCAL_WORLD_SIZE": "1",
                    "MASTER_ADDR": self.address(0),
                    "MASTER_PORT": "29400",
                    "GLOO_SOCKET_IFNAME": "eth0",
                    "OMP_NUM_THREADS": "1",
                }
                command = ["ip", "netns", "exec", name, sys.executable, "-m", module, *arguments]
                out = None if rank == 0 else Path(folder, "out").open("w")  # noqa: SIM115
                ranks.append(subprocess.Popen(command, env=environment, stdout=out, stderr=out))
            codes = [process.wait() for process in ranks]
            if any(codes):
                raise RuntimeError(f"{shlex.join([module, *arguments])} ended with {codes}")


def limit(megabits: int) -> None:
    """This machine's end of the cable, from now on. Called on both."""
    _run("tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", f"{megabits}mbit", *_QUEUE)


def sent_bytes() -> int:
    """What has left this machine so far, as the system counts it: headers, acknowledgements and all."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def _run(*command: str, check: bool = True) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if check and done.returncode:
        raise RuntimeError(f"{shlex.join(command)}: {done.stderr.strip()}")
