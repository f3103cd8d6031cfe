"""The order of the training samples that a task asks for, and whether a run that is resumed still has it."""

from __future__ import annotations

from typing import Any

from torch.utils.data import IterableDataset

from rung.checkpoint import Checkpoint
from rung.data.batches import Batches
from rung.data.orders import ByLength, Mixture, Order, WeightedDraws
from rung.errors import CheckpointError, DataError
from rung.spec.config import RunConfig
from rung.spec.task import Task


def order_of(task: Task, config: RunConfig, dataset: Any) -> Order | None:
    """The order that the task asks for; None for a plain one."""
    name = task.order()
    if name is None:
        return None
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"{task.name}: {name} orders a map-style data set, and {type(dataset).__name__} is iterable: it has "
            "an order of its own. Let its __iter__ choose, or define __len__ and __getitem__."
        )
    if task.mixture is not None:
        return Mixture(dataset, task.mixture, config.seed, shuffle=config.shuffle is not False)
    if config.shuffle is False:
        raise DataError(
            f"{task.name}: {name} draws an order at random, and --no-shuffle turns that off. Leave one out."
        )
    if task.sample_weights is not None:
        return WeightedDraws(task.sample_weights(dataset), len(dataset), config.seed)
    assert task.sample_lengths is not None
    return ByLength(task.sample_lengths(dataset), len(dataset), config.batch_size, config.seed)


def refuse_other_data(checkpoint: Checkpoint | None, batches: Batches) -> None:
    """Refuse to go on where the samples that an epoch has already seen cannot be determined."""
    if checkpoint is None:
        return
    before = checkpoint.manifest.get("num_samples")
    if before != batches.num_samples:
        raise CheckpointError(
            f"the training data had {before} samples when the state was saved and has {batches.num_samples} now, so "
            "the samples that this epoch has already seen cannot be determined. Resume with the same data, or start a "
            "new run from the weights (rung export)."
        )
    if checkpoint.manifest.get("order") != batches.order_digest:
        raise CheckpointError(
            "the training samples have another order than when the state was saved, so those that this epoch has "
            "already seen cannot be determined: sample_weights(), sample_lengths() or mixture of the task has changed, "
            "or the batch size, within which lengths are sorted. Resume with the same order, or start a new run from "
            "the weights (rung export)."
        )
