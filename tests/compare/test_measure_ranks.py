"""Counted bytes are those of theory: what each strategy must send in a step of the GPT example, from its sizes alone.

The bytes are those that `rung compare` shows: of every message that rank 0 sends or takes part in, the whole result of
a collective once. Everything is in fp32, and gradients are clipped, so the ranks also agree on their norm: one number
of 4 bytes, wherever no rank has the whole gradient.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from rung.compare.measure import RankProfile, profile_steps
from rung.spec.config import RunConfig
from rung.train.job import RankJob
from tests.harness import on_ranks
from tests.tasks import EXAMPLES

LAYERS, WIDTH, CONTEXT, VOCABULARY, BATCH = 2, 16, 8, 98, 8
FLOAT = 4  # bytes
NORM = FLOAT

# Query, key, value and out of an attention; two matrices with biases of an MLP that is four times as wide; two norms.
BLOCK = FLOAT * (4 * WIDTH**2 + (4 * WIDTH**2 + 4 * WIDTH) + (4 * WIDTH**2 + WIDTH) + 2 * 2 * WIDTH)
BLOCKS = LAYERS * BLOCK
TOKENS = FLOAT * VOCABULARY * WIDTH  # the embedding, which is the head as well
POSITIONS = FLOAT * CONTEXT * WIDTH
REST = TOKENS + POSITIONS + FLOAT * 2 * WIDTH  # what is in no block: embeddings and the last norm
MODEL = BLOCKS + REST
# What a block receives and gives, for so many samples.
ACTIVATION = FLOAT * CONTEXT * WIDTH
ROWS = BATCH * CONTEXT  # of the cross entropy: one for each token

Theory = dict[tuple[str, str], int]  # (collective, phase) -> bytes of rank 0 in a step
ONE_MICRO_BATCH, TWO_MICRO_BATCHES = {}, {"micro_batch": BATCH // 4}

CASES: list[tuple[str, dict[str, Any], Theory]] = [
    # Every gradient is summed over the ranks once, however many micro-batches there are.
    ("ddp", ONE_MICRO_BATCH, {("all-reduce", "backward"): MODEL}),
    ("ddp", TWO_MICRO_BATCHES, {("all-reduce", "backward"): MODEL}),
    # The same, and each rank's updated part of the parameters goes to all others.
    ("zero1", ONE_MICRO_BATCH, {("all-reduce", "backward"): MODEL, ("all-gather", "update"): MODEL}),
    # Parameters are gathered once a step and kept; gradients are summed and cut in every micro-batch.
    (
        "zero2",
        TWO_MICRO_BATCHES,
        {
            ("all-gather", "forward"): MODEL,
            ("reduce-scatter", "backward"): 2 * MODEL,
            ("all-reduce", "update"): NORM,
        },
    ),
    # Parameters are gathered in forward and again in backward, but for those in no block, which backward needs first:
    # they stay. Gradients are summed and cut. All of it in every micro-batch.
    (
        "zero3",
        ONE_MICRO_BATCH,
        {
            ("all-gather", "forward"): MODEL,
            ("all-gather", "backward"): BLOCKS,
            ("reduce-scatter", "backward"): MODEL,
            ("all-reduce", "update"): NORM,
        },
    ),
    (
        "zero3",
        TWO_MICRO_BATCHES,
        {
            ("all-gather", "forward"): 2 * MODEL,
            ("all-gather", "backward"): 2 * BLOCKS,
            ("reduce-scatter", "backward"): 2 * MODEL,
            ("all-reduce", "update"): NORM,
        },
    ),
    # In forward the parts of each attention and each MLP are summed, and those of both embeddings, of which each rank
    # has some rows. The cross entropy of logits that are cut needs for each row the highest of them, the sum of their
    # powers and the one of the target. In backward the gradients of what each attention, each MLP and the head were
    # given are summed.
    (
        "tp2",
        ONE_MICRO_BATCH,
        {
            ("all-reduce", "forward"): (2 * LAYERS + 1) * BATCH * ACTIVATION + POSITIONS + 3 * FLOAT * ROWS,
            ("all-reduce", "backward"): (2 * LAYERS + 1) * BATCH * ACTIVATION,
            ("all-reduce", "update"): NORM,
        },
    ),
    # Between the two stages each sample's activation goes forward once and its gradient back once, whatever the number
    # of micro-batches. Both stages have the embedding, so its gradients are summed.
    (
        "pp2",
        ONE_MICRO_BATCH,
        {
            ("send", "forward"): BATCH * ACTIVATION,
            ("receive", "backward"): BATCH * ACTIVATION,
            ("all-reduce", "backward"): TOKENS,
            ("all-reduce", "update"): NORM,
        },
    ),
]


def look_at_all(ports: list[int], folder: str) -> list[RankProfile]:
    """Each case in a world of its own, with a store of its own."""
    found = []
    arguments = {
        "model.layers": LAYERS,
        "model.width": WIDTH,
        "model.heads": 2,
        "model.context": CONTEXT,
        "train_data.context": CONTEXT,
        "train_data.characters": 5000,
    }
    for port, (strategy, changes, _) in zip(ports, CASES, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        config = RunConfig(batch_size=BATCH, clip=1.0, steps=12, eval_every="never", device="cpu", **changes)
        look = profile_steps(RankJob(str(EXAMPLES / "gpt"), strategy, config, arguments, folder), lambda told: None)
        assert look is not None
        found.append(look)
    return found


@pytest.fixture(scope="module")
def looks(tmp_path_factory: pytest.TempPathFactory) -> list[list[RankProfile]]:
    """Of each rank and case."""
    folder: Path = tmp_path_factory.mktemp("theory")
    (folder / "logs").mkdir()
    stores = [dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) for _ in CASES]
    return on_ranks(look_at_all, 2, [store.port for store in stores], str(folder))


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: f"{CASES[number][0]}-{number}")
def test_counted_bytes_are_those_of_theory(looks: list[list[RankProfile]], number: int) -> None:
    theory = CASES[number][2]
    followed = looks[0][number].followed
    assert followed is not None
    counted: Counter[tuple[str, str]] = Counter()
    for message in followed.messages:
        counted[message.collective, message.phase] += message.num_bytes
    assert dict(counted) == theory


def test_the_other_stage_sends_what_the_first_receives(looks: list[list[RankProfile]]) -> None:
    number = next(n for n, case in enumerate(CASES) if case[0] == "pp2")
    opposite = {"send": "receive", "receive": "send"}
    first, second = (
        {(m.collective, m.phase): m.num_bytes for m in followed.messages}
        for followed in (rank[number].followed for rank in looks)
        if followed is not None
    )
    assert second == {(opposite.get(what, what), phase): size for (what, phase), size in first.items()}
