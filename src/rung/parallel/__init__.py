"""Parallelize a module for the layout of a world. This module alone defines the order of transformations:

pipeline stages -> float8 -> batch norm -> activation checkpointing -> compile -> positions of sequences -> loss in
chunks -> for each unit: storage, tensor parallel, experts, FSDP.
Units get their storage one at a time from `Weights.fill`, because the whole model may not fit on a device. The runtime
applies DDP, which wraps the finished module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rung.distributed import fake_world
from rung.distributed.torch_private import forward_hooks_of
from rung.distributed.world import World
from rung.errors import ModelError, StrategyError
from rung.parallel.activation import apply_activation_checkpointing
from rung.parallel.adapters import low_rank_layers, without_adapters
from rung.parallel.batchnorm import SyncBatchNorm, batch_norms, synchronise_batch_norm
from rung.parallel.blocks import BlockReuse, find_blocks, find_list_of_blocks, fold
from rung.parallel.context.blocks import ContextParallel, plan_context
from rung.parallel.dropout import NoDropout, turn_off_dropout, without_dropout
from rung.parallel.experts.balance import WholeBatchBalance
from rung.parallel.experts.dispatch import ExpertPlan, find_experts, plan_experts, share_out
from rung.parallel.experts.lists import find_lists
from rung.parallel.experts.rows import RowCounter
from rung.parallel.experts.two_passes import ListCall
from rung.parallel.experts.validate import ExpertCall
from rung.parallel.float8 import compute_in_float8
from rung.parallel.float8_gather import gather_in_float8
from rung.parallel.forward_tracer import ForwardTracer
from rung.parallel.host_weights import HostWeights
from rung.parallel.materialize import Weights, is_absent
from rung.parallel.output_head import chunk_heads, heads_to_chunk, settle_heads, without_heads
from rung.parallel.pipeline.partition import Stages, crossing, cut, lies_in, parts_of
from rung.parallel.pipeline.stage_forward import StageExecutor, StagePart, places_of
from rung.parallel.sharding import Sharding, choose_units, gathered_type, without_shared
from rung.parallel.tensor.apply import apply_sequence_parallel, apply_tensor_plan
from rung.parallel.tensor.experts import without_experts
from rung.parallel.tensor.overlap import overlap_messages
from rung.parallel.tensor.plan import TensorPlan, make_plan, plan_adapters, plan_outside
from rung.parallel.tensor.survey import Survey
from rung.spec.abilities import compiles_blocks
from rung.spec.config import RunConfig
from rung.spec.task import Task

__all__ = ["ParallelModel", "parallelize"]


@dataclass
class ParallelModel:
    """The parallelized model, and the plans and partitions that were applied to it."""

    model: nn.Module
    notes: list[str]
    roots: list[nn.Module]  # FSDP root modules: the model, or this rank's stages
    plan: TensorPlan | None = None
    experts: ExpertPlan | None = None
    balance: WholeBatchBalance | None = None
    rows: RowCounter | None = None
    stages: Stages | None = None
    parts: list[StagePart] = field(default_factory=list)
    forward_tracer: ForwardTracer | None = None
    host_weights: HostWeights | None = None
    places: dict[str, int] = field(default_factory=dict)  # tensor -> the parameter server that holds it
    remote: dict[str, int] = field(default_factory=dict)  # module -> the server that runs it for trainers
    elsewhere: set[str] = field(default_factory=set)  # modules that other ranks run, of a pipeline's other stages
    base: dict[str, str] = field(default_factory=dict)  # what is frozen beside adapters, with digests
    compiles_blocks: bool = False  # each by itself; else the runtime compiles the model with its loss

    @property
    def is_divided(self) -> bool:
        """Whether ranks run different modules, or keep them for others."""
        return self.stages is not None or bool(self.places or self.remote)

    @property
    def divides_updates(self) -> bool:
        """Whether several ranks update different parameters, each with an optimizer that sees its own alone."""
        has_lists = self.experts is not None and bool(self.experts.lists)
        return self.stages is not None or bool(self.remote) or len(set(self.places.values())) > 1 or has_lists

    def runs(self, name: str, world: World) -> bool:
        """Whether this rank runs the forward of the module `name`."""
        server = next((rank for path, rank in self.remote.items() if lies_in(name, {path})), None)
        if server is not None or world.role.is_server:
            return world.rank == server
        return not lies_in(name, self.elsewhere)


def parallelize(
    weights: Weights,
    world: World,
    config: RunConfig,
    task: Task,
    run: Callable[[nn.Module, Any], Any],
    example: Any = None,
    reuse: BlockReuse | None = None,
    *,
    blocks_on_host: bool = False,
) -> ParallelModel:
    """Materialize the model and transform it in place for the layout.

    `run` calls a model on a batch, and `example` is a batch of the task; tensor and pipeline parallelism trace them.
    `reuse` is the cache that dry runs of one task share. With `blocks_on_host`, one process keeps the parameters of
    blocks in host memory.
    """
    reuse = reuse or BlockReuse()
    model = weights.model
    assert model is not None
    notes: list[str] = []
    layout, blocks = world.layout, task.blocks
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError("no parameter of the model requires a gradient; there is nothing to train.")

    if not config.dropout:
        turn_off_dropout(model)

    # In compiled code a count would end the graph at each layer; under ep the graph ends there as it is.
    rows = RowCounter(model, world) if layout.ep > 1 or not config.compile else None
    heads = heads_to_chunk(weights, world, config, task, run, example)
    parallel = ParallelModel(model, notes, roots=[model], rows=rows)
    if blocks_on_host:
        parallel.host_weights = HostWeights(world.device)
    if layout.is_composed or layout.cp > 1:
        parallel.forward_tracer = ForwardTracer(model, run, world.device, weights.mode)
        parallel.forward_tracer.parameter_dtype = gathered_type(world, config)
        parallel.forward_tracer.repeats = reuse.is_quick
        parallel.forward_tracer.is_part = parts_of(parallel.forward_tracer.meta_model, blocks)
    experts: dict[str, ExpertCall | str] = {}
    if layout.tp > 1 or layout.ep > 1:
        assert parallel.forward_tracer is not None
        experts = find_experts(parallel.forward_tracer, layout.ep if layout.ep > 1 else layout.tp, example)
    lists: dict[str, ListCall | str] = {}
    if layout.ep > 1:
        assert parallel.forward_tracer is not None
        lists = find_lists(parallel.forward_tracer, layout.ep, example)
    if layout.tp > 1:
        plan = _plan_tensors(parallel, task, world, config, example, reuse, experts)
        callers = {one.caller for one in lists.values() if isinstance(one, ListCall)}
        parallel.plan = plan_outside(plan, callers)
        if callers and config.sequence_parallel:
            raise StrategyError(
                f"--sequence-parallel gives each tensor rank a part of a sequence, and {min(callers)}, which calls "
                "experts that ep shares out, needs the whole. Leave it out."
            )
        if callers:
            notes.append(
                f"tensor parallel: {', '.join(fold(callers))} are whole on every rank: ep shares out the experts that "
                "they call"
            )
    if layout.pp > 1:
        parallel.stages = _split(parallel, weights, world, config, task, example)
    context = _plan_context(parallel, world, config, blocks, example) if layout.cp > 1 else None
    if layout.ep > 1:
        parallel.experts = plan_experts(experts, lists, model, world, config.expert_load)
        notes += parallel.experts.notes
        _share_out_lists(parallel, weights)

    if config.precision == "fp8":
        styles = parallel.plan.styles if parallel.plan else {}
        notes.append(compute_in_float8(model, world, config, blocks, styles, low_rank_layers(model)))
    _apply_batch_norm(model, world, config, notes)

    if layout.num_data_ranks > 1 and config.local_steps == 1:
        _balance_over_ranks(parallel, world)

    if config.activation_checkpointing != "none":
        whole = _whole_blocks(parallel, blocks)
        if not whole and parallel.experts is not None:
            raise ModelError(
                "the model's own forward calls the experts of a list, so that there is no block in it whose "
                "activations could be recomputed. Call the experts in the forward of a module of their own."
            )
        if context is not None:
            for name, block in find_list_of_blocks(model, blocks):
                context.recompute(name, block)
        if not config.dropout and not config.compile and layout.kind != "dp":  # dp wraps its replicas itself
            for block in whole:
                block.forward = without_dropout(block.forward)
        recomputing = None if config.dropout or config.compile else NoDropout
        apply_activation_checkpointing(whole, config.activation_checkpointing, recomputing)

    parallel.compiles_blocks = compiles_blocks(layout) or bool(heads)  # a loss in chunks is not compiled as a whole
    if config.async_tp:
        notes.append(overlap_messages(world, config))
    if config.compile and parallel.compiles_blocks:
        for block in without_heads(_whole_blocks(parallel, blocks), model, heads):
            if layout.pp > 1 or context is not None:  # `forward` is wrapped later, and `compile` would take it all
                block.forward = torch.compile(block.forward)
            else:
                block.compile()

    if reuse.wrap is not None:
        for block in _whole_blocks(parallel, blocks):
            reuse.wrap(block)

    if context is not None:
        is_recomputed = config.activation_checkpointing != "none"
        for name, block in find_list_of_blocks(model, blocks):
            context.apply(name, block, is_recomputed=is_recomputed)
        context.watch(model)

    chunk_heads(model, heads, config, world)
    _make_units(parallel, weights, world, config, blocks)
    parallel.notes += settle_heads(model, heads, config, world, parallel.plan.styles if parallel.plan else {})
    if rows is not None:
        shared = parallel.experts.lists if parallel.experts is not None else []
        is_recording = {one.call.name: one.is_recording for one in shared}
        rows.install(model, is_recording, context.is_even if context is not None else None)
    return parallel


def _share_out_lists(parallel: ParallelModel, weights: Weights) -> None:
    """Exchange the forward of lists of experts, and leave out those of other ranks."""
    assert parallel.experts is not None
    for one in parallel.experts.lists:
        one.install()
    foreign = parallel.experts.foreign
    parallel.elsewhere |= foreign
    weights.keep_only(lambda name: not lies_in(name, foreign))


def _whole_blocks(parallel: ParallelModel, blocks: str | None) -> list[nn.Module]:
    """The blocks that lie within one stage; if no block does, the parts that the stages call."""
    found = find_blocks(parallel.model, blocks)
    if parallel.experts is not None:  # their forward is exchanged already
        found = [(name, block) for name, block in found if not parallel.experts.is_inside(name)]
    if parallel.stages is None:
        return [block for _, block in found]
    parts = set(parallel.stages.calls)
    inside = [block for name, block in found if lies_in(name, parts)]
    return inside or [parallel.model.get_submodule(name) for name in dict.fromkeys(parallel.stages.calls)]


def _plan_tensors(
    parallel: ParallelModel,
    task: Task,
    world: World,
    config: RunConfig,
    example: Any,
    reuse: BlockReuse,
    experts: Mapping[str, ExpertCall | str],
) -> TensorPlan:
    tracer = parallel.forward_tracer
    assert tracer is not None
    model, run = tracer.meta_model, tracer.run(example)
    shared = {name: call for name, call in experts.items() if isinstance(call, ExpertCall)}
    with without_adapters(model) as layers, without_experts(model, shared):
        if layers and config.sequence_parallel:
            raise StrategyError(
                "--sequence-parallel cuts activations between layers along the sequence, which Rung does not do with "
                f"adapters, as at {next(iter(layers))}. Leave it out."
            )
        survey = Survey(model, world.layout.tp, run, world.device, tracer.mode, task.blocks, tracer.is_part)
        if world.layout.ep == 1:  # else ranks of another axis share them out
            survey.experts = experts
        plan = make_plan(survey, task.tensor_parallel, sequence_parallel=config.sequence_parallel, reuse=reuse)
    plan = plan_adapters(plan, layers)
    origin = {"task": "the task's plan", "model": "the model's own plan"}.get(plan.source, "derived")
    parallel.notes.append(f"tensor parallel: {len(plan.styles)} modules sharded {world.layout.tp} ways ({origin})")
    if plan.experts:
        counts = " or ".join(map(str, sorted({call.num_experts for call in plan.experts.values()})))
        parallel.notes.append(
            f"tensor parallel: {counts} whole experts of a layer shared out: {', '.join(fold(plan.experts))}"
        )
    if plan.whole:
        parallel.notes.append(f"tensor parallel: replicated on every rank: {', '.join(plan.whole)}")
    parallel.notes += plan.notes
    return plan


def _plan_context(
    parallel: ParallelModel, world: World, config: RunConfig, blocks: str | None, example: Any
) -> ContextParallel:
    tracer, stages = parallel.forward_tracer, parallel.stages
    assert tracer is not None
    if config.sequence_parallel:
        raise StrategyError(
            f"--sequence-parallel cuts activations along the sequence among tensor ranks, and {world.layout.name} has "
            "cut it already. Leave it out."
        )
    plan = plan_context(
        tracer, blocks, world, example, lambda name: stages.stages_of_module(name) if stages is not None else None
    )
    parallel.notes += plan.notes
    return ContextParallel(plan, world, config.cp_form)


def _split(
    parallel: ParallelModel, weights: Weights, world: World, config: RunConfig, task: Task, example: Any
) -> Stages:
    """Partition the model into stages; this rank keeps the tensors of its own stages."""
    forward_tracer = parallel.forward_tracer
    assert forward_tracer is not None
    layout = world.layout
    before = _plain_values(forward_tracer)
    forward_trace = forward_tracer(example)
    changed = [name for name, value in _plain_values(forward_tracer).items() if before.get(name) != value]
    if changed:
        raise ModelError(
            f"forward changes {', '.join(changed[:3])} outside of the parts that stages run; a stage that ends before "
            "that line would not. Keep such a count in a part, or use a strategy without stages."
        )
    stages = cut(forward_tracer.meta_model, forward_trace, layout.num_stages, config.split)
    if task.eval_data is not None and config.eval_every != "never":
        crossing(stages, forward_tracer(example, training=False))  # raise now, not at the first evaluation
    parallel.notes += stages.describe()
    own = set(own_stages(world))
    parts = {name for stage in range(layout.num_stages) for name in stages.modules_of(stage)}
    absent = {name for name in parts if not stages.stages_of_module(name) & own}
    parallel.elsewhere |= absent

    def keeps(name: str) -> bool:
        if name in stages.holders:
            return bool(own & set(stages.holders[name]))
        # A buffer stays with the part that it belongs to, or on every rank.
        return not lies_in(name, absent)

    weights.keep_only(keeps)
    if layout.zero == 3:
        parallel.notes.append(
            f"{layout.name}: parameters are gathered anew for each micro-batch; zero2 or zero1 gathers once a step"
        )
    if layout.zero >= 2 and layout.schedule == "zb":
        parallel.notes.append(
            f"{layout.name}: with zero bubble parameters stay gathered and gradients whole until the end of a step"
        )
    return stages


def _plain_values(forward_tracer: ForwardTracer) -> dict[str, Any]:
    """Number attributes of the modules outside of the parts, by name."""
    found: dict[str, Any] = {}
    parts = {name for name, module in forward_tracer.meta_model.named_modules() if forward_tracer.is_part(name, module)}
    for name, module in forward_tracer.meta_model.named_modules():
        if not lies_in(name, parts):
            for key, value in vars(module).items():
                if type(value) in (int, float) and key != "training":
                    found[f"{name}.{key}".lstrip(".")] = value
    return found


def own_stages(world: World) -> list[int]:
    return list(range(world.role.stage, world.layout.num_stages, world.layout.pp))


def _apply_batch_norm(model: nn.Module, world: World, config: RunConfig, notes: list[str]) -> None:
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


def _balance_over_ranks(parallel: ParallelModel, world: World) -> None:
    with fake_world.outside_fakes():
        balance = WholeBatchBalance(world)
    if balance.apply(parallel.model):
        parallel.balance = balance


def _make_units(parallel: ParallelModel, weights: Weights, world: World, config: RunConfig, blocks: str | None) -> None:
    """Materialize units, then apply tensor parallelism and FSDP. All ranks use one order, because `fill` broadcasts."""
    model, stages, layout = parallel.model, parallel.stages, world.layout
    sharding = Sharding(world, config, parallel.notes) if layout.uses_fully_shard else None
    host = parallel.host_weights
    has_units = sharding is not None or host is not None or layout.tp > 1
    units = choose_units(model, config.shard_by, blocks) if has_units else []
    if stages is not None:  # FSDP hooks the call of a unit, so a unit must lie within a part
        parts = set(stages.calls)
        units = [(name, unit) for name, unit in units if lies_in(name, parts)]
    units = without_shared(model, units, parallel.notes)
    if parallel.experts is not None:  # which are units of their own
        units = [(name, unit) for name, unit in units if not parallel.experts.is_inside(name)]

    def prepare(name: str, module: nn.Module) -> None:
        weights.fill(module)
        if parallel.plan is not None and _is_here(module):
            with world.tensors.mode():
                apply_tensor_plan(module, name, parallel.plan, world.axis("tp"))
        share_out_experts(name, module)

    def share_out_experts(name: str, module: nn.Module) -> None:
        if parallel.experts is None:
            return
        for experts, call in parallel.experts.within(name, module):
            if not any(is_absent(p) for p in experts.parameters()):
                assert sharding is not None
                with world.tensors.mode():
                    share_out(experts, call, world, parallel.experts.loads)
                sharding.apply(experts, holds_experts=True)
        for one in parallel.experts.lists:
            if lies_in(one.call.name, {name} if name else {one.call.name}) and not one.is_unit and _is_here(one.module):
                assert sharding is not None
                one.shard(partial(sharding.apply, holds_experts=True))

    for name, unit in units:
        prepare(name, unit)
        if sharding is not None and _is_here(unit):
            sharding.apply(unit)
        if host is not None:
            host.keep(unit)
    if stages is None:
        prepare("", model)
        _apply_sequence_parallel(parallel, world)
    else:
        weights.fill(model)
        share_out_experts("", model)
        _make_parts(parallel, world)
    if sharding is not None:
        for root in parallel.roots:
            sharding.apply(root, is_root=True)
        for part in parallel.parts:
            part.show_parameters()
        if config.precision == "fp8" and (note := gather_in_float8(model, parallel.roots, world, config)) is not None:
            parallel.notes.append(note)
        sharding.finish(parallel.roots, has_units=bool(units))


def _is_here(module: nn.Module) -> bool:
    """Whether this rank has the module, if not all experts in it; of another stage's it has nothing."""
    parameters = list(module.parameters())
    return not parameters or not all(is_absent(p) for p in parameters)


