from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from rung.data.batch_shard import BatchPartition, MicroBatch, SampleRange
from rung.data.batches import Batches, _of_workers
from rung.data.permutation import Permutation
from rung.data.sample_reader import SampleReader, example_batch
from rung.errors import DataError


class Numbers(Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index)


class Augmented(Numbers):
    """Draws from all three generators, as image augmentations do."""

    def __getitem__(self, index: int) -> Any:
        draws = [random.random(), float(np.random.rand()), torch.rand(()).item()]
        return torch.tensor([float(index), *draws], dtype=torch.float64)


class Stream(IterableDataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.count):
            yield torch.tensor([index, int(torch.randint(1000, ()))])


def windows(
    dataset: Any, batch: int, ranks: int = 1, rank: int = 0, micro: int | None = None, **options: Any
) -> list[Any]:
    options.setdefault("num_epochs", 1)
    return list(Batches(dataset, BatchPartition(batch, ranks, rank, micro), **options))


def samples(found: list[Any]) -> list[Any]:
    return [row for w in found for m in w.micro_batches if m.num_samples for row in m.data.tolist()]


SIZES = [
    (103, 25, 4, None),
    (103, 25, 4, 2),
    (3, 8, 4, None),
    (3, 2, 4, 1),
    (16, 4, 3, 1),
    (7, 7, 2, 3),
    (1, 1, 4, None),
]


@pytest.mark.parametrize(("count", "batch", "ranks", "micro"), SIZES)
@pytest.mark.parametrize("shuffle", [True, False])
def test_each_sample_once_an_epoch_for_any_sizes(
    count: int, batch: int, ranks: int, micro: int | None, shuffle: bool
) -> None:
    seen = Counter(
        s for rank in range(ranks) for s in samples(windows(Numbers(count), batch, ranks, rank, micro, shuffle=shuffle))
    )
    assert seen == Counter(range(count))


@pytest.mark.parametrize(("count", "batch", "ranks", "micro"), SIZES)
def test_all_ranks_see_the_same_number_of_micro_batches(count: int, batch: int, ranks: int, micro: int | None) -> None:
    shapes = {
        tuple(
            tuple(m.num_global_samples for m in w.micro_batches)
            for w in windows(Numbers(count), batch, ranks, r, micro)
        )
        for r in range(ranks)
    }
    assert len(shapes) == 1
    assert sum(map(sum, shapes.pop())) == count


