"""Context parallelism gives the numbers of one process, whatever attention a model has, and for any length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from rung.spec.compatibility import micro_batch_size
from rung.spec.config import RunConfig
from rung.spec.strategy import parse, required_num_ranks
from rung.spec.task import Task
from tests.checkpoints import legs
from tests.harness import on_ranks
from tests.marks import slow
from tests.parity import by_hand, largest_difference, with_rung, with_rung_traced
from tests.tasks import TASKS, grouped_sgd

WIDTH, VOCABULARY = 16, 23
CONFIG = RunConfig(batch_size=6, steps=3, precision="fp64", clip=0.5, device="cpu")


class Grouped(nn.Module):
    """A block with grouped queries, which gets its positions and a mask from outside."""

    def __init__(self, heads: int = 4, key_heads: int = 2) -> None:
        super().__init__()
        self.heads, self.key_heads, self.each = heads, key_heads, WIDTH // heads
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key, self.value = (nn.Linear(WIDTH, key_heads * self.each) for _ in range(2))
        self.out, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, angles: Tensor, mask: Tensor | None = None) -> Tensor:
        h = self.norm(x) + angles.unsqueeze(-1).sin()
        query = self.query(h).unflatten(-1, (self.heads, self.each)).transpose(1, 2)
        key, value = (
            layer(h).unflatten(-1, (self.key_heads, self.each)).transpose(1, 2) for layer in (self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None, enable_gqa=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """Grouped queries; with `packed`, a batch holds documents that must not see each other."""

    def __init__(self, heads: int = 4, key_heads: int = 2, packed: bool = False) -> None:
        super().__init__()
        self.packed = packed
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Grouped(heads, key_heads) for _ in range(3)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        angles = torch.arange(tokens.shape[1], dtype=x.dtype)
        mask = None
        if self.packed:  # a token 0 begins a document
            document = (tokens == 0).cumsum(1)
            same = document.unsqueeze(1) == document.unsqueeze(2)
            mask = same.tril().unsqueeze(1)
        for block in self.blocks:
            x = block(x, angles, mask=mask) if self.packed else block(x, angles)
        return self.head(x)


class Between(Decoder):
    """Code between the blocks mixes positions."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        angles = torch.arange(tokens.shape[1], dtype=x.dtype)
        for block in self.blocks:
            x = block(x, angles)
            x = x - x.mean(1, keepdim=True)
        return self.head(x)


class Encoder(nn.Module):
    """torch's own layers, with positions first, and padding that no query sees."""

    def __init__(self, batch_first: bool = False) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(64, WIDTH) * 0.1)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 24, dropout=0.0, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position[: tokens.shape[1]]
        x = self.encoder(x if self.batch_first else x.transpose(0, 1), src_key_padding_mask=tokens == 1)
        return self.head(x if self.batch_first else x.transpose(0, 1))


class Recomputing(Decoder):
    """Computes its blocks again in backward by itself."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        angles = torch.arange(tokens.shape[1], dtype=x.dtype)
        for block in self.blocks:
            x = checkpoint(block, x, angles, use_reentrant=True)
        return self.head(x)


class Across(nn.Module):
    """A decoder that attends to an encoder's sequence of another length."""

    def __init__(self, memory: int = 5) -> None:
        super().__init__()
        self.memory = memory
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            [nn.TransformerDecoderLayer(WIDTH, 4, 24, dropout=0.0, batch_first=True) for _ in range(2)]
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        memory = x[:, : self.memory].cumsum(1)
        for layer in self.layers:
            x = layer(x, memory)
        return self.head(x)


def text(length: int, count: int = 19) -> TensorDataset:
    g = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCABULARY, (count, length + 1), generator=g)
    tokens[:, 1] = 2  # so that no row is padding alone
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def task_of(model: Callable[[], nn.Module], length: int = 13) -> Task:
    def shifted(output: Tensor, target: Tensor) -> Tensor:
        """The loss shifts by itself, across every cut."""
        return F.cross_entropy(output[:, :-1].flatten(0, 1), target[:, 1:].flatten(), label_smoothing=0.1)

    base = TASKS["gpt"]()
    return replace(
        base,
        model=model,
        train_data=lambda: text(length),
        eval_data=lambda: text(length, 5),
        loss=shifted,
        metrics=lambda output, target: {"right": (output.argmax(-1) == target).double().mean(1)},
        optimizer=grouped_sgd,
        schedule=None,
        blocks=None,
    )


def decoder_task() -> Task:
    return task_of(Decoder)


def short_task() -> Task:
    """Fewer positions than chunks."""
    return task_of(Decoder, length=3)


