"""A run in a store of objects, as a launcher sees it: a local folder in which everything happens as in any other run,
and the address to which its files are sent. The ranks send the checkpoints; see `checkpoint/stored.py`."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rung.checkpoint.stored import METRICS, fetch_longer
from rung.errors import ConfigError, JobFailed, StoreError
from rung.launch.rendezvous.elastic import running_launcher
from rung.launch.resume import CONFIG
from rung.system.store import Store, check_address, local_folder
from rung.system.untrusted import open_regular, read_regular

_IDENTITY = "run"  # the run's identity, as .state/run in its local folder
_ADDRESS = "store"  # in .state: the address of a local folder
_MAX_IDENTITY = 2**12
_MAX_CONFIG = 2**20
_SYNC_SECONDS = 15.0  # between two looks at what has changed
# Not sent: checkpoints, which the ranks send, and what is of use on this machine alone.
_LEFT_OUT = ("checkpoints", "rescue")


@dataclass(frozen=True)
class StoredRun:
    """The address of a run, and its folder on this machine."""

    url: str
    folder: Path
    identity: bytes | None  # of the run that the store had before
    goes_on: bool  # with that run

    def fetch(self) -> None:
        """Put the run's settings and metrics into its local folder, if it goes on. Machines may share that folder: what
        is there already is not written again."""
        _set_aside_another(self.folder, self.identity)
        if not self.goes_on or self.identity is None:
            return
        store, state = Store(self.url), self.folder / ".state"
        state.mkdir(parents=True, exist_ok=True)
        config = store.get(CONFIG, _MAX_CONFIG)
        for path, content in (
            (state / _IDENTITY, self.identity),
            (state / _ADDRESS, self.url.encode()),
            (self.folder / CONFIG, config),
        ):
            if not path.exists() or path.read_bytes() != content:
                path.write_bytes(content)
        fetch_longer(store, METRICS, self.folder / METRICS)

    def note_address(self) -> None:
        """Note in the local folder where the run lies."""
        (self.folder / ".state" / _ADDRESS).write_text(self.url)

    def begin(self) -> None:
        """Note in the store which run it is. Raises if that fails: it is known before training whether the store can
        be written."""
        own = (self.folder / ".state" / _IDENTITY).read_bytes()
        if self.identity not in (None, own):  # machines of one job agree on theirs
            raise ConfigError(_taken(self.url))
        self.note_address()
        store = Store(self.url)
        store.put(_IDENTITY, own)
        store.put(CONFIG, (self.folder / CONFIG).read_bytes())

    def to_json(self) -> str:
        identity = self.identity.hex() if self.identity is not None else None
        return json.dumps([self.url, str(self.folder), identity, self.goes_on])

    @classmethod
    def from_json(cls, text: str) -> StoredRun:
        url, folder, identity, goes_on = json.loads(text)
        return cls(url, Path(folder), bytes.fromhex(identity) if identity is not None else None, goes_on)


def find_stored_run(address: str, flag: str, *, is_new: bool | None) -> StoredRun:
    """The run at an address. `is_new` says that the job begins a run, False that it goes on with one; None leaves that
    open."""
    url = check_address(address, flag)
    if url.startswith("memory:"):
        raise ConfigError(f"{flag} {url}: the memory of one process is not that of its ranks. Use file:///DIRECTORY.")
    store = Store(url)
    try:
        names = store.sizes()
        identity = store.get(_IDENTITY, _MAX_IDENTITY) if _IDENTITY in names else None
    except StoreError as error:
        raise ConfigError(f"{flag}: {error}") from None
    is_there = identity is not None and CONFIG in names
    if is_new and names and identity is None:
        raise ConfigError(_taken(url))
    if is_new is False and not is_there:
        raise ConfigError(f"there is no run in {url}: it has no {CONFIG}.")
    return StoredRun(url, local_folder(url), identity, is_there and not is_new)


def _taken(url: str) -> str:
    return f"--out {url} holds a run already, or something else. Choose another address, or resume it: --resume {url}."


def _set_aside_another(folder: Path, identity: bytes | None) -> None:
    """Rename a local folder that is of another run than the one in the store: its state must not be taken for it."""
    if not folder.exists():
        return
    try:
        own = read_regular(folder / ".state" / _IDENTITY, _MAX_IDENTITY)
    except OSError:
        own = None
    if own is None or own != identity:
        other = running_launcher(folder / ".state")
        if other is not None:
            raise ConfigError(f"{folder} is being run already, by process {other}. Stop it first, or wait for its end.")
        number = next(n for n in range(1, 10_000) if not folder.with_name(f"{folder.name}.old-{n}").exists())
        folder.rename(folder.with_name(f"{folder.name}.old-{number}"))


def refuse_local_part(folder: Path | None) -> None:
    """Refuse to go on in the local folder of a run in a store by its path: nothing of it would be sent."""
    mark = folder / ".state" / _ADDRESS if folder is not None else None
    if mark is not None and mark.exists():
        url = read_regular(mark, _MAX_IDENTITY).decode(errors="replace")
        raise ConfigError(f"{folder} is the part on this machine of a run in a store. Resume that: --resume {url}.")


class FolderMirror:
    """Sends the files of a run's folder to its address as they change, from a thread: settings, metrics, logs, weights.

    A store that fails costs a warning, and its end another; `finish` raises if something is not there at the end.
    """

    def __init__(self, folder: Path, url: str, *, patience: float, only_new: bool = False) -> None:
        """`only_new`: what is there now is not sent. Of several machines, those without rank 0 may have files of an
        earlier time, as the metrics of a run that is resumed, which rank 0's machine writes on."""
        self._folder, self._store = folder, Store(url, patience=patience)
        found = {path: path.stat() for path in self._files()} if only_new else {}
        # Time of the change and size, by name.
        self._sent = {self._name(path): (stat.st_mtime_ns, stat.st_size) for path, stat in found.items()}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_failing = False

    def start(self, say: Callable[[str], None]) -> None:
        self._thread = threading.Thread(target=self._run, args=(say,), name="rung-mirror", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None

    def finish(self) -> None:
        """Send what has changed since. Raises StoreError with the files that are not in the store."""
        self.stop()
        self._send()

    def _run(self, say: Callable[[str], None]) -> None:
        pause = _SYNC_SECONDS
        while not self._stop.wait(pause):
            started = time.monotonic()
            try:
                self._send()
            except StoreError as error:
                if not self._is_failing:
                    say(f"warning: {error} Metrics and logs are on this machine alone; it is tried again.")
                self._is_failing = True
            else:
                if self._is_failing:
                    say(f"{self._store.url} answers again: metrics and logs are there")
                self._is_failing = False
            pause = max(_SYNC_SECONDS, 20 * (time.monotonic() - started))  # large files are not sent all the time

    def _send(self) -> None:
        for path in self._files():
            name = self._name(path)
            try:
                found = path.stat()
                if self._sent.get(name) == (found.st_mtime_ns, found.st_size):
                    continue
                with open_regular(path):
                    self._store.put_file(path, name)
            except OSError:  # removed or replaced meanwhile: the next round has it
                continue
            self._sent[name] = found.st_mtime_ns, found.st_size

    def _name(self, path: Path) -> str:
        return path.relative_to(self._folder).as_posix()

    def _files(self) -> Iterator[Path]:
        for top in sorted(self._folder.iterdir()) if self._folder.is_dir() else []:
            if top.name.startswith(".") or top.name in _LEFT_OUT:
                continue
            for path in [top] if top.is_file() else sorted(top.rglob("*")):
                if path.is_file() and not path.is_symlink() and not path.name.startswith("."):
                    yield path


def send_result(mirror: FolderMirror, url: str, folder: Path) -> None:
    """At the end of a run: everything must be in the store."""
    try:
        mirror.finish()
    except StoreError as error:
        raise JobFailed(
            f"the run is done, but not all of it is in {url}: {error} It is on this machine, in {folder}. When that is "
            f"put right, the same command with --resume {url} sends it."
        ) from None
