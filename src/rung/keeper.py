"""When the state of a run is kept, and where: checkpoints on the disk, copies in memory, and a last one in distress."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rung.best import parse_best
from rung.checkpoint import (
    Checkpoint,
    Position,
    Replicator,
    Rescuer,
    Saver,
    SaveRecord,
    Sites,
    checkpoints_folder,
    choose,
    memory_folder,
    rescue_folder,
    state_folders,
)
from rung.checkpoint.manifest import newest_good, remove, steps_in
from rung.checkpoint.state import small_state
from rung.config import RunConfig, is_elastic
from rung.errors import CheckpointError
from rung.runtime.mesh import MeshRuntime

log = logging.getLogger("rung")


def find_state(run_dir: Path, sites: Sites, *, resume: bool) -> Checkpoint | None:
    """What a run goes on from, if it is to and there is something. Copies that are not needed any more go."""
    found = choose(state_folders(run_dir), sites.world, sites) if resume else None
    if sites.is_leader:
        _forget_copies(
            rescue_folder(run_dir), memory_folder(run_dir), besides=found.path if found is not None else None
        )
    return found


def _forget_copies(*folders: Path, besides: Path | None = None) -> None:
    for folder in folders:
        for path in steps_in(folder).values():
            if path != besides:
                remove(path)
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


class Keeper:
    """Everything the loop has to do with keeping state."""

    def __init__(
        self,
        run_dir: Path,
        runtime: MeshRuntime,
        sites: Sites,
        config: RunConfig,
        settings: Mapping[str, Any],
        start: Position,
        found: Checkpoint | None = None,
        touch: Callable[[], None] = lambda: None,
    ) -> None:
        """`found` is the state the run goes on from, of the position `start`. `touch` is called as a save proceeds."""
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
        )
        if found is not None and found.path.parent == checkpoints_folder(run_dir):
            self._saver.starts_from(start)
        # A copy that the run goes on from is needed until there is a checkpoint of a later step.
        self._has_copy = found is not None and found.path.parent != checkpoints_folder(run_dir)
        self._is_checked = False
        self._end: Position | None = None
        self._replicator = None
        if config.replicate_state:
            self._replicator = Replicator(memory_folder(run_dir), runtime, sites, settings)
        self._rescuer = Rescuer(rescue_folder(run_dir), runtime, settings, start, is_kept=found is not None)

    def before_step(self) -> None:
        self._rescuer.before_step()

    def after_step(self, position: Position) -> None:
        if not self._is_checked:
            self._check()
        self._rescuer.after_step(position)
        if self._replicator is not None:
            self._replicator.keep(position)

    def after_evaluation(self, position: Position, metrics: Mapping[str, float]) -> Position:
        """The position with what was measured, and whether that is the best so far. The same on all ranks."""
        best = self._goal.take(metrics, position.step, position.best) if self._goal is not None else None
        position = replace(position, evaluation_due=False, evaluation=metrics, best=best)
        self._rescuer.after_step(position)
        if best is not None and best.step == position.step and self._sites.world.is_main:
            log.info("  best %s so far: %.4g, after step %d", best.metric, best.value, best.step)
        return position

    def _check(self) -> None:
        """After the first step, when the optimizer has its state: whether that can be saved at all."""
        self._is_checked = True
        try:
            small_state(self._runtime)
        except CheckpointError as error:
            if self.is_protected:
                raise
            if self._sites.world.is_main:
                log.warning("%s This run can have no checkpoint, not even when it is asked to stop.", error)

    def is_due(self, position: Position) -> bool:
        every = self._config.checkpoint_every
        return (every is not None and position.step % every == 0) or self.is_best(position)

    def is_best(self, position: Position) -> bool:
        """Whether this is the best so far and is not on its way to the disk yet."""
        is_new = position.best is not None and position.best.step == position.step
        return is_new and self._saver.last != position

    def save(self, position: Position) -> None:
        self._saver.save(position)

    def finished(self) -> list[SaveRecord]:
        records = self._saver.finished()
        if self._has_copy and any(record.error is None for record in records):
            self._has_copy = False
            if self._sites.is_leader:
                _forget_copies(*self._copies())
        return records

    def _copies(self) -> list[Path]:
        """Folders of copies that nobody writes any more."""
        folders = [rescue_folder(self._run_dir)]
        return folders if self._replicator is not None else [*folders, memory_folder(self._run_dir)]

    def finish(self, position: Position) -> None:
        """At the end of training. A save that fails is told of like any other; see `refuse_lost_end`."""
        self._end = position
        self._saver.wait()  # whether the newest save failed is known to all ranks alike only then
        if self._has_checkpoints and self._saver.last != position:
            self._saver.save(position)
            self._saver.wait()

    def refuse_lost_end(self) -> None:
        """Where the last checkpoint is all that a run leaves behind: raise if it is not on the disk."""
        if self._has_checkpoints and self._end is not None and not self._saver.has(self._end):
            raise CheckpointError(f"{self._saver.error} {self.way_out}")

    def stop(self, position: Position) -> None:
        """Asked to leave: what was reached goes to the disk. Raises if that fails."""
        self._saver.wait()
        if self._saver.last != position:
            try:
                self._saver.save(position, wait=True)
            except CheckpointError as error:
                raise CheckpointError(f"{error} {self.way_out}") from None

    @property
    def way_out(self) -> str:
        """What is still good after something could not be written, and what to do."""
        return f"{self._saver.good_state} When that is put right, go on with --resume {self._run_dir}."

    @property
    def is_protected(self) -> bool:
        """Whether the state is worth saving whenever a step fails: where somebody is to go on from it."""
        config = self._config
        restarts = config.max_restarts if config.max_restarts is not None else int(is_elastic(config))
        return self._has_checkpoints or config.replicate_state or restarts > 0

    @property
    def _has_checkpoints(self) -> bool:
        return self._config.checkpoint_every is not None or self._goal is not None

    def rescue(self) -> bool:
        return self._saver.has(self._rescuer.position) or self._rescuer.rescue()

    def last_good(self) -> Path | None:
        """The newest finished checkpoint whose state is not known to be non-finite."""
        self._saver.wait()
        return newest_good(checkpoints_folder(self._run_dir))

    def close(self) -> None:
        """What was kept for bad times is not needed: the run ended in good order, or with numbers that are lost."""
        self._saver.wait()
        if self._replicator is not None:
            self._replicator.wait()
        self._sites.world.barrier()
        if self._sites.is_leader:
            _forget_copies(rescue_folder(self._run_dir), memory_folder(self._run_dir))
