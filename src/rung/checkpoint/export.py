"""Weights out of a run, for those who do not have Rung: one file, or several with an index as Hugging Face writes them.

Read and written tensor by tensor, so that a model larger than memory can be exported on any machine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from rung.checkpoint.files import Entry, TensorFile, partial_file, wide_first, write_tensors
from rung.checkpoint.manifest import MANIFEST, Checkpoint, steps_in, write_whole
from rung.checkpoint.plan import OpenFiles, dtype_of, read_whole
from rung.checkpoint.survey import Found, Place, best_whole, look, survey
from rung.disk import free_bytes, is_full, room
from rung.errors import CheckpointError, ConfigError
from rung.untrusted import read_json

PICKLED = (".pt", ".pth")
DEFAULT_SHARD_BYTES = 5 * 10**9
_MAX_INDEX = 2**28
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class Source:
    """The weights of a model somewhere on the disk."""

    called: str  # for the console
    step: int | None
    entries: list[Entry]  # every key of the module's state dict, in its order
    read: Callable[[str], Tensor]
    same: dict[str, str] = field(default_factory=dict)  # keys of one tied tensor have the same value here
    notes: list[str] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries)


def find_source(place: Place, step: int | None = None) -> Source:
    """The newest whole checkpoint, or the weights of the run's end where these are newer; or what `step` asks for."""
    if place.one is not None:
        checkpoint = _whole(look(place.one, -1))
        if step is not None and checkpoint.step != step:
            raise CheckpointError(f"{place.one} is of step {checkpoint.step}, not {step}.")
        return of_checkpoint(checkpoint)
    skipped: list[str] = []
    weights, ended = None, -1
    if place.weights is not None:
        try:
            weights = of_file(place.weights, skipped)
            ended = weights.step if weights.step is not None else -1
        except CheckpointError as error:
            skipped.append(str(error))
    folders = steps_in(place.folders["checkpoints"])
    if step is not None:
        if step in folders:
            return of_checkpoint(_whole(look(folders[step], step)))
        if weights is not None and ended == step:
            return weights
        finished = [number for number, path in folders.items() if (path / MANIFEST).exists()]
        known = ", ".join(str(number) for number in sorted({*finished, ended}) if number >= 0)
        raise CheckpointError(f"there is no checkpoint of step {step}." + (f" There are: {known}." if known else ""))
    for number, path in reversed(folders.items()):
        if ended > number:
            break  # the run went on after its last checkpoint, and came to its end
        found = look(path, number)
        if found.checkpoint is not None and found.problem is None:
            return of_checkpoint(found.checkpoint, skipped)
        skipped.append(str(found.problem))
    if weights is None:
        raise CheckpointError(" ".join([f"there are no whole weights in {place.called}.", *skipped]))
    return weights


def find_best_source(place: Place) -> Source:
    """The checkpoint of the best evaluation, by the setting `keep_best` of the run."""
    found = survey(place)
    kept, best = best_whole(found)
    if best is None:
        raise CheckpointError(
            f"no checkpoint in {place.called} says which evaluation was the best; --set keep_best=loss, or a metric as "
            "top1:max, makes `rung train` keep it. Without --best the newest is exported."
        )
    if kept is None or kept.checkpoint is None:
        raise CheckpointError(f"the best {best.metric} was that of step {best.step}, of which there is no checkpoint.")
    notes = []
    if kept.step != best.step:
        notes.append(
            f"the best {best.metric} was that of step {best.step}, of which there is no whole checkpoint; the best of "
            f"those there are is that of step {kept.step}."
        )
    return of_checkpoint(_whole(look(kept.path, kept.step, thorough=False)), notes)


def _whole(found: Found) -> Checkpoint:
    if found.checkpoint is None or found.problem is not None:
        raise CheckpointError(str(found.problem))
    return found.checkpoint


def of_checkpoint(checkpoint: Checkpoint, notes: list[str] | None = None) -> Source:
    manifest, files = checkpoint.manifest, OpenFiles(checkpoint)
    stored = {key: f"model/{name}" for key, name in manifest["state_dict"].items()}
    entries = [
        Entry(key, dtype_of(checkpoint, name), tuple(manifest["tensors"][name]["shape"]))
        for key, name in stored.items()
    ]
    told = notes if notes is not None else []
    if manifest.get("finite") is False:
        told.append(f"the loss or the gradient norm of step {checkpoint.step} was not finite.")
    if manifest["computed"]:
        told.append(
            f"{', '.join(manifest['computed'][:3])}: the module computes this for its state dict; it is not in a "
            "checkpoint and is left out."
        )
    return Source(
        f"the checkpoint of step {checkpoint.step}",
        checkpoint.step,
        entries,
        lambda key: read_whole(checkpoint, stored[key], files),
        stored,
        told,
    )


