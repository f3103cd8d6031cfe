"""Reads samples and collates them into micro-batches, in the loader's processes.

Random numbers drawn while a sample is read depend only on (seed, epoch, position), so augmentation is the same for any
number of ranks and loader processes.
"""

from __future__ import annotations

import inspect
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import GeneratorType
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, Subset, TensorDataset, default_collate

from rung.data.bad_samples import bad, can_be_left_out, good
from rung.data.batch_shard import BadSample, BatchPartition, MicroBatch, SampleRange
from rung.data.orders import Order
from rung.data.permutation import mix
from rung.data.rng import GeneratorMarks, keeping_generators, restore_generators, save_generators, seed_generators
from rung.errors import DataError

NUM_EXAMPLES = 2  # samples of an example batch, if the data set has so many


def example_batch(dataset: Any, collate: Callable[[list[Any]], Any] | None, *, num_skipped: int = 0) -> Any:
    """A batch of the first samples, to inspect its structure: the same on every rank, since they cut a model by it.
    Restores the random generators. Passes over up to `num_skipped` that cannot be read."""
    with keeping_generators():
        seed_generators(0)
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            found = iter(CountedSamples(iter(dataset), num_skipped, "of the data set"))
        else:
            found = (_read_one(dataset, index, index, num_skipped) for index in range(len(dataset)))
        first = itertools.islice(found, NUM_EXAMPLES + num_skipped)
        samples = list(itertools.islice((one for one in first if not isinstance(one, BadSample)), NUM_EXAMPLES))
        if not samples:
            raise DataError(f"the data set {type(dataset).__name__} is empty.")
        return (collate or default_collate)(samples)


def _read_one(dataset: Any, index: int, position: int, num_skipped: int) -> Any:
    """One sample of a map-style data set. If samples may be skipped and it raises, a `BadSample`."""
    try:
        return dataset[index]
    except Exception as error:
        if not num_skipped or not can_be_left_out(error):
            raise
        return BadSample.of(position, f"sample {index} of the data set", error)


class CountedSamples:
    """The samples of an iterator. If some may be skipped, one that raises is a `BadSample`."""

    def __init__(self, samples: Iterator[Any], num_skipped: int, where: str) -> None:
        self._samples, self._num_skipped, self._where = samples, num_skipped, where
        self.index = 0  # of the next one
        self._ahead: deque[Any] = deque()
        self._has_raised = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._ahead.popleft() if self._ahead else self._read()

    def next_good(self) -> Any:
        """The next one that can be read, which stays the next."""
        found = next((one for one in self._ahead if not isinstance(one, BadSample)), None)
        while found is None and len(self._ahead) <= self._num_skipped:
            self._ahead.append(self._read())
            found = None if isinstance(self._ahead[-1], BadSample) else self._ahead[-1]
        if found is None:
            raise DataError(
                f"{self._ahead[0].name} and all of the {len(self._ahead) - 1} after it cannot be read "
                f"(--skip-bad-samples {self._num_skipped}): {self._ahead[0].error}"
            )
        return found

    def _read(self) -> Any:
        name = f"sample {self.index} {self._where}"
        try:
            sample = next(self._samples)
        except StopIteration:
            if self._has_raised:
                # It could as well be the end. But training on a part of the data without a word would be worse.
                raise DataError(
                    f"the data set ended where sample {self.index - 1} {self._where} raised, as it does if a Python "
                    f"generator within it has raised and is over. {_WAY_OUT}"
                ) from None
            raise
        except Exception as error:
            if not self._num_skipped or not can_be_left_out(error):
                error.add_note(f"It is raised by {name}.")
                raise
            if isinstance(self._samples, GeneratorType):
                error.add_note(
                    f"It is raised by {name}, which --skip-bad-samples cannot leave out: a Python generator that has "
                    f"raised is over. {_WAY_OUT}"
                )
                raise
            self.index, self._has_raised = self.index + 1, True
            return BadSample.of(self.index - 1, name, error)
        self.index, self._has_raised = self.index + 1, False
        return sample


_WAY_OUT = (
    "Catch the error in the data set, let it be map-style, or let __iter__ return an object whose __next__ can be "
    "called again."
)


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
        """None if a tensor or an index is of a kind that is read otherwise, or a row is not there: read one by one, its
        sample is named. Tensors and indices may be replaced during a run."""
        try:
            return self._read(samples)
        except (IndexError, RuntimeError):  # torch raises either for an index that it does not take
            return None

    def _read(self, samples: list[int]) -> list[torch.Tensor] | None:
        tensors, places = self._dataset.tensors, samples
        if not all(type(tensor) is torch.Tensor and tensor.layout == torch.strided for tensor in tensors):
            return None
        for subset in self._subsets:
            places = [subset.indices[place] for place in places]
        if self._subsets and not all(type(place) is int or isinstance(place, np.integer) for place in places):
            return None
        index = torch.from_numpy(np.array(places, dtype=np.int64))
        return [torch.index_select(tensor, 0, index.to(tensor.device)) for tensor in tensors]


