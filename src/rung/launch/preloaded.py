"""Imported by the server that ranks are forked from, and by nobody else: it ends at once when the launcher is gone.

Ranks end with the server, and Python would first take seconds to put torch away. A launcher that was killed could not
remove its temporary directory with the socket of the server: the server does.
"""

from __future__ import annotations

import atexit
import os

from rung.launch.server import remove_sockets


def _leave(server: int) -> None:
    if os.getpid() != server:  # a rank has inherited this
        return
    remove_sockets()
    os._exit(0)


atexit.register(_leave, os.getpid())
