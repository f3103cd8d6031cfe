"""Buffers that forward may change: which of them ranks do not synchronise, and which it changed."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rung.distributed.torch_private import BatchNorm, version
from rung.parallel.materialize import is_absent


def buffers_besides(model: nn.Module, norms: list[Any]) -> list[tuple[str, Tensor]]:
    """This rank's buffers, without those of `norms`, which are equal on all ranks."""
    synchronised = {id(buffer) for norm in norms for buffer in norm.buffers()}
    own = [(name, buffer) for name, buffer in model.named_buffers() if not is_absent(buffer)]
    return [(name, buffer) for name, buffer in own if id(buffer) not in synchronised]


def buffer_change_notes(
    model: nn.Module, buffers: list[tuple[str, Tensor]], versions: list[int], holder: str = "rank"
) -> list[str]:
    """A note for the user if forward changed buffers since they had these versions, except those of local batch norms,
    which are expected to change."""
    changed = [name for (name, b), before in zip(buffers, versions, strict=True) if version(b) != before]
    others = [name for name in changed if not isinstance(_owner(model, name), BatchNorm)]
    if not others:
        return []
    return [
        f"forward changes {', '.join(others[:4])}{' ...' if len(others) > 4 else ''}: "
        f"each {holder} does so from its own samples; {holder} 0's values are kept"
    ]


def _owner(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])
