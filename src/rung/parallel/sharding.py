"""Shard parameters, gradients and optimizer state with FSDP2 (`fully_shard`): zero2, zero3/fsdp, hsdp, compositions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from rung.distributed import fake_world
from rung.distributed.world import World
from rung.errors import ModelError
from rung.parallel.blocks import find_blocks, num_parameters
from rung.parallel.materialize import is_absent
from rung.spec.abilities import reshards_after_forward, shards_parameters
from rung.spec.config import RunConfig, shard_size
from rung.spec.strategy import expert_axes

# What autocast computes in.
HALF_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


def gathered_type(world: World, config: RunConfig) -> torch.dtype | None:
    """The dtype in which sharded parameters are gathered; None if it is their own."""
    if not world.layout.uses_fully_shard or world.device_type != "cuda" or config.gather != "auto":
        return None
    return HALF_TYPES.get(config.precision)


class Sharding:
    """Applies FSDP2 to units in place. The parameters of a unit are gathered together.

    Compositions use it for all data parallelism: ddp shards over an axis of size 1, and zero1 keeps parameters and
    gradients whole within a step.
    """

    def __init__(self, world: World, config: RunConfig, notes: list[str]) -> None:
        self._world, self._config, self._notes = world, config, notes
        layout = world.layout
        replicates = layout.dp_replicate > 1
        self._mesh = world.axis("dp_replicate", "dp_shard") if replicates else world.axis("dp_shard")
        self._precision = MixedPrecisionPolicy(cast_forward_inputs=False)
        half = gathered_type(world, config)
        if half is not None:
            # Gather in the compute dtype. Autocast alone casts after gathering, and autograd would keep the cast copies
            # of the whole model until backward: the memory that sharding should save. Not on the CPU, where autocast
            # runs norms in the dtype of their input, which must be that of their parameters.
            self._precision = MixedPrecisionPolicy(
                param_dtype=half, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
            notes.append(
                f"{config.precision}: parameters are gathered in {str(half).removeprefix('torch.')}; "
                "master weights and reductions are fp32"
            )
        pins = world.device.type == "cuda"  # not the fake tensors of a dry run
        self._offload = CPUOffloadPolicy(pin_memory=pins) if config.offload == "cpu" else OffloadPolicy()
        # A split backward bypasses FSDP's hooks, so with zero bubble parameters stay gathered until the end of a step.
        self._keeps_gathered = not reshards_after_forward(layout) or (layout.num_stages > 1 and layout.schedule == "zb")

    def apply(self, module: nn.Module, *, is_root: bool = False, holds_experts: bool = False) -> None:
        """Shard a unit. Experts that ranks have shared out are sharded among those that hold the same ones."""
        if self._world.device_type == "cuda":
            self._disable_cudnn(module)
        # Not those of stages on other ranks, which hold no data. Nor numbers, which cannot be cut: every rank keeps
        # them whole, and `average_whole` reduces their gradients.
        ignored = {parameter for parameter in module.parameters() if is_absent(parameter) or parameter.dim() == 0}
        with self._world.tensors.mode():
            fully_shard(
                module,
                mesh=self._experts_mesh() if holds_experts else self._mesh,
                # Backward starts with the root, so resharding it after forward would only gather it twice.
                reshard_after_forward=not (self._keeps_gathered or is_root),
                mp_policy=self._precision,
                offload_policy=self._offload,
                ignored_params=ignored or None,
                shard_placement_fn=self._placement if holds_experts else None,
            )

        _refuse_replaced_weights(module)

    def _experts_mesh(self) -> DeviceMesh:
        replicates = expert_axes(self._world.layout)["expert_replicate"] > 1
        return self._world.axis("expert_replicate", "expert_shard") if replicates else self._world.axis("expert_shard")

    def _placement(self, parameter: nn.Parameter) -> Shard:
        """Along a dimension that all ranks get an equal part of; the first has been cut already."""
        size = expert_axes(self._world.layout)["expert_shard"]
        dims = [*range(1, parameter.dim()), 0]
        return Shard(next((dim for dim in dims if parameter.shape[dim] % size == 0), 0))

    def _disable_cudnn(self, module: nn.Module) -> None:
        """Run recurrent layers without cuDNN, which keeps using the first step's weights if sharded (torch 2.11)."""
        for layer in module.modules():
            if isinstance(layer, nn.RNNBase) and not hasattr(layer.forward, "without_cudnn"):
                layer.forward = _without_cudnn(layer.forward)
                note = "recurrent layers run without cuDNN, which does not see updates of sharded weights"
                if note not in self._notes:
                    self._notes.append(note)

    def finish(self, roots: list[nn.Module], *, has_units: bool) -> None:
        if self._config.unused_parameters != "allow":
            return
        allow_unused: list[Any] = [getattr(root, "set_reduce_scatter_unused_params", None) for root in roots]
        if None in allow_unused:  # before torch 2.13
            self._notes.append(
                "unused_parameters=allow: this torch needs every rank to use the same parameters; 2.13 does not"
            )
            return
        for allow in allow_unused:
            allow(True)
        if has_units:
            self._notes.append(
                "unused_parameters=allow: every rank must still run every block; "
                "where some ranks skip one that others run, use --shard-by whole"
            )


