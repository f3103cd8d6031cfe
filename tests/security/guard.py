"""What a reader of hostile files may not do, watched by an audit hook: write, delete or read outside of the directory
of the input, start a process, connect, unpickle. A hook cannot be taken away again, so it looks only while armed."""

from __future__ import annotations

import os
import signal
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod",
            "os.chown", "shutil.rmtree", "shutil.move", "shutil.copyfile")  # fmt: skip
_FORBIDDEN = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "os.startfile",
              "socket.connect", "socket.bind", "pickle.find_class", "os.kill", "ctypes.dlopen")  # fmt: skip
_SOURCES = Path(__file__).resolve().parents[2]


class TooLong(BaseException):
    """The time of one input is over. No reader catches it."""


class Guard:
    def __init__(self) -> None:
        self.violations: list[str] = []
        self._root: str | None = None
        # Code that is imported late, pages' own files, and what the kernel tells of processes.
        installed = {sys.prefix, sys.base_prefix, *sysconfig.get_paths().values()}
        self._readable = (*map(os.path.realpath, installed), str(_SOURCES), "/proc", "/sys", "/usr", "/etc/localtime",
                          "/dev/null", "/dev/shm")  # fmt: skip
        sys.addaudithook(self._hear)

    @contextmanager
    def armed(self, root: Path, seconds: float) -> Iterator[None]:
        """Around one input, whose files lie below `root`."""
        self.violations.clear()
        signal.signal(signal.SIGALRM, self._ring)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        self._root = os.path.realpath(root)
        try:
            yield
        finally:
            self._root = None
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _ring(self, *_: Any) -> None:
        raise TooLong

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._root is None:
            return
        if event in _FORBIDDEN:
            self.violations.append(f"{event} {arguments[:1]!r:.200}")
        elif event in _CHANGES:
            for path in arguments[: 2 if event in ("os.rename", "os.link", "os.symlink") else 1]:
                self._check(event, path, writes=True)
        elif event == "open" and not isinstance(arguments[0], int):
            path, mode, flags = arguments
            writes = bool((flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))
            self._check(f"open {mode or ''}", path, writes=writes)

    def _check(self, event: str, path: Any, *, writes: bool) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return
        root, self._root = self._root, None  # what follows opens nothing, but resolves links
        try:
            # Whoever replaces or removes a link does so where it lies; whoever opens it goes where it leads.
            given = os.fsdecode(path)
            resolved = os.path.realpath(given)
            if not event.startswith("open"):
                resolved = os.path.join(os.path.realpath(os.path.dirname(given) or "."), os.path.basename(given))
        finally:
            self._root = root
        inside = [root] if writes else [root, *self._readable]
        if not any(resolved == one or resolved.startswith(f"{one}{os.sep}") for one in inside):
            self.violations.append(f"{event} {resolved}")


def working_directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="rung-fuzz-")
