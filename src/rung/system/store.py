"""Objects in a store (`s3://`, `gs://`, `file://`) through fsspec, an optional package.

An object appears as a whole or not at all, and nothing is renamed. A request that fails for a reason that may pass is
tried again for a bounded time. Credentials are never part of an address: fsspec finds them by itself (environment,
files of the cloud's tools, the machine's role), and messages are masked. Bytes are read, never unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import time
import traceback
import uuid
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rung.errors import ConfigError, EnvironmentProblem, StoreError
from rung.system.launcher_env import store_cache

T = TypeVar("T")

# The package of each scheme, and the extra of Rung that installs it.
_PACKAGES = {"s3": ("s3fs", "s3"), "gs": ("gcsfs", "gs"), "file": ("fsspec", "s3"), "memory": ("fsspec", "s3")}
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 10.0  # seconds between two attempts
_FINAL = (PermissionError, MemoryError, TypeError, AssertionError)  # another attempt would end alike
PATIENCE_SECONDS = 60.0  # for which a request is tried again
_SECRET_PARTS = (r"(?<=//)[^/@\s]*@", r"\?[^\s\"']*")  # user:password@, and what signs an address


def is_store(path: object) -> bool:
    """Whether a path names a place in a store, as s3://bucket/run, and not one on a disk."""
    return isinstance(path, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", path) is not None


def masked(text: object) -> str:
    """A message without the parts of addresses that may be credentials."""
    shown = str(text)
    for part in _SECRET_PARTS:
        shown = re.sub(part, "***", shown)
    return shown


def check_address(url: str, what: str) -> str:
    """The address without a slash at its end. Raises if it is none, or holds a password, or needs a missing package."""
    scheme, _, place = url.partition("://")
    if scheme not in _PACKAGES:
        known = ", ".join(f"{name}://" for name in _PACKAGES if name != "memory")
        raise ConfigError(f"{what} {masked(url)}: Rung knows the stores {known}, and directories without a scheme.")
    if "@" in place.partition("/")[0] or "?" in place or "#" in place:
        raise ConfigError(
            f"{what} {masked(url)}: an address must hold no user, password or signature, because it is written to logs "
            "and settings. Give credentials by the environment, as AWS_ACCESS_KEY_ID, or by the files of the cloud's "
            "tools."
        )
    place = place.rstrip("/")
    if not place.strip("/") or ".." in place.split("/"):
        raise ConfigError(f"{what} {masked(url)} names no place in a store. Name one, as in {scheme}://bucket/run.")
    package, extra = _PACKAGES[scheme]
    if importlib.util.find_spec("fsspec") is None or importlib.util.find_spec(package) is None:
        raise EnvironmentProblem(
            f"{what} {masked(url)} needs the package {package}, which is not installed. Install it: pip install "
            f"'rung[{extra}]'"
        )
    return f"{scheme}://{place}"


def local_folder(url: str, kind: str = "") -> Path:
    """The folder on this machine for what lies at an address: the same for the same address. `kind`: what it is, if it
    is no run."""
    words = [*([kind] if kind else []), url.rpartition("/")[2], hashlib.sha256(url.encode()).hexdigest()[:8]]
    return Path(store_cache()) / "-".join(words)


class Store:
    """The objects below an address. Names are relative to it, as `checkpoints/step-00000010/manifest.json`.

    Every method raises StoreError after `patience` seconds of failed attempts; `touch` is called meanwhile. What does
    not exist raises FileNotFoundError at once.
    """

    def __init__(
        self, url: str, *, patience: float = PATIENCE_SECONDS, touch: Callable[[], None] = lambda: None
    ) -> None:
        import fsspec  # optional, and not quick

        self.url, self._patience, self._touch = url, patience, touch
        options: dict[str, Any] = {} if url.startswith("memory:") else {"skip_instance_cache": True}
        if url.startswith("s3:"):  # Rung tries again itself: attempts inside of attempts would last for minutes
            options["config_kwargs"] = {"retries": {"total_max_attempts": 1}}
        # Listings must be those of now: other machines write to the same place.
        self._files, self._root = fsspec.core.url_to_fs(url, use_listings_cache=False, **options)
        if url.startswith("s3:"):
            self._files.retries = 1
        self._renames = url.startswith("file:")  # a disk, where a file grows while it is written

    def at(self, name: str) -> str:
        return f"{self.url}/{name}"

    def sizes(self, below: str = "") -> dict[str, int]:
        """The objects whose names begin with `below`, and a slash, with their sizes."""

        def find() -> dict[str, int]:
            self._files.invalidate_cache()
            found = self._files.find(self._path(below) if below else self._root, detail=True)
            start = len(self._root.rstrip("/")) + 1
            files = {path[start:]: int(info["size"]) for path, info in found.items() if info["type"] == "file"}
            # A name becomes a path on this disk, and must not lead out of its folder.
            return {name: size for name, size in files.items() if not {"", ".", ".."} & set(name.split("/"))}

        with contextlib.suppress(FileNotFoundError):
            return self._attempt(f"{self.at(below) if below else self.url} could not be listed", find)
        return {}

    def version(self, name: str) -> str:
        """What changes when an object is replaced."""
        return str(self._attempt(f"{self.at(name)} could not be read", lambda: self._files.ukey(self._path(name))))

    def get(self, name: str, most: int) -> bytes:
        """A small object as a whole, of at most `most` bytes."""

        def read() -> bytes:
            content: bytes = self._files.cat_file(self._path(name), start=0, end=most + 1)
            return content

        content = self._attempt(f"{self.at(name)} could not be read", read)
        if len(content) > most:
            raise StoreError(f"{self.at(name)} is larger than {most:,} bytes.")
        return content

    def get_file(self, name: str, path: Path) -> None:
        """Write an object to a file, which is there as a whole afterwards, or not at all."""
        partial = path.with_name(f".{path.name}.{_unique()}.partial")  # machines may share this folder
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._attempt(
                f"{self.at(name)} could not be read",
                lambda: self._files.get_file(self._path(name), str(partial), callback=_Ticks(self._touch)),
            )
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    def put(self, name: str, content: bytes) -> None:
        self._put(name, lambda target: self._files.pipe_file(target, content))

    def put_file(self, path: Path, name: str) -> None:
        self._put(
            name, lambda target: self._files.put_file(str(path), target, callback=_Ticks(self._touch)), source=path
        )

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects, one after the other; those that are gone already are left out."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._attempt(f"{self.at(name)} could not be removed", partial(self._files.rm_file, self._path(name)))

    def _put(self, name: str, write: Callable[[str], object], source: Path | None = None) -> None:
        path = self._path(name)

        def attempt() -> None:
            if not self._renames:
                write(path)
                return
            folder, _, last = path.rpartition("/")
            self._files.makedirs(folder, exist_ok=True)
            partial = f"{folder}/.{last}.{_unique()}.partial"
            try:
                write(partial)
                os.replace(partial, path)
            finally:
                Path(partial).unlink(missing_ok=True)

        try:
            self._attempt(f"{self.at(name)} could not be written", attempt)
        except FileNotFoundError as error:
            if source is not None and not source.exists():
                raise
            raise StoreError(f"{self.at(name)} could not be written: {masked(error)}.") from None

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def _attempt(self, failure: str, action: Callable[[], T]) -> T:
        deadline, pause = time.monotonic() + self._patience, _FIRST_PAUSE
        while True:
            self._touch()
            try:
                return action()
            except FileNotFoundError:
                raise
            except Exception as error:  # those of the cloud's library are of no common kind
                # fsspec keeps an error in a circle with its frames, and so the ports that frames above hold open.
                traceback.clear_frames(error.__traceback__)
                text = masked(error).strip().rstrip(".") or type(error).__name__
                is_final = isinstance(error, _FINAL) or type(error).__name__.endswith("CredentialsError")
            if is_final or time.monotonic() + pause > deadline:
                raise StoreError(f"{failure}: {text}.")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


def _unique() -> str:
    return uuid.uuid4().hex[:8]


class _Ticks:
    """Calls `touch` as bytes are transferred; fsspec asks for an object with these methods."""

    def __init__(self, touch: Callable[[], None]) -> None:
        self._touch = touch

    def __getattr__(self, name: str) -> Callable[..., None]:
        def tick(*_: object, **__: object) -> None:
            self._touch()

        return tick
