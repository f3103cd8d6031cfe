"""Choose the state to resume from, and restore it into a runtime of any topology.

The state may be a checkpoint, a copy in memory that outlived the ranks, or an emergency save of failing ranks; on one
disk, or on several that are not shared. The ranks search together and choose the newest whole state.
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
from rung.checkpoint.notes import compose, read_notes
from rung.checkpoint.plan import read_into, read_whole
from rung.checkpoint.rank_local_state import restore_rank_local
from rung.checkpoint.sites import StorageTopology, pass_on
from rung.checkpoint.state import Restorer, restore_random
from rung.data.permutation import mix
from rung.distributed.world import World
from rung.errors import CheckpointError
from rung.runtime.base import Runtime
from rung.spec.abilities import topology

log = logging.getLogger("rung")

_MAX_PROBLEMS = 5
# Of one step: copies in memory are of all ranks, an emergency save is of those that were left.
_PREFERRED = ["checkpoints", "rescue", "memory"]


def choose(folders: Mapping[str, Path], world: World, sites: StorageTopology) -> Checkpoint | None:
    """Choose the newest whole state and complete it at every site. Collective; all ranks get the same.

    Each rank checks some of the files. The main rank logs the damage of newer states. Sites send each other the files
    that they lack. A state with a non-finite loss is chosen only if there is no other. Returns None if nothing was ever
    saved. If every checkpoint is damaged, raises CheckpointError instead of restarting at the first step.
    """
    own = [(step, kind) for kind, folder in folders.items() for step in steps_in(folder)] if sites.is_leader else []
    listed = {(step, kind) for some in world.gather_objects(own) for step, kind in some}
    candidates = sorted(listed, key=lambda found: (found[0], _PREFERRED.index(found[1])), reverse=True)
    non_finite: list[tuple[int, str]] = []
    problems: list[str] = []
    found = _choose(candidates, folders, world, sites, problems, non_finite)
    if found is None and non_finite:
        found = _choose(non_finite, folders, world, sites, problems)
    if found is None and problems:
        raise CheckpointError(_all_damaged(problems, folders))
    return found


def _choose(
    candidates: list[tuple[int, str]],
    folders: Mapping[str, Path],
    world: World,
    sites: StorageTopology,
    problems: list[str],
    non_finite: list[tuple[int, str]] | None = None,
) -> Checkpoint | None:
    """The first whole candidate. Adds the damage of others to `problems`, and skips and lists non-finite states in
    `non_finite` if that is given."""
    for step, kind in candidates:
        folder = folder_of(folders[kind], step)
        content, problem = _content(folder, world, sites)
        if content is not None and content.get("finite") is False and non_finite is not None:
            non_finite.append((step, kind))
            if world.is_main:
                log.warning("%s is left out: the loss or the gradient norm of its step was not finite.", folder)
            continue
        if content is None:
            # States of other kinds may be incomplete: killed ranks do not finish them.
            if problem is not None and kind == "checkpoints":
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
        world.barrier()  # the other ranks of a site read the manifest that its leader wrote
        return read_checkpoint(folder)
    return None


def _all_damaged(problems: list[str], folders: Mapping[str, Path]) -> str:
    num_hidden = len(problems) - _MAX_PROBLEMS
    shown = [*problems[:_MAX_PROBLEMS], *([f"And {num_hidden} more."] if num_hidden > 0 else [])]
    which = "the only checkpoint is" if len(problems) == 1 else f"all {len(problems)} checkpoints are"
    return (
        f"{which} damaged: {' '.join(shown)} There is nothing to resume from. Repair the files, or move "
        f"{folders['checkpoints']} away to start at the first step."
    )


def _content(folder: Path, world: World, sites: StorageTopology) -> tuple[dict[str, Any] | None, str | None]:
    """The manifest of a state from any site, or composed from the notes of all ranks; else None and the problem."""
    manifest, problem, notes = None, None, []
    if sites.is_leader and folder.is_dir():
        notes = read_notes(folder)
        try:
            manifest = dict(read_checkpoint(folder).manifest)
        except CheckpointError as error:
            problem = str(error)
    rows = world.gather_objects((manifest, problem, notes))
    found = next((manifest for manifest, _, _ in rows if manifest is not None), None)
    if found is not None:
        return found, None
    try:
        composed = compose([note for _, _, notes in rows for note in notes])
        if composed is not None:
            check_content(composed, folder)
            return composed, None
    except CheckpointError as error:
        return None, f"{folder}: {error}"
    return None, next((problem for _, problem, _ in rows if problem is not None), None)


def _has_manifest(folder: Path) -> bool:
    try:
        read_checkpoint(folder)
    except CheckpointError:  # missing here, or damaged: another site has it
        return False
    return True


@dataclass(frozen=True)
class _Copies:
    """The sites that have a whole copy of a file."""

    name: str
    at: set[int]  # leaders of sites
    problem: str | None  # of a copy that is not whole


def _whole_copies(checkpoint: Checkpoint, world: World, sites: StorageTopology) -> list[_Copies]:
    members = sites.members
    own = sorted(checkpoint.files)[members.index(world.rank) :: len(members)]
    checked = {name: find_damage(checkpoint, [name]) for name in own}
    rows = world.gather_objects((sites.own, checked))
    found = []
    for name in sorted(checkpoint.files):
        verdicts = [(site, damage[name]) for site, damage in rows if name in damage]
        whole = {site for site, problem in verdicts if problem is None}
        # Damage before absence: where disks are not shared, a site need not have every file.
        problems = sorted((problem for _, problem in verdicts if problem), key=lambda p: p.endswith("is missing."))
        found.append(_Copies(name, whole, problems[0] if problems else None))
    return found


def restore(runtime: Runtime, checkpoint: Checkpoint, *, seed: int) -> None:
    """Restore weights, optimizer, schedule and scaler; on the same topology also the random generators."""
    try:
        _restore(runtime, checkpoint, seed=seed)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        # Whole and of the right shapes, but with values that the model, the optimizer or the schedule refuses.
        # Not RuntimeError: lost connections and out-of-memory raise it.
        raise CheckpointError(
            f"{checkpoint.path} cannot be restored into this task: {type(error).__name__}: {error}. The task's model, "
            "optimizer and schedule must be those of the run."
        ) from error


def _restore(runtime: Runtime, checkpoint: Checkpoint, *, seed: int) -> None:
    manifest, world = checkpoint.manifest, runtime.world
    restorer = Restorer(runtime, manifest)
    with torch.no_grad():
        read_into(restorer.targets, checkpoint)
    restorer.finish()
    is_same = is_same_topology(manifest, world)
    restore_rank_local(runtime, manifest, lambda name: read_whole(checkpoint, name), is_same=is_same)
    if is_same and f"rank/{world.rank}/torch" in manifest["tensors"]:
        restore_random(world, lambda name: read_whole(checkpoint, name))
    else:
        torch.manual_seed(mix(seed, world.rank // (world.layout.tp * world.layout.cp), 1, checkpoint.step))


def is_same_topology(manifest: Mapping[str, Any], world: World) -> bool:
    return bool(manifest["topology"] == topology(world.layout)) and bool(manifest["device"] == world.device.type)
