"""The secret that the processes of one job share, with which they sign their values in the store.

A job on one machine gets a random key from its launcher. Launchers on several machines, and ranks that other programs
start, need a common key: a file, an environment variable, or a file in the user's home directory, which most clusters
share. Several jobs may share that key, so the ranks of a world sign with one that is derived from it and from nonces of
the world's processes. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import secrets
import stat
from pathlib import Path

from rung.errors import ConfigError, EnvironmentProblem
from rung.system.launcher_env import KEY_VARIABLE, environment_key

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)  # by file system: FAT, some of FUSE, AFS
_LEAST_CHARACTERS = 16
_MOST_BYTES = 4096


def new_key() -> str:
    return secrets.token_hex(32)


def new_nonce() -> str:
    """A fresh random number: a value that contains it or is derived from it cannot be a replay."""
    return secrets.token_hex(16)


def derive_key(key: str, purpose: str) -> str:
    """A key for one purpose: a message signed with it is invalid elsewhere."""
    return hmac.new(key.encode(), purpose.encode(), "sha256").hexdigest()


def shared_key(file: str | None = None) -> str:
    """The key of a job's processes on several machines: from --rdzv-key, the environment, or the user's key file."""
    if file is not None:
        return _read(Path(file), "--rdzv-key")
    if (key := environment_key()) is not None:
        return _checked(key, f"the environment variable {KEY_VARIABLE}")
    return _user_key()


def user_folder() -> Path:
    """The folder for files of a user rather than of a job."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")) / "rung"


def _user_key() -> str:
    """The user's own key, created on first use."""
    path = user_folder() / "key"
    try:
        if not path.exists():
            _make(path)
        return _read(path, "the key of this user")
    except OSError as error:
        raise EnvironmentProblem(
            f"{path}, the key with which processes of one job authenticate, cannot be made: {error.strerror}. Give all "
            f"of them the same key: --rdzv-key FILE, or the environment variable {KEY_VARIABLE}."
        ) from None


def _make(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_name(f".key-{secrets.token_hex(8)}")
    descriptor = os.open(partial, _NEW, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{new_key()}\n")
        # A link, not a rename, which would replace the key of a machine that creates it at the same moment.
        with contextlib.suppress(FileExistsError):
            os.link(partial, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # Without links: create it exclusively. A process that reads it before the write raises, as it is too short.
        with contextlib.suppress(FileExistsError), os.fdopen(os.open(path, _NEW, 0o600), "w") as file:
            file.write(partial.read_text())
    finally:
        partial.unlink()


def _read(path: Path, what: str) -> str:
    try:
        # Without O_NONBLOCK, opening a FIFO that has no writer would block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"{what}, {path}, cannot be read: {error.strerror}.") from None
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{what}, {path}, is not a file.")
        # A key that other users can read is no secret. Keys mounted into a container have modes that cannot be changed.
        if found.st_mode & 0o077 and found.st_uid == os.geteuid() and os.access(path.parent, os.W_OK):
            raise ConfigError(f"{what}, {path}, can be read by other users of this machine: chmod 600 {path}")
        if found.st_uid not in (os.geteuid(), 0):
            raise ConfigError(
                f"{what}, {path}, belongs to another user of this machine, who can read it. Use a file of your own."
            )
        text = file.read(_MOST_BYTES + 1)
    try:
        return _checked(text.decode().strip(), f"{what}, {path},")
    except UnicodeDecodeError:
        raise ConfigError(f"{what}, {path}, is not text. Make one: openssl rand -hex 32 > {path}") from None


def _checked(key: str, what: str) -> str:
    if not _LEAST_CHARACTERS <= len(key.encode()) <= _MOST_BYTES:
        raise ConfigError(
            f"{what} has {len(key)} characters; a key has {_LEAST_CHARACTERS} to {_MOST_BYTES}, such as those of "
            "`openssl rand -hex 32`."
        )
    return key
