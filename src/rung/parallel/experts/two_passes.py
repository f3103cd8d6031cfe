"""Run a module that calls the experts of a list one by one, so that all of them are computed at once, anywhere.

The module's own code runs twice. In the first pass each expert keeps the rows that it is called with and returns zeros;
then the rows of all experts are computed; in the second pass each returns its results. So the module may choose rows,
skip experts without any, and combine results in any way, as long as no expert's rows depend on another one's results.
Gradients take the same way: those of results from the second pass, those of rows through the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rung.distributed import fake_world
from rung.distributed.torch_private import tree_flatten, tree_unflatten, version
from rung.errors import ModelError
from rung.parallel.forward_trace import tensors_of
from rung.parallel.module_state import ModuleState

Key = int | str  # the place or the name of an argument


@dataclass(frozen=True)
class ListCall:
    """How the experts of a list are called."""

    name: str  # of the list
    caller: str  # the module whose forward calls them
    num_experts: int
    rows: Key  # the argument with rows of hidden values; the others are the same in all calls
    others: tuple[tuple[Key, Any], ...]
    widths: tuple[int, int]  # of a row, and of its result
    dtypes: tuple[torch.dtype, torch.dtype]

    def rows_of(self, number: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """The rows of one call, as the trace has shown them to be."""
        given: dict[Key, Any] = dict([*enumerate(args), *kwargs.items()])
        rows = given.pop(self.rows, None)
        if not isinstance(rows, Tensor) or tuple(given.items()) != self.others:
            raise ModelError(f"{self.name}.{number} is called with other arguments than the trace of the model showed.")
        if rows.shape[-1] != self.widths[0] or rows.dtype != self.dtypes[0]:
            raise ModelError(
                f"{self.name}.{number} is called with rows of {rows.shape[-1]} numbers in {rows.dtype}, where the "
                f"trace of the model had {self.widths[0]} in {self.dtypes[0]}."
            )
        return rows

    def compute(self, expert: Callable[..., Tensor], rows: Tensor) -> Tensor:
        """The results of rows of one expert."""
        given: dict[Key, Any] = {**dict(self.others), self.rows: rows}
        places = sorted(key for key in given if isinstance(key, int))
        named = {key: value for key, value in given.items() if isinstance(key, str)}
        return expert(*(given[place] for place in places), **named)


@dataclass
class Recorded:
    """One call of an expert in the first pass."""

    call: ListCall
    number: int
    rows: Tensor
    version: int


# From the calls of the first pass to their results, and a tensor on which the output must depend.
Compute = Callable[[list[Recorded]], tuple[list[Tensor], Tensor | None]]


class TwoPasses:
    """Stands in for the forward of a module and of the experts of the lists that it calls."""

    def __init__(self, caller: nn.Module) -> None:
        self.caller = caller
        self._lists: dict[ListCall, tuple[nn.Module, Compute]] = {}
        self._recorded: list[Recorded] | None = None
        self._results: Iterator[tuple[Recorded, Tensor]] | None = None
        self._is_computing = self._is_installed = False

    def add(self, experts: nn.Module, call: ListCall, compute: Compute) -> None:
        """Take on a list. Before `install`."""
        self._lists[call] = experts, compute

    def install(self) -> None:
        """Exchange the modules' forward in place, once."""
        if self._is_installed:
            return
        self._is_installed = True
        for call, (experts, _) in self._lists.items():
            for number, expert in enumerate(experts.children()):
                expert.forward = self._stand_in(call, number, expert.forward)
        self.caller.forward = torch.compiler.disable(self._around(self.caller.forward))  # type: ignore[no-untyped-call]

    @property
    def is_recording(self) -> bool:
        """Whether this is the first pass, in which experts are called as the module's own code calls them."""
        return self._recorded is not None

    @contextmanager
    def computing(self) -> Iterator[None]:
        """While inside, experts compute what they are called with."""
        self._is_computing = True
        try:
            yield
        finally:
            self._is_computing = False

    def _stand_in(self, call: ListCall, number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._is_computing:
                return forward(*args, **kwargs)
            rows = call.rows_of(number, args, kwargs)
            if self._recorded is not None:
                self._recorded.append(Recorded(call, number, rows, version(rows)))
                return rows.new_zeros((*rows.shape[:-1], call.widths[1]), dtype=call.dtypes[1])
            if self._results is None:
                raise ModelError(
                    f"{call.name}.{number} is called outside of {call.caller or 'the model'}, which alone knows on "
                    "which rank it is. Call it there."
                )
            earlier, result = next(self._results, (None, rows))
            if earlier is None or (earlier.call, earlier.number) != (call, number) or earlier.rows.shape != rows.shape:
                raise ModelError(
                    f"the rows of {call.name}.{number} depend on what the experts have computed, so that they cannot "
                    "be sent to another rank together."
                )
            return result.view(*rows.shape[:-1], call.widths[1])

        return run

    def _around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        caller = next(iter(self._lists)).caller or "the model"
        lists = nn.ModuleList([experts for experts, _ in self._lists.values()])

        def run(*args: Any, **kwargs: Any) -> Any:
            generators = _Generators(args, kwargs)
            state = ModuleState(self.caller, besides=lists)
            given = [(tensor, version(tensor)) for tensor in tensors_of((args, kwargs))]
            recorded: list[Recorded] = []
            self._recorded = recorded
            try:
                forward(*args, **kwargs)
            finally:
                self._recorded = None
            state.restore()
            if any(version(tensor) != before for tensor, before in given) or any(
                version(one.rows) != one.version for one in recorded
            ):
                raise ModelError(
                    f"{caller} changes its arguments, or the rows of its experts, in place. "
                    "It is run twice where ranks share out its experts, so that it must leave them as they are."
                )
            results, last = self._compute_all(recorded)
            after = generators.begin_again()
            self._results = pairs = iter(zip(recorded, results, strict=True))
            try:
                output = forward(*args, **kwargs)
            finally:
                self._results = None
            if next(pairs, None) is not None:
                names = " and ".join(call.name for call in self._lists)
                raise ModelError(f"which of {names} are called depends on what the experts have computed.")
            after()
            for one in last:
                output = depend_on(output, one)
            return output

        return run

    def _compute_all(self, recorded: list[Recorded]) -> tuple[list[Tensor], list[Tensor]]:
        """The results of all calls in their order, and what the output must depend on."""
        results: dict[int, Tensor] = {}
        last: list[Tensor] = []
        for call, (_, compute) in self._lists.items():
            own = [place for place, one in enumerate(recorded) if one.call == call]
            found, joined = compute([recorded[place] for place in own])
            results |= dict(zip(own, found, strict=True))
            last += [joined] if joined is not None and joined.requires_grad else []
        return [results[place] for place in range(len(recorded))], last


class _Generators:
    """Lets the second pass draw the random numbers of the first, and what follows others than the experts drew."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        tensors = tensors_of((args, kwargs))
        self._is_on = not any(map(fake_world.is_fake, tensors))
        self._device = next((t.device for t in tensors if t.device.type == "cuda"), None)
        self._states = self._get()

    def _get(self) -> tuple[Tensor, Tensor | None] | None:
        if not self._is_on:
            return None
        return torch.get_rng_state(), None if self._device is None else torch.cuda.get_rng_state(self._device)

    def _set(self, states: tuple[Tensor, Tensor | None] | None) -> None:
        if states is not None:
            torch.set_rng_state(states[0])
            if states[1] is not None and self._device is not None:
                torch.cuda.set_rng_state(states[1], self._device)

    def begin_again(self) -> Callable[[], None]:
        """Go back to the beginning; the returned call goes on from here."""
        now = self._get()
        self._set(self._states)
        return lambda: self._set(now)


def depend_on(output: Any, last: Tensor) -> Any:
    """The output, of which every tensor with a gradient reaches `last` in backward, with a gradient of 0: a rank that
    called no expert takes part in its messages all the same."""
    leaves, structure = tree_flatten(output)
    floating = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    for place in floating:
        if place == floating[0] or leaves[place].requires_grad:
            leaves[place] = _Joined.apply(leaves[place], last)  # type: ignore[no-untyped-call]
    return tree_unflatten(leaves, structure)


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, last: Tensor) -> Tensor:
        # A saved tensor that is made after all messages of forward: a recomputation of activations ends with the last
        # saved tensor, which otherwise could be an earlier one on some ranks.
        ctx.save_for_backward(last[:0])
        ctx.shape, ctx.dtype = last.shape, last.dtype
        return output.clone()  # FSDP wants no view

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, gradient.new_zeros(ctx.shape, dtype=ctx.dtype)
