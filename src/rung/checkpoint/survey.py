"""What checkpoints there are in a run, and which of them are whole. For people: nothing here changes a file.

Needs no torch, unless ranks left states that they wrote each for themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rung.best import Best, figure_of, read_best
from rung.checkpoint.manifest import MANIFEST, Checkpoint, check_content, find_damage, read_checkpoint, steps_in
from rung.checkpoint.places import checkpoints_folder, state_folders
from rung.errors import CheckpointError

WEIGHTS = "model.safetensors"
# What a manifest says of each tensor and parameter. A list of a thousand checkpoints must not hold it a thousand times.
_OF_TENSORS = ("tensors", "state_dict", "optimizer", "computed")
_OF_A_RUN = (WEIGHTS, "metrics.jsonl", "config.toml")


@dataclass(frozen=True)
class Place:
    """Where to look for checkpoints, found from whatever path a user gives."""

    called: Path  # as it was given
    folders: dict[str, Path]  # of steps, by kind
    one: Path | None = None  # a single checkpoint was meant
    weights: Path | None = None  # what the run left behind at its end


@dataclass(frozen=True)
class Found:
    """A folder that may hold a checkpoint, and what a look at it told."""

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
        """Whether loss and gradient norm of its step were finite numbers; None where that is not known."""
        return self.checkpoint.manifest.get("finite") if self.checkpoint is not None else None


def locate(path: Path) -> Place:
    """A run directory, its folder of checkpoints, or one checkpoint."""
    try:
        return _locate(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None


def _locate(path: Path) -> Place:
    if not path.exists():
        raise CheckpointError(f"there is no directory {path}.")
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file; the directory of a run is wanted.")
    if (path / MANIFEST).exists() or list(path.glob("rank-*.safetensors")):
        return Place(path, {}, one=path)
    if steps_in(path):
        return Place(path, {"checkpoints": path})
    if _is_run(path):
        weights = path / WEIGHTS
        return Place(path, state_folders(path), weights=weights if weights.is_file() else None)
    runs = [run for run in path.iterdir() if _is_run(run)]
    hint = f" Did you mean {max(runs, key=lambda run: run.stat().st_mtime)}?" if runs else ""
    raise CheckpointError(f"{path} is not the directory of a run.{hint}")


def _is_run(path: Path) -> bool:
    return checkpoints_folder(path).is_dir() or any((path / name).is_file() for name in _OF_A_RUN)


def look(path: Path, step: int, kind: str = "checkpoints", *, thorough: bool = True) -> Found:
    """Whether the checkpoint in a folder is whole: every byte of it, or the sizes alone."""
    if not (path / MANIFEST).exists():
        checkpoint = _compose(path) if kind != "checkpoints" else None
        if checkpoint is None:
            told = "the ranks' parts do not make a whole" if kind != "checkpoints" else "there is no manifest"
            return Found(path, step, kind, None, f"{path} was never finished: {told}.", unfinished=True)
    else:
        try:
            checkpoint = read_checkpoint(path)
        except CheckpointError as error:
            return Found(path, step, kind, None, str(error))
    return Found(path, step, kind, checkpoint, find_damage(checkpoint, thorough=thorough))


def survey(place: Place, *, thorough: bool = True, tell: Callable[[Path], None] = lambda path: None) -> list[Found]:
    """All that may be checkpoints, oldest first, in the order of preference of one that resumes. Their manifests are
    without what they say of tensors: `look` at one again to read from it."""
    try:
        return _survey(place, thorough, tell)
    except OSError as error:
        raise CheckpointError(f"{error.filename or place.called} cannot be read: {error.strerror}.") from None


def _survey(place: Place, thorough: bool, tell: Callable[[Path], None]) -> list[Found]:
    if place.one is not None:
        tell(place.one)
        found = _without_tensors(look(place.one, -1, thorough=thorough))
        return [found if found.checkpoint is None else _with_step(found, found.checkpoint.step)]
    results = []
    for step, kind, path in _listed(place):
        tell(path)
        found = look(path, step, kind, thorough=thorough)
        if found.problem is None or path.exists():  # else a run that goes on has removed it meanwhile
            results.append(_without_tensors(found))
    return results


def newest_whole(found: list[Found]) -> Found | None:
    """The one that a run goes on from: of a finite state, if there is one."""
    whole = [one for one in reversed(found) if one.state == "whole"]
    return next((one for one in whole if one.is_finite is not False), whole[0] if whole else None)


def find_newest(place: Place, *, thorough: bool = True) -> Found | None:
    """The one that a run goes on from. Older ones are not looked at: a run may have kept thousands."""
    whole = []
    for step, kind, path in reversed(_listed(place)):
        found = look(path, step, kind, thorough=thorough)
        if found.state == "whole" and found.is_finite is not False:
            return found
        whole += [found] if found.state == "whole" else []
    return whole[0] if whole else None


def best_whole(found: list[Found]) -> tuple[Found | None, Best | None]:
    """The whole checkpoint of the best evaluation by the setting `keep_best`, and what is known to be the best of all:
    its own checkpoint may be damaged, or may never have been finished."""
    whole = [one for one in found if one.kind == "checkpoints" and one.state == "whole"]
    told = [(one, one.checkpoint.manifest) for one in whole if one.checkpoint is not None]
    best = next((best for _, manifest in reversed(told) if (best := read_best(manifest)) is not None), None)
    if best is None:
        return None, None
    figures = [(figure, one) for one, manifest in told if (figure := figure_of(manifest, best.metric)) is not None]
    sign = 1 if best.better == "max" else -1
    return max(figures, key=lambda row: (sign * row[0], -row[1].step), default=(0.0, None))[1], best


def _listed(place: Place) -> list[tuple[int, str, Path]]:
    """Step, kind and path of all that may be checkpoints, oldest first."""
    return sorted(
        (step, kind, path) for kind, folder in place.folders.items() for step, path in steps_in(folder).items()
    )


def _without_tensors(found: Found) -> Found:
    if found.checkpoint is None:
        return found
    kept = {key: value for key, value in found.checkpoint.manifest.items() if key not in _OF_TENSORS}
    return replace(found, checkpoint=Checkpoint(found.checkpoint.path, kept))


def _with_step(found: Found, step: int) -> Found:
    return Found(found.path, step, found.kind, found.checkpoint, found.problem, found.unfinished)


def _compose(path: Path) -> Checkpoint | None:
    """A state without a manifest, of which each rank wrote its own part."""
    from rung.checkpoint.parts import compose, read_notes

    try:
        content = compose(read_notes(path))
        if content is None:
            return None
        check_content(content, path)
    except CheckpointError:
        return None
    return Checkpoint(path, content)
