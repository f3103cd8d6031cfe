"""Sharded parameters, gradients and optimizer state by FSDP2 (`fully_shard`): zero2, zero3/fsdp, hsdp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from rung.config import RunConfig, shard_size
from rung.errors import ModelError
from rung.parallel.blocks import find_blocks, num_parameters
from rung.world import World


def apply_sharding(
    model: nn.Module, world: World, config: RunConfig, blocks: str | None, fill: Callable[[nn.Module], None]
) -> list[str]:
    """Shard the model in place, one unit after the other; each is filled just before it is cut. Returns notes.

    A unit is what is gathered at a time. Units are chosen by `shard_by`: the model's blocks, any part that reaches a
    size, or the whole model.
    """
    scalars = [name for name, parameter in model.named_parameters() if parameter.dim() == 0]
    if scalars:
        raise ModelError(
            f"{', '.join(scalars[:4])}: a parameter without dimensions cannot be sharded. "
            "Give it the shape (1,), or use ddp or zero1."
        )
    units = choose_units(model, config.shard_by, blocks)
    units, notes = _without_shared(model, units)
    mesh = world.axis("dp_replicate", "dp_shard") if world.layout.dp_replicate > 1 else world.axis("dp_shard")
    precision = MixedPrecisionPolicy(cast_forward_inputs=False)
    if config.precision in ("bf16", "fp16") and config.gather == "auto" and world.device.type == "cuda":
        # Gathered in the type that computes. Autocast alone would cast after gathering, and autograd would hold the
        # cast copies of the whole model until backward: the memory that sharding is for. (On the CPU, autocast leaves
        # norms in the type of their input, which then must be that of their parameters.)
        half = torch.bfloat16 if config.precision == "bf16" else torch.float16
        precision = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32, cast_forward_inputs=False)
        notes.append(
            f"{config.precision}: parameters are gathered in {config.precision}; master weights and reductions are fp32"
        )
    offload = CPUOffloadPolicy(pin_memory=world.device.type == "cuda") if config.offload == "cpu" else OffloadPolicy()
    keep = world.layout.zero == 2
    for module in [*(unit for _, unit in units), model]:
        fill(module)
        with world.tensors():
            fully_shard(
                module,
                mesh=mesh,
                # The root is needed again at once when backward starts, so it stays gathered under every stage.
                reshard_after_forward=not (keep or module is model),
                mp_policy=precision,
                offload_policy=offload,
            )
    allow_unused: Any = getattr(model, "set_reduce_scatter_unused_params", None)  # torch 2.13
    if config.unused_parameters == "allow" and allow_unused is None:
        notes.append("unused_parameters=allow: this torch needs every rank to use the same parameters; 2.13 does not")
    elif config.unused_parameters == "allow":
        allow_unused(True)
        if units:
            notes.append(
                "unused_parameters=allow: every rank must still run every block; "
                "where some ranks skip one that others run, use --shard-by whole"
            )
    return notes


def choose_units(model: nn.Module, shard_by: str, blocks: str | None) -> list[tuple[str, nn.Module]]:
    """The units below the root, innermost first."""
    if shard_by == "whole":
        return []
    threshold = shard_size(shard_by)
    if threshold is None:
        return [(name, block) for name, block in find_blocks(model, blocks) if _can_be_unit(block)]
    units: list[tuple[str, nn.Module]] = []

    def visit(name: str, module: nn.Module) -> int:
        """Cut below `module`; returns the parameters that are left to it."""
        left = sum(p.numel() for p in module.parameters(recurse=False))
        for key, child in module.named_children():
            left += visit(f"{name}.{key}" if name else key, child)
        if name and left >= threshold and _can_be_unit(module):
            units.append((name, module))
            return 0
        return left

    visit("", model)
    return units


def set_gradient_sync(model: nn.Module, world: World, *, is_last: bool) -> None:
    """What the backward of one micro-batch does with gradients and gathered parameters.

    Gradients are reduced into shards in every micro-batch (that is what keeps them sharded); between replicas only in
    the last one. zero2 keeps its parameters gathered until the last.
    """
    assert isinstance(model, FSDPModule)
    if world.layout.dp_replicate > 1:
        model.set_requires_all_reduce(is_last)
    if world.layout.zero == 2:
        model.set_reshard_after_backward(is_last)
    model.set_is_last_backward(is_last)


def name_gathered(model: nn.Module) -> dict[int, str]:
    """The names of gathered parameters by identity, filled as forward passes: autograd knows these, not the shards."""
    names: dict[int, str] = {}
    for prefix, unit in model.named_modules():
        module: nn.Module = unit
        if isinstance(unit, FSDPModule):

            def remember(module: nn.Module, inputs: Any, prefix: str = prefix) -> None:
                for name, parameter in module.named_parameters(prefix=prefix):
                    names[id(parameter)] = name

            module.register_forward_pre_hook(remember)
    return names


def free_gathered(model: nn.Module) -> None:
    """Give back what an evaluation left gathered: without a backward, nobody else does."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _can_be_unit(module: nn.Module) -> bool:
    return not isinstance(module, nn.ModuleList | nn.ModuleDict) and num_parameters(module) > 0


def _without_shared(
    model: nn.Module, units: list[tuple[str, nn.Module]]
) -> tuple[list[tuple[str, nn.Module]], list[str]]:
    """Leave to the root every unit that shares a parameter with something outside itself: a shard has one owner."""
    users: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users[id(parameter)] = users.get(id(parameter), 0) + 1
    kept, notes = [], []
    for name, unit in units:
        inside: dict[int, int] = {}
        for module in unit.modules():
            for parameter in module.parameters(recurse=False):
                inside[id(parameter)] = inside.get(id(parameter), 0) + 1
        if any(users[key] > count for key, count in inside.items()):
            notes.append(
                f"{name} shares a parameter with another part of the model; it is gathered with the whole model"
            )
        else:
            kept.append((name, unit))
    return kept, notes
