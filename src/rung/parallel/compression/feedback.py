"""Error feedback: the part of a gradient that a message leaves out is added to the next one.

Momentum applied after compression multiplies its errors: by ten, at 0.9. So if the task's optimizer is SGD with
momentum, each rank applies momentum to its own gradients, and the resulting weight update is compressed instead: each
error is made once and corrected by the feedback.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from rung.distributed.world import World
from rung.parallel.compression.base import GradientExchange, Slots


class ErrorFeedback(GradientExchange):
    """Keeps the residual, and SGD's momentum if it takes that over. `_exchange` puts their new values into `_next`.

    A gradient is scaled by the learning rate of its own step, so a schedule does not change the residual.
    """

    def __init__(self, slots: Slots, world: World, optimizer: Optimizer, **common: Any) -> None:
        super().__init__(slots, world, **common)
        self.takes_momentum = has_momentum(optimizer)
        self._optimizer = optimizer
        self._residual = slots.zeros()
        self._velocity = slots.zeros() if self.takes_momentum else None
        self._next: tuple[Tensor, Tensor | None] = (self._residual, self._velocity)

    def _accumulated(self, gradient: Tensor, used: list[bool] | None) -> tuple[Tensor, Tensor | None]:
        """The residual plus this step's gradient or update, and the velocity. Unused parameters stay unchanged."""
        if self._velocity is None:
            return self._residual + gradient, None
        velocity, residual = self._velocity.clone(), self._residual.clone()
        # Not kept: loading a checkpoint replaces the groups, and the schedule changes the new ones.
        groups = {id(p): group for group in self._optimizer.param_groups for p in group["params"]}
        rows = zip(
            self.slots.parameters,
            self.slots.views(gradient),
            self.slots.views(velocity),
            self.slots.views(residual),
            used or [True] * len(self.slots.sizes),
            strict=True,
        )
        for parameter, own, own_velocity, own_residual, flag in rows:
            if not flag:
                continue
            group = groups.get(id(parameter))
            if group is None:
                continue  # it has a gradient, but the optimizer does not update it
            momentum = float(group["momentum"])
            begun = self._optimizer.state.get(parameter, {}).get("momentum_buffer") is not None
            # As in torch.optim.SGD, dampening starts with the second step.
            own_velocity.mul_(momentum).add_(own, alpha=1.0 - float(group["dampening"]) if begun and momentum else 1.0)
            change = own.add(own_velocity, alpha=momentum) if group["nesterov"] else own_velocity
            own_residual.add_(change, alpha=float(group["lr"]) * (1.0 if group["maximize"] else -1.0))
        return residual, velocity

    def commit(self) -> None:
        super().commit()
        self._residual, self._velocity = self._next

    def apply(self, step: Callable[[], None]) -> None:
        """Run the optimizer's step; if momentum was taken over, add the exchanged update to the weights.

        In that case the step runs on zero gradients: it applies weight decay and the momentum that it had before, which
        are equal on all ranks. SGD is linear, so the sum of the two is an SGD step.
        """
        if not self.takes_momentum:
            step()
            return
        changes = [(p, p.grad) for p in self.slots.parameters if p.grad is not None]
        for parameter, change in changes:
            parameter.grad = torch.zeros_like(change)
        step()
        for parameter, change in changes:
            parameter.detach().add_(change)

    def vectors(self) -> dict[str, Tensor]:
        # With momentum the residual is a weight update, not a gradient, so a checkpoint must not mix them up.
        if self._velocity is None:
            return {"gradient": self._residual}
        return {"update": self._residual, "velocity": self._velocity}


def has_momentum(optimizer: Optimizer) -> bool:
    """Whether an optimizer is SGD with momentum, which is linear and so can be applied before the exchange."""
    return type(optimizer) is torch.optim.SGD and any(group["momentum"] != 0 for group in optimizer.param_groups)
