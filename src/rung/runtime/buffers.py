"""Buffers that forward may change: which of them are this rank's own affair, and which it did change."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rung.parallel.materialize import is_absent


def buffers_besides(model: nn.Module, norms: list[Any]) -> list[tuple[str, Tensor]]:
    """All that are here but those of the given batch norms, which are equal on all ranks."""
    synchronised = {id(buffer) for norm in norms for buffer in norm.buffers()}
    own = [(name, buffer) for name, buffer in model.named_buffers() if not is_absent(buffer)]
    return [(name, buffer) for name, buffer in own if id(buffer) not in synchronised]


def note_of_changes(
    model: nn.Module, buffers: list[tuple[str, Tensor]], versions: list[int], who: str = "rank"
) -> list[str]:
    """A note for the user, where forward changed buffers since they had these versions. Of a local batch norm it is
    known and needs no word."""
    changed = [name for (name, b), version in zip(buffers, versions, strict=True) if b._version != version]
    others = [name for name in changed if not isinstance(_owner(model, name), nn.modules.batchnorm._BatchNorm)]
    if not others:
        return []
    return [
        f"forward changes {', '.join(others[:4])}{' ...' if len(others) > 4 else ''}: "
        f"each {who} does so from its own samples; {who} 0's values are kept"
    ]


def _owner(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])
