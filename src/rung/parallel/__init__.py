"""From a plain module to one that is spread over the world: the one place where the order of transformations stands.

batch norm -> activation checkpointing -> compile -> shard. Storage comes from `Weights.fill` as the last step needs it.
DDP is not here: it is a wrapper around a finished module and belongs to the runtime.
"""

from __future__ import annotations

from torch import nn

from rung.config import RunConfig
from rung.errors import ModelError
from rung.parallel.activation import apply_activation_checkpointing
from rung.parallel.batchnorm import SyncBatchNorm, batch_norms, synchronise_batch_norm
from rung.parallel.blocks import find_blocks
from rung.parallel.materialize import Weights
from rung.parallel.sharding import apply_sharding
from rung.world import World

__all__ = ["parallelize"]


def parallelize(weights: Weights, world: World, config: RunConfig, blocks: str | None) -> tuple[nn.Module, list[str]]:
    """The model with storage, spread as the layout says; and notes for the user on what was done."""
    model = weights.model
    assert model is not None
    notes: list[str] = []
    layout = world.layout
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError("no parameter of the model requires a gradient; there is nothing to train.")

    if not config.dropout:
        turn_off_dropout(model)

    if batch_norms(model) and layout.num_data_ranks > 1:
        if config.batch_norm == "sync":
            synchronise_batch_norm(model, world.data_group)
            notes.append("batch norm: sync, statistics of the whole micro-batch over all ranks")
        else:
            notes.append("batch norm: local, each rank normalises by its own samples; rank 0's statistics are kept")

    if config.activation_checkpointing != "none":
        apply_activation_checkpointing(
            [block for _, block in find_blocks(model, blocks)], config.activation_checkpointing
        )

    if config.compile and layout.shards_parameters:
        # Block by block: the gathering between blocks cannot be compiled. Whole models are compiled by the runtime.
        for _, block in find_blocks(model, blocks):
            block.compile()

    if layout.shards_parameters:
        notes += apply_sharding(model, world, config, blocks, weights.fill)
    else:
        weights.fill(model)
    return model, notes


def sync_batch_norms(model: nn.Module) -> list[SyncBatchNorm]:
    return [module for module in model.modules() if isinstance(module, SyncBatchNorm)]


def turn_off_dropout(model: nn.Module) -> None:
    """For modules that drop inside a kernel or a function that nobody can look into from outside."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            module.dropout = 0.0
