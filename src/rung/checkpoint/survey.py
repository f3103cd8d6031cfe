"""List the checkpoints of a run and check which of them are whole. Read-only, and without torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rung.checkpoint.manifest import MANIFEST, Checkpoint, check_content, find_damage, read_checkpoint, steps_in
from rung.checkpoint.notes import compose, read_notes
from rung.checkpoint.places import checkpoints_folder, state_folders
from rung.errors import CheckpointError
from rung.spec.best_metric import Best, figure_of, read_best

WEIGHTS = "model.safetensors"
AVERAGE_WEIGHTS = "average.safetensors"  # the average that --ema keeps
# The keys of a manifest that grow with the model: dropped, because a run may have a thousand checkpoints.
_TENSOR_KEYS = ("tensors", "state_dict", "optimizer", "computed", "base", "adapters")
_RUN_FILES = (WEIGHTS, "metrics.jsonl", "config.toml")


@dataclass(frozen=True)
class CheckpointLocation:
    """The folders that a path given by the user stands for."""

    given: Path
    folders: dict[str, Path]  # of steps, by kind
    single: Path | None = None  # the path is one checkpoint
    weights: Path | None = None  # the weights saved at the end of the run
    average: Path | None = None  # their average, with --ema


@dataclass(frozen=True)
class CheckpointStatus:
    """A folder that may hold a checkpoint, and the result of checking it."""

    path: Path
    step: int
    kind: str  # checkpoints, rescue or memory
    checkpoint: Checkpoint | None
    problem: str | None
    unfinished: bool = False

    @property
    def state(self) -> str:
        if self.unfinished:
            return "unfinished"
        return "whole" if self.problem is None else "damaged"

    @property
    def is_finite(self) -> bool | None:
        """Whether loss and gradient norm of its step were finite; None if unknown."""
        return self.checkpoint.manifest.get("finite") if self.checkpoint is not None else None


def locate(path: Path) -> CheckpointLocation:
    """The checkpoints at a path: a run directory, its folder of checkpoints, or a single checkpoint."""
    try:
        return _locate(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None


def _locate(path: Path) -> CheckpointLocation:
    if not path.exists():
        raise CheckpointError(f"there is no directory {path}.")
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file; give the directory of a run.")
    if (path / MANIFEST).exists() or list(path.glob("rank-*.safetensors")):
        return CheckpointLocation(path, {}, single=path)
    if steps_in(path):
        return CheckpointLocation(path, {"checkpoints": path})
    if _is_run(path):
        weights, average = (path / name for name in (WEIGHTS, AVERAGE_WEIGHTS))
        return CheckpointLocation(
            path,
            state_folders(path),
            weights=weights if weights.is_file() else None,
            average=average if average.is_file() else None,
        )
    runs = [run for run in path.iterdir() if _is_run(run)]
    hint = f" Did you mean {max(runs, key=lambda run: run.stat().st_mtime)}?" if runs else ""
    raise CheckpointError(f"{path} is not the directory of a run.{hint}")


def _is_run(path: Path) -> bool:
    return checkpoints_folder(path).is_dir() or any((path / name).is_file() for name in _RUN_FILES)


def inspect_checkpoint(path: Path, step: int, kind: str = "checkpoints", *, thorough: bool = True) -> CheckpointStatus:
    """Check the checkpoint in a folder: every byte of it if `thorough`, else only the sizes."""
    if not (path / MANIFEST).exists():
        checkpoint = _compose(path) if kind != "checkpoints" else None
        if checkpoint is None:
            why = "the ranks' parts are not complete" if kind != "checkpoints" else "there is no manifest"
            return CheckpointStatus(path, step, kind, None, f"{path} was never finished: {why}.", unfinished=True)
    else:
        try:
            checkpoint = read_checkpoint(path)
        except CheckpointError as error:
            return CheckpointStatus(path, step, kind, None, str(error))
    return CheckpointStatus(path, step, kind, checkpoint, find_damage(checkpoint, thorough=thorough))


def survey(
    location: CheckpointLocation, *, thorough: bool = True, on_check: Callable[[Path], None] = lambda path: None
) -> list[CheckpointStatus]:
    """Check all checkpoints, oldest first; `--resume` prefers the last. `on_check` is called before each.

    The manifests lack the tensors: call `inspect_checkpoint` again to read from one.
    """
    try:
        return _survey(location, thorough, on_check)
    except OSError as error:
        raise CheckpointError(f"{error.filename or location.given} cannot be read: {error.strerror}.") from None


def _survey(location: CheckpointLocation, thorough: bool, on_check: Callable[[Path], None]) -> list[CheckpointStatus]:
    if location.single is not None:
        on_check(location.single)
        found = _without_tensors(inspect_checkpoint(location.single, -1, thorough=thorough))
        return [found if found.checkpoint is None else replace(found, step=found.checkpoint.step)]
    results = []
    for step, kind, path in _listed(location):
        on_check(path)
        found = inspect_checkpoint(path, step, kind, thorough=thorough)
        if found.problem is None or path.exists():  # else a running job has removed it meanwhile
            results.append(_without_tensors(found))
    return results


def newest_whole(found: list[CheckpointStatus]) -> CheckpointStatus | None:
    """The checkpoint that a run resumes from: the newest finite one, or the newest if none is finite."""
    whole = [status for status in reversed(found) if status.state == "whole"]
    return next((status for status in whole if status.is_finite is not False), whole[0] if whole else None)


def find_newest(location: CheckpointLocation, *, thorough: bool = True) -> CheckpointStatus | None:
    """As `newest_whole`, but without checking older checkpoints: a run may have kept thousands."""
    whole = []
    for step, kind, path in reversed(_listed(location)):
        found = inspect_checkpoint(path, step, kind, thorough=thorough)
        if found.state == "whole" and found.is_finite is not False:
            return found
        whole += [found] if found.state == "whole" else []
    return whole[0] if whole else None


def best_whole(found: list[CheckpointStatus]) -> tuple[CheckpointStatus | None, Best | None]:
    """The best whole checkpoint by the setting `keep_best`, and the best evaluation of the run.

    The two differ if the checkpoint of the best evaluation is damaged or was never finished.
    """
    whole = [status for status in found if status.kind == "checkpoints" and status.state == "whole"]
    manifests = [(status, status.checkpoint.manifest) for status in whole if status.checkpoint is not None]
    best = next((best for _, manifest in reversed(manifests) if (best := read_best(manifest)) is not None), None)
    if best is None:
        return None, None
    figures = [(figure, status) for status, m in manifests if (figure := figure_of(m, best.metric)) is not None]
    sign = 1 if best.better == "max" else -1
    # Of equal figures the earlier step wins.
    return max(figures, key=lambda row: (sign * row[0], -row[1].step), default=(0.0, None))[1], best


def _listed(location: CheckpointLocation) -> list[tuple[int, str, Path]]:
    """Step, kind and path of every folder that may hold a checkpoint, oldest first."""
    return sorted(
        (step, kind, path) for kind, folder in location.folders.items() for step, path in steps_in(folder).items()
    )


def _without_tensors(found: CheckpointStatus) -> CheckpointStatus:
    if found.checkpoint is None:
        return found
    kept = {key: value for key, value in found.checkpoint.manifest.items() if key not in _TENSOR_KEYS}
    return replace(found, checkpoint=Checkpoint(found.checkpoint.path, kept))


def _compose(path: Path) -> Checkpoint | None:
    """A state without a manifest, from the parts that each rank wrote separately; None if they are not complete."""
    try:
        content = compose(read_notes(path))
        if content is None:
            return None
        check_content(content, path)
    except CheckpointError:
        return None
    return Checkpoint(path, content)
