"""What is counted of experts, and what is not, where it could not be told truly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rung.distributed.world import open_world
from rung.parallel.experts.rows import RowCounter
from rung.spec.expert_rows import end_words, read_layers
from rung.spec.strategy import parse
from tests.tasks import Experts

ROWS = torch.randn(6, 12, generator=torch.Generator().manual_seed(1))


def count(model: nn.Module, *args: Any) -> dict[str, dict[str, Any]]:
    with open_world(parse("single", 1), device="cpu") as world:
        counter = RowCounter(model, world)
        counter.install(model, {})
        counter.is_wanted = counter.is_open = True
        model(*args)
        found = counter.take()
        return found.named(found.counts.tolist()) if found is not None else {}


class Layer(nn.Module):
    """Calls its experts with what a test gives."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, *args: Tensor) -> Tensor:
        found: Tensor = self.experts(*args)
        return found


def test_choices_of_weight_0_are_dropped() -> None:
    chosen = torch.tensor([[0, 1], [1, 2], [1, 2], [0, 1], [1, 0], [1, 2]])
    weights = torch.full((6, 2), 0.5)
    weights[4:] = 0.0
    assert count(Layer(Experts(3)), ROWS, chosen, weights) == {
        "experts": {"rows": [3, 6, 3], "choices": 12, "dropped": 4}
    }


class Passing(Experts):
    """Choices of number `num_experts` and more, or less than 0, get nothing."""

    def forward(self, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        is_known = (chosen >= 0) & (chosen < len(self.up))
        return super().forward(rows, chosen.where(is_known, 0), weights.where(is_known, 0.0))


def test_choices_of_no_expert_are_dropped() -> None:
    chosen = torch.tensor([[0, 3], [1, -1], [1, 2], [0, 1], [1, 0], [1, 2]])
    assert count(Layer(Passing(3)), ROWS, chosen, torch.full((6, 2), 0.5)) == {
        "experts": {"rows": [3, 5, 2], "choices": 12, "dropped": 2}
    }


class Exponential(Experts):
    """A weight of 0 is a weight like others."""

    def forward(self, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return super().forward(rows, chosen, weights.exp())


def test_a_weight_of_0_that_does_not_multiply_drops_nothing() -> None:
    found = count(Layer(Exponential(3)), ROWS, torch.zeros(6, 2, dtype=torch.int64), torch.zeros(6, 2))
    assert found == {"experts": {"rows": [12, 0, 0], "choices": 12, "dropped": 0}}


class Masked(Experts):
    """Called with a mask of whole numbers, which look like numbers of experts."""

    def forward(self, rows: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
        every = torch.arange(len(self.up)).expand(len(rows), -1)
        return super().forward(rows, every, mask * weights)


def test_a_mask_is_not_taken_for_numbers() -> None:
    mask = F.one_hot(torch.tensor([0, 1, 2, 2, 2, 1]), 3)
    assert count(Layer(Masked(3)), ROWS, mask, torch.ones(6, 3)) == {}


class Capacity(nn.Module):
    """Each expert has two places for the rows of a sequence, whose choice is given; rows beyond are dropped."""

    def __init__(self, name: str = "experts") -> None:
        super().__init__()
        self.name = name
        self.add_module(name, nn.ModuleList([nn.Linear(12, 12) for _ in range(3)]))

    def forward(self, x: Tensor) -> Tensor:
        onehot = F.one_hot(torch.tensor([0, 0, 0, 0, 1, 1]), 3)
        place = (onehot.cumsum(0) * onehot).sum(-1) - 1
        taken = F.one_hot(place.clamp(max=1), 2) * (place < 2).unsqueeze(-1)
        dispatch = (onehot.unsqueeze(-1) * taken.unsqueeze(1)).to(x)
        rows = torch.einsum("tec,btd->ebcd", dispatch, x)
        found = torch.stack([expert(rows[number]) for number, expert in enumerate(getattr(self, self.name))])
        return torch.einsum("tec,ebcd->btd", dispatch, found)


def test_empty_places_of_a_list_are_no_rows() -> None:
    """Of 12 rows 8 get a place; the third expert's places are empty."""
    found = count(nn.Sequential(Capacity()), torch.stack([ROWS, ROWS]))
    assert found == {"0.experts": {"rows": [4, 4, 0], "empty": 4, "rows_in": 12}}
    assert read_layers(found)[0].lost() == "0.67 experts a row, 33 % of places empty"


def test_a_list_of_layers_is_no_list_of_experts() -> None:
    """Without a trace only its name tells."""
    model = nn.Sequential(Capacity("layers"))
    model[0].add_module("gate", nn.Linear(12, 3))
    assert count(model, ROWS.unsqueeze(0)) == {}


@pytest.mark.parametrize("raw", [None, [], {"a": 1}, {"a": {"rows": [1, -1]}}, {"a": {"rows": []}}, {"a": {"rows": 3}}])
def test_damaged_counts_are_left_out(raw: Any) -> None:
    assert read_layers(raw) == []


def test_the_line_at_the_end_names_the_worst_layers() -> None:
    layers = read_layers(
        {
            "even": {"rows": [5, 5], "choices": 20, "dropped": 10},
            "uneven": {"rows": [9, 1], "choices": 10, "dropped": 0},
        }
    )
    assert end_words(layers) == (
        "rows of experts: busiest 90 %, least 10 % in uneven, the most uneven of 2 layers; "
        "50 % of choices dropped in even"
    )
    assert end_words([]) == ""
