"""What a run leaves behind of the model: whole weights under the module's own names."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from rung.checkpoint.files import Entry, bytes_of, header_of, partial_file, wide_first
from rung.runtime.mesh import MeshRuntime


def save_weights(runtime: MeshRuntime, path: Path, *, step: int | None = None) -> None:
    """Write a safetensors file that loads with strict=True into the bare module.

    All ranks take part, because sharded tensors are gathered one by one; the main one writes each before the next
    comes, so it needs room for one. Tied weights are written under each of their names.
    """
    if not runtime.world.is_main:
        for _ in runtime.named_weights():
            pass
        return
    state = runtime.model.state_dict().items()
    entries = wide_first([Entry(k, v.dtype, tuple(v.shape)) for k, v in state if isinstance(v, Tensor)])
    text, _ = header_of(entries, {} if step is None else {"step": str(step)})
    places, start = {}, len(text)
    for entry in entries:
        places[entry.key] = start
        start += entry.num_bytes
    with partial_file(path) as partial:
        with partial.open("wb") as file:
            file.write(text)
            for name, tensor in runtime.named_weights():
                file.seek(places.pop(name))
                if tensor.numel() > 0:
                    file.write(bytes_of(tensor).numpy().data)
        assert not places, "named_weights goes through the state dict"
