"""The checkpoints of a run in a store of objects: sent after they are on the disk, fetched before they are chosen.

The names are those of the run's directory. The manifest is sent last and removed first, so a checkpoint that is half
sent, or half removed, does not count. What is fetched is checked against its digests before it gets its name.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rung.checkpoint.manifest import (
    MANIFEST,
    MAX_MANIFEST,
    Checkpoint,
    find_damage,
    folder_of,
    kept_steps,
    partial_of,
    put_in_place,
    read_checkpoint,
    remove,
    step_of,
    steps_in,
    write_whole,
)
from rung.checkpoint.places import checkpoints_folder
from rung.errors import CheckpointError, StoreError
from rung.system.store import Store
from rung.system.untrusted import parse_json

if TYPE_CHECKING:
    from rung.checkpoint.sites import StorageTopology  # needs torch, which `rung checkpoints` does not

log = logging.getLogger("rung")

_CHECKPOINTS = "checkpoints"
METRICS = "metrics.jsonl"


class StoredCheckpoints:
    """The checkpoints below `checkpoints/` of a run's address."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.fetched: int | None = None  # the step whose local checkpoint is that of the store

    def steps(self) -> dict[int, dict[str, int]]:
        """The files of every step with their sizes, oldest step first. Without a manifest a step is not finished."""
        found: dict[int, dict[str, int]] = {}
        for name, size in self.store.sizes(_CHECKPOINTS).items():
            folder, _, file = name.removeprefix(f"{_CHECKPOINTS}/").partition("/")
            step = step_of(folder)
            if step is not None and file and "/" not in file:
                found.setdefault(step, {})[file] = size
        return dict(sorted(found.items()))

    def finished(self) -> list[int]:
        """The steps that have a manifest, newest first."""
        return [step for step, files in reversed(self.steps().items()) if MANIFEST in files]

    # -- sending -------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Remove the manifest of an earlier checkpoint of this step: its files are about to be replaced."""
        self.store.remove([_name(step, MANIFEST)])

    def send(self, folder: Path, step: int, file: str) -> None:
        self.store.put_file(folder / file, _name(step, file))

    def finish(self, folder: Path, step: int, files: Mapping[str, Mapping[str, Any]]) -> None:
        """Send the manifest, once every file is there with its size, after the metrics up to its step: a machine that
        goes on from it has nothing but the store."""
        there = self.steps().get(step, {})
        for name, known in files.items():
            if there.get(name) != known["bytes"]:
                raise StoreError(f"{self.store.at(_name(step, name))} is not there with all of its bytes.")
        metrics = folder.parent.parent / METRICS
        if metrics.exists():
            self.store.put_file(metrics, METRICS)
        self.store.put(_name(step, MANIFEST), (folder / MANIFEST).read_bytes())

    def prune(self, keep: int, keep_every: int | None, *, newest: int, best: int | None) -> None:
        """Remove what the run's settings do not keep, as `manifest.prune` does on the disk."""
        found = {step: files for step, files in self.steps().items() if step <= newest}
        whole = [step for step, files in found.items() if MANIFEST in files]
        kept = kept_steps(whole, keep, keep_every, newest=newest, best=best, may_be_good=self._may_be_good)
        for step in found.keys() - kept:
            files = sorted(found[step], key=lambda name: name != MANIFEST)  # the manifest first
            self.store.remove(_name(step, name) for name in files)

    def _may_be_good(self, step: int) -> bool:
        try:
            content = parse_json(self.store.get(_name(step, MANIFEST), MAX_MANIFEST))
            return bool(content.get("finite") is not False)
        except (OSError, ValueError, AttributeError):
            return False

    # -- fetching ------------------------------------------------------------------------------------------------

    def fetch_manifest(self, step: int, folder: Path) -> Checkpoint:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            content = self.store.get(_name(step, MANIFEST), MAX_MANIFEST)
        except FileNotFoundError:
            raise CheckpointError(f"{self.store.at(_name(step, MANIFEST))} is missing.") from None
        write_whole(folder / MANIFEST, content)
        found = read_checkpoint(folder)
        if found.step != step:
            raise CheckpointError(f"{self.store.at(_name(step, MANIFEST))} is of step {found.step}.")
        return found

    def fetch_files(self, checkpoint: Checkpoint, names: Iterable[str], here: Path | None = None) -> str | None:
        """Put files beside a manifest and check them: from the folder `here` those that are whole there, else from the
        store. Returns the first damage, by its address."""
        for name in names:
            if here is not None and find_damage(Checkpoint(here, checkpoint.manifest), [name]) is None:
                os.link(here / name, checkpoint.path / name)
                continue
            try:
                self.store.get_file(_name(checkpoint.step, name), checkpoint.path / name)
            except FileNotFoundError:
                return f"{self.store.at(_name(checkpoint.step, name))} is missing."
            damage = find_damage(checkpoint, [name])
            if damage is not None:
                return self.in_words(damage, checkpoint.path, checkpoint.step)
        return None

    def in_words(self, text: str, folder: Path, step: int) -> str:
        """A message with the address in place of the local folder."""
        return text.replace(str(folder), self.in_store(folder_of(folder.parent, step)))

    def in_store(self, folder: Path) -> str:
        """The address of a checkpoint's folder."""
        return self.store.at(f"{_CHECKPOINTS}/{folder.name}")

    def fetch_newest(self, run_dir: Path, sites: StorageTopology, *, restarted: bool) -> None:
        """Bring the newest whole checkpoint to every machine, where it is not there yet. Collective.

        The ranks of a machine share the files. A damaged checkpoint is named and passed by; one of a state that was
        not finite is taken if there is no other. After a restart a store that does not answer costs a warning: the
        disks have what the run wrote itself.
        """
        world = sites.world
        steps, problem = world.gather_objects(_tried(self.finished) if world.is_main else None)[0]
        if problem is not None:
            if not restarted:
                raise StoreError(problem)
            if world.is_main:
                log.warning("%s The run goes on with what is on the disks of its machines.", problem)
            return
        problems: list[str] = []
        non_finite: list[int] = []
        for step in steps:
            if self._fetch(run_dir, sites, step, problems, non_finite):
                break
        else:
            if not any(self._fetch(run_dir, sites, step, problems) for step in non_finite):
                has_own = bool(steps_in(checkpoints_folder(run_dir)))
                if problems and not any(world.gather_objects(has_own)):
                    raise CheckpointError(
                        f"no checkpoint in {self.store.url} is whole: {' '.join(problems[:3])} There is nothing to "
                        f"resume from. Put the files right, or move {self.store.at(_CHECKPOINTS)} away to start at "
                        "the first step."
                    )
        if world.is_main:
            for text in problems:
                log.warning("%s An older state is used instead.", text)
            fetch_longer(self.store, METRICS, run_dir / METRICS)

    def _fetch(
        self,
        run_dir: Path,
        sites: StorageTopology,
        step: int,
        problems: list[str],
        non_finite: list[int] | None = None,
    ) -> bool:
        """Fetch one checkpoint, if it is whole. With `non_finite`, one that is not finite is only added there."""
        world, members = sites.world, sites.members
        folder = folder_of(checkpoints_folder(run_dir), step)
        partial = partial_of(checkpoints_folder(run_dir), step)
        is_finite, problem = True, None
        if sites.is_leader:
            remove(partial)
            is_finite, problem = _tried(lambda: self._is_finite(step, partial))
        states = world.gather_objects((is_finite, problem))
        is_whole = _note_first(states, problems)
        if is_whole and non_finite is not None and not states[0][0]:
            non_finite.append(step)
            if world.is_main:
                where = self.in_store(folder)
                log.warning("%s is left out: the loss or the gradient norm of its step was not finite.", where)
            is_whole = False
        elif is_whole:
            checkpoint = read_checkpoint(partial)
            own = sorted(checkpoint.files)[members.index(world.rank) :: len(members)]
            damage, problem = _tried(lambda: self.fetch_files(checkpoint, own, folder))
            is_whole = _note_first(world.gather_objects((None, problem or damage)), problems)
        if sites.is_leader:
            if is_whole:
                put_in_place(partial, folder)
            else:
                remove(partial)
        world.barrier()
        if is_whole:
            self.fetched = step
        return is_whole

    def _is_finite(self, step: int, folder: Path) -> bool:
        return self.fetch_manifest(step, folder).manifest.get("finite") is not False


def fetch_longer(store: Store, name: str, path: Path) -> None:
    """Fetch a file to which a run only appends, unless the one here is as long."""
    size = store.sizes().get(name)
    if size is not None and (not path.exists() or path.stat().st_size < size):
        store.get_file(name, path)


def _note_first(rows: list[Any], problems: list[str]) -> bool:
    """Add the first problem of any rank to `problems`. Returns whether there is none."""
    first = next((problem for _, problem in rows if problem is not None), None)
    if first is not None:
        problems.append(first)
    return first is None


def _tried(action: Callable[[], Any]) -> tuple[Any, str | None]:
    """The result of an action, or why it failed, for the other ranks."""
    try:
        return action(), None
    except (CheckpointError, StoreError) as error:
        return None, str(error)
    except OSError as error:
        return None, f"{error.filename or 'a file'} could not be written: {error.strerror or error}."


def _name(step: int, file: str) -> str:
    return f"{_CHECKPOINTS}/step-{step:08d}/{file}"
