"""Error feedback: what a message leaves out is added to the next. With SGD's momentum taken before, where there is one.

A compressed gradient is a rough one, and momentum added afterwards would multiply its errors: by ten, at 0.9. So where
the task's optimizer is SGD with momentum, each rank keeps the momentum of its own gradients, and the change of the
weights that follows from it is what is compressed: its errors are made once, and made good.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from rung.parallel.compression.base import Exchange, Slots
from rung.world import World


class ErrorFeedback(Exchange):
    """Keeps what was not sent, and the momentum if it takes that over. `_exchange` leaves the new ones in `_next`.

    A gradient counts with the learning rate of its own step, so that a schedule does not change what waits.
    """

    def __init__(self, slots: Slots, world: World, optimizer: Optimizer, **common: Any) -> None:
        super().__init__(slots, world, **common)
        self.takes_momentum = has_momentum(optimizer)
        self._optimizer = optimizer
        self._left = slots.zeros()
        self._velocity = slots.zeros() if self.takes_momentum else None
        self._next: tuple[Tensor, Tensor | None] = (self._left, self._velocity)
        self._groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}

    def _accumulated(self, gradient: Tensor, used: list[bool] | None) -> tuple[Tensor, Tensor | None]:
        """What there is to be sent now, and the velocity. What no rank used stays as it was."""
        if self._velocity is None:
            return self._left + gradient, None
        velocity, left = self._velocity.clone(), self._left.clone()
        rows = zip(
            self.slots.parameters,
            self.slots.views(gradient),
            self.slots.views(velocity),
            self.slots.views(left),
            used or [True] * len(self.slots.sizes),
            strict=True,
        )
        for parameter, own, moving, waiting, flag in rows:
            if not flag:
                continue
            group = self._groups.get(id(parameter))
            if group is None:
                continue  # it has a gradient, but the optimizer was not given it
            momentum = float(group["momentum"])
            begun = self._optimizer.state.get(parameter, {}).get("momentum_buffer") is not None
            moving.mul_(momentum).add_(own, alpha=1.0 - float(group["dampening"]) if begun and momentum else 1.0)
            change = own.add(moving, alpha=momentum) if group["nesterov"] else moving
            waiting.add_(change, alpha=float(group["lr"]) * (1.0 if group["maximize"] else -1.0))
        return left, velocity

    def commit(self) -> None:
        super().commit()
        self._left, self._velocity = self._next

    def apply(self, step: Callable[[], None]) -> None:
        """Where momentum was taken over, what was exchanged is the change of the weights itself.

        The optimizer's own step then runs on gradients of zero: it does what all ranks know anyway, its weight decay
        and whatever momentum it had before, by its own rules. The exchanged change comes on top. The sum is what SGD
        does, because all of that is linear.
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
        # Under other names where momentum is in it: it is then a change of weights that waits, not a gradient.
        if self._velocity is None:
            return {"gradient": self._left}
        return {"update": self._left, "velocity": self._velocity}


def has_momentum(optimizer: Optimizer) -> bool:
    """Whether an optimizer is SGD with momentum, which is linear, so that it can be taken before the exchange."""
    return type(optimizer) is torch.optim.SGD and any(group["momentum"] != 0 for group in optimizer.param_groups)
