"""What the methods have in common: all gradients as one vector, an exchange that counts, and a state by parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rung.errors import ModelError
from rung.parallel.gradients import clip, global_norm
from rung.world import World, gather_flat


class Wire:
    """The process group, and how many bytes this rank has sent to it.

    Counted is the payload of the algorithms that gloo and NCCL use: a ring. What TCP adds is about a twentieth.
    """

    def __init__(self, world: World) -> None:
        self.num_ranks = world.layout.num_data_ranks
        self.group = world.data_group if self.num_ranks > 1 else None
        self.num_bytes, self.num_messages = 0, 0
        self.plain_bytes = 0  # that gradients would have taken as they are

    def gather(self, message: Tensor) -> Tensor:
        """The equally long messages of all ranks, as rows."""
        if self.group is None:
            return message.unsqueeze(0)
        self.num_bytes += (self.num_ranks - 1) * message.numel() * message.element_size()
        self.num_messages += 1
        return gather_flat(message, self.group)

    def all_reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        if self.group is not None:
            self.count_reduce(values.numel() * values.element_size())
            dist.all_reduce(values, op=op, group=self.group)

    def count_reduce(self, num_bytes: int) -> None:
        """So many bytes are all-reduced by somebody else."""
        self.num_bytes += ring_bytes(num_bytes, self.num_ranks)
        self.num_messages += 1


def ring_bytes(num_bytes: int, num_ranks: int) -> int:
    """What each rank sends when so many bytes are all-reduced."""
    return 2 * (num_ranks - 1) * num_bytes // num_ranks


class Slots:
    """Where each trainable parameter lies in one vector of them all, in the order of their names in the module."""

    def __init__(self, trainable: list[tuple[str, nn.Parameter]], device: torch.device) -> None:
        self.names = [name for name, _ in trainable]
        self.parameters = [parameter for _, parameter in trainable]
        self.sizes = [parameter.numel() for parameter in self.parameters]
        self.total = sum(self.sizes)
        self.device = device
        wide = any(parameter.dtype == torch.float64 for parameter in self.parameters)
        self.dtype = torch.float64 if wide else torch.float32  # in which sums are kept
        self.plain_bytes = sum(p.numel() * p.element_size() for p in self.parameters)

    def zeros(self) -> Tensor:
        return torch.zeros(self.total, dtype=self.dtype, device=self.device)

    def views(self, vector: Tensor) -> list[Tensor]:
        """The parts of the vector, each in the shape of its parameter."""
        parts = torch.split(vector, self.sizes)
        return [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]

    def gradients(self) -> Tensor:
        """This rank's gradients as a new vector; zeros where there is none."""
        vector = self.zeros()
        for name, parameter, view in zip(self.names, self.parameters, self.views(vector), strict=True):
            if parameter.grad is None:
                continue
            if parameter.grad.is_sparse:
                raise ModelError(
                    f"the gradient of {name} is sparse, and --compress works on dense ones. Make it with sparse=False, "
                    "or leave --compress out."
                )
            view.copy_(parameter.grad)
        return vector

    def hand_out(self, vector: Tensor, used: list[bool] | None) -> None:
        """The vector's parts as gradients; none for a parameter that no rank used."""
        for number, (parameter, view) in enumerate(zip(self.parameters, self.views(vector), strict=True)):
            parameter.grad = view.to(parameter.dtype) if used is None or used[number] else None


class Exchange:
    """Turns each rank's own gradients into something like their mean, the same on all ranks.

    A step is `reduce`, which talks to the others and leaves the present state as it is, `commit`, which makes the new
    state the present one, and `apply`. Whatever fails in `reduce` thus leaves the state of the step before, which can
    still be saved.
    """

    def __init__(self, slots: Slots, world: World, *, max_norm: float | None, finds_unused: bool) -> None:
        self.slots, self.wire, self.world = slots, Wire(world), world
        self.notes: list[str] = []
        self.num_steps = 0
        self._max_norm, self._finds_unused = max_norm, finds_unused

    @property
    def clips(self) -> bool:
        """Whether gradients are clipped here, by each rank before they are exchanged."""
        return True

    @torch.no_grad()
    def reduce(self) -> None:
        """From each parameter's own gradient to the common one."""
        self.wire.plain_bytes += ring_bytes(self.slots.plain_bytes, self.wire.num_ranks)
        used = self._used_by_any()
        if self.clips and self._max_norm is not None:
            self._clip(self._max_norm)
        self.slots.hand_out(self._exchange(self.slots.gradients(), used), used)

    def _exchange(self, gradient: Tensor, used: list[bool] | None) -> Tensor:
        """The common gradient. `used` tells which parameters got a gradient on some rank; None: all did."""
        raise NotImplementedError

    def commit(self) -> None:
        self.num_steps += 1

    def apply(self, step: Callable[[], None]) -> None:
        """Let the optimizer take the step."""
        step()

    def _clip(self, max_norm: float) -> None:
        """As Deep Gradient Compression does, before anything is added to what was left over.

        A rank's part of the mean is its gradient over n. Were the parts independent, their sum would be sqrt(n) times
        as long as each, so each may be max_norm / sqrt(n) long.
        """
        allowed = max_norm * math.sqrt(self.wire.num_ranks)
        clip(self.slots.parameters, allowed, global_norm(self.slots.parameters))

    def _used_by_any(self) -> list[bool] | None:
        """On one device a parameter without a gradient is left alone: here, one that no rank has a gradient for."""
        if not self._finds_unused:
            return None
        flags = torch.tensor([float(p.grad is not None) for p in self.slots.parameters], device=self.slots.device)
        self.wire.all_reduce(flags, dist.ReduceOp.MAX)
        return [flag > 0 for flag in self.world.read(list(flags.unbind()))] if not self.world.pretend else None

    # -- state --------------------------------------------------------------------------------------------------

    def vectors(self) -> dict[str, Tensor]:
        """What this rank keeps between steps, by what it is called in a checkpoint: vectors over all parameters."""
        return {}

    def extras(self) -> dict[str, Tensor]:
        """What is kept besides, and is the same on all ranks."""
        return {"steps": torch.tensor([self.num_steps])}

    def restore(self, extras: Mapping[str, Tensor]) -> None:
        """After `vectors` were filled."""
        if "steps" in extras:
            self.num_steps = int(extras["steps"])
