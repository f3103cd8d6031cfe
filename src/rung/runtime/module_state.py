"""What a forward may change on its modules besides parameters: buffers, and attributes such as a counter of calls."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from rung.distributed.torch_private import buffers_of
from rung.parallel.materialize import is_absent

_OWN = frozenset(vars(nn.Module()))  # torch's, on every module
_CONTAINERS = (list, dict, set, OrderedDict, defaultdict)  # not their subclasses, which may refuse to be changed
_SIMPLE = (int, float, complex, str, bytes, tuple, type(None), Tensor, *_CONTAINERS)


class ModuleState:
    """Buffers and plain attributes of a model, to be put back: by identity, and by content where that can change.

    Not what a model keeps elsewhere: globals, and objects of classes of its own.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._attributes = {module: _plain(module) for module in model.modules()}
        self._buffers = {module: dict(buffers_of(module)) for module in model.modules()}
        held = [v for found in (*self._attributes.values(), *self._buffers.values()) for v in found.values()]
        tensors = {id(v): v for v in held if isinstance(v, Tensor) and not is_absent(v)}
        self._values = [(tensor, tensor.detach().clone()) for tensor in tensors.values()]
        self._contents = [(value, copy.copy(value)) for value in held if type(value) in _CONTAINERS]

    def restore(self) -> None:
        for module, before in self._attributes.items():
            for name in _plain(module).keys() - before.keys():
                del vars(module)[name]
            vars(module).update(before)
        for module, buffers in self._buffers.items():
            buffers_of(module).clear()
            buffers_of(module).update(buffers)
        with torch.no_grad():
            for tensor, value in self._values:
                # By value: torch's batch norm writes its running statistics without a new version of them.
                if not torch.equal(tensor.detach(), value):
                    tensor.detach().copy_(value)
        for container, content in self._contents:
            if isinstance(container, list):
                container[:] = content
            else:
                container.clear()
                container.update(content)


def _plain(module: nn.Module) -> dict[str, Any]:
    return {name: v for name, v in vars(module).items() if name not in _OWN and isinstance(v, _SIMPLE)}
