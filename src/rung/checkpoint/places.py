"""Where the state of a run may lie. Nothing here needs torch."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path


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


def _is_ours(folder: Path) -> bool:
    """Or not there yet."""
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return True
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
