"""Computes with a model that does not fit on the device: its blocks stay in host memory and come one at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rung.parallel.activation import apply_activation_checkpointing
from rung.parallel.dropout import NoDropout


class HostWeights:
    """Keeps the parameters of units on the host, and a unit's on the device while it computes.

    Backward computes a unit's forward again, for which its parameters come again. Their gradients go to the host. What
    lies outside of all units stays on the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._gradients: dict[nn.Parameter, Tensor] = {}

    def keep(self, unit: nn.Module) -> None:
        for parameter in unit.parameters():
            parameter.data = parameter.data.cpu()
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._take_gradient)  # type: ignore[no-untyped-call]
        unit.forward = self._with_weights(unit, unit.forward)
        apply_activation_checkpointing([unit], "full", NoDropout)

    def return_gradients(self) -> None:
        """Make the sums of the gradients those of the parameters, on the host."""
        for parameter, gradient in self._gradients.items():
            parameter.grad = gradient
        self._gradients = {}

    def _with_weights(self, unit: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self._on_device(unit):
                return forward(*args, **kwargs)

        return run

    @contextmanager
    def _on_device(self, unit: nn.Module) -> Iterator[None]:
        at_home = {parameter: parameter.data for parameter in unit.parameters()}
        try:
            for parameter, value in at_home.items():
                # Copied on a CPU, too, so that this is the same there. Autograd keeps the copy as long as it needs it.
                parameter.data = value.to(self._device, copy=True)
            yield
        finally:
            for parameter, value in at_home.items():
                parameter.data = value

    def _take_gradient(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        gradient, parameter.grad = parameter.grad.cpu(), None
        before = self._gradients.get(parameter)
        self._gradients[parameter] = gradient if before is None else before + gradient
