"""Checks of paths before any work, free space, and the reason of a failed write in words. Imports no torch."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from rung.errors import ConfigError
from rung.system.units import human_size

_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (
    *_FULL, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EMFILE,
    errno.ENFILE, errno.ELOOP, errno.EIO, errno.ESTALE,
)  # fmt: skip


def is_full(error: BaseException) -> bool:
    """Whether a write failed because the disk, or the user's quota of it, is used up."""
    return isinstance(error, OSError) and error.errno in _FULL


def is_refused(error: OSError) -> bool:
    """Whether the system refused an operation for a reason that the user can change, not because of a bug."""
    return error.errno in _REFUSED


def reason(error: OSError) -> str:
    """The system's message, with the file where it is known."""
    words = (error.strerror or str(error) or type(error).__name__).lower()
    return f"{words} ({error.filename})" if error.filename else words


def free_bytes(path: Path) -> int | None:
    """Free space for this user at `path`, which need not exist. None where the system does not provide it."""
    with contextlib.suppress(OSError):
        return shutil.disk_usage(_existing(path)).free
    return None


def room(needed_bytes: int, free: int | None, *, quota: bool = False) -> str:
    """The needed and the free bytes in words. Under a quota, the free bytes of the disk are not the limit."""
    needed = f"{human_size(needed_bytes)} {'are' if needed_bytes != 1 else 'is'} needed"
    return needed if free is None or quota else f"{needed}, {human_size(free)} were free"


def trouble_with(folder: Path) -> str:
    """Why a directory has become unwritable, in a few words; empty if it has not."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return f"{folder} is gone"
    if found.f_flag & os.ST_RDONLY:
        return f"{folder} is on a read-only file system"
    return f"the disk of {folder} is full" if found.f_bavail == 0 and found.f_blocks else ""


def check_file(path: str | Path, flag: str) -> Path:
    """Raise, before any work, if a file could not be written at its end. Creates nothing."""
    file = _named(path, flag)
    if file.is_dir():
        raise ConfigError(f"{flag} {path} is a directory, but must be a file. Name a file in it.")
    if file.exists() and not os.access(file, os.W_OK):
        raise ConfigError(f"{flag} {path} cannot be written: permission denied.")
    if not file.exists():
        _check_new(file, f"{flag} {path}")
    return file


def check_folder(path: str | Path, flag: str) -> Path:
    """The same for a directory in which files are to be made."""
    folder = _named(path, flag)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{flag} {path} is a file, but must be a directory.")
    _check_new(folder / "file", f"{flag} {path}")
    return folder


@contextlib.contextmanager
def writing(path: str | Path, flag: str) -> Iterator[None]:
    """Wraps writing a result: a failure becomes a ConfigError. `check_file` cannot foresee a disk that fills up."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be written: {reason(error)}.") from None


def _named(path: str | Path, flag: str) -> Path:
    if not str(path).strip():
        raise ConfigError(f"{flag} has no value. Name a path, or leave it out.")
    return Path(path)


def _check_new(path: Path, argument: str) -> None:
    """Raise if nothing can be created at a path that does not exist."""
    try:
        above = _existing(path.parent)
    except OSError as error:
        raise ConfigError(f"{argument} cannot be written: {reason(error)}.") from None
    if not above.is_dir():
        raise ConfigError(f"{argument} cannot be written: {above} is a file, not a directory.")
    if not os.access(above, os.W_OK | os.X_OK):
        is_fixed = bool(os.statvfs(above).f_flag & os.ST_RDONLY)
        why = "is on a read-only file system" if is_fixed else "is not writable for this user"
        raise ConfigError(f"{argument} cannot be written: {above} {why}.")


def _existing(path: Path) -> Path:
    """The path itself, or its nearest existing parent."""
    path = path.absolute()
    while not path.exists():
        if path.is_symlink():  # a dangling link
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        path = path.parent
    return path
