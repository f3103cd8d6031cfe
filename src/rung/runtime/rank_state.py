"""The interface of rank-local state, which checkpoints save and restore per rank.

Weights and optimizer state belong to the job, whatever part of them a rank holds. The residuals of compression, and
weights between two averagings, belong to a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from rung.errors import CheckpointError


@dataclass(frozen=True)
class SavedRankState:
    """The rank-local state of one kind in a checkpoint, as this rank is to restore it."""

    manifest: Mapping[str, Any]
    read: Callable[[str], Tensor]
    kind: str  # compress or local
    own_rank: int | None  # the saved rank that this rank continues; None on another topology

    @property
    def num_ranks(self) -> int:
        return int(self.manifest["ranks"])

    def names(self) -> list[str]:
        first = f"rank/{self.own_rank or 0}/{self.kind}/"
        return [name.removeprefix(first) for name in self.manifest["tensors"] if name.startswith(first)]

    def get(self, name: str) -> Tensor:
        """This rank's own tensor; on another topology the mean over all, computed in float64."""
        if self.own_rank is not None:
            return self.read(f"rank/{self.own_rank}/{self.kind}/{name}")
        found = [self.read(f"rank/{rank}/{self.kind}/{name}") for rank in range(self.num_ranks)]
        if not found[0].is_floating_point():
            return found[0]
        if any(tensor.shape != found[0].shape for tensor in found):
            raise CheckpointError(f"the ranks of the checkpoint have {name} in different shapes.")
        return torch.stack([tensor.to(torch.float64) for tensor in found]).mean(dim=0).to(found[0].dtype)


class RankLocalState(Protocol):
    """Part of a runtime; None where a rank has no such state."""

    kind: str  # the first part of its tensors' names in a checkpoint

    def tensors(self) -> dict[str, Tensor]:
        """`<parameter>/<key>`, and numbers under `<key>` alone."""
        ...

    def common_tensors(self, found: dict[str, Tensor], *, alone: bool) -> dict[str, Tensor]:
        """Turn this rank's tensors of model and optimizer into those that a checkpoint has once for all ranks. `alone`:
        no other rank takes part."""
        ...

    def restore(self, saved: SavedRankState) -> bool:
        """Called after weights and optimizer. Restores nothing and returns False if the saved state does not fit."""
        ...


def shaped_like(whole: Tensor, target: Tensor, name: str) -> Tensor:
    """A whole tensor in the shape, type and placement of `target`."""
    if whole.numel() != target.numel():
        raise CheckpointError(
            f"the checkpoint is of another model: its {name} has {whole.numel()} elements, and the task's has "
            f"{target.numel()}."
        )
    shaped = whole.reshape(target.shape).to(device=target.device, dtype=target.dtype)
    if not isinstance(target, DTensor):
        return shaped
    mesh = target.device_mesh
    everywhere = DTensor.from_local(shaped, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(mesh, target.placements)
