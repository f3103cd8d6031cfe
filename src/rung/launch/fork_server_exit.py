"""Exits the fork server at once when the launcher is gone. Only the fork server imports this module.

Ranks end with the server, and Python's normal exit takes seconds with torch loaded. A launcher that was killed could
not remove its temporary directory with the server's socket, so the server does.
"""

from __future__ import annotations

import atexit
import os

from rung.launch.fork_server import remove_sockets


def _leave(server: int) -> None:
    if os.getpid() != server:  # a rank has inherited the handler
        return
    remove_sockets()
    os._exit(0)


atexit.register(_leave, os.getpid())
