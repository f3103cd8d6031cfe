"""Imported by the server that ranks are forked from, and by nobody else: it ends at once when the launcher is gone.

Ranks end with the server, and Python would first take seconds to put torch away. A launcher that was killed could not
remove its temporary directory with the socket of the server: the server does.
"""

from __future__ import annotations

import atexit
import os
import shutil
from multiprocessing import forkserver
from pathlib import Path
from typing import Any


def _leave(server: int) -> None:
    if os.getpid() != server:  # a rank has inherited this
        return
    known: Any = getattr(forkserver, "_forkserver", None)
    address = getattr(known, "_forkserver_address", None)
    if isinstance(address, str) and (folder := Path(address).parent).name.startswith("pymp-"):
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


atexit.register(_leave, os.getpid())
