"""Whether the windows that ranks read of an iterable data set go together: nothing else tells before they wait."""

from __future__ import annotations

import torch
import torch.distributed as dist

from rung.data.batch_shard import LocalBatch
from rung.data.batches import Batches
from rung.data.shard_windows import Exchange
from rung.distributed.world import World
from rung.errors import DataError


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


def _describe(rank: int, ends: int, num_micro_batches: int, num_samples: int) -> str:
    return f"the data of rank {rank} {'ends after' if ends else 'goes on after'} {num_samples} samples"
