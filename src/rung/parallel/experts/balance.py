"""Load-balancing losses of transformers' models, over the whole micro-batch of all ranks.

Such a loss is a product of means over all rows, which is no mean of what each rank has of its own rows. In the forward
of the model, transformers' function for it is therefore given the router's logits of the rows of all data ranks.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rung.distributed.collectives import gather_flat
from rung.distributed.world import World
from rung.parallel.collectives import exchange

_NAME = "load_balancing_loss_func"


class WholeBatchBalance:
    """Gathers the rows that the function sees."""

    def __init__(self, world: World) -> None:
        self.counted = True  # the runtime sets it to False while a stand-in sample passes
        self._world = world
        self._group = world.data_group

    def apply(self, model: nn.Module) -> bool:
        """Wrap the model's forward; False if no module of it is of a class from a file with such a function."""
        files = {one.__module__ for module in model.modules() for one in type(module).__mro__}
        modules = [module for name in sorted(files) if (module := sys.modules.get(name)) and _is_known(module)]
        if modules:
            functions = [getattr(module, _NAME) for module in modules]
            model.forward = _exchanged(
                model.forward, modules, functions, [self._over_all_ranks(function) for function in functions]
            )
        return bool(modules)

    def _over_all_ranks(self, function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            logits, mask = given.arguments["gate_logits"], given.arguments.get("attention_mask")
            if isinstance(logits, tuple):
                counts = self._counts(len(logits[0]))
                given.arguments["gate_logits"] = tuple(self._gather(rows, counts) for rows in logits)
                if mask is not None:
                    given.arguments["attention_mask"] = self._gather(mask.reshape(-1), counts).unsqueeze(0)
            return function(*given.args, **given.kwargs)

        run_eagerly: Callable[..., Any] = torch.compiler.disable(run)  # type: ignore[no-untyped-call]
        return run_eagerly

    def _counts(self, num_rows: int) -> list[int]:
        """The numbers of rows of all ranks, 0 for a stand-in sample."""
        own = num_rows if self.counted else 0
        if not self._world.tensors.has_values:
            return [own] * dist.get_world_size(self._group)
        counts = gather_flat(torch.tensor([own], device=self._world.device), self._group)
        found: list[int] = counts.flatten().tolist()
        return found

    def _gather(self, rows: Tensor, counts: list[int]) -> Tensor:
        """The rows of all ranks; backward sums the gradients of all ranks."""
        sent = rows if self.counted else rows[:0]
        copies = sent.repeat(len(counts), *[1] * (rows.dim() - 1))
        return exchange(copies, self._group, [len(sent)] * len(counts), counts)


def _is_known(module: Any) -> bool:
    return getattr(getattr(module, _NAME, None), "__module__", "").startswith("transformers.")


def _exchanged(
    forward: Callable[..., Any], modules: list[Any], functions: list[Any], others: list[Any]
) -> Callable[..., Any]:
    """`forward`, during which other functions stand in the place of some modules' own."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        for module, other in zip(modules, others, strict=True):
            setattr(module, _NAME, other)
        try:
            return forward(*args, **kwargs)
        finally:
            for module, function in zip(modules, functions, strict=True):
                setattr(module, _NAME, function)

    # Of the code that compiled models run, only this frame is not compiled.
    wrapped: Callable[..., Any] = torch.compiler.disable(run, recursive=False)  # type: ignore[no-untyped-call]
    return wrapped
