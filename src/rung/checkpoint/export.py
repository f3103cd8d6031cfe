"""Export the weights of a run: one file, or several with an index in the format of Hugging Face.

Tensors are read and written one at a time, so that a model larger than memory can be exported on any machine.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rung.checkpoint.files import Entry, TensorFile, partial_file, wide_first, write_tensors
from rung.checkpoint.manifest import MANIFEST, Checkpoint, is_adapters, steps_in, write_whole
from rung.checkpoint.plan import OpenFiles, dtype_of, read_whole
from rung.checkpoint.survey import CheckpointLocation, CheckpointStatus, best_whole, inspect_checkpoint, survey
from rung.errors import CheckpointError, ConfigError
from rung.runtime.base import AVERAGE
from rung.system.disk import free_bytes, is_full, room
from rung.system.untrusted import parse_json, read_json

PICKLED = (".pt", ".pth")
DEFAULT_SHARD_BYTES = 5 * 10**9
_MAX_INDEX = 2**28
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class WeightSource:
    """Weights on disk, read one tensor at a time."""

    label: str  # for the console
    step: int | None
    entries: list[Entry]  # every key of the module's state dict, in its order
    read: Callable[[str], Tensor]
    same: dict[str, str] = field(default_factory=dict)  # keys of tied tensors map to the same value
    notes: list[str] = field(default_factory=list)
    adapters: Mapping[str, Any] | None = None  # of `describe_adapters`
    base: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # what is frozen beside them and not here

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries)

    @property
    def floating_type(self) -> str:
        """That of most numbers, as in "float32"."""
        counts: Counter[torch.dtype] = Counter()
        for entry in self.entries:
            if entry.dtype.is_floating_point:
                counts[entry.dtype] += entry.num_bytes // entry.dtype.itemsize
        return str(counts.most_common(1)[0][0]).removeprefix("torch.") if counts else "float32"


def find_source(location: CheckpointLocation, step: int | None = None, *, average: bool = False) -> WeightSource:
    """The newest whole checkpoint, or the weights of the run's end if newer; with `step`, those of that step."""
    if location.single is not None:
        checkpoint = _whole(inspect_checkpoint(location.single, -1))
        if step is not None and checkpoint.step != step:
            raise CheckpointError(f"{location.single} is of step {checkpoint.step}, not {step}.")
        return of_checkpoint(checkpoint, average=average)
    skipped: list[str] = []
    weights, ended = None, -1
    file = location.average if average else location.weights
    if file is not None:
        try:
            weights = of_file(file, skipped)
            ended = weights.step if weights.step is not None else -1
        except CheckpointError as error:
            skipped.append(str(error))
    folders = steps_in(location.folders["checkpoints"])
    if step is not None:
        if step in folders:
            return of_checkpoint(_whole(inspect_checkpoint(folders[step], step)), average=average)
        if weights is not None and ended == step:
            return weights
        finished = [number for number, path in folders.items() if (path / MANIFEST).exists()]
        known = ", ".join(str(number) for number in sorted({*finished, ended}) if number >= 0)
        raise CheckpointError(f"there is no checkpoint of step {step}." + (f" There are: {known}." if known else ""))
    for number, path in reversed(folders.items()):
        if ended > number:
            break  # the final weights are newer than every checkpoint left
        found = inspect_checkpoint(path, number)
        if found.checkpoint is not None and found.problem is None:
            return of_checkpoint(found.checkpoint, skipped, average=average)
        skipped.append(str(found.problem))
    if weights is None:
        raise CheckpointError(" ".join([f"there are no whole weights in {location.given}.", *skipped]))
    return weights


def find_best_source(location: CheckpointLocation, *, average: bool = False) -> WeightSource:
    """The checkpoint of the best evaluation, by the setting `keep_best` of the run."""
    found = survey(location)
    kept, best = best_whole(found)
    if best is None:
        raise CheckpointError(
            f"no checkpoint in {location.given} records a best evaluation; --set keep_best=loss, or a metric as "
            "top1:max, makes `rung train` keep it. Without --best the newest is exported."
        )
    if kept is None or kept.checkpoint is None:
        raise CheckpointError(f"the best {best.metric} was at step {best.step}, which has no checkpoint.")
    notes = []
    if kept.step != best.step:
        notes.append(
            f"the best {best.metric} was at step {best.step}, which has no whole checkpoint; the best that has one is "
            f"step {kept.step}."
        )
    return of_checkpoint(_whole(inspect_checkpoint(kept.path, kept.step, thorough=False)), notes, average=average)


def _whole(found: CheckpointStatus) -> Checkpoint:
    if found.checkpoint is None or found.problem is not None:
        raise CheckpointError(str(found.problem))
    return found.checkpoint


