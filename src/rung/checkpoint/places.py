"""Where the state of a run may lie, and what else it writes into its directory. Nothing here needs torch."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Collection
from pathlib import Path

from rung.errors import ConfigError
from rung.untrusted import find_escapes

# How everything begins that a run writes into its directory, trackers included.
_WRITTEN = (
    "checkpoints", "rescue", "logs", "metrics", "config", "model", "state", "sites", "tensorboard", "profile", "wandb",
    "mlflow", "mlruns", "trackio",
)  # fmt: skip
_MOST_NAMED = 3


def checkpoints_folder(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def rescue_folder(run_dir: Path) -> Path:
    return run_dir / "rescue"


def memory_folder(run_dir: Path) -> Path:
    """Where a run's states in memory lie: a file system without a disk, which outlives the ranks."""
    name = f"rung-{os.geteuid()}-{hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:16]}"
    shared = Path("/dev/shm")
    # All users may write there: what another one put in our place is not our state.
    return shared / name if shared.is_dir() and _is_ours(shared / name) else run_dir / ".state" / name


def state_folders(run_dir: Path) -> dict[str, Path]:
    """Everywhere that a run's state may lie."""
    return {
        "checkpoints": checkpoints_folder(run_dir),
        "rescue": rescue_folder(run_dir),
        "memory": memory_folder(run_dir),
    }


def refuse_escapes(run_dir: Path, names: Collection[str] = _WRITTEN) -> None:
    """Refuse to write into a directory whose files lead elsewhere: in a run that someone else sent, the log of a rank
    may be a link to a file of one's own. `names` is how that begins which is written. The directory may be a link."""
    try:
        found = find_escapes(run_dir, names)
    except OSError as error:
        raise ConfigError(f"{error.filename or run_dir} cannot be read: {error.strerror}.") from None
    if found:
        more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        raise ConfigError(
            f"{run_dir} leads out of itself: {'; '.join(found[:_MOST_NAMED])}{more}. A run writes and deletes there. "
            "Put what they lead to in their place, or link the whole directory of the run."
        )


def _is_ours(folder: Path) -> bool:
    """Or not there yet."""
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return True
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
