"""The settings `--profile` and `--log`.

Imports neither torch nor the trackers: invalid values are refused before a process starts.
"""

from __future__ import annotations

import importlib.util

from rung.errors import ConfigError, EnvironmentProblem, nearest

TRACKERS = ("wandb", "mlflow", "trackio")


def profiled_steps(text: str) -> range:
    """Parse '10' or '10:13'; both ends are included."""
    first, colon, last = text.partition(":")
    if not (first.isdecimal() and (last.isdecimal() or not colon)):
        raise ConfigError(f"profile is a step, or FIRST:LAST such as 10:13, not {text!r}.")
    start, stop = int(first), int(last or first)
    if not 1 <= start <= stop:
        raise ConfigError(f"profile needs 1 <= FIRST <= LAST, not {text}.")
    return range(start, stop + 1)


def tracker_names(text: str) -> tuple[str, ...]:
    """Parse 'wandb' or 'wandb,mlflow'."""
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(
                f"log cannot be {name!r}.{nearest(name, TRACKERS)} It is one or more of: {','.join(TRACKERS)}."
            )
    if len(set(names)) < len(names):
        raise ConfigError(f"log names a tracker twice: {text}.")
    return names


def refuse_missing_trackers(names: tuple[str, ...]) -> None:
    """Refuse trackers whose package, an optional dependency, is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise EnvironmentProblem(
                f"--log {name} needs the package {name}, which is not installed. Install it: pip install 'rung[{name}]'"
            )
