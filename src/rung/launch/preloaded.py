"""Imported by the server that ranks are forked from, and by nobody else: it ends at once when the launcher is gone.

Ranks end with the server, and Python would first take seconds to put torch away.
"""

from __future__ import annotations

import atexit
import os


def _leave(server: int) -> None:
    if os.getpid() == server:  # a rank has inherited this
        os._exit(0)


atexit.register(_leave, os.getpid())
