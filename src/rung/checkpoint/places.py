"""The folders of a run's state, and the other names in its directory. Nothing here needs torch."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Collection
from pathlib import Path

from rung.errors import ConfigError
from rung.system.untrusted import find_escapes

# Prefixes of everything that a run and its trackers write into its directory.
_WRITTEN = (
    "checkpoints", "rescue", "failures", "logs", "metrics", "config", "model", "state", "sites", "tensorboard",
    "profile", "wandb", "mlflow", "mlruns", "trackio",
)  # fmt: skip
_MAX_NAMED = 3


def checkpoints_folder(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def emergency_folder(run_dir: Path) -> Path:
    return run_dir / "rescue"


def memory_folder(run_dir: Path) -> Path:
    """The folder of a run's copies of the state: in a memory file system, which outlives the ranks, or in the run's
    directory where another user could write to the former."""
    shared = _shared_folder(run_dir)
    return shared if _is_ours(shared) else run_dir / ".state" / shared.name


def make_memory_folder(run_dir: Path) -> Path:
    """Create the memory folder. In /dev/shm another user may have taken its name; then it is in the run directory."""
    with contextlib.suppress(OSError):
        _shared_folder(run_dir).mkdir(mode=0o700, exist_ok=True)
    folder = memory_folder(run_dir)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _shared_folder(run_dir: Path) -> Path:
    digest = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:16]
    return Path("/dev/shm") / f"rung-{os.geteuid()}-{digest}"


def state_folders(run_dir: Path) -> dict[str, Path]:
    """All folders that may hold a run's state, by kind."""
    return {
        "checkpoints": checkpoints_folder(run_dir),
        "rescue": emergency_folder(run_dir),
        "memory": memory_folder(run_dir),
    }


def refuse_escapes(run_dir: Path, names: Collection[str] = _WRITTEN) -> None:
    """Refuse to write into a directory with links out of it: in a run received from another user, a rank's log may be a
    link to a file of this user. `names`: prefixes of what is written. The directory itself may be a link."""
    try:
        found = find_escapes(run_dir, names)
    except OSError as error:
        raise ConfigError(f"{error.filename or run_dir} cannot be read: {error.strerror}.") from None
    if found:
        more = f" and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
        raise ConfigError(
            f"{run_dir} leads out of itself: {'; '.join(found[:_MAX_NAMED])}{more}. A run writes and deletes there. "
            "Put what they lead to in their place, or link the whole directory of the run."
        )


def _is_ours(folder: Path) -> bool:
    """Whether this user owns a folder and no other can write to it. /dev/shm is sticky: no other can replace it."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
