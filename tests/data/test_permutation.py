from __future__ import annotations

import itertools
import tracemalloc
from collections import Counter
from itertools import permutations

import pytest

from rung.data.permutation import Permutation, mix
from tests.marks import slow


@pytest.mark.parametrize("count", [1, 2, 3, 5, 64, 103, 1000, 4096, 4097, 10_000])
def test_every_sample_stands_once_in_an_epoch(count: int) -> None:
    order = Permutation(count, seed=7, shuffle=True)
    assert sorted(order.samples(0, 0, count)) == list(range(count))
    assert sorted(order.samples(3, 0, count)) == list(range(count))


def test_any_piece_can_be_asked_for_at_any_time() -> None:
    whole = Permutation(10_000, seed=1, shuffle=True).samples(2, 0, 10_000)
    pieces = Permutation(10_000, seed=1, shuffle=True)
    assert pieces.samples(2, 9_990, 10_000) == whole[9_990:]
    assert pieces.samples(2, 4_000, 4_200) == whole[4_000:4_200]
    assert pieces.samples(1, 0, 5) != whole[:5]


def test_order_depends_on_seed_and_epoch() -> None:
    orders = {
        tuple(Permutation(50, seed, shuffle=True).samples(epoch, 0, 50)) for seed in range(5) for epoch in range(5)
    }
    assert len(orders) == 25


def test_without_shuffle_it_is_the_data_set_s_own() -> None:
    assert Permutation(10, seed=3, shuffle=False).samples(4, 2, 6) == [2, 3, 4, 5]


def test_a_billion_samples_cost_no_more_than_a_few() -> None:
    order = Permutation(10**9, seed=5, shuffle=True)
    tracemalloc.start()
    far = order.samples(8, 999_999_000, 10**9)
    near = order.samples(0, 0, 1000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(set(far)) == len(set(near)) == 1000
    assert all(0 <= sample < 10**9 for sample in far + near)
    assert peak < 2_000_000, f"{peak} bytes for two pieces of a thousand"


@pytest.mark.parametrize("count", [3, 4, slow(5)])
def test_small_sets_reach_every_permutation_about_equally(count: int) -> None:
    every = list(permutations(range(count)))
    trials = 100 * len(every)
    seen = Counter(tuple(Permutation(count, seed, shuffle=True).samples(0, 0, count)) for seed in range(trials))
    assert set(seen) == set(every)
    chi_square = sum((seen[p] - 100) ** 2 / 100 for p in every)
    assert chi_square < len(every) + 6 * (2 * len(every)) ** 0.5


def test_neighbours_are_scattered() -> None:
    found = Permutation(100_000, seed=2, shuffle=True).samples(0, 0, 100_000)
    near = sum(abs(a - b) < 1000 for a, b in itertools.pairwise(found))
    assert 1500 < near < 2500  # 2 % by chance


def test_the_order_is_stable_over_versions() -> None:
    """Runs are resumed by later versions: the order must not change under them."""
    assert mix(1, 2, 3) == 2623250113353451629
    assert Permutation(10, seed=0, shuffle=True).samples(0, 0, 10) == [7, 8, 3, 9, 4, 6, 2, 5, 0, 1]
    assert Permutation(10**6, seed=42, shuffle=True).samples(3, 999_995, 10**6) == [
        59156,
        147087,
        521761,
        208990,
        156667,
    ]
