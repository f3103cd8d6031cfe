"""Which batches are taken to lack samples that `collate` has left out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from rung.data.batch_shard import MicroBatch
from rung.errors import DataError
from rung.runtime.samples import RowCheck
from tests.runtime.test_habits_ranks import dropping_task


def of(*rows: int, samples: int) -> MicroBatch:
    return MicroBatch([torch.zeros(count, 2) for count in rows], samples, 2 * samples)


@pytest.mark.parametrize(
    ("batches", "is_refused"),
    [
        ([of(4, 4, samples=4), of(4, 4, samples=4)], False),
        ([of(3, 3, samples=4)], True),
        ([of(4, 4, samples=4), of(1, 1, samples=4)], True),
        ([of(2, 2, samples=4), of(2, 2, samples=5)], False),  # pairs
        ([of(1, 1, samples=4)], False),  # packed
        ([of(3, 4, samples=4)], False),  # a graph's edges, say: which are rows is not known
        ([of(9, 9, samples=4)], False),  # several crops
        ([of(samples=4)], False),
        ([of(1, 1, samples=0)], False),  # a stand-in
    ],
)
def test_fewer_rows_than_samples(batches: list[MicroBatch], is_refused: bool) -> None:
    check = RowCheck(dropping_task())
    for micro in batches[:-1]:
        check(micro, is_whole=False)
    check(batches[-1], is_whole=True)
    if is_refused:
        with pytest.raises(DataError, match="leave them out of the data set"):
            check(batches[-1], is_whole=False)
    else:
        check(batches[-1], is_whole=False)


@pytest.mark.parametrize(
    "changes", [{"collate": None, "eval_collate": None}, {"loss_weight": len}], ids=["torch's own", "counted"]
)
def test_no_rows_are_counted_where_they_do_not_matter(changes: dict[str, Any]) -> None:
    whole = {"collate": default_collate}
    RowCheck(replace(dropping_task(), **{**whole, **changes}))(of(3, 3, samples=4), is_whole=False)
