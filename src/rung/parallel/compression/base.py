"""What the compression methods share: gradients as one vector, byte-counting collectives, and checkpointed state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rung.distributed.collectives import gather_flat
from rung.distributed.world import World
from rung.errors import ModelError
from rung.parallel.gradients import clip, global_norm


class Wire:
    """Collectives over the data group that count the bytes this rank sends.

    Bytes are the payload of ring algorithms, which gloo and NCCL use. TCP adds about 5 %.
    """

    def __init__(self, world: World) -> None:
        self.num_ranks = world.layout.num_data_ranks
        self.group = world.data_group if self.num_ranks > 1 else None
        self.num_bytes, self.num_messages = 0, 0
        self.plain_bytes = 0  # what uncompressed gradients would have taken

    def gather(self, message: Tensor) -> Tensor:
        """All-gather messages of equal length, one row per rank."""
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
        """Count an all-reduce of `num_bytes` that other code performs."""
        self.num_bytes += ring_bytes(num_bytes, self.num_ranks)
        self.num_messages += 1


def ring_bytes(num_bytes: int, num_ranks: int) -> int:
    """The bytes that each rank sends in a ring all-reduce of `num_bytes`."""
    return 2 * (num_ranks - 1) * num_bytes // num_ranks


class Slots:
    """The layout of all trainable parameters in one vector, in the order of `named_parameters`."""

    def __init__(self, trainable: list[tuple[str, nn.Parameter]], device: torch.device) -> None:
        self.names = [name for name, _ in trainable]
        self.parameters = [parameter for _, parameter in trainable]
        self.sizes = [parameter.numel() for parameter in self.parameters]
        self.total = sum(self.sizes)
        self.device = device
        wide = any(parameter.dtype == torch.float64 for parameter in self.parameters)
        self.dtype = torch.float64 if wide else torch.float32  # of sums
        self.plain_bytes = sum(p.numel() * p.element_size() for p in self.parameters)

    def zeros(self) -> Tensor:
        return torch.zeros(self.total, dtype=self.dtype, device=self.device)

    def views(self, vector: Tensor) -> list[Tensor]:
        """Views of the vector in the shapes of the parameters."""
        parts = torch.split(vector, self.sizes)
        return [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]

    def gradients(self) -> Tensor:
        """This rank's gradients as a new vector, 0 for a parameter without one."""
        vector = self.zeros()
        for name, parameter, view in zip(self.names, self.parameters, self.views(vector), strict=True):
            if parameter.grad is None:
                continue
            if parameter.grad.is_sparse:
                raise ModelError(
                    f"the gradient of {name} is sparse, and --compress needs dense ones. Build its module with "
                    "sparse=False, or leave --compress out."
                )
            view.copy_(parameter.grad)
        return vector

    def set_gradients(self, vector: Tensor, used: list[bool] | None) -> None:
        """Set the gradients from the vector; None for a parameter that no rank used."""
        for number, (parameter, view) in enumerate(zip(self.parameters, self.views(vector), strict=True)):
            parameter.grad = view.to(parameter.dtype) if used is None or used[number] else None


class GradientExchange:
    """Replaces each rank's gradients by an approximate mean, equal on all ranks.

    A step is `reduce`, which communicates but does not change the state, then `commit`, which installs the new state,
    then `apply`. So if `reduce` fails, the state of the previous step is intact and can be saved.
    """

    def __init__(self, slots: Slots, world: World, *, max_norm: float | None, finds_unused: bool) -> None:
        self.slots, self.wire, self.world = slots, Wire(world), world
        self.notes: list[str] = []
        self.num_steps = 0
        self._max_norm, self._finds_unused = max_norm, finds_unused

    @property
    def clips(self) -> bool:
        """Whether each rank clips its gradients here, before the exchange."""
        return True

    @torch.no_grad()
    def reduce(self) -> None:
        """Replace this rank's gradients by the common ones."""
        self.wire.plain_bytes += ring_bytes(self.slots.plain_bytes, self.wire.num_ranks)
        used = self._used_by_any()
        if self.clips and self._max_norm is not None:
            self._clip(self._max_norm)
        self.slots.set_gradients(self._exchange(self.slots.gradients(), used), used)

    def _exchange(self, gradient: Tensor, used: list[bool] | None) -> Tensor:
        """The common gradient. `used` marks parameters with a gradient on some rank; None means all."""
        raise NotImplementedError

    def commit(self) -> None:
        self.num_steps += 1

    def apply(self, step: Callable[[], None]) -> None:
        """Run the optimizer's step."""
        step()

    def _clip(self, max_norm: float) -> None:
        """Clip as Deep Gradient Compression does, before the residual is added.

        A rank's part of the mean is its gradient / n. The sum of n independent parts has sqrt(n) times the norm of one,
        so each part may have a norm of max_norm / sqrt(n).
        """
        allowed = max_norm * math.sqrt(self.wire.num_ranks)
        clip(self.slots.parameters, allowed, global_norm(self.slots.parameters))

    def _used_by_any(self) -> list[bool] | None:
        """Which parameters have a gradient on some rank: the optimizer must skip the others, as on one device."""
        if not self._finds_unused:
            return None
        flags = torch.tensor([float(p.grad is not None) for p in self.slots.parameters], device=self.slots.device)
        self.wire.all_reduce(flags, dist.ReduceOp.MAX)
        if not self.world.tensors.has_values:
            return None
        return [flag > 0 for flag in self.world.tensors.read(list(flags.unbind()))]

    # -- state --------------------------------------------------------------------------------------------------

    def vectors(self) -> dict[str, Tensor]:
        """This rank's state between steps, by its name in a checkpoint: vectors over all parameters."""
        return {}

    def extras(self) -> dict[str, Tensor]:
        """Other state, equal on all ranks."""
        return {"steps": torch.tensor([self.num_steps])}

    def restore(self, extras: Mapping[str, Tensor]) -> None:
        """Restore `extras`, after the checkpoint has filled `vectors`."""
        if "steps" in extras:
            self.num_steps = int(extras["steps"])
