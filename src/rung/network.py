"""Which address and interface of this machine reach another one. Standard library only."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from pathlib import Path

from rung.errors import EnvironmentProblem

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Host and port of HOST:PORT or [HOST]:PORT."""
    host, _, port = endpoint.rpartition(":")
    return host.strip("[]"), int(port)


def resolve_host(host: str, port: int) -> str:
    """The address of a name."""
    try:
        return str(socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][4][0])
    except OSError as error:
        raise EnvironmentProblem(f"the name {host!r} of --rdzv does not resolve: {error}.") from None


def address_towards(host: str, port: int) -> str:
    """The address that this machine uses to reach `host`. Asks the routing table; nothing is sent."""
    remote = resolve_host(host, port)
    family = socket.AF_INET6 if ":" in remote else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((remote, port or 1))
        except OSError as error:
            raise EnvironmentProblem(f"this machine has no route to {host} of --rdzv: {error}.") from None
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The network interface that carries an address; None where the system does not tell."""
    if ":" in address:
        return _interface_of_ipv6(address)
    if address.startswith("127."):
        return "lo" if Path("/sys/class/net/lo").exists() else None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has none
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def _interface_of_ipv6(address: str) -> str | None:
    wanted = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
    try:
        rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    except FileNotFoundError:
        return None
    return next((row[5] for row in rows if row[0] == wanted), None)


def answers(host: str, port: int, seconds: float = 1.0) -> bool:
    """Whether somebody listens there."""
    try:
        with socket.create_connection((host, port), seconds):
            return True
    except OSError:
        return False


def close_connections() -> None:
    """End every network connection of this process, whoever opened it. The other sides notice, too."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                connection.getpeername()  # a listening one has none, and gloo aborts if it is closed
                connection.shutdown(socket.SHUT_RDWR)
