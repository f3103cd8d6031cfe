"""What a checkpoint says of itself: a JSON file that is written last, with a digest of every other file and of itself.

A checkpoint exists when its manifest does. Reading one runs no code: JSON and raw bytes, every name and size checked
before it is used. Nothing here needs torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from rung.errors import CheckpointError
from rung.untrusted import open_regular, parse_json, read_regular

MANIFEST = "manifest.json"
FORMAT = 1
_FOLDER = re.compile(r"step-([0-9]{8,15})")
_FILE = re.compile(r"[A-Za-z0-9_.-]+\.safetensors")
_BLOCK = 4 * 2**20
_MAX_MANIFEST = 2**30
_MAX_CUTS = 6  # dimensions along which one tensor is cut; a mesh of all strategies together cuts two


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest was read and found whole. Its files may still be damaged: see `find_damage`."""

    path: Path
    manifest: Mapping[str, Any]

    @property
    def step(self) -> int:
        return int(self.manifest["step"])

    @property
    def files(self) -> Mapping[str, Mapping[str, Any]]:
        return self.manifest["files"]  # type: ignore[no-any-return]

    @property
    def num_bytes(self) -> int:
        return sum(int(file["bytes"]) for file in self.files.values())


def folder_of(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:08d}"


def steps_in(checkpoints: Path) -> dict[int, Path]:
    """Every folder that may hold a checkpoint, whole or not, by step, oldest first."""
    if not checkpoints.is_dir():
        return {}
    named = [(_FOLDER.fullmatch(path.name), path) for path in checkpoints.iterdir() if path.is_dir()]
    return dict(sorted((int(match.group(1)), path) for match, path in named if match))


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """In one go: a reader finds all of it or nothing."""
    body = {"format": FORMAT, **content}
    text = json.dumps({**body, "digest": _digest_of(body)}, indent=1)
    write_whole(folder / MANIFEST, text.encode())


def write_whole(path: Path, content: bytes) -> None:
    """A file that is there completely or not at all, also after a power cut."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)  # one that was left behind may be a link
    with partial.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in a folder. Raises CheckpointError that names the file and what is wrong with it."""
    path = folder / MANIFEST
    try:
        content = parse_json(read_regular(path, _MAX_MANIFEST))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: the checkpoint was never finished.") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}.") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
    if not isinstance(content, dict) or "format" not in content:
        raise CheckpointError(f"{path} is not the manifest of a checkpoint.")
    if content["format"] != FORMAT:
        raise CheckpointError(
            f"{path} has format {content['format']!r:.60}; this version of Rung reads format {FORMAT}."
        )
    digest = content.pop("digest", None)
    if digest != _digest_of(content):
        raise CheckpointError(f"{path} is damaged: its content does not match its digest.")
    check_content(content, path)
    named = _FOLDER.fullmatch(folder.name)
    if named and int(named.group(1)) != content["step"]:
        raise CheckpointError(f"{path} is of step {content['step']}, not of the step that its folder is called after.")
    return Checkpoint(folder, content)


def check_content(content: Mapping[str, Any], path: Path) -> None:
    """Refuse what no save writes, before a name or a size of it is used. A digest tells of accidents, not of intent."""
    try:
        strange = next((name for name in content["files"] if not _FILE.fullmatch(name)), None)
        if strange is not None:
            raise CheckpointError(f"{path} names a file that cannot be its own: {strange!r}.")
        problem = _find_nonsense(content)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
    if problem is not None:
        raise CheckpointError(f"{path} is not the manifest of a checkpoint: {problem}.")


