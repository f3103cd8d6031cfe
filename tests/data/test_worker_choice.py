"""`workers=auto`: the number of processes follows from the first windows, and no sample changes."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from rung.data.batch_shard import BatchPartition
from rung.data.batches import Batches
from rung.data.worker_choice import WorkerChoice


@pytest.mark.parametrize(
    ("read", "whole", "most", "chosen", "said"),
    [
        (0.001, 0.1, 7, 0, "reading takes 1% of a step; the rank reads by itself"),
        (0.02, 0.1, 7, 1, "reading takes 20% of a step; 1 process reads for each rank from now on"),
        (0.06, 0.1, 7, 2, "2 processes read"),
        (0.09, 0.1, 7, 7, "7 processes read"),
        (0.09, 0.1, 0, 0, "reading takes 90% of a step, and no core is left"),
    ],
)
def test_as_many_as_are_needed_and_the_cores_allow(
    read: float, whole: float, most: int, chosen: int, said: str
) -> None:
    lines: list[str] = []
    choice = WorkerChoice(most, lines.append)
    decided = [choice.see(read, whole) for _ in range(20)]
    assert decided.count(True) == 1
    assert choice.num_workers == chosen
    assert said in lines[0]


def test_a_rank_that_still_waits_is_told_that_reading_is_the_limit() -> None:
    lines: list[str] = []
    choice = WorkerChoice(2, lines.append)
    while not choice.see(0.09, 0.1):
        pass
    for _ in range(20):
        choice.see(0.03, 0.1)
    assert len(lines) == 2
    assert "with 2 processes, all that the cores allow, a rank still waits for data in 30% of the time" in lines[1]


def test_the_first_windows_do_not_count() -> None:
    choice = WorkerChoice(4, lambda line: None)
    for _ in range(2):
        choice.see(1.0, 1.0)
    while not choice.see(0.0, 0.1):
        pass
    assert choice.num_workers == 0


class Slow(Dataset[tuple[Tensor, Tensor, int]]):
    """Draws at random, as an augmentation does, and says where it was read."""

    def __len__(self) -> int:
        return 103

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        time.sleep(0.003)
        return torch.tensor(index), torch.rand(()), 0 if get_worker_info() is None else 1


def _read(**how: Any) -> tuple[list[list[int]], list[list[float]], list[int]]:
    cut = BatchPartition(8, 1, 0, 4)
    windows = [
        [micro.data for micro in window.micro_batches] for window in Batches(Slow(), cut, num_steps=20, seed=3, **how)
    ]
    indices = [[int(i) for batch in window for i in batch[0]] for window in windows]
    drawn = [[float(x) for batch in window for x in batch[1]] for window in windows]
    return indices, drawn, [int(window[0][2][0]) for window in windows]


def test_no_sample_changes_when_processes_take_over() -> None:
    choice = WorkerChoice(2, lambda line: None)
    indices, drawn, places = _read(choice=choice)
    alone, drawn_alone, _ = _read()
    assert choice.num_workers == 2
    assert places[0] == 0 and places[-1] == 1  # the rank first, then the processes
    assert indices == alone
    assert drawn == drawn_alone


def test_a_stream_says_that_ranks_read_it() -> None:
    lines: list[str] = []
    Batches(iter([1, 2, 3]), BatchPartition(2, 1, 0), choice=WorkerChoice(2, lines.append))
    assert lines == ["workers=auto: ranks read an iterable data set themselves; workers=N lets processes do it"]
