"""Machines of our own making: network namespaces joined by a bridge, whose cables can be pulled. Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid


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
    """`count` machines on one network. Use as a context manager."""

    def __init__(self, count: int) -> None:
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
        return self

    def __exit__(self, *error: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", f"rg{self._mark}"], capture_output=True)

    def address(self, number: int) -> str:
        return f"{self._net}.{number + 1}"

    def prefix(self, number: int) -> list[str]:
        """What runs a command on a machine."""
        return ["ip", "netns", "exec", self.names[number]]

    def cut(self, number: int) -> None:
        _ip("link", "set", self._cable(number), "down")

    def mend(self, number: int) -> None:
        _ip("link", "set", self._cable(number), "up")

    def _cable(self, number: int) -> str:
        return f"v{self._mark}{number}"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
