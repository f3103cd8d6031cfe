"""The turns of a step: one for each of a task's losses, in which the parameters of one optimizer are trained.

Most tasks have one loss, and one turn without a name. With several, the parameters of all other optimizers are frozen
meanwhile: their gradients are neither computed nor sent, and the graph ends where nothing before it is trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rung.errors import TaskError
from rung.parallel.combined_optimizer import CombinedOptimizer, members_of
from rung.spec.config import RunConfig
from rung.spec.task import Task
from rung.spec.turns import turns_of


class StepTurns:
    """Takes the turns of a step one after the other."""

    def __init__(
        self,
        task: Task,
        config: RunConfig,
        optimizer: Optimizer,
        groups: Sequence[list[str]],
        trainable: Sequence[tuple[str, nn.Parameter]],
    ) -> None:
        """`groups` has the names of the parameters in each group of the optimizer."""
        self._turns, self._optimizer, self._trainable = turns_of(task.loss), optimizer, trainable
        self.names: list[str | None] = [None] if self._turns is None else list(self._turns.losses)
        self.current: str | None = self.names[0]
        self._own: dict[str | None, set[str]] = {}
        if self._turns is None:
            return
        members, rest = members_of(optimizer), iter(groups)
        for name, member in members.items():
            self._own[name] = {parameter for _ in member.param_groups for parameter in next(rest)}
        if set(members) != set(self.names):
            raise TaskError(
                f"{task.name}: the losses {', '.join(map(repr, self.names))} take turns, each with the optimizer of "
                f"its name, but optimizer(model) returned {', '.join(map(repr, members))}. Return a dict with a key "
                "for each loss."
            )
        if config.compress != "none" or config.local_steps > 1:
            raise TaskError(
                f"{task.name}: losses that take turns are not possible with --compress or --local-steps, which "
                "exchange all parameters together. Leave them out."
            )

    @property
    def are_several(self) -> bool:
        return self._turns is not None

    @property
    def is_last(self) -> bool:
        return self.current == self.names[-1]

    def take(self, name: str | None) -> AbstractContextManager[None]:
        """While open, it is the turn of the loss `name`."""
        return self._taken(name) if self._turns is not None else nullcontext()

    @contextmanager
    def _taken(self, name: str | None) -> Iterator[None]:
        assert self._turns is not None
        assert isinstance(self._optimizer, CombinedOptimizer)
        others = [parameter for own, parameter in self._trainable if own not in self._own[name]]
        for parameter in others:
            parameter.requires_grad_(False)
        self.current = self._turns.current = self._optimizer.turn = name  # type: ignore[assignment]
        try:
            yield
        finally:
            self._optimizer.turn = None
            for parameter in others:
                parameter.requires_grad_(True)


def total_of(losses: Sequence[Tensor]) -> Tensor:
    """The loss of a step: the sum over its turns."""
    return losses[0] if len(losses) == 1 else torch.stack(list(losses)).sum()


def norm_of(norms: Sequence[Tensor | None]) -> Tensor | None:
    """The norm over the gradients of all turns."""
    found = [norm for norm in norms if norm is not None]
    if len(found) < 2:
        return found[0] if found else None
    return torch.stack(found).square().sum().sqrt()
