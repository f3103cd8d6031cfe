"""From a plain module to one that is spread over the world: the one place where the order of transformations stands.

split into stages -> batch norm -> activation checkpointing -> compile -> for each unit: storage, cut tensors, shard.
Storage comes piece by piece from `Weights.fill`, because a whole model need not fit. DDP is not here: it is a wrapper
around a finished module and belongs to the runtime.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rung.config import RunConfig
from rung.errors import ModelError, StrategyError
from rung.parallel.activation import apply_activation_checkpointing
from rung.parallel.batchnorm import SyncBatchNorm, batch_norms, synchronise_batch_norm
from rung.parallel.blocks import find_blocks
from rung.parallel.dropout import NoDropout, without_dropout
from rung.parallel.materialize import Weights, is_absent
from rung.parallel.pipeline import Conductor, StagePart, places_of
from rung.parallel.rehearsal import Rehearser
from rung.parallel.sharding import Sharding, choose_units, gathered_type, without_shared
from rung.parallel.stages import Stages, crossing, cut, lies_in, parts_of
from rung.parallel.tensor import apply_sequence_parallel, apply_tensor_plan
from rung.parallel.tensor_plan import TensorPlan, make_plan
from rung.task import Task
from rung.world import World

__all__ = ["Spread", "parallelize"]


@dataclass
class Spread:
    """A model that is spread over the world, and what was done to it."""

    model: nn.Module
    notes: list[str]
    roots: list[nn.Module]  # what is sharded as a whole: the model, or this rank's stages
    plan: TensorPlan | None = None
    stages: Stages | None = None
    parts: list[StagePart] = field(default_factory=list)
    rehearser: Rehearser | None = None
    places: dict[str, int] = field(default_factory=dict)  # the server of each tensor that lives on one
    remote: dict[str, int] = field(default_factory=dict)  # the server of each module that trainers call there


def parallelize(
    weights: Weights,
    world: World,
    config: RunConfig,
    task: Task,
    run: Callable[[nn.Module, Any], Any],
    example: Any = None,
) -> Spread:
    """The model with storage, spread as the layout says.

    `run` calls a model on a batch, and `example` is a batch of the task; both are needed where the model itself is cut.
    """
    model = weights.model
    assert model is not None
    notes: list[str] = []
    layout, blocks = world.layout, task.blocks
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError("no parameter of the model requires a gradient; there is nothing to train.")

    if not config.dropout:
        turn_off_dropout(model)

    spread = Spread(model, notes, roots=[model])
    if layout.is_composed:
        spread.rehearser = Rehearser(model, run, world.device, weights.mode)
        spread.rehearser.parameter_dtype = gathered_type(world, config)
        spread.rehearser.repeats = world.wrap_block is not None
    if layout.tp > 1:
        spread.plan = _plan_tensors(spread, task, world, config, example)
    if layout.pp > 1:
        spread.stages = _split(spread, weights, world, config, task, example)

    _treat_batch_norm(model, world, config, notes)

    if config.activation_checkpointing != "none":
        whole = _whole_blocks(spread, blocks)
        if not config.dropout and not config.compile and layout.kind != "dp":  # whose copies are wrapped anew
            for block in whole:
                block.forward = without_dropout(block.forward)
        recomputing = None if config.dropout or config.compile else NoDropout
        apply_activation_checkpointing(whole, config.activation_checkpointing, recomputing)

    if config.compile and (layout.uses_fully_shard or layout.is_composed):
        # Block by block: the communication between blocks cannot be compiled. Whole models are compiled by the runtime.
        for block in _whole_blocks(spread, blocks):
            if layout.pp > 1:
                block.forward = torch.compile(block.forward)
            else:
                block.compile()

    if world.wrap_block is not None:
        for block in _whole_blocks(spread, blocks):
            world.wrap_block(block)

    _give_storage(spread, weights, world, config, blocks)
    return spread


def _whole_blocks(spread: Spread, blocks: str | None) -> list[nn.Module]:
    """The model's blocks, none of which a cut goes through; or, where stages cut all of them, the stages' parts."""
    found = find_blocks(spread.model, blocks)
    if spread.stages is None:
        return [block for _, block in found]
    parts = set(spread.stages.calls)
    inside = [block for name, block in found if lies_in(name, parts)]
    return inside or [spread.model.get_submodule(name) for name in dict.fromkeys(spread.stages.calls)]


def _plan_tensors(spread: Spread, task: Task, world: World, config: RunConfig, example: Any) -> TensorPlan:
    rehearser = spread.rehearser
    assert rehearser is not None
    plan = make_plan(
        rehearser.twin,
        world.layout.tp,
        given=task.tensor_parallel,
        run=rehearser.run(example),
        device=world.device,
        mode=rehearser.mode,
        blocks=task.blocks,
        sequence_parallel=config.sequence_parallel,
        proofs=world.proofs,
        quick=world.wrap_block is not None,
    )
    origin = {"task": "the task's plan", "model": "the model's own plan"}.get(plan.source, "derived")
    spread.notes.append(f"tensor parallel: {len(plan.styles)} modules cut in {world.layout.tp} ({origin})")
    if plan.whole:
        spread.notes.append(f"tensor parallel: whole on every rank: {', '.join(plan.whole)}")
    spread.notes += plan.notes
    return plan


def _split(spread: Spread, weights: Weights, world: World, config: RunConfig, task: Task, example: Any) -> Stages:
    """Cut into stages, and let this rank keep what its own need."""
    rehearser = spread.rehearser
    assert rehearser is not None
    layout = world.layout
    rehearser.is_part = parts_of(rehearser.twin, task.blocks)
    before = _plain_values(rehearser)
    rehearsal = rehearser(example)
    changed = [name for name, value in _plain_values(rehearser).items() if before.get(name) != value]
    if changed:
        raise ModelError(
            f"forward changes {', '.join(changed[:3])}, outside of the parts that stages are made of; a stage that "
            "ends before that line would not. Keep such a count in a part, or use a strategy without stages."
        )
    stages = cut(rehearser.twin, rehearsal, layout.num_stages, config.split)
    if task.eval_data is not None and config.eval_every != "never":
        crossing(stages, rehearser(example, training=False))  # now, rather than after the first epoch
    spread.notes += stages.describe()
    own = set(own_stages(world))
    parts = {name for stage in range(layout.num_stages) for name in stages.modules_of(stage)}
    elsewhere = {name for name in parts if not stages.stages_of_module(name) & own}

    def keeps(name: str) -> bool:
        if name in stages.holders:
            return bool(own & set(stages.holders[name]))
        # A buffer: with the part that it belongs to, or on every rank.
        return not lies_in(name, elsewhere)

    weights.keep_only(keeps)
    if layout.zero == 3:
        spread.notes.append(
            f"{layout.name}: parameters are gathered anew for each micro-batch; zero2 or zero1 gathers once a step"
        )
    if layout.zero >= 2 and layout.schedule == "zb":
        spread.notes.append(
            f"{layout.name}: with zero bubble parameters stay gathered and gradients whole until the end of a step"
        )
    return stages


def _plain_values(rehearser: Rehearser) -> dict[str, Any]:
    """Numbers that modules outside of the parts keep as attributes."""
    found: dict[str, Any] = {}
    parts = {name for name, module in rehearser.twin.named_modules() if rehearser.is_part(name, module)}
    for name, module in rehearser.twin.named_modules():
        if not lies_in(name, parts):
            for key, value in vars(module).items():
                if type(value) in (int, float) and key != "training":
                    found[f"{name}.{key}".lstrip(".")] = value
    return found


def own_stages(world: World) -> list[int]:
    return list(range(world.stage, world.layout.num_stages, world.layout.pp))


def _treat_batch_norm(model: nn.Module, world: World, config: RunConfig, notes: list[str]) -> None:
    if not batch_norms(model):
        return
    if world.layout.num_data_ranks > 1:
        if config.batch_norm == "sync":
            synchronise_batch_norm(model, world.data_group)
            notes.append("batch norm: sync, statistics of the whole micro-batch over all ranks")
        else:
            notes.append("batch norm: local, each rank normalises by its own samples; rank 0's statistics are kept")
    elif world.layout.pp > 1:
        notes.append("batch norm: statistics of each micro-batch, as one process would have with --micro-batch")


def _give_storage(spread: Spread, weights: Weights, world: World, config: RunConfig, blocks: str | None) -> None:
    """Unit by unit: fill, cut tensors, shard. All ranks walk the same way, whatever they keep of it."""
    model, stages, layout = spread.model, spread.stages, world.layout
    sharding = Sharding(world, config, spread.notes) if layout.uses_fully_shard else None
    if sharding is not None:
        sharding.refuse_scalars(model)
    units = choose_units(model, config.shard_by, blocks) if sharding is not None or layout.tp > 1 else []
    if stages is not None:  # a unit is called as a whole, so it must lie within a part
        parts = set(stages.calls)
        units = [(name, unit) for name, unit in units if lies_in(name, parts)]
    units = without_shared(model, units, spread.notes)

    def prepare(name: str, module: nn.Module) -> None:
        weights.fill(module)
        if spread.plan is not None and not any(is_absent(p) for p in module.parameters()):
            with world.tensors():
                apply_tensor_plan(module, name, spread.plan, world.axis("tp"))

    for name, unit in units:
        prepare(name, unit)
        if sharding is not None and not any(is_absent(p) for p in unit.parameters()):
            sharding.apply(unit)
    if stages is None:
        prepare("", model)
        _apply_sequence_parallel(spread, world)
    else:
        weights.fill(model)
        _make_parts(spread, world)
    if sharding is not None:
        for root in spread.roots:
            sharding.apply(root, is_root=True)
        for part in spread.parts:
            part.show_parameters()
        sharding.finish(spread.roots, has_units=bool(units))


def _make_parts(spread: Spread, world: World) -> None:
    """The stages of this rank as modules, their tensors cut."""
    model, stages = spread.model, spread.stages
    assert stages is not None
    own = own_stages(world)
    places = places_of(model)
    for name in dict.fromkeys(stages.calls):
        here = stages.stages_of_module(name) & set(own)
        if len(here) > 1 and world.layout.uses_fully_shard:
            raise StrategyError(
                f"{name} is called in stages {sorted(here)}, which lie on one rank; it cannot be sharded with both. "
                "Use --schedule 1f1b, or a split that keeps its calls together."
            )
        module = model.get_submodule(name)
        if here and spread.plan is not None:
            with world.tensors():
                apply_tensor_plan(module, name, spread.plan, world.axis("tp"))
    for shared in places.values():  # one of them may have been cut, the others follow
        cut_one = next(
            (owner._parameters[key] for owner, key in shared if isinstance(owner._parameters[key], DTensor)), None
        )
        for owner, key in shared if cut_one is not None else []:
            owner._parameters[key] = cut_one
    _apply_sequence_parallel(spread, world)
    conductor = Conductor(model, stages, expects_data=world.has_storage)
    spread.parts = [StagePart(conductor, stage) for stage in own]
    spread.roots = list(spread.parts)


def _apply_sequence_parallel(spread: Spread, world: World) -> None:
    """Each run of blocks that this rank has without a break cuts its input and gathers its output."""
    if spread.plan is None or not spread.plan.sequence_blocks:
        return
    groups = [list(spread.plan.sequence_blocks)]
    if spread.stages is not None:
        groups = [spread.stages.modules_of(stage) for stage in own_stages(world)]
    for group in groups:
        blocks = [(n, spread.model.get_submodule(n)) for n in group if n in spread.plan.sequence_blocks]
        if blocks:
            with world.tensors():
                apply_sequence_parallel(blocks, spread.plan, world.axis("tp"))


def sync_batch_norms(model: nn.Module) -> list[SyncBatchNorm]:
    return [module for module in model.modules() if isinstance(module, SyncBatchNorm)]


def turn_off_dropout(model: nn.Module) -> None:
    """For modules that drop inside a kernel or a function that nobody can look into from outside."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            module.dropout = 0.0
