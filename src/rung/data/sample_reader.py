"""Reads samples and collates them into micro-batches, in the loader's processes.

Random numbers drawn while a sample is read depend only on (seed, epoch, position), so augmentation is the same for any
number of ranks and loader processes.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, Subset, TensorDataset, default_collate

from rung.data.batch_shard import BatchPartition, MicroBatch, SampleRange
from rung.data.orders import Order
from rung.data.permutation import mix
from rung.data.rng import GeneratorMarks, keeping_generators, restore_generators, save_generators, seed_generators
from rung.errors import DataError

_EXAMPLES = 2


def example_batch(dataset: Any, collate: Callable[[list[Any]], Any] | None) -> Any:
    """A batch of the first samples, to inspect its structure: the same on every rank, since they cut a model by it.
    Restores the random generators."""
    with keeping_generators():
        seed_generators(0)
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            samples = list(itertools.islice(iter(dataset), _EXAMPLES))
        else:
            samples = [dataset[index] for index in range(min(_EXAMPLES, len(dataset)))]
        if not samples:
            raise DataError(f"the data set {type(dataset).__name__} is empty.")
        return (collate or default_collate)(samples)


class Collator:
    """The task's `collate`. Random numbers that it draws depend on the place of the samples alone, not on what was read
    before; they are those of a whole rank's samples, so other numbers of ranks give others."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate
        self.draws = False

    def __call__(self, samples: list[Any], *place: int) -> Any:
        if self._collate is default_collate:  # it draws none
            return self._collate(samples)
        if not self.draws:
            before = GeneratorMarks()
            data = self._collate(samples)
            if before.hold():
                return data
            self.draws = True
            before.restore()
        with keeping_generators():
            seed_generators(mix(*place))
            return self._collate(samples)


class _Rows:
    """Reads a batch of a TensorDataset, or of subsets of one, in one operation for each tensor. That gives what
    default_collate makes of its samples."""

    def __init__(self, dataset: TensorDataset, subsets: list[Subset[Any]]) -> None:
        self._dataset, self._subsets = dataset, subsets

    @classmethod
    def of(cls, dataset: Any) -> _Rows | None:
        """None if the data set is no such one, or a subclass, which may read otherwise."""
        subsets = []
        while type(dataset) is Subset:
            subsets.append(dataset)
            dataset = dataset.dataset
        return cls(dataset, subsets) if type(dataset) is TensorDataset else None

    def read(self, samples: list[int]) -> list[torch.Tensor] | None:
        """None if a tensor or an index is of a kind that is read otherwise. Both may be replaced during a run."""
        tensors, places = self._dataset.tensors, samples
        for subset in self._subsets:
            places = [subset.indices[place] for place in places]
        is_plain = all(type(tensor) is torch.Tensor and tensor.layout == torch.strided for tensor in tensors)
        if not is_plain or not all(type(place) is int or isinstance(place, np.integer) for place in places):
            return None
        index = torch.tensor(places)
        return [tensor[index].contiguous() for tensor in tensors]


class SampleReader:
    """Reads and collates the samples of a range, each with its own random seed."""

    def __init__(self, dataset: Any, order: Order, collate: Callable[[list[Any]], Any], seed: int) -> None:
        self._dataset = dataset
        self._order = order
        self._collate = Collator(collate)
        self._seed = seed
        self._draws_random_numbers = False
        self._rows = _Rows.of(dataset) if collate is default_collate else None

    def __len__(self) -> int:
        return self._order.num_samples

    def __getitem__(self, piece: SampleRange) -> MicroBatch:
        samples = self._order.samples(piece.epoch, piece.start, piece.stop)
        rows = self._rows.read(samples) if self._rows is not None else None
        if rows is not None:
            return MicroBatch(rows, piece.real, piece.num_global)
        # A place of its own: no sample has a negative position.
        try:
            items = self._read(piece, samples)
        except Exception as error:
            error.add_note(self._which(samples))
            raise
        data = self._collate(items, self._seed, piece.epoch, -1 - piece.start)
        return MicroBatch(data, piece.real, piece.num_global, self._collate.draws)

    def _which(self, samples: list[int]) -> str:
        """Which of the samples cannot be read."""
        for index in samples:
            try:
                self._dataset[index]
            except Exception:
                return f"This is sample {index} of the data set: dataset[{index}] raises it."
        return f"These are samples {', '.join(map(str, samples))} of the data set, read together."

    def _read(self, piece: SampleRange, samples: list[int]) -> list[Any]:
        # Seeding three generators for each sample costs more than reading a small one. Most data sets draw no random
        # numbers: read without seeding, and only if a generator moved, read again with seeds.
        if not self._draws_random_numbers:
            before = GeneratorMarks()
            many = getattr(self._dataset, "__getitems__", None)  # torch's protocol for batched reads
            items = many(samples) if many else [self._dataset[index] for index in samples]
            if before.hold():
                return items
            self._draws_random_numbers = True
            before.restore()
        with keeping_generators():
            items = []
            for position, index in zip(range(piece.start, piece.stop), samples, strict=True):
                seed_generators(mix(self._seed, piece.epoch, position))
                items.append(self._dataset[index])
            return items


class StreamReader(IterableDataset[MicroBatch]):
    """This rank's samples of an iterable data set.

    Every rank and every loader process reads the whole stream with the same random numbers and keeps its own positions:
    the only partition that needs no cooperation of the data set and does not depend on the number of processes.
    """

    def __init__(
        self, dataset: Iterable[Any], cut: BatchPartition, collate: Callable[[list[Any]], Any], seed: int, epoch: int
    ) -> None:
        self._dataset = dataset
        self._cut = cut
        self._collate = Collator(collate)
        self._seed = mix(seed, epoch)
        self._epoch = epoch

    def __iter__(self) -> Iterator[MicroBatch]:
        worker = torch.utils.data.get_worker_info()
        number, count = (worker.id, worker.num_workers) if worker else (0, 1)
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(self._epoch)
        # The data set draws from generators of its own (`inside`), swapped in while it runs.
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
                own = taken[start:stop] or taken[:1]  # a stand-in for an empty range
                data = self._collate(own, self._seed, index, -1 - start)
                yield MicroBatch(data, stop - start, len(taken), self._collate.draws)
            index += 1
            position_in_window = (position_in_window + len(taken)) % self._cut.batch_size
            if len(taken) < size:
                return


def check_stream(dataset: Any, shuffle: bool | None, num_workers: int, num_ranks: int, *, has_shards: bool) -> None:
    kind = type(dataset).__name__
    if shuffle and not has_shards:
        raise DataError(
            f"the data set {kind} is iterable and has only its own order. "
            "Leave shuffle out, or define __len__ and __getitem__, or num_shards and shard(num_shards, index)."
        )
    names = _names_used(type(dataset).__iter__) if hasattr(type(dataset), "__iter__") else set()
    if num_workers > 1 and "get_worker_info" in names and not has_shards:
        raise DataError(
            f"the data set {kind} splits itself among loader processes (it calls get_worker_info), and Rung would "
            "split it again. Use workers=1 or workers=0, or remove the split from its __iter__."
        )
    splitting = sorted(names & {"get_rank", "get_world_size"})
    if num_ranks > 1 and splitting:
        raise DataError(
            f"the data set {kind} splits itself among ranks (it calls {', '.join(splitting)}), "
            "and Rung would split it again. Let its __iter__ yield every sample."
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
