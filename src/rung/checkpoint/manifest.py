"""The manifest of a checkpoint: a JSON file, written last, with a digest of every other file and of itself.

A checkpoint exists once its manifest does. Reading one executes no code: it is JSON and raw bytes, and every name and
size is checked before it is used. Nothing here needs torch.
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
from rung.system.untrusted import open_regular, parse_json, read_regular

MANIFEST = "manifest.json"
FORMAT = 1
_FOLDER = re.compile(r"step-([0-9]{8,15})")
_FILE = re.compile(r"[A-Za-z0-9_.-]+\.safetensors")
_BLOCK = 4 * 2**20  # bytes hashed at a time
MAX_MANIFEST = 2**28  # bytes
_MAX_CUTS = 6  # dimensions along which one tensor is cut; all strategies together cut two


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest is valid. Its files may still be damaged: see `find_damage`."""

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


def step_of(name: str) -> int | None:
    """The step of a folder with this name; None if it is not that of a checkpoint."""
    match = _FOLDER.fullmatch(name)
    return int(match.group(1)) if match else None


def steps_in(checkpoints: Path) -> dict[int, Path]:
    """Every folder that may hold a checkpoint, whole or not, by step, oldest first."""
    if not checkpoints.is_dir():
        return {}
    named = [(step_of(path.name), path) for path in checkpoints.iterdir() if path.is_dir()]
    return dict(sorted((step, path) for step, path in named if step is not None))


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """Write the manifest atomically, with the format and its own digest."""
    body = {"format": FORMAT, **content}
    text = json.dumps({**body, "digest": _digest_of(body)}, indent=1)
    write_whole(folder / MANIFEST, text.encode())


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically: complete or absent, even after a power failure."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)  # a leftover may be a link, which must not be followed
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
    """Read the checkpoint in a folder. Raises CheckpointError with the file and its damage."""
    path = folder / MANIFEST
    try:
        content = parse_json(read_regular(path, MAX_MANIFEST))
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
    if step_of(folder.name) not in (None, content["step"]):
        raise CheckpointError(f"{path} is of step {content['step']}, not of the step in its folder's name.")
    return Checkpoint(folder, content)


def check_content(content: Mapping[str, Any], path: Path) -> None:
    """Refuse content that no save writes, before its names and sizes are used. A digest does not detect forgery."""
    try:
        strange = next((name for name in content["files"] if not _FILE.fullmatch(name)), None)
        if strange is not None:
            raise CheckpointError(f"{path} names a file that is not part of a checkpoint: {strange!r}.")
        problem = _find_invalid(content)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
    if problem is not None:
        raise CheckpointError(f"{path} is not the manifest of a checkpoint: {problem}.")