def few_heads_task() -> Task:
    """One head, which cannot be shared out: keys and values are gathered."""
    return task_of(lambda: Decoder(heads=1, key_heads=1))


def packed_task() -> Task:
    return task_of(lambda: Decoder(packed=True))


def between_task() -> Task:
    return task_of(Between)


def encoder_task() -> Task:
    return task_of(Encoder)


def across_task() -> Task:
    return task_of(Across)


def across_as_in_proof_task() -> Task:
    """The other sequence has as many positions as the proof of blocks that look alike."""
    return task_of(lambda: Across(memory=9))


def recomputing_task() -> Task:
    return task_of(Recomputing)


def difference(make_task: Callable[[], Task], strategy: str, config: RunConfig) -> float:
    num_ranks = required_num_ranks(strategy)
    assert num_ranks is not None
    layout = parse(strategy, num_ranks)
    own = micro_batch_size(config, layout)
    expected = by_hand(make_task(), config, None if own is None else own * layout.num_data_ranks)
    found = on_ranks(with_rung, num_ranks, make_task, strategy, config)
    assert all(rank.losses == found[0].losses for rank in found)
    return largest_difference(expected, found[0])


@pytest.mark.parametrize(
    ("make_task", "strategy", "settings"),
    [
        (decoder_task, "cp2", {"cp_form": "ulysses"}),
        (decoder_task, "cp4", {"cp_form": "gather", "micro_batch": 2}),
        slow(decoder_task, "cp4", {"cp_form": "ulysses", "micro_batch": 2}),
        (decoder_task, "cp4", {"cp_form": "ring", "micro_batch": 2}),
        slow(decoder_task, "cp2", {"activation_checkpointing": "full", "cp_form": "ring"}),
        slow(short_task, "cp4", {"cp_form": "ring"}),
        slow(few_heads_task, "fsdp2,cp2", {"cp_form": "ring"}),
        slow(across_task, "pp2,cp2", {"cp_form": "ring"}),
        slow(decoder_task, "cp2", {"activation_checkpointing": "full", "cp_form": "gather"}),
        (decoder_task, "cp2", {"activation_checkpointing": "selective"}),
        (short_task, "cp4", {}),
        slow(short_task, "fsdp2,cp2", {"cp_form": "gather"}),
        (few_heads_task, "fsdp2,cp2", {"micro_batch": 1}),
        (packed_task, "cp2", {"cp_form": "gather"}),
        slow(packed_task, "cp4", {}),
        slow(packed_task, "pp2,cp2", {}),
        (between_task, "cp2", {}),
        (encoder_task, "cp2", {}),
        slow(encoder_task, "fsdp2,cp2", {"cp_form": "gather", "activation_checkpointing": "full"}),
        (across_as_in_proof_task, "cp2", {}),
        slow(across_task, "cp2", {}),
        (recomputing_task, "cp2", {"micro_batch": 2}),
        slow(across_task, "pp2,cp2", {}),
    ],
)
def test_matches_one_process(make_task: Callable[[], Task], strategy: str, settings: dict[str, Any]) -> None:
    assert difference(make_task, strategy, replace(CONFIG, **settings)) < 1e-9


@pytest.mark.parametrize("mode", ["full", slow("selective")])
def test_compiled_blocks_compute_again_in_backward(mode: str) -> None:
    chosen = replace(CONFIG, steps=2, activation_checkpointing=mode)
    expected = by_hand(decoder_task(), chosen)
    found = on_ranks(with_rung_traced, 2, decoder_task, "cp2", replace(chosen, compile=True), timeout=600)
    assert largest_difference(expected, found[0]) < 1e-9


@pytest.mark.parametrize("strategy", ["fsdp2,cp2", slow("pp2,cp2"), slow("cp2,tp2")])
def test_loss_weighted_by_tokens(strategy: str) -> None:
    assert difference(TASKS["padded"], strategy, replace(CONFIG, batch_size=25, micro_batch=2)) < 1e-9


def test_checkpoints_know_nothing_of_positions(tmp_path: Path) -> None:
    plan = [("ddp", 2, 1), ("fsdp2,cp2", 4, 2), ("cp2", 2, 3), ("single", 1, 4)]
    config = replace(CONFIG, batch_size=49, steps=4)
    expected = by_hand(TASKS["gpt"](), config)
    losses, state = legs(TASKS["gpt"], config, tmp_path, plan)
    assert losses == pytest.approx(expected.losses, abs=1e-9)
    assert max(float((state[name] - value).abs().max()) for name, value in expected.state.items()) < 1e-9
