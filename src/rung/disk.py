"""Files that the system refuses to write: its reason in words, what room there is, and refusals before any work.

Nothing here needs torch.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from rung.errors import ConfigError
from rung.sizes import human_size

_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (
    *_FULL, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EMFILE,
    errno.ENFILE, errno.ELOOP, errno.EIO, errno.ESTALE,
)  # fmt: skip


def is_full(error: BaseException) -> bool:
    """Whether a write failed because the disk, or the user's quota of it, is used up."""
    return isinstance(error, OSError) and error.errno in _FULL


def is_refused(error: OSError) -> bool:
    """Whether the system refuses something for a reason that is the user's to change, not a mistake of a program."""
    return error.errno in _REFUSED


def reason(error: OSError) -> str:
    """The system's words, with the file where it is known."""
    words = (error.strerror or str(error) or type(error).__name__).lower()
    return f"{words} ({error.filename})" if error.filename else words


def free_bytes(path: Path) -> int | None:
    """Room for this user where `path` lies, or would lie. None where the system does not say."""
    with contextlib.suppress(OSError):
        return shutil.disk_usage(_existing(path)).free
    return None


def room(needed_bytes: int, free: int | None, *, quota: bool = False) -> str:
    """What was needed and what there was. Under a quota, the free bytes of the disk say nothing."""
    told = f"{human_size(needed_bytes)} {'are' if needed_bytes != 1 else 'is'} needed"
    return told if free is None or quota else f"{told}, {human_size(free)} were free"


def trouble_with(folder: Path) -> str:
    """Why nothing can be written into a directory that was written to before, in a few words; empty where it can."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return f"{folder} is gone"
    if found.f_flag & os.ST_RDONLY:
        return f"{folder} is on a read-only file system"
    return f"the disk of {folder} is full" if found.f_bavail == 0 and found.f_blocks else ""


def check_file(path: str | Path, flag: str) -> Path:
    """Refuse, before any work, a file that cannot be written in the end. Makes nothing."""
    file = _named(path, flag)
    if file.is_dir():
        raise ConfigError(f"{flag} {path} is a directory, and a file is wanted. Name a file in it.")
    if file.exists() and not os.access(file, os.W_OK):
        raise ConfigError(f"{flag} {path} cannot be written: permission denied.")
    if not file.exists():
        _check_new(file, f"{flag} {path}")
    return file


def check_folder(path: str | Path, flag: str) -> Path:
    """The same for a directory in which files are to be made."""
    folder = _named(path, flag)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{flag} {path} is a file, and a directory is wanted.")
    _check_new(folder / "file", f"{flag} {path}")
    return folder


@contextlib.contextmanager
def writing(path: str | Path, flag: str) -> Iterator[None]:
    """Around writing a result: what the system refuses is one line. `check_file` cannot know of a disk that fills."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be written: {reason(error)}.") from None


def _named(path: str | Path, flag: str) -> Path:
    if not str(path).strip():
        raise ConfigError(f"{flag} has no value. Name a path, or leave it out.")
    return Path(path)


def _check_new(path: Path, asked: str) -> None:
    """Whether something can be made at a path where there is nothing yet."""
    try:
        above = _existing(path.parent)
    except OSError as error:
        raise ConfigError(f"{asked} cannot be written: {reason(error)}.") from None
    if not above.is_dir():
        raise ConfigError(f"{asked} cannot be written: {above} is a file, not a directory.")
    if not os.access(above, os.W_OK | os.X_OK):
        is_fixed = bool(os.statvfs(above).f_flag & os.ST_RDONLY)
        why = "is on a read-only file system" if is_fixed else "is not writable for this user"
        raise ConfigError(f"{asked} cannot be written: {above} {why}.")


def _existing(path: Path) -> Path:
    """The path itself, or the nearest above it that is there."""
    path = path.absolute()
    while not path.exists():
        if path.is_symlink():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        path = path.parent
    return path