def _find_invalid(content: Mapping[str, Any]) -> str | None:
    if not are_sizes([content[key] for key in ("step", "epoch", "samples", "sample", "ranks")]):
        return "its position is invalid"
    if not all(isinstance(content[key], str) for key in ("strategy", "device")):
        return "its strategy is invalid"
    if not isinstance(content["topology"], dict) or not isinstance(content["evaluation_due"], bool):
        return "its topology is invalid"
    if not _is_evaluation(content):
        return "its evaluation is invalid"
    if not isinstance(content.get("finite"), bool | None):
        return "its key 'finite' is invalid"
    if not _is_stream(content.get("stream")):
        return "its key 'stream' is invalid"
    skipped = content.get("skipped", [])
    if not isinstance(skipped, list) or not all(isinstance(name, str) for name in skipped):
        return "its key 'skipped' is invalid"
    if not _is_optimizer(content["optimizer"]) or not {"schedule", "scaler"} <= content.keys():
        return "its optimizer is invalid"
    for name, file in content["files"].items():
        if not are_sizes([file["bytes"]]) or not re.fullmatch("[0-9a-f]{64}", file["sha256"]):
            return f"its entry for {name} is invalid"
    # Bound the memory that a load allocates by the size of the files: each chunk is a different part of a file, and
    # each element takes at least one byte.
    left, taken = {name: file["bytes"] for name, file in content["files"].items()}, set()
    for name, tensor in content["tensors"].items():
        if not isinstance(tensor["dtype"], str):
            return f"its entry for {name} is invalid"
        if (problem := find_untiled(tensor)) is not None:
            return f"the chunks of {name} {problem}"
        for chunk in tensor["chunks"]:
            file, key = chunk["file"], chunk["key"]
            if file not in left or not isinstance(key, str):
                return f"{name} is in a file that the checkpoint does not have"
            if (file, key) in taken:
                return f"{key} in {file} belongs to two chunks"
            taken.add((file, key))
            left[file] -= math.prod(chunk["shape"])
            if left[file] < 0:
                return f"{name} is larger than its file"
    base = content.get("base", {})
    for name, tensor in base.items():
        if not are_sizes(tensor["shape"]) or not all(isinstance(tensor[key], str) for key in ("dtype", "digest")):
            return f"its entry for {name} of the base is invalid"
    for name, stored in content["state_dict"].items():
        if f"model/{stored}" not in content["tensors"] and stored not in base:
            return f"{name} has no tensor"
    if (adapters := content.get("adapters")) is not None and not is_adapters(adapters):
        return "its adapters are invalid"
    computed = content["computed"]
    are_names = isinstance(computed, list) and all(isinstance(name, str) for name in computed)
    return None if are_names else "its computed names are invalid"


def is_adapters(content: Any) -> bool:
    """Whether untrusted content describes adapters, as `describe_adapters` does."""
    if not isinstance(content, dict) or not isinstance(content.get("layers"), dict):
        return False
    kinds = {"A": str, "B": str, "scale": int | float, "is_turned": bool}
    layers = content["layers"].values()
    return (
        all(
            isinstance(layer, dict) and all(isinstance(layer.get(key), kind) for key, kind in kinds.items())
            for layer in layers
        )
        and all(isinstance(layer.get("magnitude", ""), str) for layer in layers)
        and isinstance(content.get("config"), dict)
        and isinstance(content.get("special"), str)
    )


def _is_optimizer(optimizer: Mapping[str, Any]) -> bool:
    groups, values, others = optimizer["groups"], optimizer["values"], optimizer.get("others", [])
    if not isinstance(optimizer["class"], str) or not isinstance(groups, list) or not isinstance(values, dict):
        return False
    if not isinstance(others, list) or not all(isinstance(one, list) and len(one) == 2 for one in others):
        return False
    return all(isinstance(one, dict) for one in (*groups, *values.values()))


def _is_evaluation(content: Mapping[str, Any]) -> bool:
    """Whether the figures of the step's evaluation and the best evaluation are valid, or absent."""
    figures, best = content.get("evaluation"), content.get("best")
    if figures is not None and not all(isinstance(value, int | float | str) for value in figures.values()):
        return False
    if best is None:
        return True
    named = isinstance(best["metric"], str) and best["better"] in ("max", "min")
    return named and isinstance(best["value"], int | float) and are_sizes([best["step"]])


def _is_stream(stream: Any) -> bool:
    """Whether the places in the shards of a data set are valid, or absent."""
    if stream is None:
        return True
    lanes = stream["lanes"]
    if not isinstance(lanes, dict) or not are_sizes([stream["epoch"], stream["batch"]]):
        return False
    return all(
        lane.isdecimal() and are_sizes([place["shard"], place["index"], place["state_index"]]) and "state" in place
        for lane, place in lanes.items()
    )


def are_sizes(values: Any) -> bool:
    """Whether an untrusted value is a list of sizes: the shape of a tensor, or counts."""
    return isinstance(values, list) and len(values) <= 64 and all(type(n) is int and 0 <= n < 2**48 for n in values)


