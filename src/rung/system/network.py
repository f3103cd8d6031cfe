"""Addresses, interfaces and sockets of this machine, and name resolution. Standard library only."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import stat
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

from rung.errors import EnvironmentProblem

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
UNASSIGNED_ADDRESS = "192.0.2.1"  # reserved (TEST-NET-1), so its route is the default route
_SCONTROL_SECONDS = 20.0


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Host and port of HOST:PORT or [HOST]:PORT."""
    host, _, port = endpoint.rpartition(":")
    return host.strip("[]"), int(port)


def resolve_host(host: str, port: int) -> str:
    try:
        return str(socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][4][0])
    except OSError as error:
        raise EnvironmentProblem(f"the name {host!r} of --rdzv does not resolve: {error}.") from None


def address_towards(host: str, port: int) -> str:
    """The address from which this machine reaches `host`, by the routing table; nothing is sent."""
    remote = resolve_host(host, port)
    family = socket.AF_INET6 if ":" in remote else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((remote, port or 1))
        except OSError as error:
            raise EnvironmentProblem(f"this machine has no route to {host} of --rdzv: {error}.") from None
        return str(probe.getsockname()[0])


def address_among_others(host: str, port: int) -> tuple[str, bool]:
    """The address of this machine for a rendezvous at `host`, and whether `host` is this machine.

    Many systems resolve their own name to loopback, which other machines cannot reach. Then it is the address of the
    default route, or of any interface. localhost and loopback addresses are taken literally.
    """
    remote = resolve_host(host, port)
    is_loopback = remote.startswith("127.") or remote == "::1"
    if not is_loopback or host == "localhost" or host == remote:
        address = address_towards(host, port)
        return address, is_loopback or address == remote
    with contextlib.suppress(EnvironmentProblem):
        return address_towards(UNASSIGNED_ADDRESS, 1), True
    outward = [address for address in _own_addresses().values() if not address.startswith("127.")]
    return outward[0] if outward else address_towards(host, port), True


def slurm_address(node: str) -> str:
    """A name or address of one of Slurm's machines. Slurm's own name of it need not resolve."""
    with contextlib.suppress(EnvironmentProblem):
        resolve_host(node, 1)
        return node
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["scontrol", "show", "node", node]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=_SCONTROL_SECONDS, check=True).stdout
        if (found := re.search(r"\bNodeAddr=(\S+)", shown)) is not None:
            return found.group(1)
    raise EnvironmentProblem(
        f"task 0 of this Slurm step is on {node}, a name that does not resolve here, and scontrol shows no address of "
        "it. Export MASTER_ADDR with the address of that machine."
    )


def interface_of(address: str) -> str | None:
    """The network interface that has an address; None where none is found."""
    if ":" in address:
        return _interface_of_ipv6(address)
    if address.startswith("127."):
        return "lo" if Path("/sys/class/net/lo").exists() else None
    return next((name for name, own in _own_addresses().items() if own == address), None)


def _own_addresses() -> dict[str, str]:
    """The IPv4 address of each interface that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])  # struct ifreq: name (16), family (2), port (2), address
    return found


def _interface_of_ipv6(address: str) -> str | None:
    wanted = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
    try:
        rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    except FileNotFoundError:
        return None
    return next((row[5] for row in rows if row[0] == wanted), None)


def answers(host: str, port: int, seconds: float = 1.0) -> bool:
    """Whether a connection to the address succeeds."""
    try:
        with socket.create_connection((host, port), seconds):
            return True
    except OSError:
        return False


def own_sockets() -> Iterator[socket.socket]:
    """All TCP sockets of this process, those of libraries included. Each is a duplicate, closed before the next."""
    for number in map(int, os.listdir("/proc/self/fd")):
        if _is_socket(number):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                    yield found


def close_connections() -> None:
    """Shut down every TCP connection of this process, those of libraries included. The peers see it closed."""
    for connection in own_sockets():
        with contextlib.suppress(OSError):
            connection.getpeername()  # raises for a listening socket: gloo aborts if that is shut down
            connection.shutdown(socket.SHUT_RDWR)


def _is_socket(number: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(number).st_mode)
    except OSError:  # the descriptor of the listing itself, closed by now
        return False
