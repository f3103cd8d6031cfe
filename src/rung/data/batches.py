"""The windows of a data set, one after the other, as a rank takes them. Knows nothing of models and strategies."""

from __future__ import annotations

import hashlib
import multiprocessing
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from types import TracebackType
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
    default_collate,
)

from rung.data.bad_samples import BadSamples
from rung.data.batch_shard import BatchPartition, LocalBatch, MicroBatch, SampleRange, ranges_of
from rung.data.orders import Order
from rung.data.permutation import Permutation, mix
from rung.data.sample_reader import SampleReader, StreamReader, check_stream
from rung.data.shard_windows import Exchange, ShardWindows, StreamPlace
from rung.data.shards import ReadSamples, ShardReader, Shards
from rung.data.token_batches import TokenBatches
from rung.data.worker_choice import WorkerChoice
from rung.errors import DataError
from rung.system.processes import die_with_parent, leave_requests_to_parent, name_process, own_temporary_folder

_DIGESTED = 10_000  # samples that tell one order from another
_SIGNAL_SECONDS = 1.0  # after which the death of a loader process has been told


class Batches:
    """Windows of a data set, from step `start_step` on, for one rank.

    Iterating gives `LocalBatch`es over as many epochs as `num_steps` and `num_epochs` allow. A map-style data set is
    read in shuffled order and each epoch holds every sample once; the last batch of an epoch is short. An iterable one
    is read in its own order, or shard by shard in the order of `shards.py`, if it has shards.
    """

    def __init__(
        self,
        dataset: Any,
        cut: BatchPartition,
        *,
        seed: int = 0,
        shuffle: bool | None = None,
        order: Order | None = None,
        num_steps: int | None = None,
        num_epochs: int | None = None,
        start_step: int = 0,
        start_place: StreamPlace | None = None,
        exchange: Exchange | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        choice: WorkerChoice | None = None,
        pin_memory: bool = False,
        reads: bool = True,
        bad_samples: BadSamples | None = None,
        by_tokens: TokenBatches | None = None,
    ) -> None:
        """Without `reads` there are the windows but not their data, unless only reading tells how many there are. The
        `choice` learns from the first windows how many processes read the others; an iterable data set has none. With
        an `exchange` ranks read only their own shards; `start_place` is where such a data set is read on. With
        `bad_samples` those that raise are left out. With `by_tokens` batches are those, in place of an `order`."""
        if isinstance(dataset, DataLoader):
            raise DataError(
                "train_data() and eval_data() return a data set, and this is a DataLoader: Rung makes the batches, and "
                "would make batches of its batches. Return its data set; the batch size is --batch-size, a collate_fn "
                f"the task's collate(samples), num_workers the setting workers.{_in_place_of(dataset)}"
            )
        self.cut = cut
        self.order = order  # of a map-style data set
        self.by_tokens = by_tokens
        self._bad_samples = bad_samples
        self._num_skipped = bad_samples.limit if bad_samples is not None else 0
        self._reads = reads
        self.is_stream = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
        self._dataset = dataset
        self._seed = seed
        self._collate = collate or default_collate
        self._num_workers = num_workers
        self._choice = choice if reads else None
        self._pin_memory = pin_memory
        self._start_step = start_step
        self._num_epochs = num_epochs
        self._num_steps = num_steps
        self._shards: Shards | None = None
        if self.is_stream:
            has_shards = Shards.are_in(dataset)
            check_stream(dataset, shuffle, num_workers, cut.num_ranks, has_shards=has_shards)
            if has_shards:
                self._shards = Shards(
                    dataset, cut.batch_size, seed, shuffle=shuffle is not False, num_skipped=self._num_skipped
                )
                self._start_place = start_place
                self._shard_windows = ShardWindows(
                    self._shards, cut, self._collate, seed, self._load_shards, exchange, pin_memory=pin_memory
                )
            if choice is not None:
                choice.say("workers=auto: ranks read an iterable data set themselves; workers=N lets processes do it")
            self.num_samples: int | None = None
            return
        if not isinstance(dataset, Sized):
            raise DataError(
                f"the data set {type(dataset).__name__} has __getitem__ but no __len__; its length is needed to cut it."
            )
        self.num_samples = len(dataset)
        if self.num_samples == 0:
            raise DataError(f"the data set {type(dataset).__name__} is empty.")
        self.order = by_tokens or order or Permutation(self.num_samples, seed, shuffle=shuffle is not False)
        self._reader = SampleReader(dataset, self.order, self._collate, seed, self._num_skipped)

    @property
    def dataset(self) -> Any:
        return self._dataset

    @property
    def num_shards(self) -> tuple[int, int] | None:
        """Of a data set in shards: how many it has, and how many of them this rank reads in an epoch."""
        if self._shards is None:
            return None
        lanes = self._shard_windows.lanes_read
        return self._shards.num_shards, sum(len(self._shards.of_lane(0, lane)) for lane in lanes)

    @property
    def order_digest(self) -> str | None:
        """Tells orders other than a plain permutation from each other, by their first samples: whether a task that is
        resumed still draws by the same weights, lengths or shares."""
        if self.order is None or isinstance(self.order, Permutation):
            return None
        first: list[Any] = self.order.samples(0, 0, min(self.order.num_samples, _DIGESTED))
        if self.by_tokens is not None:
            first.append(self.by_tokens.starts(0)[:_DIGESTED].tolist())
        return hashlib.sha256(repr(first).encode()).hexdigest()[:16]

    @property
    def steps_per_epoch(self) -> int | None:
        if self.by_tokens is not None:
            return self.by_tokens.num_batches
        return None if self.num_samples is None else -(-self.num_samples // self.cut.batch_size)

    @property
    def total_steps(self) -> int | None:
        """Steps from the first to the last, if that can be known."""
        per_epoch = self.steps_per_epoch
        limits = [self._num_steps] if self._num_steps is not None else []
        if per_epoch is not None and self._num_epochs is not None:
            limits.append(per_epoch * self._num_epochs)
        return min(limits) if limits else None

    def __iter__(self) -> Iterator[LocalBatch]:
        windows = self._stream_windows() if self.is_stream else self._map_windows()
        if self._shards is not None:
            windows = self._windows_of_shards()
        return windows if self._bad_samples is None else self._bad_samples.settle(windows)

    def ranges(self, step: int) -> list[SampleRange]:
        """This rank's ranges of a step; steps count from 0."""
        assert self.steps_per_epoch is not None
        assert self.num_samples is not None
        epoch, within = divmod(step, self.steps_per_epoch)
        start = within * self.cut.batch_size
        stop = min(start + self.cut.batch_size, self.num_samples)
        if self.by_tokens is not None:
            start, stop = self.by_tokens.starts(epoch)[within : within + 2].tolist()
        return list(ranges_of(self.cut, epoch, start, stop))

    def window(self, step: int) -> LocalBatch:
        """One window by the number of its step."""
        per_epoch = self.steps_per_epoch
        if per_epoch is None:
            raise DataError(
                f"the data set {type(self._dataset).__name__} is iterable, and its samples can be had only one after "
                "the other; here windows are asked for by number. Give it __len__ and __getitem__, or use ps."
            )
        started = time.perf_counter()
        micro_batches = [self._reader[piece] for piece in self.ranges(step - 1)]
        epoch, within = divmod(step - 1, per_epoch)
        return LocalBatch(step, epoch, micro_batches, within == per_epoch - 1, time.perf_counter() - started)

    def _loader(
        self, dataset: Any, sampler: Iterable[Any] | None, *, num_workers: int | None = None, pin_memory: bool = True
    ) -> Iterator[Any]:
        num_workers = self._num_workers if num_workers is None else num_workers
        pin_memory = pin_memory and self._pin_memory
        if not num_workers and not pin_memory:
            return iter(dataset)
        methods = multiprocessing.get_all_start_methods()
        generator = torch.Generator()
        generator.manual_seed(mix(self._seed, self.cut.rank))
        loader = DataLoader(
            dataset,
            batch_size=None,
            sampler=sampler,
            collate_fn=_as_is,
            num_workers=num_workers,
            worker_init_fn=_start_worker,
            pin_memory=pin_memory,
            generator=generator,
            multiprocessing_context="fork" if num_workers and "fork" in methods else None,
        )
        return _of_workers(iter(loader), own_temporary_folder()) if num_workers else iter(loader)

    def _map_windows(self) -> Iterator[LocalBatch]:
        total, per_epoch = self.total_steps, self.steps_per_epoch
        assert per_epoch is not None
        step = self._start_step
        read = self._piece_reader(step, total)
        ended = time.perf_counter()
        while total is None or step < total:
            epoch, within = divmod(step, per_epoch)
            started = time.perf_counter()
            micro_batches = [read(piece) for piece in self.ranges(step)]
            waited = time.perf_counter() - started
            step += 1
            before, ended = ended, time.perf_counter()
            if self._choice is not None and self._choice.see(waited, ended - before) and self._choice.num_workers:
                self._num_workers = self._choice.num_workers
                read = self._piece_reader(step, total)
            yield LocalBatch(step, epoch, micro_batches, ends_epoch=within == per_epoch - 1, wait_seconds=waited)

    def _piece_reader(self, start_step: int, total_steps: int | None) -> Callable[[SampleRange], MicroBatch]:
        """Reads the ranges of the steps after `start_step`, in order."""
        if not self._reads:
            return lambda piece: MicroBatch(None, 0, piece.num_global)
        if not self._num_workers and not self._pin_memory:  # torch's loader would only add its own time
            return self._reader.__getitem__
        loader = self._loader(self._reader, _PieceStream(self, start_step, total_steps))
        return lambda _: next(loader)

    def _windows_of_shards(self) -> Iterator[LocalBatch]:
        is_known = self._start_place is not None
        step, place = (self._start_step, self._start_place) if is_known else (0, StreamPlace())
        assert place is not None
        while self._num_epochs is None or place.epoch < self._num_epochs:
            epoch, windows = place.epoch, self._shard_windows.epoch(place)
            place = StreamPlace(epoch + 1)
            following = next(windows, None)
            while following is not None:
                micro_batches, after, waited = following
                is_end = self._num_steps is not None and step + 1 >= self._num_steps
                following = next(windows, None)
                step += 1
                if step > self._start_step:
                    after = after if following is not None else place
                    yield LocalBatch(step, epoch, micro_batches, following is None, waited, after)
                if is_end:
                    return

    def _load_shards(self, reader: ShardReader) -> Iterator[ReadSamples]:
        """Loader processes share out the lanes of this rank, and each gives its part of every batch in turn."""
        num_workers = min(self._num_workers, reader.num_lanes)
        items = self._loader(reader, None, num_workers=num_workers, pin_memory=False)
        while True:
            parts = [next(items) for _ in range(max(1, num_workers))]
            samples = {slot: sample for part in parts for slot, sample in part.samples.items()}
            yield ReadSamples(samples, {lane: place for part in parts for lane, place in part.places.items()})

    def _stream_windows(self) -> Iterator[LocalBatch]:
        step, epoch = 0, 0
        per_window = self.cut.num_micro_batches
        while self._num_epochs is None or epoch < self._num_epochs:
            reader = StreamReader(self._dataset, self.cut, self._collate, self._seed, epoch, self._num_skipped)
            loader = self._loader(reader, None)
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
                        yield LocalBatch(step, epoch, pending, ends_epoch=following is None, wait_seconds=waited)
                    pending, waited = [], 0.0
                    if self._num_steps is not None and step >= self._num_steps:
                        return
            epoch += 1


class _PieceStream:
    """The pieces of all steps after `start_step`, in order; the loader's sampler. It holds no list."""

    def __init__(self, batches: Batches, start_step: int, total_steps: int | None) -> None:
        self._batches = batches
        self._start_step, self._total_steps = start_step, total_steps

    def __iter__(self) -> Iterator[SampleRange]:
        step = self._start_step
        while self._total_steps is None or step < self._total_steps:
            yield from self._batches.ranges(step)
            step += 1


def _of_workers(loader: Iterator[Any], folder: str | None) -> Iterator[Any]:
    """The batches of a loader with processes, whose temporary files lie in a folder that goes with the launcher.

    When a worker breaks off, torch's loader opens ten files to find out whether there are too many. A rank that is
    killed then would leave them. The data set's own files are not affected: its code runs in the workers.
    """
    while True:
        before, tempfile.tempdir = tempfile.tempdir, folder or tempfile.tempdir
        try:
            item = next(loader)
        except StopIteration:
            return
        except (EOFError, OSError):
            # Perhaps the worker died while it handed a tensor over. torch raises the cause in the handler of a signal,
            # which comes a moment later.
            time.sleep(_SIGNAL_SECONDS)
            raise
        finally:
            tempfile.tempdir = before
        yield item


def _in_place_of(loader: DataLoader[Any]) -> str:
    """What a task has instead of the sampler of a loader."""
    if isinstance(loader.sampler, WeightedRandomSampler):
        return " In place of its WeightedRandomSampler define sample_weights(data)."
    is_own = type(loader.sampler) not in (RandomSampler, SequentialSampler) or type(loader.batch_sampler) not in (
        BatchSampler,
        type(None),
    )
    own = " In place of its sampler define sample_weights(data), or sample_lengths(data) for batches by length."
    return own if is_own and not isinstance(loader.dataset, IterableDataset) else ""


def _as_is(item: Any) -> Any:
    return item


def _start_worker(worker_id: int) -> None:
    die_with_parent()
    leave_requests_to_parent()
    name_process(f"data worker {worker_id}")  # how it is named in the report of a hang
    sys.excepthook = _hide_broken_transfer


def _hide_broken_transfer(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an uncaught exception, unless the rank broke off while multiprocessing passed it a tensor.

    The thread that passes tensors prints a traceback then. It stands before the report of the failure that made the
    rank break off (another worker was killed, say) and looks like a cause of its own.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread or not isinstance(error, ConnectionError | EOFError):
        sys.__excepthook__(kind, error, trace)