def find_untiled(tensor: Mapping[str, Any]) -> str | None:
    """The problem with the chunks of a tensor; None if they tile it, without a gap and without an overlap.

    The chunks' indicator functions sum to that of the whole exactly if their mixed differences do, and these are a sign
    at each corner of a chunk. So time and memory are linear in the number of chunks, however they lie.
    """
    shape, chunks = tensor["shape"], tensor["chunks"]
    if not are_sizes(shape) or not isinstance(chunks, list):
        return "are invalid"
    boxes = []
    for chunk in chunks:
        offsets, lengths = chunk["offsets"], chunk["shape"]
        if not (are_sizes(offsets) and are_sizes(lengths) and len(offsets) == len(lengths) == len(shape)):
            return "are invalid"
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
    """The first problem with the files of a checkpoint (all, or `names`), or None.

    `thorough` reads every byte; else only the sizes are checked.
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
    """Remove old checkpoints after `newest` was written, and the remains of interrupted saves. Returns removed steps.

    Kept are the last `keep`, steps that `keep_every` divides, the `best` evaluation, and the newest finite state.
    Checkpoints after `newest` are neither counted nor removed: the run resumed before them, as they may be damaged.
    """
    found = {step: path for step, path in steps_in(checkpoints).items() if step <= newest}
    whole = [step for step, path in found.items() if (path / MANIFEST).exists()]
    kept = kept_steps(
        whole, keep, keep_every, newest=newest, best=best, may_be_good=lambda step: _may_be_good(found[step])
    )
    removed = [step for step in found if step not in kept]
    for step in removed:
        remove(found[step])
    for path in checkpoints.glob(".step-*"):
        remove(path)
    return removed


def kept_steps(
    whole: list[int],
    keep: int,
    keep_every: int | None,
    *,
    newest: int,
    best: int | None,
    may_be_good: Callable[[int], bool],
) -> set[int | None]:
    """Of the steps of `whole` checkpoints, oldest first, those that are kept."""
    kept = {newest, best, *whole[-keep:], *(step for step in whole if keep_every and step % keep_every == 0)}
    return kept | {next((step for step in reversed(whole) if may_be_good(step)), None)}


def newest_good(checkpoints: Path) -> Path | None:
    """The newest finished checkpoint whose state is not known to be non-finite."""
    finished = [path for path in steps_in(checkpoints).values() if (path / MANIFEST).exists()]
    return next((path for path in reversed(finished) if _may_be_good(path)), None)


def _may_be_good(folder: Path) -> bool:
    """Whether a manifest is readable and does not mark its step as non-finite."""
    try:
        return parse_json(read_regular(folder / MANIFEST, MAX_MANIFEST)).get("finite") is not False
    except (OSError, ValueError, AttributeError):
        return False


def partial_of(checkpoints: Path, step: int) -> Path:
    """The folder in which a checkpoint is written before it gets its name."""
    return checkpoints / f".step-{step:08d}.partial"


def put_in_place(partial: Path, folder: Path) -> None:
    """Rename a written checkpoint to its final name, replacing one of the same step."""
    old = folder.with_name(f".{folder.name}.old")
    if folder.exists() or folder.is_symlink():
        remove(old)
        folder.rename(old)
    partial.rename(folder)
    sync_folder(folder.parent)
    remove(old)


def remove(folder: Path) -> None:
    """Remove a checkpoint, its manifest first: a half-removed one must not count. A link is removed, not its target."""
    if folder.is_symlink():
        folder.unlink()
        return
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def newest(checkpoints: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint without damage, and the problems of newer ones."""
    problems: list[str] = []
    for path in reversed(steps_in(checkpoints).values()):
        try:
            checkpoint = read_checkpoint(path)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        damage = find_damage(checkpoint)
        if damage is None:
            return checkpoint, problems
        problems.append(damage)
    return None, problems


def _digest_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
