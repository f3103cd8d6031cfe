"""Turn dropout off, whether it is a module or a function call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from rung.distributed.torch_private import Dropout

# Before anything stands in its place (`rung.parallel.context.attention`).
SCALED_DOT_PRODUCT_ATTENTION = nn.functional.scaled_dot_product_attention


class NoDropout(TorchFunctionMode):
    """Makes every dropout call the identity. `found` is whether an active one was called."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    _DROPOUTS = frozenset(
        getattr(nn.functional, name)
        for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in self._DROPOUTS or func is torch.dropout:
            p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            is_on = kwargs.get("training", args[2] if len(args) > 2 else True)
            self.found = self.found or bool(is_on and p > 0)
            return args[0] if args else kwargs["input"]
        if func is SCALED_DOT_PRODUCT_ATTENTION:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


def turn_off_dropout(model: nn.Module) -> None:
    """Set dropout probabilities to 0, also where a kernel applies the dropout (attention, recurrent layers) and where
    whole branches are dropped, by the names that torchvision, timm and transformers have for it."""
    for module in model.modules():
        if isinstance(module, Dropout):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            module.dropout = 0.0
        elif type(module).__name__.endswith(("DropPath", "StochasticDepth")):
            for name in {"p", "drop_prob"} & vars(module).keys():
                setattr(module, name, 0.0)


def without_dropout(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `forward` in NoDropout, because modes around backward are not active when it recomputes a block."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with NoDropout():
            return forward(*args, **kwargs)

    return run
