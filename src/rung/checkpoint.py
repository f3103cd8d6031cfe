"""What a run leaves behind of the model: whole weights under the module's own names."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor


def save_weights(named_weights: Iterable[tuple[str, Tensor]], path: Path, *, is_main: bool) -> None:
    """Write a safetensors file that loads with strict=True into the bare module.

    All ranks take part, because sharded tensors are gathered one by one; the main one writes. Tied weights are written
    under each of their names.
    """
    collected: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in named_weights:
        if is_main:
            shared = tensor.untyped_storage().data_ptr() in seen
            seen.add(tensor.untyped_storage().data_ptr())
            collected[name] = tensor.clone() if shared else tensor.contiguous()
    if is_main:
        from safetensors.torch import save_file

        partial = path.with_suffix(".partial")
        save_file(collected, str(partial), metadata={"format": "pt"})
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(partial, 0o666 & ~mask)  # safetensors writes for the owner alone
        os.replace(partial, path)
