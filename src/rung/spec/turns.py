"""Several losses of one task that take turns within a step, as a GAN's: `loss = {"critic": ..., "generator": ...}`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rung.errors import TaskError


class Turns:
    """Called as a task's `loss`, it calls the loss whose turn it is. A runtime sets `current`."""

    def __init__(self, losses: Mapping[str, Callable[..., Any]]) -> None:
        self.losses = dict(losses)
        self.current = next(iter(self.losses))

    def __call__(self, output: Any, target: Any, log: Callable[..., None]) -> Any:
        loss = self.losses[self.current]
        value = loss(output, target, log=log) if "log" in inspect.signature(loss).parameters else loss(output, target)
        if getattr(value, "ndim", None) == 0:  # else the runtime says what is wrong with it
            log(f"{self.current} loss", value)
        return value

    def told_forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A task's `forward` that is given whose turn it is, if it takes an argument `turn`."""
        signature = inspect.signature(forward)
        turn = signature.parameters.get("turn")
        if turn is None or turn.default is not turn.empty:  # one with a default is a setting
            return forward

        @functools.wraps(forward)
        def told(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, turn=self.current, **kwargs)

        left = [parameter for parameter in signature.parameters.values() if parameter is not turn]
        told.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return told


def make_turns(losses: Mapping[Any, Any], where: str) -> Turns:
    """Check a dict of losses."""
    if len(losses) < 2:
        raise TaskError(
            f"{where}: a dict of losses has two or more, which take turns. Give one as loss(output, target)."
        )
    for name, loss in losses.items():
        if not isinstance(name, str) or not name or not callable(loss):
            raise TaskError(
                f"{where}: a dict of losses has names and functions, called as loss(output, target), but {name!r} is "
                f"{loss!r:.60}."
            )
    return Turns(losses)


def turns_of(loss: Callable[..., Any]) -> Turns | None:
    """The losses that take turns in a task's `loss`; None if it has one."""
    while isinstance(loss, functools.partial):
        loss = loss.func
    return loss if isinstance(loss, Turns) else None
