"""What each form of context parallelism sends is what theory says."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rung.distributed.world import open_fake_world
from rung.errors import ModelError
from rung.parallel.context.attention import Attention
from rung.parallel.context.positions import RankPositions
from rung.planner.dryrun import dry_run
from rung.planner.trace import Sent
from rung.spec.config import RunConfig
from rung.spec.strategy import parse
from tests.parallel.context.test_context_ranks import VOCABULARY, WIDTH, task_of

LENGTH, BATCH = 64, 3
BYTES = 4  # of an element


class OneBlock(nn.Module):
    """torch's own layer with as many keys as queries, and nothing else that sends."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        layers = [nn.TransformerEncoderLayer(WIDTH, 4, 24, dropout=0.0, batch_first=True) for _ in range(2)]
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def sent(form: str, num_ranks: int) -> Counter[str]:
    """Bytes of a step by kind of message: of the result, for collectives."""
    task = replace(task_of(OneBlock, LENGTH), blocks="layers.*")
    config = RunConfig(batch_size=BATCH, steps=2, eval_every="never", cp_form=form, precision="fp32")
    run = dry_run(task, parse(f"cp{num_ranks}", num_ranks), config)
    found: Counter[str] = Counter()
    for event in run.trace.events[run.second_step :]:
        if isinstance(event, Sent):
            found[event.message.operation] += event.message.num_bytes
    return found


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_messages_are_as_long_as_in_theory(num_ranks: int) -> None:
    whole = BATCH * LENGTH * WIDTH * BYTES  # queries, keys or values of all positions, and also the blocks' results
    part = whole // num_ranks
    layers = 2
    # Queries, keys and values to heads, results back; the same in backward.
    assert sent("ulysses", num_ranks)["all-to-all"] == layers * 2 * 4 * part
    gathered = sent("gather", num_ranks)
    # The result of the last block is put together, whose gradients are summed into parts in backward.
    assert gathered["all-gather"] == layers * 2 * whole + whole
    assert gathered["reduce-scatter"] == layers * 2 * whole + whole
    ring = sent("ring", num_ranks)
    # Keys and values pass by twice; their gradients come home.
    assert ring["send"] == ring["receive"] == layers * 2 * part * (2 * (num_ranks - 1) + num_ranks)


def test_the_ring_refuses_what_flash_kernels_do_not_take() -> None:
    with open_fake_world(parse("cp2", 2)) as world:
        group = world.axis("cp").get_group()
    ring = Attention(RankPositions(8, 2, 0, torch.device("cpu")), group, "ring", (True, True, True))
    rows = torch.randn(1, 2, ring._positions.each, 4)
    ring.begin()
    with pytest.raises(ModelError, match="has a mask, which that does not take"):
        ring(rows, rows, rows, attn_mask=torch.ones(ring._positions.each, 8, dtype=torch.bool))
    with pytest.raises(ModelError, match="has dropout, which"):
        ring(rows, rows, rows, dropout_p=0.1)
    with pytest.raises(ModelError, match="has queries without heads, which"):
        ring(rows[0, 0], rows[0, 0], rows[0, 0])


def test_a_mask_of_another_sequence_as_long_as_a_part_is_left_alone() -> None:
    positions = RankPositions(13, 2, 0, torch.device("cpu"))
    with open_fake_world(parse("cp2", 2)) as world:
        across = Attention(positions, world.axis("cp").get_group(), "gather", (False,))
    rows, other = torch.randn(1, 2, positions.each, 4), torch.randn(1, 2, positions.each, 4)
    for shape in ((1, 1, 1, positions.each), (1, 1, positions.each, positions.each)):
        mask = torch.randn(shape)
        across.begin()
        expected = nn.functional.scaled_dot_product_attention(rows, other, other, attn_mask=mask)
        assert torch.equal(across(rows, other, other, attn_mask=mask), expected)


def test_dropout_in_attention_draws_as_many_numbers_on_all_ranks() -> None:
    """Else what the model draws outside of its blocks would differ on ranks that share samples."""
    states = []
    with open_fake_world(parse("cp2", 2)) as world:
        for rank in range(2):
            positions = RankPositions(13, 2, rank, torch.device("cpu"))
            own = Attention(positions, world.axis("cp").get_group(), "gather", (True,))
            rows = torch.randn(1, 2, positions.each, 4)
            torch.manual_seed(1)
            own.begin()
            own(rows, rows, rows, is_causal=True, dropout_p=0.5)
            states.append(torch.get_rng_state())
    assert torch.equal(states[0], states[1])


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_block_that_checkpoints_a_part_of_itself_is_refused(use_reentrant: bool) -> None:
    """Backward would compute it again with torch's attention, of a rank's part alone."""
    with open_fake_world(parse("cp2", 2)) as world:
        own = Attention(RankPositions(8, 2, 0, torch.device("cpu")), world.axis("cp").get_group(), "gather", (True,))
    rows = torch.randn(1, 2, own._positions.each, 4, requires_grad=True)
    own.begin()
    with pytest.raises(ModelError, match="a block checkpoints a part of itself"):
        checkpoint(own, rows, rows, rows, use_reentrant=use_reentrant)
