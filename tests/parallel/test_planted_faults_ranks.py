"""Faults that sharing sequences and experts could have, planted: the comparison with one process shows each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rung.parallel.context import blocks
from rung.parallel.experts import dispatch
from rung.spec.config import RunConfig
from rung.spec.task import Task
from tests import expert_models
from tests.harness import on_ranks
from tests.parallel.context.test_context_ranks import decoder_task
from tests.parity import Outcome, by_hand, largest_difference, with_rung

CONFIG = RunConfig(batch_size=8, steps=2, precision="fp64", device="cpu")


def angles_of_the_local_length() -> None:
    """Every rank turns its queries and keys as if its positions were the first of the sequence."""
    cut = blocks.ContextParallel._part

    def part(self: Any, name: str, plan: Any, positions: Any, key: Any, tensor: torch.Tensor) -> torch.Tensor:
        own = cut(self, name, plan, positions, key, tensor)
        dim = plan.cut.dims.get(key)
        return own if dim is None or tensor.requires_grad else tensor.narrow(dim, 0, own.shape[dim])

    blocks.ContextParallel._part = part  # type: ignore[method-assign]


def results_beside_the_targets_of_others() -> None:
    """Parts are put together one position off."""
    put_together = blocks.whole_positions
    blocks.whole_positions = lambda tensor, dim, *args: put_together(tensor, dim, *args).roll(1, dim)


def a_lost_row() -> None:
    """One of the rows that came to a rank's experts does not go back."""
    bring_back = dispatch._Sent.bring_back

    def without_the_last(self: Any, result: torch.Tensor) -> torch.Tensor:
        return bring_back(self, torch.cat([result[:-1], torch.zeros_like(result[-1:])]))

    dispatch._Sent.bring_back = without_the_last  # type: ignore[method-assign]


def _spoilt(plant: Callable[[], None] | None, make_task: Callable[[], Task], strategy: str) -> Outcome:
    if plant is not None:
        plant()
    return with_rung(make_task, strategy, CONFIG)


@pytest.mark.parametrize(
    ("plant", "make_task", "strategy"),
    [
        (angles_of_the_local_length, decoder_task, "cp2"),
        (results_beside_the_targets_of_others, decoder_task, "cp2"),
        (a_lost_row, expert_models.padded_mixture_task, "ep2"),
    ],
)
def test_a_planted_fault_is_seen(plant: Callable[[], None], make_task: Callable[[], Task], strategy: str) -> None:
    expected = by_hand(make_task(), CONFIG)
    whole, spoilt = (on_ranks(_spoilt, 2, one, make_task, strategy)[0] for one in (None, plant))
    assert largest_difference(expected, whole) < 1e-9
    assert largest_difference(expected, spoilt) > 1e-5
