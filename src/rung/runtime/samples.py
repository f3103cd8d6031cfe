"""A check of the first batch: ranks that share samples must read the same ones."""

from __future__ import annotations

import torch

from rung.data.batch_shard import LocalBatch
from rung.data.pytree import tensors_in
from rung.distributed.world import World
from rung.errors import DataError


def check_same_samples(world: World, window: LocalBatch) -> None:
    """Raise if ranks that share samples read different ones: their stages or parts would not fit together."""
    layout = world.layout
    if layout.num_data_ranks + layout.servers == layout.num_ranks or not world.has_peers:
        return
    checksum = torch.zeros((), dtype=torch.float64, device=world.device)
    for number, micro in enumerate(window.micro_batches, start=1):
        for place, tensor in enumerate(tensors_in(micro.data), start=1):
            values = (tensor.abs() if tensor.is_complex() else tensor).to(torch.float64)
            # Weighted by position, so that swapped tensors differ. nan would differ from itself.
            checksum += values.sum().nan_to_num() * number * place + values.numel()
    rows = world.gather(world.tensors.read([checksum]))
    for rank, row in enumerate(rows):
        same = next(r for r in range(layout.num_ranks) if layout.data_rank(r) == layout.data_rank(rank))
        if row != rows[same]:
            raise DataError(
                f"ranks {same} and {rank} read different samples, though {layout.name} lets them share a batch. "
                "The data set differs between processes: does it draw random numbers that no seed fixes?"
            )
