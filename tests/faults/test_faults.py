"""A few faults of every kind over several strategies. `make chaos` does many more."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.faults.harness import KINDS, STRATEGIES, reference, suffer

# Every kind at least once, every strategy at least once; which rank and which moment is chance.
PLANS = {
    "ddp": ["kill", "exception", "disk"],
    "zero1": ["exit", "corrupt"],
    "zero3": ["term", "kill"],
    "pp2": ["stop", "exception"],
    "tp2": ["preempt", "exit"],
}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("references")


def test_every_kind_is_tried() -> None:
    assert {kind for kinds in PLANS.values() for kind in kinds} == set(KINDS)


@pytest.mark.parametrize("strategy", PLANS)
def test_comes_through(tmp_path: Path, references: Path, strategy: str) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    num_ranks = STRATEGIES[strategy]
    known = reference(references, strategy, num_ranks)
    story = suffer(tmp_path / "job", strategy, num_ranks, PLANS[strategy], seed, known)
    told = "\n".join([f"seed {seed}", *map(str, story.faults), *story.problems])
    assert not story.problems, told
    assert all(fault.recovered for fault in story.faults), told
