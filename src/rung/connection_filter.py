"""Lets into a listening socket of this process those connections alone that the other ranks of the job have announced.

TensorPipe, which is below torch's RPC, does what any connection asks for: it calls operators of torch, some of which
read and write files. So no connection may reach it that is not of a rank. A filter of the kernel on its listening
socket cuts off whatever arrives, and every connection that is accepted inherits it. Each rank announces in the signed
store the connections that it has opened, by the addresses and ports of both ends; the rank at the other end takes the
filter off those, and TCP sends again what was cut off, 0.2 s later. When all ranks are connected with all others, the
listening socket takes no more connections.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import struct
import sys
import threading
from datetime import timedelta
from urllib.parse import urlsplit

from rung.errors import EnvironmentProblem
from rung.network import own_sockets
from rung.signed_store import SignedStore

# Linux, as in <asm-generic/socket.h>; Python does not name them.
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
# What a filter returns is how many bytes of a packet to keep. TCP keeps its header in any case, but for 0.
_NO_PACKET, _NO_CONTENT = 0, 1
_RETURN = 0x06  # the one instruction of these filters: BPF_RET | BPF_K
_TCP_INFO_BYTES, _TCP_INFO_UNACKED = 104, 24  # of a listening socket: how many connections wait to be accepted
_LOOK_SECONDS = 0.01

_End = tuple[str, int]  # address and port


class ConnectionFilter:
    """Watches over one listening socket, from before its address is published until all ranks are connected.

    Its `guard` is to be called when a store publishes the address. Where the system has no such filters, `problem` says
    so, and everybody is let in.
    """

    def __init__(self, rank: int, size: int, store: SignedStore, name: str) -> None:
        self.problem = "" if sys.platform == "linux" else f"{sys.platform} has no socket filters"
        self._rank, self._size, self._name = rank, size, name
        self._store = store.clone()  # the thread must not wait for a store in which others wait
        self._known = {_inode(found) for found in own_sockets()}  # that need not be looked at any more
        self._opened: list[tuple[_End, _End]] = []  # by this rank, own end first
        self._announced: set[tuple[_End, _End]] = set()  # by all ranks
        self._unannounced: set[_End] = set()  # the other ends of connections that no rank has announced yet
        self._port: int | None = None
        self._error: Exception | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="connection filter", daemon=True)

    def guard(self, name: str, value: bytes) -> None:
        """If this is the address of a listening socket of this process, cut off whatever arrives there."""
        address = urlsplit(value.decode(errors="replace")) if b"://" in value else None
        if self.problem or self._port is not None or address is None or address.port is None:
            return
        try:
            is_found = self._filter_listeners(address.port, _NO_CONTENT)
        except OSError as error:
            self.problem = f"this system takes no socket filter ({error.strerror})"
            return
        if not is_found:
            self.problem = f"no socket of this process listens at {value.decode()}"
            return
        self._port = address.port
        if self._is_connected():
            raise EnvironmentProblem(
                f"somebody connected to {value.decode()}, where this rank listens for calls of the others, before any "
                "of them knew the address. Another user of this machine tries to reach the job."
            )
        self._thread.start()

    def seal(self, timeout_seconds: float) -> None:
        """When this rank is connected with all others: wait until they are, too, and take no more connections."""
        if self._port is None:
            return
        self._store.set(f"{self._name}/connected/{self._rank}", "yes")
        everyone = [f"{self._name}/connected/{rank}" for rank in range(self._size)]
        self._store.wait(everyone, timedelta(seconds=timeout_seconds))
        self.end()
        self._filter_listeners(self._port, _NO_PACKET)

    def end(self) -> None:
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()

    def failure(self) -> Exception | None:
        """Why ranks did not come together, if that is known here."""
        if self._error is not None or not self._unannounced:
            return self._error
        found = ", ".join(f"{host}:{port}" for host, port in sorted(self._unannounced))
        return EnvironmentProblem(
            f"rank {self._rank} has connections from {found} that no rank says it has opened, and lets nobody in but "
            "the ranks of this job. Are addresses translated between the machines (NAT, a service mesh)? RPC needs "
            "machines that see each other's own addresses: choose the network with --rdzv or rpc_host."
        )

    def _follow(self) -> None:
        try:
            while not self._done.wait(_LOOK_SECONDS):
                self._look()
        except Exception as error:  # whoever waits for connections finds it in `failure`
            self._error = error

    def _look(self) -> None:
        num_opened, unannounced = len(self._opened), set()
        for found in own_sockets():
            if (inode := _inode(found)) in self._known:
                continue
            try:
                own, other = _end(found.getsockname()), _end(found.getpeername())
            except OSError:  # it listens, or is not connected yet
                continue
            if own[1] != self._port:
                self._opened.append((own, other))
                self._announced.add((own, other))  # a rank calls itself, too
            elif (other, own) in self._announced:
                found.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
            else:
                unannounced.add(other)
                continue
            self._known.add(inode)
        self._unannounced = unannounced
        if len(self._opened) > num_opened:
            self._store.set(f"{self._name}/opened/{self._rank}", json.dumps(self._opened))
        if unannounced:
            self._read_announcements()

    def _read_announcements(self) -> None:
        for rank in range(self._size):
            name = f"{self._name}/opened/{rank}"
            if rank != self._rank and self._store.check([name]):
                self._announced |= {(_end(own), _end(other)) for own, other in json.loads(self._store.get(name))}

    def _filter_listeners(self, port: int, keep: int) -> bool:
        """Whether there are any."""
        instruction = ctypes.create_string_buffer(struct.pack("HBBI", _RETURN, 0, 0, keep))
        program = struct.pack("HP", 1, ctypes.addressof(instruction))
        is_found = False
        for found in own_sockets():
            if _listens(found, port):
                found.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
                is_found = True
        return is_found

    def _is_connected(self) -> bool:
        """Whether anybody came before the filter. First those that wait to be accepted: they become sockets then."""
        assert self._port is not None
        for found in own_sockets():
            if _listens(found, self._port):
                info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
                if struct.unpack_from("I", info, _TCP_INFO_UNACKED)[0]:
                    return True
        return any(f.getsockname()[1] == self._port and not _listens(f, self._port) for f in own_sockets())


def _listens(found: socket.socket, port: int) -> bool:
    is_listening = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    return bool(is_listening) and int(found.getsockname()[1]) == port


def _end(address: list[object] | tuple[object, ...]) -> _End:
    host, port = address[:2]
    return str(host), int(str(port))


def _inode(found: socket.socket) -> int:
    return os.fstat(found.fileno()).st_ino
