"""Which experts are shared out, and which cannot be: decided on random numbers, before any rank trains."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rung.distributed.world import open_fake_world
from rung.errors import ModelError, StrategyError
from rung.parallel import ParallelModel
from rung.runtime import build_runtime
from rung.spec.config import RunConfig
from rung.spec.strategy import expert_axes, fit, parse, required_num_ranks
from tests.tasks import Experts, Mixture, TinyGPT, text_task


def shared_out(model: Callable[[], nn.Module], strategy: str = "ep2", num_ranks: int = 2) -> ParallelModel:
    with open_fake_world(parse(strategy, num_ranks)) as world:
        config = RunConfig(batch_size=8, device="cpu")
        return build_runtime(text_task(model=model), world, config, total_steps=1).parallel


def with_experts(kind: Callable[[int], nn.Module], num_experts: int = 8) -> nn.Module:
    model = Mixture(num_experts)
    for block in model.blocks:
        block.experts = kind(num_experts)
    return model


class Mixing(Experts):
    """A row sees the others."""

    def forward(self, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return super().forward(rows - rows.mean(0), chosen, weights)


class Sharing(Experts):
    """An expert sees the weights of the others."""

    def forward(self, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return super().forward(rows, chosen, weights) + rows @ self.up.mean(0) @ self.down.mean(0)


class Squaring(Experts):
    """The results of a row's experts meet in more than a sum."""

    def forward(self, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return super().forward(rows, chosen, weights).square()


class Failing(Experts):
    """Runs only on as many rows as there were when the model was traced."""

    def forward(self, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return super().forward(rows.view(-1, 6, 12).flatten(0, 1), chosen, weights)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Mixing, "its result is not the sum over parts"),
        (Sharing, "its result is not the sum over parts"),
        (Squaring, "its result is not the sum over parts"),
        (Failing, "it fails on random numbers"),
    ],
)
def test_experts_that_are_no_sum_over_rows_are_refused(kind: type[Experts], message: str) -> None:
    with pytest.raises(ModelError, match=message) as error:
        shared_out(partial(with_experts, kind))
    assert "blocks.*.experts" in str(error.value)


class Called(nn.Module):
    """Calls its experts in other ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.token = nn.Embedding(23, 12)
        self.router = nn.Linear(12, 8)
        self.experts = Otherwise(8)

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.token(tokens).flatten(0, 1)
        weights, chosen = self.router(rows).softmax(-1).topk(2, dim=-1)
        arguments: dict[str, tuple[Any, ...]] = {
            "nested": ([rows], chosen, weights),
            "without numbers": (rows, weights, weights),
            "more": (rows, chosen, weights, rows),
            "other rows": (rows[:-1], chosen, weights),
            "pair": (rows, chosen, weights, "pair"),
        }
        found = self.experts(*arguments[self.how])
        return torch.zeros(*tokens.shape, 23) + found.mean()


class Otherwise(Experts):
    def forward(self, rows: Any, *others: Any) -> Any:
        return self.up.sum() + (rows[0] if isinstance(rows, list) else rows).sum()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("nested", "called with tensors inside of other arguments"),
        ("without numbers", "not called with one tensor that has the numbers of the experts"),
        ("more", "not called with rows of hidden values, the numbers of their experts and weights for these alone"),
        ("other rows", "numbers of experts for other rows"),
        ("pair", "not a tensor with a row for each row"),
    ],
)
def test_experts_that_are_called_otherwise_are_refused(how: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        shared_out(partial(Called, how))


def test_every_rank_has_an_expert() -> None:
    with pytest.raises(ModelError, match="its 6 experts, 2 on a rank, leave none for the last of 4 ranks"):
        shared_out(lambda: Mixture(6), "ep4", 4)


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(23, 12)
        self.experts = nn.ModuleList([nn.Linear(12, 23) for _ in range(4)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        return torch.stack([expert(x) for expert in self.experts]).mean(0)


def test_experts_in_a_list_are_shared_out() -> None:
    found = shared_out(Listed).notes
    assert "expert parallel: 1 layer with 4 experts shared out among 2 ranks: experts" in found


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(ModelError, match="finds none in this model"):
        shared_out(TinyGPT)


def test_what_is_shared_out_is_said() -> None:
    found = shared_out(lambda: Mixture(8), "fsdp4,ep2", 4)
    said = "expert parallel: 2 layers with 8 experts shared out among 2 ranks: blocks.*.experts"
    assert said in found.notes


def test_experts_are_counted_in_the_data_axis() -> None:
    layout = parse("fsdp4,ep2", 4)
    assert (layout.num_ranks, layout.num_data_ranks, layout.ep, layout.name) == (4, 4, 2, "fsdp4,ep2")
    assert expert_axes(layout) == {"pp": 1, "expert_replicate": 1, "expert_shard": 2, "ep": 2, "tp": 1}
    assert parse("ep4", 4) == parse("ep", 4)
    assert required_num_ranks("pp2,fsdp4,ep2") == 8
    assert fit("fsdp,ep2", 5)[0].num_ranks == 4
    with pytest.raises(StrategyError, match="whose 3 ranks cannot be divided in groups of 2"):
        parse("ddp3,ep2", 3)
    with pytest.raises(StrategyError, match="ep needs a size beside ddp4, as in 'ep2'"):
        parse("ddp4,ep", 4)


class Uneven(Experts):
    """One parameter has rows for more than the experts."""

    def __init__(self, num_experts: int) -> None:
        super().__init__(num_experts)
        self.up = nn.Parameter(torch.randn(num_experts + 2, 12, 10))


class Scaled(Experts):
    """Results are multiplied by a number of each expert, or of all."""

    def __init__(self, num_experts: int, shape: tuple[int, ...]) -> None:
        super().__init__(num_experts)
        self.scale = nn.Parameter(torch.rand(shape))

    def forward(self, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        scale = self.scale[chosen] if self.scale.dim() else self.scale
        return super().forward(rows, chosen, weights * scale)


class Clamping(Experts):
    """A constant is a buffer."""

    def __init__(self, num_experts: int) -> None:
        super().__init__(num_experts)
        self.register_buffer("limit", torch.tensor(7.0))


class Normed(Experts):
    """Experts share a norm."""

    def __init__(self, num_experts: int) -> None:
        super().__init__(num_experts)
        self.norm = nn.LayerNorm(12)


def test_experts_with_one_number_each_are_shared_out() -> None:
    found = shared_out(lambda: with_experts(lambda count: Scaled(count, (count,))))
    assert "8 experts shared out among 2 ranks: blocks.*.experts" in found.notes[0]


class Named(nn.ModuleDict):
    """Experts by name."""

    def __init__(self, num_experts: int) -> None:
        super().__init__({f"expert_{number}": nn.Linear(12, 12) for number in range(num_experts)})

    def forward(self, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        found = torch.stack([expert(rows) for expert in self.values()], 1)
        return (found.gather(1, chosen.unsqueeze(-1).expand(-1, -1, 12)) * weights.unsqueeze(-1)).sum(1)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Uneven, r"its parameters have not all one row for each expert \(rows: 8, 10\)"),
        (lambda count: Scaled(count, ()), r"its parameters have not all one row for each expert \(rows: 1, 8\)"),
        (Clamping, r"it has buffers \(limit\)"),
        (Normed, "it has parameters in a module of its own, norm, which"),
        (Named, "it is a ModuleDict"),
    ],
)
def test_experts_of_another_form_are_named(kind: Any, reason: str) -> None:
    with pytest.raises(ModelError, match=rf"blocks\.\*\.experts: {reason}"):
        shared_out(lambda: with_experts(kind))
