"""Buffers that forward may change: which of them ranks do not synchronise, and which it changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from rung.distributed.torch_private import BatchNorm, buffers_of, version
from rung.errors import ModelError
from rung.parallel.materialize import is_absent

Versions = dict[str, tuple[Tensor, int]]  # by name: a buffer, and its version


class OwnBuffers:
    """This rank's buffers but those of synchronised batch norms, which are equal on all ranks.

    They are looked up by name whenever they are needed, since a forward may also replace one or create it.
    """

    def __init__(self, model: nn.Module, norms: list[Any]) -> None:
        self._model = model
        self._places = [
            (f"{path}.{key}".lstrip("."), buffers_of(module), key)
            for path, module in model.named_modules()
            if not any(module is norm for norm in norms)
            for key in buffers_of(module)
        ]

    def named(self) -> list[tuple[str, Tensor]]:
        found = [(name, buffers[key]) for name, buffers, key in self._places]
        return [(name, buffer) for name, buffer in found if buffer is not None and not is_absent(buffer)]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Puts back what the computation inside changes; a buffer that it creates stays, as all ranks have it then."""
        before = [(buffers, key, buffer) for _, buffers, key in self._places if (buffer := buffers[key]) is not None]
        saved = [(*row, row[2].clone()) for row in before if not is_absent(row[2])]
        yield
        for buffers, key, buffer, value in saved:
            buffer.data.copy_(value)
            buffers[key] = buffer

    def versions(self) -> Versions:
        return {name: (buffer, version(buffer)) for name, buffer in self.named()}

    def change_notes(self, before: Versions, holder: str = "rank") -> list[str]:
        """A note for the user if forward changed or replaced buffers since then, except those of local batch norms,
        which are expected to change."""
        changed = [name for name, found in self.versions().items() if not _is_same(found, before.get(name))]
        others = [name for name in changed if not isinstance(_owner(self._model, name), BatchNorm)]
        if not others:
            return []
        return [
            f"forward changes {', '.join(others[:4])}{' ...' if len(others) > 4 else ''}: "
            f"each {holder} does so from its own samples; {holder} 0's values are kept"
        ]

    def refuse_created(self, before: Versions) -> None:
        """Raise if forward created a buffer, where only some ranks run the module: the others cannot save it."""
        created = [name for name, _ in self.named() if name not in before]
        if created:
            raise ModelError(
                f"forward creates the buffer {created[0]}, which was None. Ranks that do not run its module do not "
                "have it. Register it with a tensor of its shape, or use a strategy without stages and servers."
            )


def _is_same(found: tuple[Tensor, int], before: tuple[Tensor, int] | None) -> bool:
    return before is not None and found[0] is before[0] and found[1] == before[1]


def _owner(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])