def of_checkpoint(checkpoint: Checkpoint, notes: list[str] | None = None, *, average: bool = False) -> WeightSource:
    """The weights of a checkpoint, or their average; what is not trained has none, and is taken as it is."""
    manifest, files = checkpoint.manifest, OpenFiles(checkpoint)
    base = {
        key: manifest["base"][name] for key, name in manifest["state_dict"].items() if name in manifest.get("base", {})
    }
    stored = {key: f"model/{name}" for key, name in manifest["state_dict"].items() if key not in base}
    if average:
        averages = {key: f"optimizer/{name}/{AVERAGE}" for key, name in manifest["state_dict"].items()}
        found = {key: name for key, name in averages.items() if name in manifest["tensors"]}
        if not found:
            raise CheckpointError(
                f"the checkpoint of step {checkpoint.step} has no average: its run had no --ema, and no --swa-start at "
                "or before that step."
            )
        stored |= found
    entries = [
        Entry(key, dtype_of(checkpoint, name), tuple(manifest["tensors"][name]["shape"]))
        for key, name in stored.items()
    ]
    notes = notes if notes is not None else []
    if manifest.get("finite") is False:
        notes.append(f"the loss or the gradient norm of step {checkpoint.step} was not finite.")
    if manifest["computed"]:
        notes.append(
            f"{', '.join(manifest['computed'][:3])}: the module computes this for its state dict; it is not in a "
            "checkpoint and is left out."
        )
    return WeightSource(
        f"the {'average in the ' if average else ''}checkpoint of step {checkpoint.step}",
        checkpoint.step,
        entries,
        lambda key: read_whole(checkpoint, stored[key], files),
        stored | {key: f"base/{manifest['state_dict'][key]}" for key in base},
        notes,
        manifest.get("adapters"),
        base,
    )


def of_file(path: Path, notes: list[str] | None = None) -> WeightSource:
    file = TensorFile(path)

    def read(key: str) -> Tensor:
        with file.open(key) as value:
            return value.clone()

    step = file.metadata.get("step", "")
    adapters = parse_json(file.metadata["adapters"].encode()) if "adapters" in file.metadata else None
    if adapters is not None and not is_adapters(adapters):
        raise CheckpointError(f"{path} is damaged: its adapters are invalid.")
    return WeightSource(
        f"the weights of the run's end, {path.name}",
        int(step) if re.fullmatch("[0-9]{1,15}", step) else None,
        [Entry(key, *file.dtype_and_shape(key)) for key in file.keys()],  # noqa: SIM118
        read,
        notes=notes if notes is not None else [],
        adapters=adapters,
    )


def export(source: WeightSource, output: Path, *, shard_bytes: int | None = None, force: bool = False) -> list[Path]:
    """Write the weights. Returns the files, an index last. Existing files are replaced only with `force`."""
    check_output(output, shard_bytes=shard_bytes, force=force)
    pickled = output.suffix in PICKLED
    raw = [entry.key for entry in source.entries if entry.dtype == torch.complex128]
    if raw and not pickled:
        raise ConfigError(f"safetensors has no complex128, the type of {raw[0]}. Use {output.with_suffix('.pt')}.")
    shards = [source.entries] if pickled else into_shards(source.entries, shard_bytes or DEFAULT_SHARD_BYTES)
    files = [output.with_name(name) for name in _names(output, len(shards))]
    _refuse_to_replace(files, force)
    index = _index_of(output)
    replaced = {output, *_files_of(index)}
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:  # renamed only after all are written: no mix of old and new shards
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
        why = error.strerror if isinstance(error, OSError) else str(error).partition("\n")[0]
        if is_full(error):
            why = f"{why}; {room(source.num_bytes, free_bytes(output))}"
        raise CheckpointError(f"{output} could not be written: {why}.") from error
    return files


def into_shards(entries: list[Entry], most: int) -> list[list[Entry]]:
    """Fill shards up to `most` bytes in the module's order; a larger tensor gets a shard of its own."""
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
    """Parse 5GB, 500MB, 2GiB or a number of bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text, re.IGNORECASE)
    unit = match.group(2).upper() if match else None
    size = int(float(match.group(1)) * _UNITS[unit]) if match and unit in _UNITS else 0
    if size < 1:
        raise ConfigError(f"{text!r} is not a size. Sizes are like 5GB, 500MB or 2GiB.")
    return size


def check_output(output: Path, *, shard_bytes: int | None, force: bool) -> None:
    """Refuse an invalid output before a checkpoint is read."""
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
        raise ConfigError(f"{there} exists. Use another name, or --force to replace it.")


def _index_of(output: Path) -> Path:
    return output.with_name(f"{output.name}.index.json")


def _names(output: Path, count: int) -> list[str]:
    if count == 1:
        return [output.name]
    return [f"{output.stem}-{n:05d}-of-{count:05d}{output.suffix}" for n in range(1, count + 1)]


def _once(source: WeightSource, key: str, values: dict[str, Tensor]) -> Tensor:
    """Read a tied tensor once, so that torch.save keeps it tied."""
    name = source.same.get(key, key)
    if name not in values:
        values[name] = source.read(key)
    return values[name]


def _files_of(index: Path) -> list[Path]:
    """The files of an earlier export. They are removed too, or shards that the new export lacks would be left over."""
    try:
        names = set(read_json(index, _MAX_INDEX)["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
    stem = re.escape(index.name.removesuffix(".safetensors.index.json"))
    own = re.compile(rf"{stem}-\d{{5}}-of-\d{{5}}\.safetensors")
    return [*(index.with_name(name) for name in names if isinstance(name, str) and own.fullmatch(name)), index]
