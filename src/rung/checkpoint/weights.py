"""What a run leaves behind of the model: whole weights under the module's own names."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from rung.checkpoint.files import Entry, bytes_of, header_of, partial_file, wide_first
from rung.disk import free_bytes, is_full, reason, room
from rung.errors import CheckpointError
from rung.runtime.mesh import MeshRuntime


def save_weights(runtime: MeshRuntime, path: Path, *, step: int | None = None) -> None:
    """Write a safetensors file that loads with strict=True into the bare module.

    All ranks take part, because sharded tensors are gathered one by one; the main one writes each before the next
    comes, so it needs room for one. Tied weights are written under each of their names. Where the disk does not take
    the file, all ranks raise the same CheckpointError, and what was there before stays.
    """
    world, weights = runtime.world, runtime.named_weights()
    error = None
    if world.is_main:
        state = runtime.model.state_dict().items()
        entries = wide_first([Entry(k, v.dtype, tuple(v.shape)) for k, v in state if isinstance(v, Tensor)])
        try:
            _write(path, entries, weights, {} if step is None else {"step": str(step)})
        except OSError as problem:
            error = f"{path} could not be written: {reason(problem)}"
            if is_full(problem):
                needed = sum(entry.num_bytes for entry in entries)
                error += f"; {room(needed, free_bytes(path), quota=problem.errno == errno.EDQUOT)}"
    for _ in weights:  # of the main rank, what was left when it failed: the others take part in every gather
        pass
    error = world.gather_objects(error)[0]
    if error is not None:
        raise CheckpointError(f"{error}.")


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
                file.seek(places.pop(name))
                if tensor.numel() > 0:
                    file.write(bytes_of(tensor).numpy().data)
            file.flush()
            os.fsync(file.fileno())  # a disk that fills may say so only now
        assert not places, "named_weights goes through the state dict"
