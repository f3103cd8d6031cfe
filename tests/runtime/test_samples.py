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


def of(*shapes: tuple[int, ...], samples: int) -> MicroBatch:
    return MicroBatch([torch.zeros(shape) for shape in shapes], samples, 2 * samples)


ALL = of((4, 2), (4,), samples=4)


@pytest.mark.parametrize(
    ("batches", "is_refused"),
    [
        ([ALL, ALL], False),
        ([ALL, of((3, 2), (3,), samples=4)], True),
        ([of((3, 2), (3,), samples=4), ALL], True),
        ([of((1, 2), (1,), samples=4), of((2, 2), (2,), samples=4)], True),
        ([ALL, of((0, 2), (0,), samples=4)], True),
        ([of((2, 2), samples=4), of((3, 2), samples=5), of((2, 2), samples=4)], False),  # pairs
        ([of((1, 9), samples=4), of((1, 1), samples=1), of((1, 7), samples=4)], False),  # packed into one row
        ([of((9, 2), samples=4), of((12, 2), samples=4)], False),  # words, say, of which there are more
        ([ALL, of((3, 2), (4,), samples=4)], False),  # which are rows is not known
        ([of((3, 4), samples=4), of((2, 4), samples=4)], False),  # time first
        ([ALL, of((1, 2), samples=0)], False),  # a stand-in
        ([of(samples=4), ALL], False),
    ],
)
def test_rows_of_equally_many_samples(batches: list[MicroBatch], is_refused: bool) -> None:
    check = RowCheck(dropping_task())
    for micro in batches[:-1]:
        check(micro, is_whole=False)
    check(batches[-1], is_whole=True)
    check(batches[-1], is_whole=False, trains=False)  # another collate, perhaps
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
    check = RowCheck(replace(dropping_task(), **{**whole, **changes}))
    for micro in (ALL, of((3, 2), (3,), samples=4)):
        check(micro, is_whole=False)