class SampleReader:
    """Reads and collates the samples of a range, each with its own random seed."""

    def __init__(
        self, dataset: Any, order: Order, collate: Callable[[list[Any]], Any], seed: int, num_skipped: int = 0
    ) -> None:
        self._dataset = dataset
        self._order = order
        self._collate = Collator(collate)
        self._seed = seed
        self._draws_random_numbers = False
        self._rows = _Rows.of(dataset) if collate is default_collate else None
        self._num_skipped = num_skipped  # samples that may raise, each left out of its batch
        self._stand_in: Any = None

    def __len__(self) -> int:
        return self._order.num_samples

    def __getitem__(self, piece: SampleRange) -> MicroBatch:
        samples = self._order.samples(piece.epoch, piece.start, piece.stop)
        rows = self._rows.read(samples) if self._rows is not None else None
        if rows is not None:
            return MicroBatch(rows, piece.real, piece.num_global)
        try:
            items = self._read(piece, samples)
        except Exception as error:
            error.add_note(self._which(samples))
            raise
        left_out = bad(items) if piece.real else ()
        # A place of its own: no sample has a negative position.
        data = self._collate(good(items) or [self._any_good()], self._seed, piece.epoch, -1 - piece.start)
        return MicroBatch(data, piece.real - len(left_out), piece.num_global, self._collate.draws, left_out)

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
        positions = range(piece.start, piece.stop)
        if not self._draws_random_numbers:
            before = GeneratorMarks()
            items = self._read_together(positions, samples)
            if before.hold():
                return items
            self._draws_random_numbers = True
            before.restore()
        with keeping_generators():
            items = []
            for position, index in zip(positions, samples, strict=True):
                seed_generators(mix(self._seed, piece.epoch, position))
                items.append(_read_one(self._dataset, index, position, self._num_skipped))
            return items

    def _read_together(self, positions: range, samples: list[int]) -> list[Any]:
        many = getattr(self._dataset, "__getitems__", None)  # torch's protocol for batched reads
        if many:
            try:
                items = list(many(samples))
            except Exception as error:
                if not self._num_skipped or not can_be_left_out(error):
                    raise
            else:
                return self._checked(items, samples)
        pairs = zip(positions, samples, strict=True)
        return [_read_one(self._dataset, index, position, self._num_skipped) for position, index in pairs]

    def _checked(self, items: list[Any], samples: list[int]) -> list[Any]:
        if len(items) != len(samples):
            raise DataError(
                f"__getitems__ of the data set {type(self._dataset).__name__} gave {len(items)} items for "
                f"{len(samples)} indices. Let it return a list with one sample for each index, in their order: the "
                "task's collate(samples) makes a batch of them, and --skip-bad-samples leaves out those that raise."
            )
        return items

    def _any_good(self) -> Any:
        """A sample in place of those that cannot be read. The same on all ranks, some of which share a batch."""
        if self._stand_in is None:
            for position in range(min(self._num_skipped + 1, len(self))):
                piece = SampleRange(0, position, position + 1, 0, 1)
                (item,) = self._read(piece, self._order.samples(0, position, position + 1))
                if not isinstance(item, BadSample):
                    self._stand_in = item
                    return item
            raise DataError(
                f"{item.name} cannot be read, and neither can any sample before it (--skip-bad-samples "
                f"{self._num_skipped}): {item.error}"
            )
        return self._stand_in


class StreamReader(IterableDataset[MicroBatch]):
    """This rank's samples of an iterable data set.

    Every rank and every loader process reads the whole stream with the same random numbers and keeps its own positions:
    the only partition that needs no cooperation of the data set and does not depend on the number of processes.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        cut: BatchPartition,
        collate: Callable[[list[Any]], Any],
        seed: int,
        epoch: int,
        num_skipped: int = 0,
    ) -> None:
        self._dataset = dataset
        self._cut = cut
        self._collate = Collator(collate)
        self._seed = mix(seed, epoch)
        self._epoch, self._num_skipped = epoch, num_skipped

    def __iter__(self) -> Iterator[MicroBatch]:
        worker = torch.utils.data.get_worker_info()
        number, count = (worker.id, worker.num_workers) if worker else (0, 1)
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(self._epoch)
        # The data set draws from generators of its own (`inside`), swapped in while it runs.
        outside = save_generators()
        seed_generators(self._seed)
        samples = CountedSamples(iter(self._dataset), self._num_skipped, f"of epoch {self._epoch}")
        inside, index = save_generators(), 0
        restore_generators(outside)
        stand_in: list[Any] = []  # the last sample that could be read
        position_in_window = 0
        while True:
            size = min(self._cut.global_micro_batch, self._cut.batch_size - position_in_window)
            outside = save_generators()
            restore_generators(inside)
            taken = list(itertools.islice(samples, size))
            if taken:
                stand_in = good(taken)[:1] or stand_in or [samples.next_good()]
            inside = save_generators()
            restore_generators(outside)
            if not taken:
                return
            if index % count == number:
                start, stop = self._cut.piece(len(taken))
                own, left_out = good(taken[start:stop]), bad(taken[start:stop])
                data = self._collate(own or stand_in, self._seed, index, -1 - start)
                yield MicroBatch(data, len(own), len(taken), self._collate.draws, left_out)
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
    parts = getattr(getattr(dataset, "_distributed", None), "world_size", 1)
    if parts > 1:
        raise DataError(
            f"the data set {kind} is one part of {parts}, of split_dataset_by_node(), and Rung would divide it "
            "again. Leave that call out: every rank gets shards of its own, also after a resume on another number of "
            "ranks."
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
