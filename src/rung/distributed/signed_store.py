"""torch's store with signed values, listening on one interface only.

torch's TCPStore listens on all interfaces and has no access control: any process that reaches its port can read and
write. So the listening socket is made here, and every value carries a signature over its name and content
(HMAC-SHA256). A value without a valid signature is refused before it is parsed. A signature does not prevent replay: an
attacker can write back an older value of the same name. So ranks sign with the key of one world, which is derived from
fresh nonces whenever a world is formed; see `launch/rendezvous/forming.py` and `store.py`. Counters (`add`) cannot
be signed, since the server computes them; only waits depend on them.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from rung.errors import EnvironmentProblem
from rung.system.launcher_env import KEY_VARIABLE

_DIGEST_BYTES = 32
_BACKLOG = 4096  # torch's own: all ranks of a large job may connect at once

LOOPBACK = "127.0.0.1"


class ForgedMessage(EnvironmentProblem):
    """A value of the store was written without the key of this job, or replayed from an earlier world."""


class SignedStore(Store):
    """A store whose values are signed. torch's process groups and RPC accept it like any other."""

    def __init__(self, store: Store, key: str) -> None:
        super().__init__()
        self.unsigned: Any = store  # Any: by the stubs, values are not bytes
        self.key = key
        self._counters: set[str] = set()  # names that this process has added to; RPC reads some of them with `get`
        served: Any = store.underlying_store if isinstance(store, PrefixStore) else store
        self.host, self.port = served.host, served.port
        self.before_set: Callable[[str, bytes], None] | None = None  # called with a name and its new value

    def set(self, name: str, value: str | bytes) -> None:
        if self.before_set is not None:
            self.before_set(name, value.encode() if isinstance(value, str) else bytes(value))
        self.unsigned.set(name, self.sign(name, value))

    def get(self, name: str) -> bytes:
        found = bytes(self.unsigned.get(name))
        if name in self._counters and found.isdigit():
            return found
        return self.verify(name, found)

    def compare_set(self, name: str, expected: str | bytes, desired: str | bytes) -> bytes:
        # A signature is a function of name and value, so the server can compare signed values.
        old = self.sign(name, expected) if expected else ""
        return self.verify(name, bytes(self.unsigned.compare_set(name, old, self.sign(name, desired))))

    def add(self, name: str, amount: int) -> int:
        self._counters.add(name)
        return int(self.unsigned.add(name, amount))

    def check(self, names: Sequence[str]) -> bool:
        return bool(self.unsigned.check(list(names)))

    def wait(self, names: Sequence[str], timeout: timedelta | None = None) -> None:
        if timeout is None:
            self.unsigned.wait(list(names))
        else:
            self.unsigned.wait(list(names), timeout)

    def delete_key(self, name: str) -> bool:
        return bool(self.unsigned.delete_key(name))

    def num_keys(self) -> int:
        return int(self.unsigned.num_keys())

    def set_timeout(self, timeout: timedelta) -> None:
        self.unsigned.set_timeout(timeout)

    def has_extended_api(self) -> bool:
        return False

    def clone(self) -> SignedStore:
        return SignedStore(self.unsigned.clone(), self.key)

    def sign(self, name: str, value: str | bytes) -> bytes:
        """A value with its signature in front."""
        content = value.encode() if isinstance(value, str) else bytes(value)
        return self._digest(name, content) + content

    def verify(self, name: str, signed: bytes) -> bytes:
        """The value without its signature. Raises ForgedMessage where it is not the job's."""
        digest, content = signed[:_DIGEST_BYTES], signed[_DIGEST_BYTES:]
        if not hmac.compare_digest(digest, self._digest(name, content)):
            raise ForgedMessage(
                f"{name!r} at {self.host}:{self.port} is not signed with the key of this job: either a process of "
                "another job or of another user wrote it, or the machines of this job have different keys. Give all "
                f"of them the same --rdzv-key FILE, or the same {KEY_VARIABLE}."
            )
        return content

    def replayed(self, name: str) -> ForgedMessage:
        """The error for a signed value of another world."""
        return ForgedMessage(
            f"{name!r} at {self.host}:{self.port} was not made for the world that is forming: a process has replayed "
            "the value of an earlier world. Block other users' access to that port, or use another port."
        )

    def _digest(self, name: str, content: bytes) -> bytes:
        encoded = name.encode()
        return hmac.digest(
            self.key.encode(), b"rung store" + len(encoded).to_bytes(8, "big") + encoded + content, "sha256"
        )


def serve_store(address: str, port: int = 0, *, seconds: float | None = None) -> TCPStore:
    """Serve a store at one address of this machine; port 0 is any free one. Raises OSError if it cannot listen."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(_BACKLOG)
        # A TCPStore server also has a client, which cannot connect to the addresses that mean all interfaces.
        host = {"": LOOPBACK, "0.0.0.0": LOOPBACK, "::": "::1"}.get(address, address)
        port = int(listener.getsockname()[1])
        return TCPStore(
            host, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach(), **_timeout(seconds)
        )


def join_store(host: str, port: int, *, seconds: float | None = None) -> TCPStore:
    """Connect to a store that another process serves."""
    return TCPStore(host, port, None, False, wait_for_workers=False, **_timeout(seconds))


def _timeout(seconds: float | None) -> dict[str, Any]:
    return {} if seconds is None else {"timeout": timedelta(seconds=seconds)}
