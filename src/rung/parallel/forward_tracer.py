"""Traces of a model's forward for the batches of a run, each made once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rung.distributed import fake_world
from rung.distributed.torch_private import tree_flatten, tree_map_only
from rung.parallel.forward_trace import ForwardTrace, signature, trace_forward
from rung.parallel.model_copy import meta_copy


class ForwardTracer:
    """Traces the forward of batches, once for each combination of shapes.

    It runs a meta copy of the model taken before parallelization: a parallelized module starts collectives, which a
    trace must not do.
    """

    def __init__(
        self, model: nn.Module, run: Callable[[nn.Module, Any], Any], device: torch.device, mode: Any = None
    ) -> None:
        self.meta_model = meta_copy(model)
        self.device = device
        self.mode = mode or fake_world.new_fake_mode()
        self.parameter_dtype: torch.dtype | None = None
        self.repeats = False  # dry runs trace one of several identical parts
        self.is_part: Callable[[str, nn.Module], bool] = lambda name, module: False
        self._run = run
        self._known: dict[Any, ForwardTrace] = {}

    def fake(self, batch: Any) -> Any:
        """The batch as fake tensors."""
        return tree_map_only(Tensor, self._fake, batch)

    def run(self, batch: Any) -> Callable[[], Any]:
        faked = self.fake(batch)
        return lambda: self._run(self.meta_model, faked)

    def __call__(self, batch: Any, *, training: bool = True) -> ForwardTrace:
        leaves, structure = tree_flatten(batch)
        key = (training, str(structure), *(signature(leaf) for leaf in leaves))
        if key not in self._known:
            self.meta_model.train(training)
            self._known[key] = trace_forward(
                self.meta_model,
                self.run(batch),
                self.is_part,
                device=self.device,
                mode=self.mode,
                parameter_dtype=self.parameter_dtype,
                repeats=self.repeats,
            )
        return self._known[key]

    def watch(
        self,
        batch: Any,
        is_watched: Callable[[str, nn.Module], bool],
        may_decide: Callable[[str, nn.Module], bool] | None = None,
    ) -> ForwardTrace:
        """A trace of training by the calls of other modules than a run's parts. It is not kept."""
        self.meta_model.train()
        return trace_forward(
            self.meta_model,
            self.run(batch),
            is_watched,
            device=self.device,
            mode=self.mode,
            parameter_dtype=self.parameter_dtype,
            may_decide=may_decide,
        )

    def _fake(self, tensor: Tensor) -> Tensor:
        with fake_world.imagined(self.mode):
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