def _make_parts(parallel: ParallelModel, world: World) -> None:
    """Build the stages of this rank as modules, with tensor parallelism applied."""
    model, stages = parallel.model, parallel.stages
    assert stages is not None
    own = own_stages(world)
    places = places_of(model)
    for name in dict.fromkeys(stages.calls):
        here = stages.stages_of_module(name) & set(own)
        if len(here) > 1 and world.layout.uses_fully_shard:
            raise StrategyError(
                f"{name} is called in stages {sorted(here)}, which share a rank; FSDP cannot shard it with both. "
                "Use --schedule 1f1b, or a --split that keeps its calls in one stage."
            )
        module = model.get_submodule(name)
        if here and parallel.plan is not None:
            with world.tensors.mode():
                apply_tensor_plan(module, name, parallel.plan, world.axis("tp"))
    for shared in places.values():  # where one module of a tied parameter was sharded, the others get its DTensor
        sharded = next((p for p in (owner.get_parameter(key) for owner, key in shared) if isinstance(p, DTensor)), None)
        for owner, key in shared if sharded is not None else []:
            owner.register_parameter(key, sharded)
    _apply_sequence_parallel(parallel, world)
    assert parallel.forward_tracer is not None
    bare = parallel.forward_tracer.meta_model  # copied before FSDP and tensor parallelism registered hooks
    hooks = {name: set().union(*forward_hooks_of(bare.get_submodule(name))) for name in stages.calls}
    executor = StageExecutor(model, stages, expects_data=world.tensors.has_storage, hooks=hooks)
    parallel.parts = [StagePart(executor, stage) for stage in own]
    parallel.roots = list(parallel.parts)


def _apply_sequence_parallel(parallel: ParallelModel, world: World) -> None:
    """Each run of consecutive blocks of this rank splits its input and gathers its output along the sequence."""
    if parallel.plan is None or not parallel.plan.sequence_blocks:
        return
    groups = [list(parallel.plan.sequence_blocks)]
    if parallel.stages is not None:
        groups = [parallel.stages.modules_of(stage) for stage in own_stages(world)]
    for group in groups:
        blocks = [(n, parallel.model.get_submodule(n)) for n in group if n in parallel.plan.sequence_blocks]
        if blocks:
            with world.tensors.mode():
                apply_sequence_parallel(blocks, parallel.plan, world.axis("tp"))


def sync_batch_norms(model: nn.Module) -> list[SyncBatchNorm]:
    return [module for module in model.modules() if isinstance(module, SyncBatchNorm)]
