"""Dropout turned off, wherever it is written."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


class NoDropout(TorchFunctionMode):
    """Makes every dropout the identity, written as a module or called as a function. `met`: whether there was one."""

    def __init__(self) -> None:
        super().__init__()
        self.met = False

    _DROPOUTS = frozenset(
        getattr(nn.functional, name)
        for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in self._DROPOUTS or func is torch.dropout:
            p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            is_on = kwargs.get("training", args[2] if len(args) > 2 else True)
            self.met = self.met or bool(is_on and p > 0)
            return args[0] if args else kwargs["input"]
        if func is nn.functional.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


def without_dropout(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The same with dropout off, whoever calls it: no mode is around what backward computes again."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with NoDropout():
            return forward(*args, **kwargs)

    return run