def _find_nonsense(content: Mapping[str, Any]) -> str | None:
    if not are_sizes([content[key] for key in ("step", "epoch", "samples", "sample", "ranks")]):
        return "its position makes no sense"
    if not all(isinstance(content[key], str) for key in ("strategy", "device")):
        return "its strategy makes no sense"
    if not isinstance(content["topology"], dict) or not isinstance(content["evaluation_due"], bool):
        return "its topology makes no sense"
    if not _is_evaluation(content):
        return "its evaluation makes no sense"
    if not isinstance(content.get("finite"), bool | None):
        return "what it says of its step makes no sense"
    if not _is_optimizer(content["optimizer"]) or not {"schedule", "scaler"} <= content.keys():
        return "its optimizer makes no sense"
    for name, file in content["files"].items():
        if not are_sizes([file["bytes"]]) or not re.fullmatch("[0-9a-f]{64}", file["sha256"]):
            return f"what it says of {name} makes no sense"
    # What a load makes room for is bounded by the files: each part of them stands for one chunk, of a byte or more for
    # each element.
    left, taken = {name: file["bytes"] for name, file in content["files"].items()}, set()
    for name, tensor in content["tensors"].items():
        if not isinstance(tensor["dtype"], str):
            return f"what it says of {name} makes no sense"
        if (problem := find_untiled(tensor)) is not None:
            return f"the chunks of {name} {problem}"
        for chunk in tensor["chunks"]:
            file, key = chunk["file"], chunk["key"]
            if file not in left or not isinstance(key, str):
                return f"{name} lies in a file that is not its own"
            if (file, key) in taken:
                return f"{key} in {file} is part of two tensors, or twice of one"
            taken.add((file, key))
            left[file] -= math.prod(chunk["shape"])
            if left[file] < 0:
                return f"{name} is larger than its file"
    for name, stored in content["state_dict"].items():
        if f"model/{stored}" not in content["tensors"]:
            return f"{name} is not in it"
    computed = content["computed"]
    are_names = isinstance(computed, list) and all(isinstance(name, str) for name in computed)
    return None if are_names else "its names make no sense"


def _is_optimizer(optimizer: Mapping[str, Any]) -> bool:
    groups, values, others = optimizer["groups"], optimizer["values"], optimizer.get("others", [])
    if not isinstance(optimizer["class"], str) or not isinstance(groups, list) or not isinstance(values, dict):
        return False
    if not isinstance(others, list) or not all(isinstance(one, list) and len(one) == 2 for one in others):
        return False
    return all(isinstance(one, dict) for one in (*groups, *values.values()))


def _is_evaluation(content: Mapping[str, Any]) -> bool:
    """Whether what is told of the step's evaluation and of the best one, if anything is, can be that."""
    figures, best = content.get("evaluation"), content.get("best")
    if figures is not None and not all(isinstance(value, int | float | str) for value in figures.values()):
        return False
    if best is None:
        return True
    named = isinstance(best["metric"], str) and best["better"] in ("max", "min")
    return named and isinstance(best["value"], int | float) and are_sizes([best["step"]])


def are_sizes(values: Any) -> bool:
    """Whether a value out of a file can be taken for the shape of a tensor, or for counts of anything."""
    return isinstance(values, list) and len(values) <= 64 and all(type(n) is int and 0 <= n < 2**48 for n in values)


def find_untiled(tensor: Mapping[str, Any]) -> str | None:
    """What is wrong with the chunks of a tensor, unless they tile it: inside it, without a gap and without an overlap.

    The sum of the chunks' indicator functions is that of the whole exactly if their mixed differences are, and these
    are a sign at each corner: time and memory grow with the number of chunks, however they lie.
    """
    shape, chunks = tensor["shape"], tensor["chunks"]
    if not are_sizes(shape) or not isinstance(chunks, list):
        return "make no sense"
    boxes = []
    for chunk in chunks:
        offsets, lengths = chunk["offsets"], chunk["shape"]
        if not (are_sizes(offsets) and are_sizes(lengths) and len(offsets) == len(lengths) == len(shape)):
            return "make no sense"
        if any(offset + length > size for offset, length, size in zip(offsets, lengths, shape, strict=True)):
            return "lie outside of it"
        if math.prod(lengths):
            boxes.append(list(zip(offsets, lengths, strict=True)))
    if not math.prod(shape):
        return None
    cut = [dim for dim, size in enumerate(shape) if any(box[dim] != (0, size) for box in boxes)]
    if len(cut) > _MAX_CUTS:
        return f"cut it along more than {_MAX_CUTS} dimensions"
    signs: dict[tuple[int, ...], int] = {}
    whole = [(0, shape[dim]) for dim in cut]
    for box, weight in [(whole, -1), *(([box[dim] for dim in cut], 1) for box in boxes)]:
        for ends in product((0, 1), repeat=len(cut)):
            corner = tuple(offset + end * length for (offset, length), end in zip(box, ends, strict=True))
            signs[corner] = signs.get(corner, 0) + weight * (-1) ** sum(ends)
    return "overlap or leave a gap" if any(signs.values()) else None


