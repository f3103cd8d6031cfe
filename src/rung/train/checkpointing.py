"""When a run saves its state, and where: checkpoints on disk, copies in memory, and an emergency save on failure."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rung.checkpoint import (
    Checkpoint,
    EmergencySaver,
    Position,
    Replicator,
    Saver,
    SaveRecord,
    StorageTopology,
    checkpoints_folder,
    choose,
    emergency_folder,
    make_memory_folder,
    memory_folder,
    state_folders,
)
from rung.checkpoint.manifest import newest_good, remove, steps_in
from rung.checkpoint.state import small_state
from rung.checkpoint.stored import StoredCheckpoints
from rung.errors import CheckpointError
from rung.runtime.base import Runtime
from rung.spec.best_metric import parse_best
from rung.spec.config import RunConfig, restarts_by_default

log = logging.getLogger("rung")


def find_state(
    run_dir: Path,
    sites: StorageTopology,
    *,
    resume: bool,
    stored: StoredCheckpoints | None = None,
    restarted: bool = False,
) -> Checkpoint | None:
    """The state that a run resumes from, if it is to and there is one; `stored` are its checkpoints in a store. Removes
    copies that are of no use any more."""
    if resume and stored is not None:
        stored.fetch_newest(run_dir, sites, restarted=restarted)
    found = choose(state_folders(run_dir), sites.world, sites) if resume else None
    if sites.is_leader:
        _forget_copies(
            emergency_folder(run_dir), memory_folder(run_dir), besides=found.path if found is not None else None
        )
    return found


def _forget_copies(*folders: Path, besides: Path | None = None) -> None:
    for folder in folders:
        for path in steps_in(folder).values():
            if path != besides:
                remove(path)
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def is_protected(config: RunConfig) -> bool:
    """Whether a run saves its state whenever a step fails: where something will resume from it."""
    restarts = config.max_restarts if config.max_restarts is not None else int(restarts_by_default(config))
    return _has_checkpoints(config) or config.replicate_state or restarts > 0


def _has_checkpoints(config: RunConfig) -> bool:
    return config.checkpoint_every is not None or parse_best(config.keep_best) is not None


def _check_savable(runtime: Runtime, config: RunConfig, *, is_main: bool) -> None:
    """After the first step, when the optimizer has its state: refuse or warn if that cannot be saved."""
    try:
        small_state(runtime)
    except CheckpointError as error:
        if is_protected(config):
            raise
        if is_main:
            log.warning("%s This run can have no checkpoint, not even when it is asked to stop.", error)


class Checkpointing:
    """The loop's interface to everything that saves state."""

    def __init__(
        self,
        run_dir: Path,
        runtime: Runtime,
        sites: StorageTopology,
        config: RunConfig,
        settings: Mapping[str, Any],
        start: Position,
        found: Checkpoint | None = None,
        touch: Callable[[], None] = lambda: None,
        stored: StoredCheckpoints | None = None,
    ) -> None:
        """`found` is the state the run resumes from, at position `start`. A save calls `touch` as it proceeds. `stored`
        are the run's checkpoints in a store."""
        self._stored, self.is_stored = stored, stored is not None
        self._run_dir, self._sites, self._config, self._runtime = run_dir, sites, config, runtime
        self._goal = parse_best(config.keep_best)
        self._saver = Saver(
            checkpoints_folder(run_dir),
            runtime,
            sites=sites,
            settings=settings,
            keep=config.keep,
            keep_every=config.keep_every,
            background=config.async_save,
            touch=touch,
            stored=stored,
        )
        is_saved = found is not None and found.path.parent == checkpoints_folder(run_dir)
        if found is not None and is_saved and (stored is None or stored.fetched == found.step):
            self._saver.starts_from(start)
        # The copy that the run resumed from is needed until there is a checkpoint of a later step.
        self._has_copy = found is not None and not is_saved
        self._is_checked = False
        self._end: Position | None = None
        self._replicator = None
        if config.replicate_state:
            self._replicator = Replicator(make_memory_folder(run_dir), runtime, sites, settings)
        self._emergency_saver = EmergencySaver(
            emergency_folder(run_dir), runtime, settings, start, is_kept=found is not None
        )
        self.before_step = self._emergency_saver.before_step
        # States that ranks save on their own; they also have the figures of steps whose lines are not written yet.
        self.own_savers = [one for one in (self._emergency_saver, self._replicator) if one is not None]

    def after_step(self, position: Position) -> None:
        if not self._is_checked:
            self._is_checked = True
            _check_savable(self._runtime, self._config, is_main=self._sites.world.is_main)
        self._emergency_saver.after_step(position)
        if self._replicator is not None:
            self._replicator.keep(position)

    def after_evaluation(self, position: Position, metrics: Mapping[str, float]) -> Position:
        """The position with its metrics, and with the best evaluation so far. The same on all ranks."""
        best = self._goal.take(metrics, position.step, position.best) if self._goal is not None else None
        position = replace(position, evaluation_due=False, evaluation=metrics, best=best)
        self._emergency_saver.after_step(position)
        if best is not None and best.step == position.step and self._sites.world.is_main:
            log.info("  best %s so far: %.4g, after step %d", best.metric, best.value, best.step)
        return position

    def is_due(self, position: Position) -> bool:
        every = self._config.checkpoint_every
        return (every is not None and position.step % every == 0) or self.is_best(position)

    def is_best(self, position: Position) -> bool:
        """Whether this is the best so far and no save of it has begun."""
        is_new = position.best is not None and position.best.step == position.step
        return is_new and self._saver.last != position

    def save(self, position: Position) -> None:
        self._saver.save(position)

    @property
    def after_failure(self) -> str:
        """For the warning of a save that failed: how the run goes on."""
        if self._stored is None:
            return "Training goes on."
        return f"Training goes on, and it is tried again. {self._saver.good_state}"

    def finished(self) -> list[SaveRecord]:
        records = self._saver.finished()
        if self._has_copy and any(record.error is None for record in records):
            self._has_copy = False
            if self._sites.is_leader:
                unused = [] if self._replicator is not None else [memory_folder(self._run_dir)]
                _forget_copies(emergency_folder(self._run_dir), *unused)
        return records

    def finish(self, position: Position) -> bool:
        """At the end of training. `finished` reports a save that fails, as any other; see `refuse_lost_end`. Returns
        whether there was something to save."""
        self._end = position
        self._saver.wait()  # only then do all ranks know whether the newest save failed
        is_new = _has_checkpoints(self._config) and self._saver.last != position
        if is_new:
            self._saver.save(position)
            self._saver.wait()
        return is_new

    def refuse_lost_end(self) -> None:
        """Raise if the last checkpoint is not where it belongs, for a run that leaves nothing else behind there."""
        if _has_checkpoints(self._config) and self._end is not None and not self._saver.has(self._end):
            raise CheckpointError(f"{self._saver.error} {self.way_out}")

    def stop(self, position: Position) -> bool:
        """Save before leaving early. Raises if that fails. Returns whether there was something to save."""
        self._saver.wait()
        is_new = self._saver.last != position
        if is_new:
            try:
                self._saver.save(position, wait=True)
            except CheckpointError as error:
                raise CheckpointError(f"{error} {self.way_out}") from None
        return is_new

    @property
    def way_out(self) -> str:
        """For an error: which state is still good after a failed write, and how to resume from it."""
        if self._stored is None:
            return f"{self._saver.good_state} When that is put right, go on with --resume {self._run_dir}."
        return (
            f"{self._saver.good_state} This machine has the newer state, in {self._run_dir}: when that is put right, "
            f"go on here with --resume {self._stored.store.url}."
        )

    def rescue(self) -> bool:
        return self._saver.has(self._emergency_saver.position) or self._emergency_saver.rescue()

    def last_good(self) -> Path | None:
        """The newest finished checkpoint whose state is not known to be non-finite."""
        self._saver.wait()
        return newest_good(checkpoints_folder(self._run_dir))

    def close(self) -> None:
        """Remove the copies: the run ended normally, or its numbers are of no use any more."""
        self._saver.wait()
        if self._replicator is not None:
            self._replicator.wait()
        self._sites.world.barrier()
        if self._sites.is_leader:
            _forget_copies(emergency_folder(self._run_dir), memory_folder(self._run_dir))
