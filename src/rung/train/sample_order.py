"""The order of the training samples that a task asks for, and whether a run that is resumed still has it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.utils.data import IterableDataset, Subset

from rung.checkpoint import Checkpoint
from rung.data.batches import Batches
from rung.data.orders import ByLength, Mixture, Order, WeightedDraws
from rung.data.token_batches import TokenBatches
from rung.errors import CheckpointError, DataError
from rung.spec.config import RunConfig
from rung.spec.task import Task


def order_of(task: Task, config: RunConfig, dataset: Any) -> Order | None:
    """The order that the task asks for; None for a plain one, and for batches by tokens, which have their own."""
    name = task.order()
    if name is None or config.batch_tokens is not None:
        return None
    _refuse_iterable(task, name, dataset)
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


def token_batches_of(
    task: Task, config: RunConfig, dataset: Any, *, is_evaluation: bool = False
) -> TokenBatches | None:
    """With --batch-tokens, the batches of a data set; None without."""
    if config.batch_tokens is None:
        return None
    asked = f"--batch-tokens {config.batch_tokens}"
    if task.sample_lengths is None:
        instead = f", and {task.order()} gives the samples another order" if task.order() is not None else ""
        raise DataError(
            f"{task.name}: {asked} needs the number of tokens of each sample{instead}. Define sample_lengths(data), as "
            "for batches of similar length, or use --batch-size."
        )
    _refuse_iterable(task, asked, dataset)
    return TokenBatches(
        task.sample_lengths(dataset),
        len(dataset),
        config.batch_tokens,
        config.seed,
        shuffle=config.shuffle is not False and not is_evaluation,
        takes_longer=is_evaluation,
    )


def with_fullest_batch(task: Task, config: RunConfig) -> tuple[Task, RunConfig]:
    """For a plan, which is about one batch: with --batch-tokens, a task whose every batch is the one with the most
    tokens, and its number of samples as the batch size."""
    if config.batch_tokens is None:
        return task, config
    dataset = task.train_data()
    batches = token_batches_of(task, config, dataset)
    assert batches is not None
    fullest = batches.fullest()
    # Enough of them for the other batch sizes that a plan tries.
    again = Subset(dataset, fullest * -(-max(4 * len(fullest), 4096) // len(fullest)))
    task = replace(task, train_data=lambda: again, sample_lengths=None)
    config = replace(config, batch_tokens=None, batch_size=len(fullest), shuffle=False)
    if config.micro_batch is not None:
        micro = int(config.micro_batch // batches.lengths[fullest].max())
        config = replace(config, micro_batch=min(max(1, micro), len(fullest)))
    return task, config


def _refuse_iterable(task: Task, name: str, dataset: Any) -> None:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"{task.name}: {name} orders a map-style data set, and {type(dataset).__name__} is iterable: it has "
            "an order of its own. Let its __iter__ choose, or define __len__ and __getitem__."
        )


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
            "or the batch size or number of tokens, by which lengths are sorted. Resume with the same order, or start "
            "a new run from the weights (rung export)."
        )
