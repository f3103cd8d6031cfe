"""Losses of a whole micro-batch (`loss_scope = "batch"`): every rank gets the outputs and targets of all data ranks.

Each rank then computes the same loss. Only its own rows carry gradients, so the sum of the ranks' gradients is that of
the loss, as it is for the shares of a mean over samples.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rung.data.batch_shard import BatchPartition
from rung.data.pytree import map_tensors
from rung.distributed.world import World
from rung.errors import TaskError


class BatchGather:
    """Gathers rows over the data ranks."""

    def __init__(self, world: World) -> None:
        self._world, self._rank, self._num_ranks = world, world.role.data_rank, world.layout.num_data_ranks

    def sizes(self, num_global_samples: int) -> list[int]:
        """The number of samples of each data rank in a micro-batch."""
        cuts = [BatchPartition(num_global_samples, self._num_ranks, rank) for rank in range(self._num_ranks)]
        pieces = [cut.piece(num_global_samples) for cut in cuts]
        return [stop - start for start, stop in pieces]

    def __call__(self, data: Any, num_global_samples: int) -> Any:
        """The rows of all data ranks in every tensor; one without a row for each sample is taken from this rank."""
        sizes = self.sizes(num_global_samples)
        num_rows = max(sizes[self._rank], 1)  # a stand-in has one row

        def gather(tensor: Tensor) -> Tensor:
            if tensor.dim() == 0 or tensor.shape[0] != num_rows:
                # All ranks compute it alike, a learnt temperature, say, and each has its whole gradient.
                fixed = tensor.detach()
                return fixed + (tensor - fixed) / self._num_ranks if tensor.requires_grad else tensor
            return self._rows(tensor, sizes)

        return map_tensors(data, gather)

    def _rows(self, tensor: Tensor, sizes: list[int]) -> Tensor:
        world, own = self._world, tensor[: sizes[self._rank]]
        shapes = world_shapes(tensor, world)
        if any(shape != shapes[0] for shape in shapes):
            raise TaskError(
                f'loss_scope = "batch": ranks have outputs or targets of different shapes, {shapes}, which cannot be '
                "one batch. Let collate() pad them to one length."
            )
        padded = tensor.new_zeros((max(sizes), *tensor.shape[1:]))
        padded[: len(own)] = own.detach()
        rows = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(rows, padded, group=world.data_group)
        pieces = [
            own if rank == self._rank else row[:size] for rank, (row, size) in enumerate(zip(rows, sizes, strict=True))
        ]
        return torch.cat(pieces)


def world_shapes(tensor: Tensor, world: World) -> list[list[int]]:
    """The shapes of one row on all data ranks."""
    own = torch.tensor([tensor.dim(), *tensor.shape[1:], *[0] * (8 - tensor.dim())], device=world.device)
    rows = [torch.empty_like(own) for _ in range(world.layout.num_data_ranks)]
    dist.all_gather(rows, own, group=world.data_group)
    if not world.tensors.has_values:  # a dry run takes those of the others to be its own
        return [list(tensor.shape[1:]) for _ in rows]
    return [row.tolist()[1 : row.tolist()[0]] for row in rows]
