"""Admits to a listening socket of this process only connections that other ranks of the job have announced.

TensorPipe, below torch's RPC, executes the requests of any connection: it calls operators of torch, some of which read
and write files. So only connections of ranks may reach it. A kernel filter on its listening socket truncates arriving
packets, and every accepted connection inherits it. Each rank announces in the signed store the connections that it has
opened, by the addresses and ports of both ends; the rank at the other end detaches the filter from those, and TCP
retransmits the truncated data 0.2 s later. When all ranks are connected with all others, the listening socket accepts
no more connections.
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

from rung.distributed.signed_store import SignedStore
from rung.errors import EnvironmentProblem
from rung.system.network import own_sockets

# From Linux's <asm-generic/socket.h>; Python has no names for them.
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
# A filter returns how many bytes of a packet to keep. The TCP header is kept in any case, except for 0.
_NO_PACKET, _NO_CONTENT = 0, 1
_RETURN = 0x06  # the one instruction of these filters: BPF_RET | BPF_K
_TCP_INFO_BYTES, _TCP_INFO_UNACKED = 104, 24  # of a listening socket: how many connections wait to be accepted
_POLL_SECONDS = 0.01

_End = tuple[str, int]  # address and port


class ConnectionFilter:
    """Filters one listening socket, from before its address is published until all ranks are connected.

    A store calls `guard` before it publishes the address. Where the system has no such filters, `problem` says why, and
    every connection is admitted.
    """

    def __init__(self, rank: int, size: int, store: SignedStore, name: str) -> None:
        self.problem = "" if sys.platform == "linux" else f"{sys.platform} has no socket filters"
        self._rank, self._size, self._name = rank, size, name
        # One client for each thread: `seal` waits for slow ranks, and meanwhile the other thread must admit them.
        self._callers_store, self._store = store, store.clone()
        self._known = {_inode(found) for found in own_sockets()}  # sockets that need no more checks
        self._opened: list[tuple[_End, _End]] = []  # by this rank, own end first
        self._announced: set[tuple[_End, _End]] = set()  # by all ranks
        self._unannounced: set[_End] = set()  # the other ends of connections that no rank has announced yet
        self._admitted: set[tuple[_End, _End]] = set()  # each once: its ends may be free again
        self._port: int | None = None
        self._error: Exception | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="connection filter", daemon=True)

    def guard(self, name: str, value: bytes) -> None:
        """If `value` is the address of a listening socket of this process, attach the filter to it."""
        address = urlsplit(value.decode(errors="replace")) if b"://" in value else None
        if self._port is not None or address is None or address.port is None:
            return
        if not self.problem:
            try:
                if not self._filter_listeners(address.port, _NO_CONTENT):
                    self.problem = f"no socket of this process listens at {value.decode()}"
            except OSError as error:
                self.problem = f"this system takes no socket filter ({error.strerror})"
        self._port = address.port
        if not self.problem and self._is_connected():
            raise EnvironmentProblem(
                f"a process connected to {value.decode()}, where this rank listens for calls of the others, before "
                "the address was published. Another user of this machine may be trying to reach the job."
            )
        self._thread.start()  # without a filter, too: ranks that have one wait for this rank's announcements

    def seal(self, timeout_seconds: float) -> None:
        """Wait until all ranks are connected with all others, as this one is; then accept no more connections."""
        if self._port is None:
            return
        self._callers_store.set(f"{self._name}/connected/{self._rank}", "yes")
        everyone = [f"{self._name}/connected/{rank}" for rank in range(self._size)]
        self._callers_store.wait(everyone, timedelta(seconds=timeout_seconds))
        self.end()
        if not self.problem:
            self._filter_listeners(self._port, _NO_PACKET)

    def end(self) -> None:
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()

    def failure(self) -> Exception | None:
        """Why ranks could not connect, if the filter is the reason."""
        if self._error is not None or not self._unannounced:
            return self._error
        found = ", ".join(f"{host}:{port}" for host, port in sorted(self._unannounced))
        return EnvironmentProblem(
            f"rank {self._rank} has connections from {found} that no rank has announced, and admits only ranks of this "
            "job. Are addresses translated between the machines (NAT, a service mesh)? RPC needs machines that see "
            "each other's own addresses: choose the network with --rdzv or rpc_host."
        )

    def _run(self) -> None:
        try:
            while not self._done.wait(_POLL_SECONDS):
                self._poll()
        except Exception as error:  # reported by `failure`, to the thread that waits for connections
            self._error = error

    def _poll(self) -> None:
        num_opened, unannounced = len(self._opened), set()
        for found in own_sockets():
            if (inode := _inode(found)) in self._known:
                continue
            try:
                own, other = _end(found.getsockname()), _end(found.getpeername())
            except OSError:  # a listening socket, or not connected yet
                continue
            if own[1] != self._port:
                self._opened.append((own, other))
                self._announced.add((own, other))  # a rank also connects to itself
            elif self.problem:
                pass  # there is no filter to detach
            elif (other, own) in self._announced - self._admitted:
                self._admitted.add((other, own))
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
        """Attach a filter to all sockets that listen at `port`; whether there are any."""
        instruction = ctypes.create_string_buffer(struct.pack("HBBI", _RETURN, 0, 0, keep))
        program = struct.pack("HP", 1, ctypes.addressof(instruction))
        is_found = False
        for found in own_sockets():
            if _listens(found, port):
                found.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
                is_found = True
        return is_found

    def _is_connected(self) -> bool:
        """Whether a connection was made before the filter. Checks the accept queue first: accepting moves one from
        there to the sockets, never back."""
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
