"""What a forward may change on its modules besides parameters: buffers, and attributes such as a counter of calls."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from typing import Any

import torch
from torch import Tensor, nn

from rung.distributed import fake_world
from rung.distributed.torch_private import buffers_of
from rung.parallel.materialize import is_absent

_OWN = frozenset(vars(nn.Module()))  # torch's, on every module
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)  # not their subclasses, which may refuse to be changed
_SIMPLE = (int, float, complex, str, bytes, tuple, type(None), Tensor, *_CONTAINERS)


class ModuleState:
    """Buffers and plain attributes of a model, to be put back: by identity, and by content where that can change.

    Not what a model keeps elsewhere: globals, and objects of classes of its own.
    """

    def __init__(self, model: nn.Module, *, besides: nn.Module | None = None) -> None:
        """`besides`: a part of the model that is left out."""
        left_out = set() if besides is None else set(besides.modules())
        modules = [module for module in model.modules() if module not in left_out]
        self._attributes = {module: _plain(module) for module in modules}
        self._buffers = {module: dict(buffers_of(module)) for module in modules}
        held = [v for found in (*self._attributes.values(), *self._buffers.values()) for v in found.values()]
        tensors = {id(v): v for v in held if isinstance(v, Tensor) and not is_absent(v)}
        self._values = [(tensor, tensor.detach().clone()) for tensor in tensors.values()]
        self._contents = [(value, copy.copy(value)) for value in held if type(value) in _CONTAINERS]

        self._begun = self._attributes

    def begin(self) -> None:
        """From here on, changes are those of a forward, and not of what was set for it."""
        self._begun = {module: _plain(module) for module in self._attributes}

    def restore(self) -> bool:
        """Put everything back. Returns whether anything had changed since `begin`."""
        changed = False
        for module, before in self._attributes.items():
            now, begun = _plain(module), self._begun[module]
            changed = changed or now.keys() != begun.keys() or any(now[name] is not begun[name] for name in now)
            for name in now.keys() - before.keys():
                del vars(module)[name]
            vars(module).update(before)
        for module, buffers in self._buffers.items():
            own = buffers_of(module)
            changed = changed or any(own.get(name) is not buffer for name, buffer in buffers.items())
            own.clear()
            own.update(buffers)
        with torch.no_grad():
            for tensor, value in self._values:
                if fake_world.is_fake(tensor):  # no value to compare, or to put back
                    continue
                # By value: torch's batch norm writes its running statistics without a new version of them.
                if not torch.equal(tensor.detach(), value):
                    tensor.detach().copy_(value)
                    changed = True
        for container, content in self._contents:
            changed = changed or _elements(container) != _elements(content)
            container.clear()
            (container.extend if isinstance(container, list | deque) else container.update)(content)
        return changed


def _elements(container: Any) -> list[int]:
    items = container.items() if isinstance(container, dict) else container
    return [id(part) for item in items for part in (item if isinstance(container, dict) else (item,))]


def _plain(module: nn.Module) -> dict[str, Any]:
    return {name: v for name, v in vars(module).items() if name not in _OWN and isinstance(v, _SIMPLE)}
