"""The ring equals attention to the whole sequence, for lengths that do not divide and keys with fewer heads."""

from __future__ import annotations

import pytest
import torch

from tests.parallel.context.ring_by_threads import largest_difference


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("length", "num_ranks"), [(16, 2), (13, 2), (3, 4), (33, 4), (50, 8)])
def test_the_ring_equals_the_whole(length: int, num_ranks: int, is_causal: bool) -> None:
    for key_heads in (4, 1):
        found = largest_difference(
            length, num_ranks, is_causal=is_causal, key_heads=key_heads, dtype=torch.float64, device="cpu"
        )
        assert found < 1e-12
