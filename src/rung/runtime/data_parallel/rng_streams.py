"""One stream of random numbers per replica thread, so that runs repeat.

torch has one CPU generator; threads that draw from it concurrently get its numbers in an order that varies. A function
that draws therefore runs under a lock, with the state of its replica's stream in the generator.
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

from rung.data.permutation import mix
from rung.data.rng import GeneratorMarks
from rung.errors import ModelError
from rung.parallel.activation import Around

_NAMES = (
    "dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "alpha_dropout_", "feature_dropout",
    "feature_alpha_dropout", "native_dropout", "rrelu", "rrelu_", "gumbel_softmax", "rand", "rand_like", "randn",
    "randn_like", "randint", "randint_like", "randperm", "bernoulli", "bernoulli_", "multinomial", "normal", "normal_",
    "poisson", "uniform_", "random_", "exponential_", "geometric_", "cauchy_", "log_normal_",
)  # fmt: skip
_DRAWING = frozenset(getattr(home, name) for home in (torch, F, Tensor) for name in _NAMES if hasattr(home, name))
# Functions that draw only with a dropout probability above zero (and its argument's position): too costly to serialise
# otherwise.
_PROBABILITIES = {F.scaled_dot_product_attention: 4, F.multi_head_attention_forward: 10}


class RngStream(TorchFunctionMode):
    """The random numbers of one replica, while this mode is active in its thread."""

    def __init__(self, lock: Lock, inside: Around) -> None:
        super().__init__()
        self._lock, self._inside = lock, inside
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
        with self._lock:
            outside = torch.get_rng_state()
            torch.set_rng_state(self._state)
            try:
                return func(*args, **kwargs)
            finally:
                after = torch.get_rng_state()
                # Compared without a torch operation: selective checkpointing would count it among the block's.
                self.has_drawn = self.has_drawn or after.numpy().tobytes() != self._state.numpy().tobytes()
                self._state = after
                torch.set_rng_state(outside)

    def again(self) -> AbstractContextManager[None]:
        """A context that repeats the numbers from here on: for recomputation in backward, where no mode is active."""
        return self._from(self._state)

    @contextmanager
    def _from(self, state: Tensor) -> Iterator[None]:
        present, self._state = self._state, state
        try:
            with self, self._inside():
                yield
        finally:
            self._state = present


class RngStreams:
    """A stream for each replica. The mode costs time on every call, so it is dropped if the first step drew nothing."""

    def __init__(self, num_replicas: int, *, recomputes: bool, inside: Around = nullcontext) -> None:
        """`inside` is entered within a stream during recomputation."""
        lock = Lock()
        self.each = [RngStream(lock, inside) for _ in range(num_replicas)]
        self._recomputes = recomputes
        self._follows = True
        self.notes: list[str] = []

    def of(self, number: int) -> AbstractContextManager[Any]:
        return self.each[number] if self._follows else nullcontext()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Wraps the forward of all replicas; seeds the streams from the process's generator."""
        seed = int(torch.randint(2**62, ()))
        for number, stream in enumerate(self.each):
            stream.seed(mix(seed, number))
        before = GeneratorMarks()
        yield
        shared = not before.hold()
        if shared and self._recomputes:
            raise ModelError(
                "forward draws random numbers outside of torch's dropouts and random functions. Under dp threads share "
                "those, so that activation checkpointing cannot repeat them. Set activation_checkpointing to none, or "
                "use ddp."
            )
        if shared and not self.notes:
            self.notes.append(
                "dp: forward draws random numbers that threads share in varying order; they do not repeat from run to "
                "run"
            )
        self._follows = self._recomputes or shared or any(stream.has_drawn for stream in self.each)
