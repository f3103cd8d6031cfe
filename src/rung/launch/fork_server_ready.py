"""The last import of the fork server, before it forks ranks. Nothing else imports this module.

What was imported is kept from the garbage collector: ranks need not walk it, and leave its pages as they are, in memory
that they share.

The server exits at once when the launcher is gone: ranks end with the server, and Python's normal exit takes seconds
with torch loaded. A launcher that was killed could not remove its temporary directory with the server's socket, so the
server does. atexit calls the handler that was registered last first, which is another reason to import this last.
"""

from __future__ import annotations

import atexit
import gc
import os

from rung.launch.fork_server import remove_sockets


def _leave(server: int) -> None:
    if os.getpid() != server:  # a rank has inherited the handler
        return
    remove_sockets()
    os._exit(0)


gc.freeze()
gc.enable()
atexit.register(_leave, os.getpid())