def average_whole(parameters: list[nn.Parameter], world: World) -> None:
    """Average the gradients of parameters without dimensions over the ranks, as FSDP does with the others."""
    for parameter in parameters:
        if parameter.dim() == 0 and parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=world.gradient_group)
            parameter.grad /= world.layout.num_gradient_ranks


def _refuse_replaced_weights(unit: nn.Module) -> None:
    """Raise when a unit is called with other weights than its own, which FSDP would put back without a word."""
    places = [(module, name) for module in unit.modules() for name, _ in module.named_parameters(recurse=False)]

    def check(module: nn.Module, inputs: Any) -> None:
        for owner, name in places:
            if not isinstance(getattr(owner, name), nn.Parameter):
                raise ModelError(
                    f"{type(module).__name__} is called with other weights than its own (functional_call does that): "
                    f"{name} is no parameter. Sharding gathers the unit's own weights for each call and would put them "
                    "in their place. --shard-by whole gathers all weights before forward and lets them be replaced; so "
                    "do ddp and zero1."
                )

    unit.register_forward_pre_hook(check, prepend=True)


def _without_cudnn(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.backends.cudnn.flags(enabled=False):
            return forward(*args, **kwargs)

    run.without_cudnn = True  # type: ignore[attr-defined]
    return run


def without_shared(
    model: nn.Module, units: list[tuple[str, nn.Module]], notes: list[str]
) -> list[tuple[str, nn.Module]]:
    """Drop units that share a parameter with a module outside, since one FSDP unit must own it; the root does."""
    users: dict[int, int] = {}
    for _, module in model.named_modules(remove_duplicate=False):  # a module may lie in several units
        for parameter in module.parameters(recurse=False):
            users[id(parameter)] = users.get(id(parameter), 0) + 1
    kept = []
    for name, unit in units:
        inside: dict[int, int] = {}
        for _, module in unit.named_modules(remove_duplicate=False):
            for parameter in module.parameters(recurse=False):
                inside[id(parameter)] = inside.get(id(parameter), 0) + 1
        if any(users[key] > count for key, count in inside.items()):
            notes.append(
                f"{name} shares a parameter with another part of the model; it is gathered with the whole model"
            )
        else:
            kept.append((name, unit))
    return kept


def choose_units(model: nn.Module, shard_by: str, blocks: str | None) -> list[tuple[str, nn.Module]]:
    """The units below the root, innermost first."""
    if shard_by == "whole":
        return []
    threshold = shard_size(shard_by)
    if threshold is None:
        return [(name, block) for name, block in find_blocks(model, blocks) if _can_be_unit(block)]
    units: list[tuple[str, nn.Module]] = []

    def visit(name: str, module: nn.Module) -> int:
        """Choose units below `module`; returns the number of parameters that no unit holds."""
        left = sum(p.numel() for p in module.parameters(recurse=False))
        for key, child in module.named_children():
            left += visit(f"{name}.{key}" if name else key, child)
        if name and left >= threshold and _can_be_unit(module):
            units.append((name, module))
            return 0
        return left

    visit("", model)
    return units


def set_gradient_sync(root: nn.Module, world: World, *, is_last: bool) -> None:
    """Set what the backward of one micro-batch does with gradients and gathered parameters.

    zero2 and zero3 reduce-scatter gradients in every micro-batch, which keeps them sharded, and all-reduce between
    replicas only in the last one. zero0 and zero1 keep whole gradients until the last. Below zero3, parameters stay
    gathered until the last.
    """
    assert isinstance(root, FSDPModule)
    layout = world.layout
    if not shards_parameters(layout):
        root.set_requires_gradient_sync(is_last)
    elif layout.dp_replicate > 1:
        root.set_requires_all_reduce(is_last)
    if not reshards_after_forward(layout):
        root.set_reshard_after_backward(is_last)
    root.set_is_last_backward(is_last)


def defer_gradient_sync(root: nn.Module) -> None:
    """For a split backward: do not reduce or reshard until the schedule calls `perform_reduce_grad`."""
    assert isinstance(root, FSDPModule)
    root.set_requires_gradient_sync(False)
    root.set_reshard_after_backward(False)
    root.set_is_last_backward(False)


def name_gathered(model: nn.Module, parts: Sequence[nn.Module]) -> dict[int, str]:
    """Names of gathered parameters by id, filled in forward: autograd refers to these, not to the shards. `parts` are
    the stages of a pipeline on this rank."""
    names: dict[int, str] = {}

    def remember_all(part: Any, inputs: Any) -> None:
        part.show_parameters()
        names.update({id(parameter): name for name, parameter in model.named_parameters()})

    for part in parts:
        if isinstance(part, FSDPModule):
            part.register_forward_pre_hook(remember_all)
    for prefix, unit in model.named_modules():
        module: nn.Module = unit
        if isinstance(unit, FSDPModule):

            def remember(module: nn.Module, inputs: Any, prefix: str = prefix) -> None:
                for name, parameter in module.named_parameters(prefix=prefix):
                    names[id(parameter)] = name

            module.register_forward_pre_hook(remember)
    return names


def free_gathered(model: nn.Module) -> None:
    """Reshard parameters that an evaluation or a failed step left gathered; FSDP does so only in backward."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            fake_world.end_pass(module)
            module.reshard()


def _can_be_unit(module: nn.Module) -> bool:
    """Not a container, which is never called: its parameters would not be gathered."""
    containers = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
    return not isinstance(module, containers) and num_parameters(module) > 0
