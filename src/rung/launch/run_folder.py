"""The run's directory as its launcher keeps it: made again if it is removed while the job runs, with its settings."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from rung.launch.rendezvous.elastic import ElasticPolicy, announce, running_launcher
from rung.launch.resume import CONFIG
from rung.system.disk import reason
from rung.system.untrusted import LAYOUT, printable

_CHECK_SECONDS = 1.0


class RunFolder:
    """`path` is the run's directory, and `state` the folder in it that the launcher and its ranks share."""

    def __init__(self, path: Path, state: Path, policy: ElasticPolicy, say: Callable[[str], None]) -> None:
        self.path, self.state, self.logs = path, state, path / "logs"
        self._policy, self._say = policy, say
        self._settings = (path / CONFIG).read_bytes() if (path / CONFIG).exists() else None
        self._checked = 0.0

    def restore(self) -> None:
        """Make what is missing of the directory. The job needs only a place to write to; a later --resume needs the
        settings."""
        for folder in (self.state, self.logs):
            folder.mkdir(parents=True, exist_ok=True)
        if not running_launcher(self.state):
            announce(self.state, self._policy)
        if self._settings is not None and not (self.path / CONFIG).exists():
            (self.path / CONFIG).write_bytes(self._settings)

    def restore_if_removed(self) -> None:
        """Restore a directory that was removed while ranks train. They write their checkpoints to it again; without the
        settings beside them, a launcher that is started after this one was killed could not resume the run."""
        if self._settings is None or time.monotonic() < self._checked + _CHECK_SECONDS:
            return
        self._checked = time.monotonic()
        if not (self.path / CONFIG).exists():
            with contextlib.suppress(OSError):  # a disk that is full or read-only: the next check tries again
                self.restore()
                self._say(f"{self.path / CONFIG} was removed while the job runs; it has been written again")

    def keep_report(self, report: str) -> str:
        """Write the report of a failure after which the job continues, and say where it is."""
        folder = self.path / "failures"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            numbers = [int(path.stem) for path in folder.glob("*.txt") if path.stem.isdecimal()]
            path = folder / f"{max(numbers, default=0) + 1:03d}.txt"
            path.write_text(f"{printable(report, keep=LAYOUT)}\n")
        except OSError as error:
            self._say(report)
            return f"its report is above and not in {folder}: {reason(error)}"
        return f"report: {path}"
