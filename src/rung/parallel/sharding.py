"""Sharded parameters, gradients and optimizer state by FSDP2 (`fully_shard`): zero2, zero3/fsdp, hsdp, compositions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from rung import fakes
from rung.config import RunConfig, shard_size
from rung.errors import ModelError
from rung.parallel.blocks import find_blocks, num_parameters
from rung.parallel.materialize import is_absent
from rung.world import World


def gathered_type(world: World, config: RunConfig) -> torch.dtype | None:
    """The type in which sharded parameters are gathered, where it is not their own."""
    if not world.layout.uses_fully_shard or world.device_type != "cuda" or config.gather != "auto":
        return None
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.precision)


class Sharding:
    """Shards units in place, one after the other. A unit is what is gathered at a time.

    It carries all data parallelism of compositions, too: there, replicas are shards of one (`ddp`), and zero1 keeps
    parameters and gradients whole within a step.
    """

    def __init__(self, world: World, config: RunConfig, notes: list[str]) -> None:
        self._world, self._config, self._notes = world, config, notes
        layout = world.layout
        replicates = layout.dp_replicate > 1
        self._mesh = world.axis("dp_replicate", "dp_shard") if replicates else world.axis("dp_shard")
        self._precision = MixedPrecisionPolicy(cast_forward_inputs=False)
        half = gathered_type(world, config)
        if half is not None:
            # Gathered in the type that computes. Autocast alone would cast after gathering, and autograd would hold the
            # cast copies of the whole model until backward: the memory that sharding is for. (On the CPU, autocast
            # leaves norms in the type of their input, which then must be that of their parameters.)
            self._precision = MixedPrecisionPolicy(
                param_dtype=half, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
            notes.append(
                f"{config.precision}: parameters are gathered in {config.precision}; "
                "master weights and reductions are fp32"
            )
        on_gpu = world.device_type == "cuda"
        self._offload = CPUOffloadPolicy(pin_memory=on_gpu) if config.offload == "cpu" else OffloadPolicy()
        self._keeps_gathered = layout.zero < 3 or (layout.pp > 1 and layout.schedule == "zb")

    def refuse_scalars(self, model: nn.Module) -> None:
        scalars = [name for name, parameter in model.named_parameters() if parameter.dim() == 0]
        if scalars:
            raise ModelError(
                f"{', '.join(scalars[:4])}: a parameter without dimensions cannot be sharded. "
                "Give it the shape (1,), or use ddp or zero1 alone."
            )

    def apply(self, module: nn.Module, *, is_root: bool = False) -> None:
        if self._world.device_type == "cuda":
            self._keep_from_cudnn(module)
        # Only parameters that hold data: the others belong to stages on other ranks.
        ignored = {parameter for parameter in module.parameters() if is_absent(parameter)}
        with self._world.tensors():
            fully_shard(
                module,
                mesh=self._mesh,
                # The root is needed again at once when backward starts, so it stays gathered under every stage.
                reshard_after_forward=not (self._keeps_gathered or is_root),
                mp_policy=self._precision,
                offload_policy=self._offload,
                ignored_params=ignored or None,
            )

    def _keep_from_cudnn(self, module: nn.Module) -> None:
        """cuDNN's recurrent kernels go on using the weights of the first step when these are sharded (torch 2.11)."""
        for layer in module.modules():
            if isinstance(layer, nn.RNNBase) and not hasattr(layer.forward, "without_cudnn"):
                layer.forward = _without_cudnn(layer.forward)
                note = "recurrent layers run without cuDNN: it does not follow sharded weights"
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
    """Leave to the root every unit that shares a parameter with something outside: a shard has one owner."""
    users: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users[id(parameter)] = users.get(id(parameter), 0) + 1
    kept = []
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


def set_gradient_sync(root: nn.Module, world: World, *, is_last: bool) -> None:
    """What the backward of one micro-batch does with gradients and gathered parameters.

    zero2 and zero3 reduce gradients into shards in every micro-batch (that is what keeps them sharded), and between
    replicas only in the last one. With zero0 and zero1 gradients stay whole until the last. Below zero3, parameters
    stay gathered until the last.
    """
    assert isinstance(root, FSDPModule)
    layout = world.layout
    if layout.zero < 2:
        root.set_requires_gradient_sync(is_last)
    elif layout.dp_replicate > 1:
        root.set_requires_all_reduce(is_last)
    if layout.zero < 3:
        root.set_reshard_after_backward(is_last)
    root.set_is_last_backward(is_last)


def hold_gradients(root: nn.Module) -> None:
    """For a backward that is taken apart: nothing is reduced or resharded until the schedule says so."""
    assert isinstance(root, FSDPModule)
    root.set_requires_gradient_sync(False)
    root.set_reshard_after_backward(False)
    root.set_is_last_backward(False)


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
    """Give back what an evaluation left gathered: without a backward, nobody else does. Or a step that failed."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            fakes.end_pass(module)
            module.reshard()


def _can_be_unit(module: nn.Module) -> bool:
    return not isinstance(module, nn.ModuleList | nn.ModuleDict) and num_parameters(module) > 0
