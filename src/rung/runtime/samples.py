"""A look at the first batch: do ranks that share samples read the same ones?"""

from __future__ import annotations

import torch

from rung.errors import DataError
from rung.nested import tensors_in
from rung.windows import Window
from rung.world import World


def refuse_different_samples(world: World, window: Window) -> None:
    """Ranks that share samples must read the same ones, or stages and tensor parts compute nonsense together."""
    layout = world.layout
    if not layout.is_composed or world.pretend:
        return
    mark = torch.zeros((), dtype=torch.float64, device=world.device)
    for number, micro in enumerate(window.micro_batches, start=1):
        for place, tensor in enumerate(tensors_in(micro.data), start=1):
            values = (tensor.abs() if tensor.is_complex() else tensor).to(torch.float64)
            mark += values.sum().nan_to_num() * number * place + values.numel()
    rows = world.gather(world.read([mark]))
    for rank, row in enumerate(rows):
        same = next(r for r in range(layout.num_ranks) if layout.data_rank(r) == layout.data_rank(rank))
        if row != rows[same]:
            raise DataError(
                f"ranks {same} and {rank} read different samples, though {layout.name} lets them share a batch. "
                "The data set differs between processes: does it draw random numbers that no seed fixes?"
            )
