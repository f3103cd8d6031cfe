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
    """Finds out if the task's `collate` leaves samples out or merges them, by what it makes of equally many.

    The mean over such a part of a batch would count by samples that are not in it. A `collate` that makes pairs, or one
    row of all samples, makes as many rows of equally many each time.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._collates = {True: task.collate, False: task.eval_collate or task.collate}
        self._counts: dict[tuple[bool, int], int] = {}  # rows, by whether they are of training and how many samples

    def __call__(self, micro: MicroBatch, *, is_whole: bool, trains: bool = True) -> None:
        """`is_whole`: the micro-batch is all that the loss is a mean over, so how much it counts does not matter."""
        if self._task.loss_weight is not None or self._collates[trains] is None or is_whole or micro.num_samples == 0:
            return
        count, most = _num_rows(micro), micro.num_samples
        if count is None or count > most:
            return
        before = self._counts.setdefault((trains, most), count)
        if count == before:
            return
        advice = "leave them out of the data set"
        if self._task.loss_scope != "batch":
            advice = f"let loss_weight(target) return how many rows there are, or {advice}"
        raise DataError(
            f"{self._task.name}: collate() made {count} rows of {most} samples, and {before} of {most} others: it "
            "leaves samples out, or merges some. The loss of a rank or of a micro-batch counts by its samples, so the "
            f"others would count as well. To be exact, {advice}; --skip-bad-samples leaves out those that cannot be "
            "read."
        )


def _num_rows(micro: MicroBatch) -> int | None:
    """The size that all tensors begin with; None if that may be something else than rows."""
    tensors = [tensor for tensor in tensors_in(micro.data) if tensor.dim() > 0]
    if any(tensor.is_nested or micro.num_samples in tensor.shape[1:] for tensor in tensors):
        return None  # time may come first, and then the samples
    sizes = {tensor.shape[0] for tensor in tensors}
    return sizes.pop() if len(sizes) == 1 else None