def of_file(path: Path, notes: list[str] | None = None) -> Source:
    file = TensorFile(path)

    def read(key: str) -> Tensor:
        with file.open(key) as value:
            return value.clone()

    step = file.metadata.get("step", "")
    return Source(
        f"the weights of the run's end, {path.name}",
        int(step) if re.fullmatch("[0-9]{1,15}", step) else None,
        [Entry(key, *file.look(key)) for key in file.keys()],  # noqa: SIM118
        read,
        notes=notes if notes is not None else [],
    )


def export(source: Source, output: Path, *, shard_bytes: int | None = None, force: bool = False) -> list[Path]:
    """Write the weights. The files, an index last. Files that are there are replaced only with `force`."""
    check_output(output, shard_bytes=shard_bytes, force=force)
    pickled = output.suffix in PICKLED
    raw = [entry.key for entry in source.entries if entry.dtype == torch.complex128]
    if raw and not pickled:
        raise ConfigError(f"safetensors has no complex128, and {raw[0]} is. Use {output.with_suffix('.pt')}.")
    shards = [source.entries] if pickled else into_shards(source.entries, shard_bytes or DEFAULT_SHARD_BYTES)
    files = [output.with_name(name) for name in _names(output, len(shards))]
    _refuse_to_replace(files, force)
    index = _index_of(output)
    replaced = {output, *_files_of(index)}
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:  # all of them get their names once all are written
            for path, shard in zip(files, shards, strict=True):
                partial = stack.enter_context(partial_file(path))
                if pickled:
                    values: dict[str, Tensor] = {}
                    torch.save({entry.key: _once(source, entry.key, values) for entry in shard}, partial)
                else:
                    entries = wide_first(shard)
                    write_tensors(partial, entries, (source.read(entry.key) for entry in entries))
        if len(shards) > 1:
            places = {entry.key: path.name for path, shard in zip(files, shards, strict=True) for entry in shard}
            content = {"metadata": {"total_size": source.num_bytes}, "weight_map": places}
            write_whole(index, (json.dumps(content, indent=2) + "\n").encode())
            files.append(index)
        for path in replaced.difference(files):
            path.unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:
        told = error.strerror if isinstance(error, OSError) else str(error).partition("\n")[0]
        if is_full(error):
            told = f"{told}; {room(source.num_bytes, free_bytes(output))}"
        raise CheckpointError(f"{output} could not be written: {told}.") from error
    return files


def into_shards(entries: list[Entry], most: int) -> list[list[Entry]]:
    """In the module's order, as many in each as fit; a tensor larger than that has one of its own."""
    shards: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        if shards[-1] and filled + entry.num_bytes > most:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += entry.num_bytes
    return shards


def parse_size(text: str) -> int:
    """5GB, 500MB, 2GiB or a number of bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text, re.IGNORECASE)
    unit = match.group(2).upper() if match else None
    size = int(float(match.group(1)) * _UNITS[unit]) if match and unit in _UNITS else 0
    if size < 1:
        raise ConfigError(f"{text!r} is not a size. Sizes are like 5GB, 500MB or 2GiB.")
    return size


def check_output(output: Path, *, shard_bytes: int | None, force: bool) -> None:
    """Refuse what can be known to be wrong before a checkpoint is read."""
    if output.is_dir():
        raise ConfigError(f"--output {output} is a directory. Name a file in it: {output / 'model.safetensors'}.")
    if output.suffix not in (*PICKLED, ".safetensors"):
        wanted = output.with_suffix(".safetensors")
        raise ConfigError(f"--output {output}: the name must end in .safetensors, .pt or .pth, as in {wanted}.")
    if output.suffix in PICKLED and shard_bytes is not None:
        raise ConfigError(f"--max-shard-size is for .safetensors; {output} is always one file.")
    _refuse_to_replace([output, _index_of(output)], force)


def _refuse_to_replace(files: list[Path], force: bool) -> None:
    there = next((path for path in files if path.exists()), None)
    if there is not None and not force:
        raise ConfigError(f"{there} is there already. Use another name, or --force to replace it.")


def _index_of(output: Path) -> Path:
    return output.with_name(f"{output.name}.index.json")


def _names(output: Path, count: int) -> list[str]:
    if count == 1:
        return [output.name]
    return [f"{output.stem}-{n:05d}-of-{count:05d}{output.suffix}" for n in range(1, count + 1)]


def _once(source: Source, key: str, values: dict[str, Tensor]) -> Tensor:
    """A tied tensor is read once; torch's format keeps it tied."""
    name = source.same.get(key, key)
    if name not in values:
        values[name] = source.read(key)
    return values[name]


def _files_of(index: Path) -> list[Path]:
    """What an older export consists of, if there is one: replaced as a whole, or its shards would be left over."""
    try:
        names = set(read_json(index, _MAX_INDEX)["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
    stem = re.escape(index.name.removesuffix(".safetensors.index.json"))
    own = re.compile(rf"{stem}-\d{{5}}-of-\d{{5}}\.safetensors")
    return [*(index.with_name(name) for name in names if isinstance(name, str) and own.fullmatch(name)), index]
