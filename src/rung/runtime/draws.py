"""Random numbers that replicas draw in threads: each from a stream of its own, so that they repeat from run to run.

torch has one generator for the CPU, and threads that draw from it at once share its numbers as the moment has it. A
function that draws therefore runs alone, with the state of its replica's stream in the generator's place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from rung.errors import ModelError
from rung.generators import Marks
from rung.order import mix
from rung.parallel.activation import Around

_NAMES = (
    "dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "alpha_dropout_", "feature_dropout",
    "feature_alpha_dropout", "native_dropout", "rrelu", "rrelu_", "gumbel_softmax", "rand", "rand_like", "randn",
    "randn_like", "randint", "randint_like", "randperm", "bernoulli", "bernoulli_", "multinomial", "normal", "normal_",
    "poisson", "uniform_", "random_", "exponential_", "geometric_", "cauchy_", "log_normal_",
)  # fmt: skip
_DRAWING = frozenset(getattr(home, name) for home in (torch, F, Tensor) for name in _NAMES if hasattr(home, name))
# Where the probability stands in functions that compute much, and draw only if it is above zero.
_PROBABILITIES = {F.scaled_dot_product_attention: 4, F.multi_head_attention_forward: 10}


class Stream(TorchFunctionMode):
    """The random numbers of one replica, while active in its thread."""

    def __init__(self, alone: Lock, inside: Around) -> None:
        super().__init__()
        self._alone, self._inside = alone, inside
        self._state = torch.get_rng_state()
        self.has_drawn = False

    def seed(self, seed: int) -> None:
        self._state = torch.Generator().manual_seed(seed).get_state()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _PROBABILITIES:
            place = _PROBABILITIES[func]
            draws = kwargs.get("dropout_p", args[place] if len(args) > place else 0.0) > 0.0
        else:
            draws = func in _DRAWING
        if not draws:
            return func(*args, **kwargs)
        with self._alone:
            outside = torch.get_rng_state()
            torch.set_rng_state(self._state)
            try:
                return func(*args, **kwargs)
            finally:
                after = torch.get_rng_state()
                # Compared without an operation of torch, which selective checkpointing would count among the block's.
                self.has_drawn = self.has_drawn or after.numpy().tobytes() != self._state.numpy().tobytes()
                self._state = after
                torch.set_rng_state(outside)

    def again(self) -> AbstractContextManager[None]:
        """The numbers from here on once more: for what is computed again in backward, where no mode is active."""
        return self._from(self._state)

    @contextmanager
    def _from(self, state: Tensor) -> Iterator[None]:
        present, self._state = self._state, state
        try:
            with self, self._inside():
                yield
        finally:
            self._state = present


class Streams:
    """A stream for each replica. To follow every call costs something, so that ends if the first step drew nothing."""

    def __init__(self, num_replicas: int, *, recomputes: bool, inside: Around = nullcontext) -> None:
        """`inside` makes what is to be active within a stream when something is computed again."""
        alone = Lock()
        self.each = [Stream(alone, inside) for _ in range(num_replicas)]
        self._recomputes = recomputes
        self._follows = True
        self.notes: list[str] = []

    def of(self, number: int) -> AbstractContextManager[Any]:
        return self.each[number] if self._follows else nullcontext()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the forward of all replicas, which draws its seeds from the process's generator."""
        seed = int(torch.randint(2**62, ()))
        for number, stream in enumerate(self.each):
            stream.seed(mix(seed, number))
        before = Marks()
        yield
        shared = not before.hold()
        if shared and self._recomputes:
            raise ModelError(
                "forward draws random numbers outside of torch's dropouts and random functions. Under dp threads share "
                "those, so that activation checkpointing cannot draw them again. Leave the checkpointing out, or use "
                "ddp."
            )
        if shared and not self.notes:
            self.notes.append(
                "dp: forward draws random numbers that threads share as the moment has it; they do not repeat from run "
                "to run"
            )
        self._follows = self._recomputes or shared or any(stream.has_drawn for stream in self.each)