def find_damage(checkpoint: Checkpoint, names: Iterable[str] | None = None, *, thorough: bool = True) -> str | None:
    """What is wrong with the files of a checkpoint (all, or those named): the first damaged one, or nothing.

    `thorough` reads every byte; else only the sizes are looked at.
    """
    for name in checkpoint.files if names is None else names:
        path, known = checkpoint.path / name, checkpoint.files[name]
        try:
            size = path.stat().st_size
            if size != known["bytes"]:
                return f"{path} is damaged: it has {size:,} bytes instead of {known['bytes']:,}."
            if thorough and digest_of_file(path) != known["sha256"]:
                return f"{path} is damaged: its content does not match its digest."
        except FileNotFoundError:
            return f"{path} is missing."
        except OSError as error:
            return f"{path} cannot be read: {error.strerror}."
    return None


def digest_of_file(path: Path) -> str:
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def prune(checkpoints: Path, keep: int, keep_every: int | None, *, newest: int, best: int | None = None) -> list[int]:
    """After `newest` was written, remove what is not to be kept: of the whole ones up to it all but `keep`, those whose
    step `keep_every` divides, that of the `best` evaluation, and the newest of a finite state. Later ones are of
    another time, damaged or not, and count for nothing. What saves that were cut short have left goes, too."""
    found = {step: path for step, path in steps_in(checkpoints).items() if step <= newest}
    whole = [step for step, path in found.items() if (path / MANIFEST).exists()]
    kept = {newest, best, *whole[-keep:], *(step for step in whole if keep_every and step % keep_every == 0)}
    kept.add(next((step for step in reversed(whole) if _may_be_good(found[step])), None))
    removed = [step for step in found if step not in kept]
    for step in removed:
        remove(found[step])
    for path in checkpoints.glob(".step-*"):
        remove(path)
    return removed


def newest_good(checkpoints: Path) -> Path | None:
    """The newest finished checkpoint whose state is not known to be non-finite."""
    finished = [path for path in steps_in(checkpoints).values() if (path / MANIFEST).exists()]
    return next((path for path in reversed(finished) if _may_be_good(path)), None)


def _may_be_good(folder: Path) -> bool:
    """Whether a manifest can be read and does not say that loss or gradient norm of its step were non-finite."""
    try:
        return json.loads((folder / MANIFEST).read_bytes()).get("finite") is not False
    except (OSError, ValueError, AttributeError):
        return False


def partial_of(checkpoints: Path, step: int) -> Path:
    """Where a checkpoint is written before it is one."""
    return checkpoints / f".step-{step:08d}.partial"


def put_in_place(partial: Path, folder: Path) -> None:
    """A written checkpoint under its name; one of the same step gives way in the same moment."""
    old = folder.with_name(f".{folder.name}.old")
    if folder.exists() or folder.is_symlink():
        remove(old)
        folder.rename(old)
    partial.rename(folder)
    sync_folder(folder.parent)
    remove(old)


def remove(folder: Path) -> None:
    """The manifest goes first: a checkpoint that is being removed is none. Of a link to a directory only the link goes:
    what it leads to is not this run's."""
    if folder.is_symlink():
        folder.unlink()
        return
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def newest(
    checkpoints: Path, *, check: Callable[[Checkpoint], str | None] = find_damage
) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint without damage, and what was wrong with newer ones."""
    problems: list[str] = []
    for path in reversed(steps_in(checkpoints).values()):
        try:
            checkpoint = read_checkpoint(path)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        damage = check(checkpoint)
        if damage is None:
            return checkpoint, problems
        problems.append(damage)
    return None, problems


def _digest_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
