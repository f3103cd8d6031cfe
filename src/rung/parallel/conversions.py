"""Calls of `module.to(...)` in a forward that is traced, as routers have them to compute in a type of their own."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from rung.errors import ModelError
from rung.parallel.trace_errors import user_line


@contextmanager
def conversions_in_forward() -> Iterator[None]:
    """Let a module that already is what it is converted to stay as it is: torch would exchange its parameters for
    themselves, which it cannot with fake ones. Refuse other conversions."""
    plain = nn.Module.to

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if tensor.is_floating_point() and (made := tensor.to(*args, **kwargs)) is not tensor:
                raise ModelError(
                    f"{user_line(traceback.extract_stack())}\n"
                    f"forward converts {type(module).__name__}.{name} from {_kind(tensor)} to {_kind(made)}, and the "
                    "optimizer and other ranks have it as it was. Convert a copy (F.linear(x, weight.to(...))), train "
                    "in the type that the model asks for, or use a strategy that leaves the model whole, as ddp does."
                )
        return module

    setattr(nn.Module, "to", to)  # noqa: B010  # mypy knows no such assignment
    try:
        yield
    finally:
        setattr(nn.Module, "to", plain)  # noqa: B010


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device.type}"
