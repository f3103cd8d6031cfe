"""Whether a step draws random numbers, dropout aside."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from rung.spec.config import RunConfig
from rung.train.first_step import draws_random_numbers
from tests.tasks import TinyGPT, text_task


class Noisy(TinyGPT):
    """Draws numbers that change the result, or hardly ever."""

    bar = 0.5

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = super().forward(tokens)
        return found * (torch.rand(()) < self.bar)


class SeldomNoisy(Noisy):
    bar = 1.0


@pytest.mark.parametrize(
    ("model", "depends", "draws"), [(TinyGPT, False, False), (Noisy, True, True), (SeldomNoisy, False, True)]
)
def test_numbers_that_are_drawn_and_seldom_used_are_noticed(
    model: Callable[[], nn.Module], depends: bool, draws: bool
) -> None:
    config = RunConfig(batch_size=8, precision="fp64", device="cpu")
    task = text_task(model=model)
    assert draws_random_numbers(task, config) == depends
    assert draws_random_numbers(task, config, of_any_use=True) == draws
