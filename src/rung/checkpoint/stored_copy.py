"""A copy of what is in a store, for commands that only read it, and a folder whose files go to a store at its end."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from rung.checkpoint.manifest import MANIFEST, folder_of, step_of
from rung.checkpoint.places import checkpoints_folder
from rung.checkpoint.stored import StoredCheckpoints
from rung.checkpoint.survey import AVERAGE_WEIGHTS, WEIGHTS, CheckpointLocation, inspect_checkpoint, locate
from rung.errors import CheckpointError, ConfigError
from rung.system.store import Store, check_address, is_store

_CONFIG = "config.toml"


class StoredCopy:
    """A run in a store as a folder on this disk, into which files are fetched as they are needed."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder
        self._store = Store(url)
        self._stored = StoredCheckpoints(self._store)
        self.steps = self._stored.steps()
        self._names = self._store.sizes()
        if not self.steps and WEIGHTS not in self._names and _CONFIG not in self._names:
            raise CheckpointError(f"{url} is not the address of a run.")
        checkpoints_folder(folder).mkdir(parents=True)
        self._get(_CONFIG)

    def name(self, path: object) -> str:
        """A text with the address in place of the copy's folder."""
        return str(path).replace(str(self.folder), self.url)

    def location(self) -> CheckpointLocation:
        return locate(self.folder)

    def list_steps(self) -> None:
        """Fetch all manifests."""
        for step, files in self.steps.items():
            folder = folder_of(checkpoints_folder(self.folder), step)
            folder.mkdir()
            if MANIFEST in files:
                self._get(f"checkpoints/{folder.name}/{MANIFEST}")

    def fetch(self, folder: Path, *, thorough: bool = True) -> None:
        """Fetch the files of a step; without `thorough` make empty files of their sizes, which need no room."""
        step = step_of(folder.name)
        for name, size in self.steps.get(step, {}).items() if step is not None else []:
            if thorough:
                self._get(f"checkpoints/{folder.name}/{name}")
            elif name != MANIFEST:
                with (folder / name).open("wb") as file:
                    file.truncate(size)

    def fetch_one_at_a_time(self, folder: Path, *, thorough: bool) -> None:
        """The same, without the files of the other steps."""
        for other in checkpoints_folder(self.folder).iterdir():
            for path in other.iterdir():
                if other != folder and path.name != MANIFEST:
                    path.unlink()
        self.fetch(folder, thorough=thorough)

    def with_weights(self, step: int | None, *, best: bool, average: bool) -> CheckpointLocation:
        """Fetch what `rung export` may choose: the checkpoint of `step`, all of them for the best, or the weights of
        the run's end, else the newest whole checkpoint."""
        if best or step is not None:
            self.list_steps()
            for other in self.steps:
                if best or other == step:
                    self.fetch(folder_of(checkpoints_folder(self.folder), other))
        self._get(WEIGHTS)
        self._get(AVERAGE_WEIGHTS)
        location = self.location()
        if best or step is not None:
            return location
        ended = _step_of_weights(location.average if average else location.weights)
        for other in [other for other, files in reversed(self.steps.items()) if MANIFEST in files and other > ended]:
            folder = folder_of(checkpoints_folder(self.folder), other)
            folder.mkdir()
            self.fetch(folder)
            if inspect_checkpoint(folder, other).state == "whole":
                break
        return location

    def _get(self, name: str) -> None:
        if name in self._names:
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                self._store.get_file(name, self.folder / name)


def _step_of_weights(file: Path | None) -> int:
    """The step of the weights of a run's end; -1 if they are not there, damaged or of an unknown step."""
    from rung.checkpoint.export import of_file  # needs torch, which `rung checkpoints` does not

    with contextlib.suppress(CheckpointError):
        step = of_file(file).step if file is not None else None
        return step if step is not None else -1
    return -1


@contextlib.contextmanager
def stored_copy(run: str) -> Iterator[StoredCopy | None]:
    """A copy of the run at an address, until the end of the block; None if `run` is a path on a disk."""
    if not is_store(run):
        yield None
        return
    url = check_address(run, "RUN")
    with tempfile.TemporaryDirectory(prefix="rung-") as folder:
        yield StoredCopy(url, Path(folder) / "run")


@contextlib.contextmanager
def stored_output(output: str, *, is_folder: bool, force: bool) -> Iterator[tuple[str, Callable[[str], str]]]:
    """A path to write to, and how messages name what is there. If `output` is an address, the files are sent at the
    end of the block, those that name others last. Raises if something is there already, without `force`."""
    if not is_store(output):
        yield output, str
        return
    url = check_address(output, "--output")
    above, _, name = url.rpartition("/")
    store = Store(url if is_folder else above)
    there = [other for other in store.sizes() if is_folder or other in (name, f"{name}.index.json")]
    if there and not force:
        raise ConfigError(f"{store.at(there[0])} exists. Use another name, or --force to replace it.")
    with tempfile.TemporaryDirectory(prefix="rung-") as folder:
        top = Path(folder) / "out"
        top.mkdir()
        yield str(top if is_folder else top / name), lambda text: text.replace(str(top), store.url)
        files = [path for path in sorted(top.rglob("*")) if path.is_file()]
        for path in sorted(files, key=lambda path: path.name.endswith(".index.json")):
            store.put_file(path, path.relative_to(top).as_posix())
