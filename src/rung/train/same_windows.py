"""What ranks tell each other about the windows that they read: whether they go together, and what is not in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from rung.data.bad_samples import BadSamples
from rung.data.batch_shard import LocalBatch
from rung.data.batches import Batches
from rung.data.shard_windows import Exchange
from rung.distributed.collectives import gather_json
from rung.distributed.world import World
from rung.errors import DataError
from rung.spec.config import RunConfig


class SameWindows:
    """Compares the shapes of the ranks' windows before each step. Only for iterable data sets, whose length is not
    known: a map-style one has the same windows on all ranks by construction."""

    def __init__(self, world: World, batches: Batches) -> None:
        self._ranks = range(world.layout.servers, world.size)  # servers read no data
        is_stream = batches.is_stream and world.has_peers
        group = world.host_group(ranks=self._ranks) if is_stream else None
        self._group = group if not world.role.is_server else None

    def check(self, window: LocalBatch) -> None:
        if self._group is None:
            return
        own = torch.tensor([window.ends_epoch, len(window.micro_batches), window.num_global_samples])
        rows = [torch.empty_like(own) for _ in self._ranks]
        dist.all_gather(rows, own, group=self._group)
        found = [row.tolist() for row in rows]
        if all(row == found[0] for row in found):
            return
        other = next(place for place, row in enumerate(found) if row != found[0])
        words = [_describe(self._ranks[place], *found[place]) for place in (0, other)]
        raise DataError(
            f"in step {window.step} of epoch {window.epoch} {' and '.join(words)}: their data sets differ. Every rank "
            "reads the whole data set and keeps its own part of each batch, so it must give all samples on every rank, "
            "in the same order."
        )


def count_exchange(world: World) -> Exchange | None:
    """Ranks tell each other how many samples they have, if each of several reads only its own shards."""
    layout = world.layout
    if not world.has_peers or layout.num_data_ranks == 1 or layout.servers:
        return None
    readers = [layout.data_rank(rank) for rank in range(layout.num_ranks)]
    firsts = [readers.index(reader) for reader in range(layout.num_data_ranks)]

    def exchange(counts: list[int]) -> list[list[int]]:
        rows = world.gather([float(count) for count in counts])
        return [[int(count) for count in rows[rank]] for rank in firsts]

    return exchange


def bad_samples_of(
    config: RunConfig, world: World, known: Iterable[str] = (), say: Callable[[str, str], None] | None = None
) -> BadSamples | None:
    """What counts the samples that a run leaves out. All ranks call it, servers as well: they keep the same count."""
    if not config.skip_bad_samples:
        return None
    layout, group = world.layout, world.host_group() if world.has_peers else None

    def gather(value: Any) -> list[tuple[int, Any]]:
        rows = gather_json(value, group)
        return [(layout.data_rank(rank), row) for rank, row in enumerate(rows) if not layout.is_server(rank)]

    tell = (lambda line: say("%s", line)) if say is not None else None
    return BadSamples(config.skip_bad_samples, known, gather if group is not None else None, tell)


def _describe(rank: int, ends: int, num_micro_batches: int, num_samples: int) -> str:
    return f"the data of rank {rank} {'ends after' if ends else 'goes on after'} {num_samples} samples"
