"""The full weights at the end of a run, under the module's own names."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from rung.checkpoint.files import Entry, bytes_of, header_of, partial_file, wide_first
from rung.errors import CheckpointError
from rung.parallel.adapters import describe_adapters
from rung.runtime.base import Runtime
from rung.system.disk import free_bytes, is_full, reason, room

_COMPLEX128 = "complex128"  # the key of the file's metadata that lists names of that type


def save_weights(runtime: Runtime, path: Path, *, step: int | None = None) -> None:
    """Write a safetensors file that loads with strict=True into the bare module.

    Collective: sharded tensors are gathered one by one, and the main rank writes each before the next, so that it needs
    memory for one. Tied weights are written under each of their names. If writing fails, all ranks raise the same
    CheckpointError, and an older file stays.
    """
    world, weights = runtime.world, runtime.named_weights()
    error = None
    if world.is_main:
        state = runtime.model.state_dict().items()
        entries = wide_first([Entry(k, v.dtype, tuple(v.shape)) for k, v in state if isinstance(v, Tensor)])
        try:
            metadata = {} if step is None else {"step": str(step)}
            if (adapters := describe_adapters(runtime.model)) is not None:
                metadata["adapters"] = json.dumps(adapters)
            if raw := [entry.key for entry in entries if entry.dtype == torch.complex128]:
                metadata[_COMPLEX128] = json.dumps(raw)
            _write(path, entries, weights, metadata)
        except OSError as problem:
            error = f"{path} could not be written: {reason(problem)}"
            if is_full(problem):
                needed = sum(entry.num_bytes for entry in entries)
                error += f"; {room(needed, free_bytes(path), quota=problem.errno == errno.EDQUOT)}"
    for _ in weights:  # after an error on the main rank: the others still wait in the remaining gathers
        pass
    error = world.gather_objects(error)[0]
    if error is not None:
        raise CheckpointError(f"{error}.")


def load_weights(path: Path) -> dict[str, Tensor]:
    """Load a file of `save_weights`. It has complex128, which safetensors lacks, as bytes, listed in its metadata."""
    with safe_open(path, framework="pt") as file:
        raw = json.loads((file.metadata() or {}).get(_COMPLEX128, "[]"))
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors | {name: tensors[name].view(torch.complex128).squeeze(-1) for name in raw}


def _write(path: Path, entries: list[Entry], weights: Iterator[tuple[str, Tensor]], metadata: dict[str, str]) -> None:
    text, _ = header_of(entries, metadata)
    places, start = {}, len(text)
    for entry in entries:
        places[entry.key] = start
        start += entry.num_bytes
    with partial_file(path) as partial:
        with partial.open("wb") as file:
            file.write(text)
            for name, tensor in weights:
                file.seek(places.pop(name))  # weights come in the module's order, the file has wide types first
                if tensor.numel() > 0:
                    file.write(bytes_of(tensor).numpy().data)
            file.flush()
            os.fsync(file.fileno())  # a full disk may be reported only now
        assert not places, "named_weights goes through the state dict"
