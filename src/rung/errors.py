"""Errors that a user can act on: what was asked, why it cannot be, and the nearest valid choice.

They are raised before work starts, or name the place where they happened; the command line prints the message without a
traceback. Imports nothing of Rung and no torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# The exit code of a run that saved its state and wants to be started again with --resume (EX_TEMPFAIL of sysexits.h).
RESUME_EXIT_CODE = 75


class RungError(Exception):
    """The base of every error whose message is meant for the user."""


class TaskError(RungError):
    """The task file does not hold what a task needs."""


class ConfigError(RungError):
    """A setting is unknown, malformed or contradicts another one."""


class StrategyError(RungError):
    """A strategy does not exist or does not fit the number of processes."""


class DataError(RungError):
    """A data set cannot be read the way the run needs."""


class ModelError(RungError):
    """The model cannot be trained the way the run asks."""


class EnvironmentProblem(RungError):
    """The machine lacks something the run needs."""


class CheckpointError(RungError):
    """A checkpoint is missing, damaged, or does not fit the task."""


class StoreError(RungError):
    """A store of objects does not answer, or refuses a request."""


class NonFiniteError(RungError):
    """The loss or the gradient norm of a run is not a finite number any more."""


class ReplicaError(RungError):
    """Ranks that should hold the same weights no longer do."""


class ResumeError(RungError):
    """A resumed run does not go on where it was."""


class ReportError(RungError):
    """A run or a comparison cannot be displayed."""


class JobFailed(RungError):
    """A launched job failed; the message is the report. `is_mistake`: ranks refused the request before they trained."""

    def __init__(self, report: str, *, is_mistake: bool = False) -> None:
        super().__init__(report)
        self.is_mistake = is_mistake


def nearest(word: str, choices: Iterable[str]) -> str:
    """A suggestion to append to an error message: " Did you mean 'x'?", or nothing."""
    matches = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f" Did you mean {matches[0]!r}?" if matches else ""
