"""Which samples the global batch of a step holds, which of them this rank reads, and the reading.

The global batch is cut twice: first into micro-batches, then each micro-batch into one contiguous piece for each
rank. So a micro-batch holds the same samples for any number of ranks. Pieces may be ragged or empty; a rank with an
empty piece gets a stand-in sample that counts for nothing, because it must still take part in the collectives.

Random numbers drawn while a sample is read depend on (seed, epoch, position) alone, so augmentation, too, is the same
for any number of ranks and loader processes. This module knows nothing of models and strategies.
"""

from __future__ import annotations

import inspect
import itertools
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from rung.errors import DataError
from rung.generators import Marks, restore_generators, save_generators, seed_generators
from rung.nested import map_tensors
from rung.order import Order, mix
from rung.processes import die_with_parent, leave_requests_to_parent, name_process


@dataclass(frozen=True)
class MicroBatch:
    """This rank's piece of one micro-batch."""

    data: Any
    num_samples: int  # of this rank; 0 means that `data` is a stand-in
    num_global_samples: int

    def pin_memory(self) -> MicroBatch:
        """Called by torch's loader, which looks for tensors in lists and dicts but not in a dataclass."""
        return replace(self, data=map_tensors(self.data, _pinned))


@dataclass(frozen=True)
class Window:
    """This rank's share of one global batch."""

    step: int
    epoch: int
    micro_batches: list[MicroBatch]
    ends_epoch: bool
    wait_seconds: float = 0.0

    @property
    def num_global_samples(self) -> int:
        return sum(micro.num_global_samples for micro in self.micro_batches)

    @property
    def num_samples(self) -> int:
        """Of this rank."""
        return sum(micro.num_samples for micro in self.micro_batches)


