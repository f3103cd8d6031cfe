"""An average of the weights, as torch.optim.swa_utils computes it: exponential (`--ema`) or equal (`--swa-start`).

It lies in the optimizer's state of each parameter, under a key of its own: so it is sharded as that is, is part of
checkpoints, and goes to any other layout. Each rank averages what it updates, and nothing is sent until the average is
put in the weights' place: for an evaluation, or to save it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from rung.parallel.combined_optimizer import parameters_of, stepped_parameters
from rung.parallel.gather import local_part
from rung.runtime.base import AVERAGE
from rung.runtime.context import RuntimeContext

_UPDATES = "updates"  # the key of the number of updates, which checkpoints keep


def averages_of(context: RuntimeContext, share: Callable[[], None]) -> WeightAverage | None:
    config = context.config
    if config.ema is not None:
        return WeightAverage(context, share, decay=config.ema, every=config.ema_every)
    return WeightAverage(context, share, start=config.swa_start) if config.swa_start is not None else None


class WeightAverage:
    """Averages the weights after each update of the optimizer, and puts the average in their place for a while."""

    def __init__(
        self,
        context: RuntimeContext,
        share: Callable[[], None],
        *,
        decay: float | None = None,
        start: int = 1,
        every: int = 1,
    ) -> None:
        """With `decay` an exponential average, else an equal one; of the weights after the update `start` and after
        each `every`-th later one. `share` gives what this rank's optimizer holds to the ranks that compute with it
        (`Runtime.share_weights`)."""
        self._optimizer, self._share, self._world = context.optimizer, share, context.world
        held = {id(parameter) for parameter in parameters_of(self._optimizer)}
        self._from_others = [parameter for parameter in context.parameters if id(parameter) not in held]
        self._combine: Any = get_swa_multi_avg_fn() if decay is None else get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        self._start, self._every = start, every
        self._counts = decay is None or every > 1
        self._updates = 0
        self._done: dict[int, int] = {}  # updates so far, by the first of the parameters that a step is for
        self._kept: dict[Tensor, Tensor] = {}  # while the optimizer steps
        self._optimizer.register_step_pre_hook(self._put_aside)
        self._optimizer.register_step_post_hook(self._follow)

    def _put_aside(self, *_: Any) -> None:
        """Some optimizers take a parameter for new if its state is empty.

        A parameter that never had a gradient has no state, and is its own average until now.
        """
        parameters, state = stepped_parameters(self._optimizer), self._optimizer.state
        # A rank all of whose parameters get their first gradient late has no state yet that says how often.
        turn = id(parameters[0]) if parameters else 0
        saved = max((state.get(p, {}).pop(_UPDATES, 0) for p in parameters), default=0)
        self._updates = self._done[turn] = 1 + max(saved, self._done.get(turn, 0))
        for parameter in parameters:
            if AVERAGE in state.get(parameter, {}):
                self._kept[parameter] = state[parameter].pop(AVERAGE)
        if self._kept or self._updates > self._start:  # this is not the first step, whose result the average is
            for parameter in parameters:
                if parameter.grad is not None and parameter not in self._kept:
                    self._kept[parameter] = parameter.detach().clone()

    @torch.no_grad()
    def _follow(self, *_: Any) -> None:
        parameters = stepped_parameters(self._optimizer)
        known = [parameter for parameter in parameters if parameter in self._kept]
        if known and (self._updates - self._start) % self._every == 0:
            averages = [local_part(self._kept[parameter]) for parameter in known]
            # An equal average needs to know of how many weights it is one.
            self._combine(averages, [local_part(p.detach()) for p in known], self._updates - self._start)
        elif not known and (self._updates >= self._start or not self._counts):
            self._kept = {p: p.detach().clone() for p in parameters if p.grad is not None}
        for parameter, average in self._kept.items():
            self._optimizer.state[parameter][AVERAGE] = average
        if self._counts:
            for parameter in parameters:
                if parameter.grad is not None or self._optimizer.state.get(parameter):
                    self._optimizer.state[parameter][_UPDATES] = self._updates
        self._kept.clear()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While inside, the model has the average for its weights. All ranks enter and leave together.

        An error may end it on one rank alone. So each rank puts back its own weights by itself.
        """
        kept = [parameter.detach().clone() for parameter in self._from_others]
        self._swap()
        try:
            self._share()
            yield
        finally:
            self._swap()
            with torch.no_grad():
                for parameter, value in zip(self._from_others, kept, strict=True):
                    parameter.copy_(value)
        self._world.barrier()  # trainers go on when all servers have their own weights again

    @torch.no_grad()
    def _swap(self) -> None:
        for parameter in parameters_of(self._optimizer):
            average = self._optimizer.state.get(parameter, {}).get(AVERAGE)
            if average is not None:
                own, other = local_part(parameter.detach()), local_part(average)
                kept = own.clone()
                own.copy_(other)
                other.copy_(kept)
