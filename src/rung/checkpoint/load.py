"""Finding the state to go on from, and putting it into a runtime of whatever topology there is now.

It may lie in the run's checkpoints, in memory that outlived the ranks, or be what failing ranks rescued; on one disk or
on several that know nothing of each other. The ranks look together and take the newest that is whole.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rung.checkpoint.manifest import (
    Checkpoint,
    check_content,
    find_damage,
    folder_of,
    read_checkpoint,
    steps_in,
    write_manifest,
)
from rung.checkpoint.own import restore_own
from rung.checkpoint.parts import compose, read_notes
from rung.checkpoint.plan import read_into, read_whole
from rung.checkpoint.sites import Sites, pass_on
from rung.checkpoint.state import Restorer, restore_random, topology
from rung.errors import CheckpointError
from rung.order import mix
from rung.runtime.mesh import MeshRuntime
from rung.world import World

log = logging.getLogger("rung")

_MAX_PROBLEMS = 5


def choose(folders: Mapping[str, Path], world: World, sites: Sites) -> Checkpoint | None:
    """The newest state that is whole, complete at this rank's site. All ranks call it together and get the same.

    Each rank checks some of the files. What is wrong with newer states is said by the main rank. Where sites have
    different files, they are passed on. A state whose step had a loss of nan is taken only if there is no other. None
    where there is no state at all; one that was saved and is damaged is no reason to begin again, and raises
    CheckpointError unless another one is whole.
    """
    own = [(step, kind) for kind, folder in folders.items() for step in steps_in(folder)] if sites.is_leader else []
    candidates = sorted({(step, kind) for told in world.gather_objects(own) for step, kind in told}, reverse=True)
    lost: list[tuple[int, str]] = []
    problems: list[str] = []
    found = _choose(candidates, folders, world, sites, problems, lost)
    if found is None and lost:
        found = _choose(lost, folders, world, sites, problems)
    if found is None and problems:
        raise CheckpointError(_nothing_whole(problems, folders))
    return found


def _choose(
    candidates: list[tuple[int, str]],
    folders: Mapping[str, Path],
    world: World,
    sites: Sites,
    problems: list[str],
    lost: list[tuple[int, str]] | None = None,
) -> Checkpoint | None:
    """The first whole one. What is wrong with others is added to `problems`; those of non-finite states to `lost`,
    where that is given."""
    for step, kind in candidates:
        folder = folder_of(folders[kind], step)
        content, problem = _content(folder, world, sites)
        if content is not None and content.get("finite") is False and lost is not None:
            lost.append((step, kind))
            if world.is_main:
                log.warning("%s is left out: the loss or the gradient norm of its step was not finite.", folder)
            continue
        if content is None:
            if problem is not None and kind == "checkpoints":  # others, ranks that were killed may not have finished
                problems.append(problem)
            continue
        copies = _whole_copies(Checkpoint(folder, content), world, sites)
        if any(not copy.at for copy in copies):
            problems.append(next(str(copy.problem) for copy in copies if not copy.at))
            continue
        if world.is_main:
            for text in problems:
                log.warning("%s The state of step %d is used instead.", text, step)
        for copy in copies:
            receivers = set(sites.leaders) - copy.at
            if receivers:
                size = int(content["files"][copy.name]["bytes"])
                pass_on(sites, folder / copy.name, size, min(copy.at), receivers)
        if sites.is_leader and not _has_manifest(folder):
            write_manifest(folder, content)
        world.barrier()
        return read_checkpoint(folder)
    return None


def _nothing_whole(problems: list[str], folders: Mapping[str, Path]) -> str:
    shown = [
        *problems[:_MAX_PROBLEMS],
        *([f"And {len(problems) - _MAX_PROBLEMS} more."] * (len(problems) > _MAX_PROBLEMS)),
    ]
    told = "the only checkpoint is" if len(problems) == 1 else f"all {len(problems)} checkpoints are"
    return (
        f"{told} damaged: {' '.join(shown)} There is nothing to go on from. Put the files right, or move "
        f"{folders['checkpoints']} away to begin again at the first step."
    )


def _content(folder: Path, world: World, sites: Sites) -> tuple[dict[str, Any] | None, str | None]:
    """What a state says of itself: the manifest of any site, or the notes of all ranks together."""
    manifest, problem, notes = None, None, []
    if sites.is_leader and folder.is_dir():
        notes = read_notes(folder)
        try:
            manifest = dict(read_checkpoint(folder).manifest)
        except CheckpointError as error:
            problem = str(error)
    told = world.gather_objects((manifest, problem, notes))
    found = next((manifest for manifest, _, _ in told if manifest is not None), None)
    if found is not None:
        return found, None
    try:
        composed = compose([note for _, _, notes in told for note in notes])
        if composed is not None:
            check_content(composed, folder)
            return composed, None
    except CheckpointError as error:
        return None, f"{folder}: {error}"
    return None, next((problem for _, problem, _ in told if problem is not None), None)


def _has_manifest(folder: Path) -> bool:
    try:
        read_checkpoint(folder)
    except CheckpointError:  # missing here, or damaged: another site has it
        return False
    return True


@dataclass(frozen=True)
class _Copies:
    """Where a file is whole."""

    name: str
    at: set[int]  # leaders of sites
    problem: str | None  # with one that is not


def _whole_copies(checkpoint: Checkpoint, world: World, sites: Sites) -> list[_Copies]:
    members = sites.members
    own = sorted(checkpoint.files)[members.index(world.rank) :: len(members)]
    checked = {name: find_damage(checkpoint, [name]) for name in own}
    told = world.gather_objects((sites.own, checked))
    found = []
    for name in sorted(checkpoint.files):
        verdicts = [(site, damage[name]) for site, damage in told if name in damage]
        whole = {site for site, problem in verdicts if problem is None}
        problems = sorted((problem for _, problem in verdicts if problem), key=lambda p: p.endswith("is missing."))
        found.append(_Copies(name, whole, problems[0] if problems else None))
    return found


def restore(runtime: MeshRuntime, checkpoint: Checkpoint, *, seed: int) -> None:
    """Weights, optimizer, schedule, scaler; where the topology is the one it was saved under, random generators too."""
    try:
        _restore(runtime, checkpoint, seed=seed)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        # Whole and of the right shapes, but with values that the model, the optimizer or the schedule does not take.
        # Not RuntimeError: that is what a lost connection and a full GPU are told by.
        raise CheckpointError(
            f"{checkpoint.path} cannot be restored into this task: {type(error).__name__}: {error}. Its model, "
            "optimizer and schedule must be those of the run."
        ) from error


def _restore(runtime: MeshRuntime, checkpoint: Checkpoint, *, seed: int) -> None:
    manifest, world = checkpoint.manifest, runtime.world
    restorer = Restorer(runtime, manifest)
    with torch.no_grad():
        read_into(restorer.targets, checkpoint)
    restorer.finish()
    is_same = is_same_topology(manifest, world)
    restore_own(runtime, manifest, lambda name: read_whole(checkpoint, name), is_same=is_same)
    if is_same and f"rank/{world.rank}/torch" in manifest["tensors"]:
        restore_random(world, lambda name: read_whole(checkpoint, name))
    else:
        torch.manual_seed(mix(seed, world.rank // world.layout.tp, 1, checkpoint.step))


def is_same_topology(manifest: Mapping[str, Any], world: World) -> bool:
    return bool(manifest["topology"] == topology(world.layout)) and bool(manifest["device"] == world.device.type)
