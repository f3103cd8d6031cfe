"""What is cut among ranks, and which blocks cannot be: decided on random numbers, before any rank trains."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rung.distributed.world import open_fake_world
from rung.errors import ModelError
from rung.parallel.context.positions import RankPositions
from rung.runtime import build_runtime
from rung.spec.config import RunConfig
from rung.spec.strategy import parse
from tests.parallel.context.test_context_ranks import VOCABULARY, WIDTH, Decoder, Grouped, task_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 16, 33])
def test_parts_put_together_are_the_whole(length: int, num_ranks: int) -> None:
    whole = torch.arange(100, 100 + length)
    ranks = [RankPositions(length, num_ranks, rank, CPU) for rank in range(num_ranks)]
    parts = torch.cat([whole[one.own] for one in ranks])
    assert torch.equal(parts[ranks[0].order], whole)
    assert torch.equal(whole[ranks[0].everyone], parts)
    assert {len(one.own) for one in ranks} == {ranks[0].each}
    assert ranks[0].each != length, "sizes tell a part from the whole"


def test_causal_work_is_shared_evenly() -> None:
    """A position sees as many keys as there are before it."""
    ranks = [RankPositions(64, 4, rank, CPU) for rank in range(4)]
    assert len({int((one.own + 1).sum()) for one in ranks}) == 1


class Faulty(Grouped):
    """A block that a part of the positions would change without a word."""

    def __init__(self, spoil: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.spoil = spoil

    def forward(self, x: Tensor, angles: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(self.spoil(x), angles, mask)


def positions_by_length(x: Tensor) -> Tensor:
    return x + torch.arange(x.shape[1], dtype=x.dtype).unsqueeze(-1) * 0.1


def shifted_by_one(x: Tensor) -> Tensor:
    return x + x.roll(1, dims=1)


def centred(x: Tensor) -> Tensor:
    return x - x.mean(1, keepdim=True)


def convolved(x: Tensor) -> Tensor:
    return F.avg_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2)


class ByHand(Grouped):
    """Attention that nothing can see: products and a softmax."""

    def forward(self, x: Tensor, angles: Tensor, mask: Tensor | None = None) -> Tensor:
        weights = (self.query(x) @ self.query(x).transpose(1, 2)).softmax(-1)
        return x + self.out(weights @ x)


class Keeping(Grouped):
    """Hands a loss of its own on by an attribute."""

    kept: Any = None

    def forward(self, x: Tensor, angles: Tensor, mask: Tensor | None = None) -> Tensor:
        self.kept = self.norm(x).square().mean()
        return super().forward(x, angles, mask)


class WithKept(Decoder):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + sum(block.kept for block in self.blocks)


def build(make_block: Callable[[], nn.Module], model: Callable[[], Decoder] = Decoder, strategy: str = "cp2") -> Any:
    def made() -> nn.Module:
        found = model()
        found.blocks = nn.ModuleList([make_block() for _ in range(2)])
        return found

    with open_fake_world(parse(strategy, 2)) as world:
        return build_runtime(task_of(made), world, RunConfig(batch_size=4, steps=1)).notes


def test_the_notes_say_what_is_cut() -> None:
    (note,) = [note for note in build(Grouped) if note.startswith("context parallel")]
    assert note.endswith("2 blocks on 1/2 of the positions; sequences are put together after the last of them")


@pytest.mark.parametrize("spoil", [positions_by_length, shifted_by_one, centred, convolved])
def test_blocks_that_depend_on_where_positions_are_are_refused(spoil: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(ModelError, match=r"blocks\.0 cannot run on a part of the positions: (the queries|code in it)"):
        build(lambda: Faulty(spoil))


def test_attention_by_hand_is_refused() -> None:
    with pytest.raises(ModelError, match=r"calls F\.scaled_dot_product_attention, and it does not"):
        build(ByHand)


def test_a_tensor_that_a_block_keeps_is_refused() -> None:
    with pytest.raises(ModelError, match=r"blocks\.0 hands on a tensor that it does not return"):
        build(Keeping, WithKept)


def test_a_model_without_blocks_is_refused() -> None:
    def made() -> nn.Module:
        return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY))

    with open_fake_world(parse("cp2", 2)) as world, pytest.raises(ModelError, match="has no list of them"):
        build_runtime(task_of(made), world, RunConfig(batch_size=4, steps=1))


class OwnMask(Grouped):
    """Makes the mask of packed documents of the numbers that it gets."""

    def forward(self, x: Tensor, angles: Tensor, mask: Tensor | None = None) -> Tensor:
        number = (angles / 3).floor()
        return super().forward(x, angles, (number.unsqueeze(0) == number.unsqueeze(1)).expand(len(x), 1, -1, -1))


class Windowed(Grouped):
    """Takes another way for more positions than a window has."""

    def forward(self, x: Tensor, angles: Tensor, mask: Tensor | None = None) -> Tensor:
        near = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril().triu(-10) if x.shape[1] > 12 else None
        return super().forward(x, angles, near)


class Numbered(Grouped):
    """Does something else in every second layer, by its number."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx

    def forward(self, x: Tensor, angles: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x.roll(self.layer_idx % 2, dims=1), angles, mask)


class Pooled(Grouped):
    """A few queries of its own ask the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(8, WIDTH))

    def forward(self, x: Tensor, angles: Tensor, mask: Tensor | None = None) -> Tensor:
        latents = self.latents.expand(len(x), 1, -1, -1)
        found = F.scaled_dot_product_attention(latents, self.norm(x).unsqueeze(1), x.unsqueeze(1))
        return super().forward(x + found.mean(2), angles, mask)


class Normed(Grouped):
    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, angles: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(self.batch_norm(x.transpose(1, 2)).transpose(1, 2), angles, mask)


@pytest.mark.parametrize(
    ("make_block", "reason"),
    [
        (OwnMask, "makes the mask of its attention, of the positions that it has"),
        (Windowed, "called in another way, or another number of times"),
        (partial(map(Numbered, range(9)).__next__), r"blocks\.1 cannot run on a part"),
        (Normed, "has a batch norm"),
        (Pooled, "queries that are no positions"),
    ],
)
def test_what_only_looks_right_is_refused(make_block: Callable[[], nn.Module], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        build(make_block)
