"""How unevenly the rows of a step choose experts."""

from __future__ import annotations

import torch
from torch import Tensor


class ExpertLoads:
    """The rows of the busiest expert of this rank, and of the rank, over those of an even choice, in the most uneven
    call of the training steps since the last `take`."""

    def __init__(self, planned: float = 1.0) -> None:
        self.planned = planned  # the load of this rank in a dry run, which has no choices
        self.is_open = False  # while the forward of a step runs: not in evaluations, nor of recomputed activations
        self.counted = True  # the runtime sets it to False while a stand-in sample passes
        self._expert: Tensor | None = None
        self._rank = 0.0

    def add(self, own: Tensor, received: int, total: int, num_experts: int) -> None:
        """Count the choices of each of this rank's experts, `received` in all, among `total` of all ranks. Those of
        stand-in samples are in neither."""
        even = total / num_experts
        if even == 0:
            return
        most = own.max().to(torch.float64) / even
        self._expert = most if self._expert is None else torch.maximum(self._expert, most)
        self._rank = max(self._rank, received / (even * len(own)))

    def take(self) -> dict[str, Tensor | float]:
        """Figures of which the largest over all ranks counts."""
        if self._expert is None:
            return {}
        found: dict[str, Tensor | float] = {"expert_load_max": self._expert, "expert_rank_load_max": self._rank}
        self._expert, self._rank = None, 0.0
        return found