@dataclass(frozen=True)
class Cut:
    """How a global batch is cut: by micro-batch, then by rank."""

    batch_size: int
    num_ranks: int
    rank: int
    micro_batch: int | None = None

    @property
    def global_micro_batch(self) -> int:
        if self.micro_batch is None:
            return self.batch_size
        return min(self.batch_size, self.micro_batch * self.num_ranks)

    @property
    def num_micro_batches(self) -> int:
        return -(-self.batch_size // self.global_micro_batch)

    def piece(self, num_samples: int) -> tuple[int, int]:
        """This rank's part of a micro-batch of `num_samples`: start and stop within it."""
        return num_samples * self.rank // self.num_ranks, num_samples * (self.rank + 1) // self.num_ranks

    def micro_sizes(self, num_samples: int) -> list[int]:
        """The sizes of the micro-batches of a window of `num_samples` (the last window of an epoch is short)."""
        size = self.global_micro_batch
        return [min(size, num_samples - start) for start in range(0, num_samples, size)]


class Batches:
    """Windows of a data set, from step `start_step` on, for one rank.

    Iterating gives `Window`s over as many epochs as `num_steps` and `num_epochs` allow. A map-style data set is read in
    shuffled order and each epoch holds every sample once; the last window of an epoch is short. An iterable one is
    read in its own order.
    """

    def __init__(
        self,
        dataset: Any,
        cut: Cut,
        *,
        seed: int = 0,
        shuffle: bool | None = None,
        num_steps: int | None = None,
        num_epochs: int | None = None,
        start_step: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        reads: bool = True,
    ) -> None:
        """Without `reads` there are the windows but not their data, unless only reading tells how many there are."""
        self.cut = cut
        self._reads = reads
        self._reader: _SampleReader | None = None
        self.is_stream = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
        self._dataset = dataset
        self._seed = seed
        self._collate = collate or default_collate
        self._num_workers = num_workers
        self._pin_memory = pin_memory
        self._start_step = start_step
        self._num_epochs = num_epochs
        self._num_steps = num_steps
        if self.is_stream:
            _check_stream(dataset, shuffle, num_workers, cut.num_ranks)
            self.num_samples: int | None = None
            return
        if not isinstance(dataset, Sized):
            raise DataError(
                f"the data set {type(dataset).__name__} has __getitem__ but no __len__; its length is needed to cut it."
            )
        self.num_samples = len(dataset)
        if self.num_samples == 0:
            raise DataError(f"the data set {type(dataset).__name__} is empty.")
        self._order = Order(self.num_samples, seed, shuffle=shuffle is not False)

    @property
    def dataset(self) -> Any:
        return self._dataset

    @property
    def steps_per_epoch(self) -> int | None:
        return None if self.num_samples is None else -(-self.num_samples // self.cut.batch_size)

    @property
    def total_steps(self) -> int | None:
        """Steps from the first to the last, if that can be known."""
        per_epoch = self.steps_per_epoch
        limits = [self._num_steps] if self._num_steps is not None else []
        if per_epoch is not None and self._num_epochs is not None:
            limits.append(per_epoch * self._num_epochs)
        return min(limits) if limits else None

    def __iter__(self) -> Iterator[Window]:
        return self._stream_windows() if self.is_stream else self._map_windows()

    def window(self, step: int) -> Window:
        """One window by the number of its step."""
        per_epoch = self.steps_per_epoch
        if per_epoch is None:
            raise DataError(
                f"the data set {type(self._dataset).__name__} is iterable, and its samples can be had only one after "
                "the other; here windows are asked for by number. Give it __len__ and __getitem__, or use ps."
            )
        if self._reader is None:
            self._reader = _SampleReader(self._dataset, self._order, self._collate, self._seed)
        started = time.perf_counter()
        pieces = _pieces_of(step - 1, self.cut, per_epoch, self.num_samples or 0)
        micro_batches = [self._reader[piece] for piece in pieces]
        epoch, within = divmod(step - 1, per_epoch)
        return Window(step, epoch, micro_batches, within == per_epoch - 1, time.perf_counter() - started)

    def _loader(self, dataset: Any, sampler: Iterable[Any] | None) -> Iterator[Any]:
        methods = multiprocessing.get_all_start_methods()
        generator = torch.Generator()
        generator.manual_seed(mix(self._seed, self.cut.rank))
        return iter(
            DataLoader(
                dataset,
                batch_size=None,
                sampler=sampler,
                collate_fn=_as_is,
                num_workers=self._num_workers,
                worker_init_fn=_start_worker,
                pin_memory=self._pin_memory,
                generator=generator,
                multiprocessing_context="fork" if self._num_workers and "fork" in methods else None,
            )
        )

    def _map_windows(self) -> Iterator[Window]:
        total, per_epoch = self.total_steps, self.steps_per_epoch
        assert per_epoch is not None
        assert self.num_samples is not None
        pieces = _PieceStream(self, total)
        if self._reads:
            loader = self._loader(_SampleReader(self._dataset, self._order, self._collate, self._seed), pieces)
        else:
            loader = (MicroBatch(None, 0, piece.num_global) for piece in pieces)
        step = self._start_step
        while total is None or step < total:
            epoch, within = divmod(step, per_epoch)
            window_samples = min(self.cut.batch_size, self.num_samples - within * self.cut.batch_size)
            started = time.perf_counter()
            micro_batches = [next(loader) for _ in self.cut.micro_sizes(window_samples)]
            waited = time.perf_counter() - started
            step += 1
            yield Window(step, epoch, micro_batches, ends_epoch=within == per_epoch - 1, wait_seconds=waited)

    def _stream_windows(self) -> Iterator[Window]:
        step, epoch = 0, 0
        per_window = self.cut.num_micro_batches
        while self._num_epochs is None or epoch < self._num_epochs:
            loader = self._loader(_StreamReader(self._dataset, self.cut, self._collate, self._seed, epoch), None)
            pending: list[MicroBatch] = []
            started = time.perf_counter()
            following = next(loader, None)
            waited = time.perf_counter() - started
            if following is None:
                raise DataError(f"the data set {type(self._dataset).__name__} gave no sample in epoch {epoch}.")
            while following is not None:
                pending.append(following)
                started = time.perf_counter()
                following = next(loader, None)
                waited += time.perf_counter() - started
                if len(pending) == per_window or following is None:
                    step += 1
                    if step > self._start_step:
                        yield Window(step, epoch, pending, ends_epoch=following is None, wait_seconds=waited)
                    pending, waited = [], 0.0
                    if self._num_steps is not None and step >= self._num_steps:
                        return
            epoch += 1


def example_batch(dataset: Any, collate: Callable[[list[Any]], Any] | None, count: int = 2) -> Any:
    """The first samples of a data set as a batch, to see what batches are like. No random generator is moved by it."""
    saved = save_generators()
    try:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            samples = list(itertools.islice(iter(dataset), count))
        else:
            samples = [dataset[index] for index in range(min(count, len(dataset)))]
    finally:
        restore_generators(saved)
    if not samples:
        raise DataError(f"the data set {type(dataset).__name__} is empty.")
    return (collate or default_collate)(samples)


@dataclass(frozen=True)
class _Piece:
    """What a loader process is asked for: positions of one epoch. `real` is 0 for a stand-in."""

    epoch: int
    start: int
    stop: int
    real: int
    num_global: int


class _PieceStream:
    """The pieces of all steps in order; the loader's sampler. It holds no list."""

    def __init__(self, batches: Batches, total_steps: int | None) -> None:
        self._batches = batches
        self._total_steps = total_steps

    def __iter__(self) -> Iterator[_Piece]:
        batches, cut = self._batches, self._batches.cut
        per_epoch, num_samples = batches.steps_per_epoch, batches.num_samples
        assert per_epoch is not None
        assert num_samples is not None
        step = batches._start_step
        while self._total_steps is None or step < self._total_steps:
            yield from _pieces_of(step, cut, per_epoch, num_samples)
            step += 1


def _pieces_of(step: int, cut: Cut, per_epoch: int, num_samples: int) -> Iterator[_Piece]:
    """The pieces of one step, counted from 0."""
    epoch, within = divmod(step, per_epoch)
    base = within * cut.batch_size
    for size in cut.micro_sizes(min(cut.batch_size, num_samples - base)):
        start, stop = cut.piece(size)
        if start < stop:
            yield _Piece(epoch, base + start, base + stop, stop - start, size)
        else:
            yield _Piece(epoch, base, base + 1, 0, size)
        base += size


class _SampleReader:
    """Reads and collates the samples of a piece, each with random streams of its own."""

    def __init__(self, dataset: Any, order: Order, collate: Callable[[list[Any]], Any], seed: int) -> None:
        self._dataset = dataset
        self._order = order
        self._collate = collate
        self._seed = seed
        self._draws_random_numbers = False

    def __len__(self) -> int:
        return self._order.num_samples

    def __getitem__(self, piece: _Piece) -> MicroBatch:
        samples = self._order.samples(piece.epoch, piece.start, piece.stop)
        data = self._read(piece, samples)
        return MicroBatch(data, piece.real, piece.num_global)

    def _read(self, piece: _Piece, samples: list[int]) -> Any:
        # Seeding three generators for each sample costs more than reading a small one. Most data sets draw no random
        # numbers: read without seeding, look whether a generator moved, and only then read again, seeded.
        if not self._draws_random_numbers:
            before = Marks()
            many = getattr(self._dataset, "__getitems__", None)  # torch's protocol for reading several at once
            data = self._collate(many(samples) if many else [self._dataset[index] for index in samples])
            if before.hold():
                return data
            self._draws_random_numbers = True
            before.restore()
        saved = save_generators()
        try:
            items = []
            for position, index in zip(range(piece.start, piece.stop), samples, strict=True):
                seed_generators(mix(self._seed, piece.epoch, position))
                items.append(self._dataset[index])
            return self._collate(items)
        finally:
            restore_generators(saved)


class _StreamReader(IterableDataset[MicroBatch]):
    """This rank's pieces of an iterable data set.

    Every rank and every loader process reads the whole stream, with the same random numbers, and keeps its own
    positions: that is the only cut which needs nothing of the data set and does not depend on the number of processes.
    """

    def __init__(
        self, dataset: Iterable[Any], cut: Cut, collate: Callable[[list[Any]], Any], seed: int, epoch: int
    ) -> None:
        self._dataset = dataset
        self._cut = cut
        self._collate = collate
        self._seed = mix(seed, epoch)
        self._epoch = epoch

    def __iter__(self) -> Iterator[MicroBatch]:
        worker = torch.utils.data.get_worker_info()
        number, count = (worker.id, worker.num_workers) if worker else (0, 1)
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(self._epoch)
        outside = save_generators()
        seed_generators(self._seed)
        samples = iter(self._dataset)
        inside, index = save_generators(), 0
        restore_generators(outside)
        position_in_window = 0
        while True:
            size = min(self._cut.global_micro_batch, self._cut.batch_size - position_in_window)
            outside = save_generators()
            restore_generators(inside)
            taken = [sample for _, sample in zip(range(size), samples, strict=False)]
            inside = save_generators()
            restore_generators(outside)
            if not taken:
                return
            if index % count == number:
                start, stop = self._cut.piece(len(taken))
                own = taken[start:stop] or taken[:1]
                yield MicroBatch(self._collate(own), stop - start, len(taken))
            index += 1
            position_in_window = (position_in_window + len(taken)) % self._cut.batch_size
            if len(taken) < size:
                return


def _check_stream(dataset: Any, shuffle: bool | None, num_workers: int, num_ranks: int) -> None:
    kind = type(dataset).__name__
    if shuffle:
        raise DataError(
            f"the data set {kind} is iterable and has only its own order. "
            "Leave shuffle out, or give it __len__ and __getitem__."
        )
    names = _names_used(type(dataset).__iter__) if hasattr(type(dataset), "__iter__") else set()
    if num_workers > 1 and "get_worker_info" in names:
        raise DataError(
            f"the data set {kind} cuts itself among loader processes (it calls get_worker_info), and Rung would cut it "
            "again. Use workers=1 or workers=0, or take the cut out of its __iter__."
        )
    cutting = sorted(names & {"get_rank", "get_world_size"})
    if num_ranks > 1 and cutting:
        raise DataError(
            f"the data set {kind} cuts itself among ranks (it calls {', '.join(cutting)}), "
            "and Rung would cut it again. Let its __iter__ give every sample."
        )


def _names_used(function: Any) -> set[str]:
    code = getattr(inspect.unwrap(function), "__code__", None)
    names: set[str] = set()
    pending = [code] if code is not None else []
    while pending:
        current = pending.pop()
        names |= set(current.co_names)
        pending += [constant for constant in current.co_consts if inspect.iscode(constant)]
    return names


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """A data set may have its samples on the GPU already, or sparse ones, which have no memory that could be pinned."""
    can_be = tensor.device.type == "cpu" and tensor.layout == torch.strided
    return tensor.pin_memory() if can_be else tensor


def _as_is(item: Any) -> Any:
    return item


def _start_worker(worker_id: int) -> None:
    die_with_parent()
    leave_requests_to_parent()
    name_process(f"data worker {worker_id}")  # how it is named in the report of a hang
