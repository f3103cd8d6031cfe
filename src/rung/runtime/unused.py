"""Finds trainable parameters that get no gradient, and raises or treats them as on one device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rung.distributed.torch_private import version
from rung.distributed.world import World
from rung.errors import ModelError
from rung.parallel.experts.dispatch import ExpertPlan
from rung.parallel.sharding import name_gathered


class UnusedParameters:
    """Checks each step's gradients. `mode` is the setting `unused_parameters`: error or allow."""

    def __init__(
        self,
        model: nn.Module,
        trainable: list[tuple[str, nn.Parameter]],
        world: World,
        mode: str,
        experts: ExpertPlan | None,
        parts: Sequence[nn.Module],
    ) -> None:
        """`parts` are the stages of a pipeline on this rank."""
        self._trainable, self._world, self._mode, self._experts = trainable, world, mode, experts
        # On any rank, in one order.
        self._names = [
            n for n, p in model.named_parameters() if p.requires_grad or getattr(p, "is_trained_elsewhere", False)
        ]
        self._gathered_names = name_gathered(model, parts) if self._tracks_use else {}

    @property
    def _tracks_use(self) -> bool:
        layout = self._world.layout
        return self._mode == "allow" and layout.uses_fully_shard

    def reachable(self, loss: Tensor) -> set[str]:
        """Parameters that the loss, or what a stage sends, depends on. Walks the graph only where sharding hides it."""
        if not self._tracks_use:
            return set()
        names = self._gathered_names
        seen, pending, found = set(), [loss.grad_fn], set()
        while pending:
            node = pending.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)
            if variable is not None and id(variable) in names:
                found.add(names[id(variable)])
            pending += [following for following, _ in node.next_functions]
        return found

    def check(self, used: set[str]) -> None:
        allows, lists = self._mode == "allow", self._experts.lists if self._experts is not None else []
        if self._tracks_use or lists:
            # FSDP reduces zeros for ranks that did not use a parameter, and experts run without rows. One that no rank
            # used must have no gradient at all, as on one device, where the optimizer then skips it.
            used = used if self._tracks_use else {name for name, _ in self._trainable}
            used = used - self._experts.take_uncalled() if self._experts is not None else used
            flags = torch.tensor([float(name in used) for name in self._names], device=self._world.device)
            if self._world.size > 1:
                dist.all_reduce(flags, op=dist.ReduceOp.MAX)
            found = dict(zip(self._names, self._world.tensors.read(list(flags.unbind())), strict=True))
            for name, parameter in self._trainable:
                if not found[name] and parameter.requires_grad:  # not those that have no part in this turn
                    parameter.grad = None
        if allows:
            return
        in_lists = {id(parameter) for one in lists for parameter in one.module.parameters()}
        missing = [name for name, p in self._trainable if p.grad is None and p.requires_grad and id(p) not in in_lists]
        if missing:
            listed = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
            raise ModelError(
                f"{len(missing)} trainable parameter{'s' if len(missing) > 1 else ''} got no gradient in this step: "
                f"{listed}. Freeze them (requires_grad=False), or allow it with --set unused_parameters=allow."
            )

    def versions(self) -> list[int | None] | None:
        """The gradients' versions before the last micro-batch, the only one in which DDP reduces; None elsewhere."""
        if not self._world.layout.uses_ddp or self._mode == "allow":
            return None
        return [None if p.grad is None else version(p.grad) for _, p in self._trainable]

    def check_last_micro_batch(self, before: list[int | None] | None) -> None:
        if before is None:
            return
        untouched = [
            name
            for (name, p), earlier in zip(self._trainable, before, strict=True)
            if p.requires_grad and earlier is not None and p.grad is not None and version(p.grad) == earlier
        ]
        if untouched:
            raise ModelError(
                f"{', '.join(untouched[:8])} got a gradient in some micro-batches of this step but not in the last, in "
                "which DDP reduces gradients. Allow it with --set unused_parameters=allow."
            )
