"""Samples that raise when they are read, and the setting that leaves some of them out (`skip_bad_samples`).

A rank reads its own part of a batch alone, so it tells the others what it could not read: the mean over a batch counts
the samples that are really there, and all ranks count what the run has left out. Nothing moves to another position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from rung.data.batch_shard import BadSample, LocalBatch
from rung.errors import DataError

# Takes a JSON value of this rank. Returns those of all ranks that read data, each with the data rank that it is.
Gather = Callable[[Any], list[tuple[int, Any]]]


def good(samples: Iterable[Any]) -> list[Any]:
    return [sample for sample in samples if not isinstance(sample, BadSample)]


def bad(samples: Iterable[Any]) -> tuple[BadSample, ...]:
    return tuple(sample for sample in samples if isinstance(sample, BadSample))


def can_be_left_out(error: Exception) -> bool:
    """Whether an error is that of a sample. The next one would not fit into memory, either."""
    return not isinstance(error, MemoryError)


class BadSamples:
    """The samples that a run leaves out: at most `limit`, each counted once."""

    def __init__(
        self,
        limit: int,
        known: Iterable[str] = (),
        gather: Gather | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """`known` are those that the run left out before; `gather` is for several ranks, in each of their windows."""
        self.limit, self._known = limit, dict.fromkeys(known)
        self._names = tuple(self._known)
        self._gather, self._say = gather, say

    def settle(self, windows: Iterable[LocalBatch]) -> Iterator[LocalBatch]:
        """The windows with the numbers of samples that all ranks could read."""
        return map(self.settle_one, windows)

    def settle_one(self, window: LocalBatch) -> LocalBatch:
        found = {one.position: one for micro in window.micro_batches for one in micro.bad}
        counts = [micro.num_global_samples - len(micro.bad) for micro in window.micro_batches]
        if self._gather is not None:
            own = [[one.position, one.name, one.error] for one in found.values()]
            rows = self._gather([[micro.num_samples for micro in window.micro_batches], own])
            _refuse_disagreement(rows, window)
            found |= {row[0]: BadSample(*row) for _, (_, bad) in rows for row in bad}
            by_rank = {data_rank: sizes for data_rank, (sizes, _) in rows}
            counts = [sum(sizes) for sizes in zip(*by_rank.values(), strict=True)]
        for _, one in sorted(found.items()):
            self._count(one)
        # A micro-batch without any sample is left out as well, as those that a short last window lacks.
        pairs = zip(window.micro_batches, counts, strict=True)
        settled = [replace(micro, num_global_samples=count, bad=()) for micro, count in pairs]
        return replace(
            window,
            micro_batches=[m for m in settled if m.num_global_samples] or settled[:1],
            skipped=self._names,
        )

    def _count(self, one: BadSample) -> None:
        if one.name in self._known:
            return
        if len(self._known) >= self.limit:
            before = len(self._known)
            others = f"{before} other{' was' if before == 1 else 's were'} left out before it"
            raise DataError(f"{one.name} cannot be read, and {others} (--skip-bad-samples {self.limit}): {one.error}")
        self._known[one.name] = None
        self._names = tuple(self._known)
        if self._say is not None:
            self._say(f"{one.name} is left out ({len(self._known)} of at most {self.limit}): {one.error}")


def _refuse_disagreement(rows: list[tuple[int, Any]], window: LocalBatch) -> None:
    """Ranks that share samples must have the same ones: a disk may fail on one of them alone."""
    known: dict[int, Any] = {}
    for data_rank, row in rows:
        have = [row[0], [one[:2] for one in row[1]]]
        if known.setdefault(data_rank, have) != have:
            names = {one[1] for _, other in rows for one in other[1]}
            raise DataError(
                f"in step {window.step} {', '.join(sorted(names))} could be read on some of the ranks that share it "
                "and not on others, so it cannot be left out. A rank's disk or network may be at fault."
            )
