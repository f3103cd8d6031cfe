"""Machines of our own making: network namespaces joined by a bridge, whose cables can be pulled. Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from functools import cache
from pathlib import Path

_FILES = Path("/etc/netns")  # what lies there in a folder of a namespace's name is put over the files of /etc
_NAMED = 'hostname "$0" && exec "$@"'


@cache
def possible() -> bool:
    """Whether this machine lets us make network namespaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"rung-{uuid.uuid4().hex[:6]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    if made:
        made = subprocess.run(["ip", "netns", "exec", name, "true"], capture_output=True).returncode == 0
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return made


class Hosts:
    """`count` machines on one network. Use as a context manager.

    With `named`, they are host0, host1 and so on to each other. To itself, each is an address of loopback, as many
    systems have it.
    """

    def __init__(self, count: int, *, named: bool = False) -> None:
        self._named = named
        self._mark = uuid.uuid4().hex[:5]
        self._net = f"10.{100 + os.getpid() % 100}.{int(self._mark, 16) % 250}"
        self.names = [f"rung-{self._mark}-{number}" for number in range(count)]

    def __enter__(self) -> Hosts:
        bridge = f"rg{self._mark}"
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for number, name in enumerate(self.names):
            _ip("netns", "add", name)
            _ip("link", "add", self._cable(number), "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", self._cable(number), "master", bridge, "up")
            _ip("-n", name, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
            if self._named:
                self._write_names(number)
        return self

    def _write_names(self, number: int) -> None:
        others = [other for other in range(len(self.names)) if other != number]
        lines = ["127.0.0.1 localhost", f"127.0.1.1 host{number}", *(f"{self.address(n)} host{n}" for n in others)]
        folder = _FILES / self.names[number]
        folder.mkdir(parents=True)
        (folder / "hosts").write_text("\n".join(lines) + "\n")

    def __exit__(self, *error: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(_FILES / name, ignore_errors=True)
        subprocess.run(["ip", "link", "del", f"rg{self._mark}"], capture_output=True)

    def address(self, number: int) -> str:
        return f"{self._net}.{number + 1}"

    def prefix(self, number: int) -> list[str]:
        """What runs a command on a machine."""
        enter = ["ip", "netns", "exec", self.names[number]]
        return [*enter, "unshare", "--uts", "sh", "-c", _NAMED, f"host{number}"] if self._named else enter

    def cut(self, number: int) -> None:
        _ip("link", "set", self._cable(number), "down")

    def mend(self, number: int) -> None:
        _ip("link", "set", self._cable(number), "up")

    def _cable(self, number: int) -> str:
        return f"v{self._mark}{number}"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