@pytest.mark.parametrize("ranks", [1, 2, 4, 6])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_micro_batch_holds_the_same_samples_for_any_number_of_ranks_and_workers(ranks: int, workers: int) -> None:
    expected = windows(Numbers(103), 24, 1, 0, 12)
    pieces = [windows(Numbers(103), 24, ranks, r, 12 // ranks, num_workers=workers) for r in range(ranks)]
    for number, window in enumerate(expected):
        for micro in range(len(window.micro_batches)):
            joined = [
                value
                for r in range(ranks)
                if pieces[r][number].micro_batches[micro].num_samples
                for value in pieces[r][number].micro_batches[micro].data.tolist()
            ]
            assert joined == window.micro_batches[micro].data.tolist()


def test_a_new_order_every_epoch_with_nothing_to_call() -> None:
    found = windows(Numbers(20), 5, num_epochs=3)
    epochs = [samples([w for w in found if w.epoch == e]) for e in range(3)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [w.ends_epoch for w in found] == ([False] * 3 + [True]) * 3


def test_without_shuffle_the_data_set_s_own_order() -> None:
    assert samples(windows(Numbers(11), 4, shuffle=False)) == list(range(11))


def test_reading_can_start_at_any_step() -> None:
    whole = windows(Numbers(103), 10, num_epochs=3)
    later = windows(Numbers(103), 10, num_epochs=3, start_step=17)
    assert samples(later) == samples(whole[17:])
    assert later[0].step == 18


def test_a_billion_samples_can_be_read_from_anywhere() -> None:
    batches = Batches(Numbers(10**9), BatchPartition(4, 2, 1), num_epochs=3, start_step=2 * 250_000_000 + 12_345)
    window = next(iter(batches))
    assert (window.epoch, window.step) == (2, 500_012_346)
    assert all(0 <= s < 10**9 for s in window.micro_batches[0].data.tolist())


@pytest.mark.parametrize(("ranks", "micro", "workers"), [(2, None, 0), (4, 1, 0), (2, None, 2), (1, 3, 2)])
def test_augmentation_is_the_same_for_any_cut(ranks: int, micro: int | None, workers: int) -> None:
    expected = {row[0]: row for row in samples(windows(Augmented(23), 8))}
    found = [
        row for r in range(ranks) for row in samples(windows(Augmented(23), 8, ranks, r, micro, num_workers=workers))
    ]
    assert {row[0]: row for row in found} == expected
    assert len({row[3] for row in found}) == 23, "every sample has a stream of its own"


def test_augmentation_differs_between_epochs() -> None:
    found = windows(Augmented(6), 6, num_epochs=2)
    first, second = ({r[0]: r[3] for r in samples([w])} for w in found)
    assert all(first[k] != second[k] for k in first)


def _masked(samples: list[Any]) -> Any:
    """As collators for masked language models do it."""
    rows = torch.stack(samples)
    return torch.stack([rows, torch.randint(1000, rows.shape)], dim=1)


@pytest.mark.parametrize("make", [lambda: Numbers(23), lambda: Stream(23)], ids=["map", "stream"])
@pytest.mark.parametrize("workers", [0, 2])
def test_what_collate_draws_depends_on_the_place_alone_and_is_told(make: Callable[[], Any], workers: int) -> None:
    torch.manual_seed(1)
    whole = windows(make(), 8, 2, 1, collate=_masked)
    torch.manual_seed(2)
    again = windows(make(), 8, 2, 1, collate=_masked, num_workers=workers)
    assert samples(whole) == samples(again)
    assert all(micro.collate_draws for window in again for micro in window.micro_batches)
    assert not any(micro.collate_draws for window in windows(make(), 8) for micro in window.micro_batches)


def test_an_example_is_the_same_whatever_was_drawn_before_and_leaves_no_trace() -> None:
    torch.manual_seed(1)
    first = example_batch(Augmented(9), _masked)
    torch.manual_seed(2)
    expected = torch.rand(3).tolist()
    torch.manual_seed(2)
    assert torch.equal(example_batch(Augmented(9), _masked), first)
    assert torch.rand(3).tolist() == expected


def test_reading_leaves_the_process_s_own_generators_alone() -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    expected = torch.rand(3).tolist(), random.random(), np.random.rand()
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    windows(Augmented(9), 3)
    windows(Stream(9), 3)
    assert (torch.rand(3).tolist(), random.random(), np.random.rand()) == expected


@pytest.mark.parametrize(("ranks", "micro", "workers"), [(1, None, 0), (4, None, 0), (2, 2, 0), (2, 2, 2), (3, 1, 1)])
def test_an_iterable_data_set_is_cut_between_ranks_and_workers(ranks: int, micro: int | None, workers: int) -> None:
    expected = samples(windows(Stream(29), 8))
    assert [row[0] for row in expected] == list(range(29))
    found = [samples(windows(Stream(29), 8, ranks, r, micro, num_workers=workers)) for r in range(ranks)]
    assert sorted(row for rank in found for row in rank) == sorted(expected)
    steps = [len(windows(Stream(29), 8, ranks, r, micro, num_workers=workers)) for r in range(ranks)]
    assert steps == [4] * ranks


def test_an_iterable_data_set_has_epochs_and_steps() -> None:
    found = windows(Stream(10), 4, num_epochs=2)
    assert [(w.step, w.epoch, w.num_global_samples) for w in found] == [
        (1, 0, 4),
        (2, 0, 4),
        (3, 0, 2),
        (4, 1, 4),
        (5, 1, 4),
        (6, 1, 2),
    ]
    assert len(windows(Stream(10), 4, num_epochs=None, num_steps=5)) == 5


class CutsItself(Stream):
    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        yield from range(info.id if info else 0, self.count)


class CutsItselfByRank(Stream):
    def __iter__(self) -> Iterator[Any]:
        yield from range(torch.distributed.get_rank(), self.count)


@pytest.mark.parametrize(
    ("dataset", "options", "words"),
    [
        (Stream(5), {"shuffle": True}, "only its own order"),
        (CutsItself(5), {"num_workers": 2}, "workers=1"),
        (CutsItselfByRank(5), {"ranks": 2}, "calls get_rank"),
        (Numbers(0), {}, "is empty"),
        (Stream(0), {}, "gave no sample"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_fix(dataset: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        windows(dataset, 2, **options)


def test_the_number_of_steps_is_known_beforehand() -> None:
    assert Batches(Numbers(103), BatchPartition(25, 4, 0), num_epochs=2).total_steps == 10
    assert Batches(Numbers(103), BatchPartition(25, 4, 0), num_epochs=2, num_steps=7).total_steps == 7
    assert Batches(Stream(3), BatchPartition(25, 4, 0), num_epochs=2).total_steps is None


@dataclass
class Pair:
    image: Any
    label: Any


def test_the_loader_pins_tensors_in_any_nesting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without, a copy to a GPU waits for the host, and says nothing of it."""
    pinned: list[torch.Tensor] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor)
        return tensor + 100

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    batch = {"pair": Pair(torch.tensor(1), (torch.tensor(2), "two")), "rest": [torch.tensor(3)]}
    elsewhere = {"a": torch.empty(1, device="meta"), "b": torch.eye(2).to_sparse()}
    assert pin_memory(MicroBatch(elsewhere, 1, 1)).data == elsewhere and not pinned
    found = pin_memory(MicroBatch(batch, 4, 9))  # what torch's loader calls for whatever a data set gives
    assert [int(t) for t in pinned] == [1, 2, 3]
    assert (found.num_samples, found.num_global_samples) == (4, 9)
    assert found.data == {"pair": Pair(torch.tensor(101), (torch.tensor(102), "two")), "rest": [torch.tensor(103)]}


def test_a_worker_prints_nothing_when_its_rank_breaks_off_a_transfer() -> None:
    """As a rank does when another of its workers was killed: that one is the cause."""
    script = """
import os, socket, struct, sys, threading, time
from multiprocessing import resource_sharer
from rung.data.batches import _start_worker

_start_worker(0)
printed = []
hook = sys.excepthook
sys.excepthook = lambda *caught: (printed.append(caught[0]), hook(*caught))
resource_sharer.DupFd(0)
peer = socket.socket(socket.AF_UNIX)
peer.connect(resource_sharer._resource_sharer._address)
peer.close()
while not printed:
    time.sleep(0.01)
print(printed[0].__name__, flush=True)
raise ConnectionError("of the worker itself")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() in ("ConnectionResetError", "EOFError", "BrokenPipeError")
    assert done.stderr.count("Traceback") == 1
    assert "of the worker itself" in done.stderr


class Folders:
    """In the place of torch's loader: gives the folder of temporary files at the moment."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __iter__(self) -> Iterator[str]:
        for _ in range(4):
            yield tempfile.gettempdir()


def test_temporary_files_of_a_loader_with_workers_go_with_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's loader opens ten when a worker breaks off, and a rank that is killed then would leave them."""
    monkeypatch.setitem(vars(multiprocessing.current_process())["_config"], "tempdir", str(tmp_path))
    monkeypatch.setattr("rung.data.batches.DataLoader", Folders)
    before = tempfile.gettempdir()
    for window in Batches(Numbers(8), BatchPartition(4, 1, 0), num_epochs=1, num_workers=1):
        assert window.micro_batches == [str(tmp_path)]
        assert tempfile.gettempdir() == before, "the task's own files stay where they were"


class Doubled(TensorDataset):
    def __getitem__(self, index: Any) -> Any:
        return tuple(2 * tensor for tensor in super().__getitem__(index))


def rows_of() -> TensorDataset:
    g = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randn(29, 2, 3, generator=g), torch.randint(9, (29,), generator=g), torch.rand(29, 1) > 0.5
    )


@pytest.mark.parametrize(
    "dataset",
    [
        rows_of(),
        Subset(rows_of(), [7, 3, 3, 28, 0, 12, 5]),
        Subset(Subset(rows_of(), list(range(20, 2, -1))), np.array([4, 1, 17, 9])),
        Subset(rows_of(), torch.tensor([6, 2, 2, 11])),
        Subset(rows_of(), torch.tensor([[6], [2], [11]])),
        Subset(rows_of(), [[0, 1], [2, 3], [5, 5]]),
        Subset(rows_of(), [-1, 4, -29]),
        Subset(TensorDataset(torch.zeros(4, 0), torch.arange(4)), [-1, 1, 2]),
        Subset(Doubled(torch.arange(9.0)), [5, 2, 8]),
        Doubled(torch.arange(9.0)),
        TensorDataset(torch.arange(120.0).view(5, 2, 3, 4).permute(0, 3, 1, 2), torch.arange(5)),
        TensorDataset(torch.arange(120.0).view(5, 2, 3, 4).to(memory_format=torch.channels_last)),
    ],
    ids=[
        "tensors",
        "subset",
        "subset-of-subset",
        "by-tensor",
        "by-column",
        "groups",
        "from-the-end",
        "without-columns",
        "subset-of-another",
        "another",
        "permuted",
        "channels-last",
    ],
)
def test_rows_of_tensors_are_what_collating_their_samples_gives(dataset: Any) -> None:
    batches = Batches(dataset, BatchPartition(3, 1, 0), seed=5, num_epochs=2)
    order = Permutation(len(dataset), 5, shuffle=True)
    seen = 0
    for window in batches:
        (micro,) = window.micro_batches
        start = seen % len(dataset)
        samples = order.samples(window.epoch, start, start + micro.num_samples)
        wanted = default_collate([dataset[index] for index in samples])
        assert type(micro.data) is type(wanted) and len(micro.data) == len(wanted)
        for found, other in zip(micro.data, wanted, strict=True):
            assert found.dtype == other.dtype and torch.equal(found, other) and found.is_contiguous()
        seen += micro.num_samples
    assert seen == 2 * len(dataset)


def test_a_mask_in_the_place_of_indices_is_not_taken_for_rows_0_and_1() -> None:
    """Read sample by sample, it is an error or a batch of another shape, which the model refuses."""
    whole = TensorDataset(torch.arange(8))
    mask = np.arange(8) > 5
    for indices in (mask, mask.tolist(), torch.from_numpy(mask)):
        batches = Batches(Subset(whole, indices), BatchPartition(2, 1, 0), num_epochs=1, shuffle=False)
        try:
            (micro,) = next(iter(batches)).micro_batches
        except (IndexError, RuntimeError):
            continue
        assert micro.data[0].shape != (2,)


def test_rows_that_are_replaced_during_a_run_are_read() -> None:
    whole = TensorDataset(torch.arange(6))
    subset = Subset(whole, [0, 1, 2])
    windows = iter(Batches(subset, BatchPartition(3, 1, 0), num_epochs=3, shuffle=False))
    assert next(windows).micro_batches[0].data[0].tolist() == [0, 1, 2]
    subset.indices = [5, 4, 3]
    assert next(windows).micro_batches[0].data[0].tolist() == [5, 4, 3]
    whole.tensors = (torch.arange(10, 16),)
    assert next(windows).micro_batches[0].data[0].tolist() == [15, 14, 13]


def test_a_row_that_is_missing_is_named() -> None:
    whole = TensorDataset(torch.arange(6))
    windows = iter(Batches(whole, BatchPartition(3, 1, 0), num_epochs=3, shuffle=False))
    next(windows)
    whole.tensors = (torch.arange(4),)
    with pytest.raises(IndexError) as caught:
        next(windows)
    assert caught.value.__notes__ == ["This is sample 4 of the data set: dataset[4] raises it."]


@pytest.mark.parametrize("drops", [True, False], ids=["left out", "a batch"])
def test_several_samples_read_at_once_must_be_as_many_as_were_asked_for(drops: bool) -> None:
    class Many(Dataset[Any]):
        def __len__(self) -> int:
            return 9

        def __getitem__(self, index: int) -> dict[str, int]:
            return {"input": index, "target": 0}

        def __getitems__(self, indices: list[int]) -> Any:
            return [self[index] for index in indices if index] if drops else {"input": indices, "target": indices}

    with pytest.raises(DataError, match=r"__getitems__ of the data set Many gave 2 items for 3 indices"):
        next(iter(Batches(Many(), BatchPartition(3, 1, 0), num_epochs=1, shuffle=False)))


class _Broken:
    def __init__(self, *, reads_many: bool) -> None:
        if reads_many:
            self.__getitems__ = lambda samples: [self[index] for index in samples]

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[float, int]:
        if index == 7:
            raise ValueError("broken file")
        return 1.0, 0


@pytest.mark.parametrize("reads_many", [False, True])
def test_a_sample_that_cannot_be_read_is_named(reads_many: bool) -> None:
    reader = SampleReader(_Broken(reads_many=reads_many), Permutation(10, 0, shuffle=False), default_collate, 0)
    reader[SampleRange(0, 0, 5, 5, 5)]
    with pytest.raises(ValueError, match="broken file") as raised:
        reader[SampleRange(0, 5, 10, 5, 5)]
    assert raised.value.__notes__ == ["This is sample 7 of the data set: dataset[7] raises it."]


def test_a_worker_that_dies_while_it_hands_over_a_tensor_is_the_cause() -> None:
    """The connection breaks first, and the signal of the death comes later."""
    loader = iter(DataLoader(TensorDataset(torch.zeros(4)), num_workers=1, multiprocessing_context="fork"))
    (worker,) = multiprocessing.active_children()

    def batches() -> Iterator[Any]:
        yield next(loader)
        assert worker.pid is not None
        threading.Timer(0.1, os.kill, (worker.pid, signal.SIGKILL)).start()
        raise ConnectionResetError("by peer")

    given = _of_workers(batches(), None)
    next(given)
    with pytest.raises(RuntimeError, match="killed by signal: Killed"):
        next(given)
    with pytest.raises(FileNotFoundError):  # of the data set
        next(_of_workers(iter(lambda: Path("/no/such/file").read_text(), None), None))
