"""Checks of batches: ranks that share samples must read the same ones, and `collate` must leave none out."""

from __future__ import annotations

import torch

from rung.data.batch_shard import LocalBatch, MicroBatch
from rung.data.pytree import tensors_in
from rung.distributed.world import World
from rung.errors import DataError
from rung.spec.task import Task


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


class RowCheck:
    """Finds batches that have fewer rows than samples, because the task's `collate` has left some out.

    The mean over such a part of a batch would count by samples that are not in it. A `collate` that makes fewer rows of
    every batch, of pairs or by packing, is none of these.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._is_due = (task.collate or task.eval_collate) is not None and task.loss_weight is None
        self._had_all = False

    def __call__(self, micro: MicroBatch, *, is_whole: bool) -> None:
        """`is_whole`: the micro-batch is all that the loss is a mean over, so how much it counts does not matter."""
        if not self._is_due or is_whole or micro.num_samples == 0:
            return
        rows = {tensor.shape[0] for tensor in tensors_in(micro.data) if tensor.dim() > 0}
        count, most = max(rows, default=0), micro.num_samples
        self._had_all = self._had_all or count == most
        if len(rows) != 1 or count >= most or (2 * count <= most and not self._had_all):
            return
        advice = "leave them out of the data set"
        if self._task.loss_scope != "batch":
            advice = f"let loss_weight(target) return how many it has kept, or {advice}"
        raise DataError(
            f"{self._task.name}: collate() made a batch of {count} rows from {most} samples. The loss of a rank or of a "
            f"micro-batch counts by its samples, so those that collate leaves out would count as well. To be exact, "
            f"{advice}; --skip-bad-samples leaves out those that cannot be read."
        )
