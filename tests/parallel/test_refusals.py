"""What cannot be cut is refused before the first step, with the reason; and what looks alike is proven one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rung.distributed.world import open_fake_world
from rung.errors import ModelError, TaskError
from rung.parallel import ParallelModel
from rung.runtime import build_runtime
from rung.spec.config import RunConfig
from rung.spec.strategy import parse
from tests.tasks import text_task

WIDTH, VOCABULARY = 8, 23


class Block(nn.Module):
    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.layer_idx = number
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def middle(self, h: Tensor) -> Tensor:
        return F.gelu(h)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.middle(self.up(self.norm(x))))


class Model(nn.Module):
    kind: type[Block] = Block

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([self.kind(number) for number in range(4)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def spread(model: type[nn.Module], strategy: str, **changes: Any) -> ParallelModel:
    layout = parse(strategy, 2)
    with open_fake_world(layout) as world:
        config = RunConfig(batch_size=8, device="cpu")
        return build_runtime(text_task(model=model, **changes), world, config, total_steps=1).parallel


class Leaking(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.middle(self.up(self.norm(x)))
        self.extra = h.square().mean()
        return x + self.down(h)


class WithExtra(Model):
    """A loss of the blocks' own, handed over by an attribute."""

    kind = Leaking

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + sum(block.extra for block in self.blocks)


class Counting(Model):
    count = 0

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, tokens: Tensor) -> Tensor:
        output = super().forward(tokens)
        self.count += 1
        return output


class Remembering(Model):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class SharedNorm(Model):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.BatchNorm1d(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for block in self.blocks:
            x = self.shared(block(x).transpose(1, 2)).transpose(1, 2)
        return self.head(x)


class OneMask(Model):
    """One random mask for all blocks, drawn outside of them."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        mask = torch.rand_like(x)
        for block in self.blocks:
            x = block(x * mask)
        return self.head(x)


class Changing(Block):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(1.2)
        return super().forward(x)


class ChangedSkip(Model):
    kind = Changing

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        first = x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = block(x)
        return self.head(x + first)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (WithExtra, r"test_refusals\.py:\d+: .*extra[\s\S]*did not return\."),
        (Counting, "forward changes count"),
        (Remembering, "changes the buffer mean outside of its parts"),
        (SharedNorm, r"changes the buffer shared\.num_batches_tracked in several stages"),
        (OneMask, "draws random numbers outside of its parts"),
        (ChangedSkip, r"blocks\.1 changes the result of blocks\.0 in place"),
    ],
)
def test_a_pipeline_refuses_what_it_cannot_hand_on(model: type[nn.Module], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        spread(model, "pp2")


class ByNumber(Block):
    def middle(self, h: Tensor) -> Tensor:
        return h.softmax(-1) if self.layer_idx % 2 else F.gelu(h)


class ByMode(Block):
    def middle(self, h: Tensor) -> Tensor:
        return h - h.mean(-1, keepdim=True) if self.training else F.gelu(h)


class UnlikeByNumber(Model):
    kind = ByNumber


class UnlikeInTraining(Model):
    kind = ByMode


class Observed(Model):
    """A hook looks at what is between the two layers of a pair."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks[:2]:
            block.up.register_forward_hook(lambda module, inputs, output: None)


@pytest.mark.parametrize(
    ("model", "paired"),
    [
        (Model, [0, 1, 2, 3]),
        (UnlikeByNumber, [0, 2]),
        (UnlikeInTraining, []),
        (WithExtra, []),  # what leaves a block by an attribute must be whole
        (Observed, [2, 3]),  # and what a hook of the model sees
    ],
)
def test_only_blocks_that_were_tried_are_cut_in_pairs(model: type[nn.Module], paired: list[int]) -> None:
    plan = spread(model, "tp2").plan
    assert plan is not None
    found = [number for number in range(4) if plan.styles[f"blocks.{number}.down"] == "rowwise"]
    assert found == paired


class Renorming(Model):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH, max_norm=1.0)


def test_a_given_plan_cannot_cut_an_embedding_that_looks_at_all_of_its_rows() -> None:
    with pytest.raises(TaskError, match="token is a Embedding and cannot be embedding, as it is"):
        spread(Renorming, "tp2", tensor_parallel={"token": "embedding"})


def test_a_given_plan_that_is_wrong_is_the_task_s_mistake() -> None:
    with pytest.raises(TaskError, match="the tensor plan is wrong"):
        spread(Model, "tp2", tensor_parallel={"blocks.*.up": "rowwise", "blocks.*.down": "colwise"})
