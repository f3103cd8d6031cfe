"""Whether a backward can be split: first the gradients of the inputs, later those of the weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def can_split_backward(outputs: list[Tensor], inputs: list[Tensor]) -> bool:
    """Whether torch's split backward (`stage_backward_input`, `stage_backward_weight`) is correct for this graph.

    It follows the gradient from the outputs to the inputs and saves it at each node where a weight joins that path. So
    every output must depend on an input, and no weight may join at two nodes: one would lie on the path to the other.
    """
    if not outputs or not inputs:
        return False
    ends = {torch.autograd.graph.get_gradient_edge(tensor).node for tensor in inputs}
    roots = [torch.autograd.graph.get_gradient_edge(tensor).node for tensor in outputs]
    below = {node: [n for n, _ in node.next_functions if n is not None] for node in _nodes(roots)}
    above: dict[Any, list[Any]] = {node: [] for node in below}
    for node, nexts in below.items():
        for after in nexts:
            above[after].append(node)
    on_path: set[Any] = set()
    waiting = [node for node in ends if node in below]
    while waiting:
        node = waiting.pop()
        if node not in on_path:
            on_path.add(node)
            waiting += above[node]
    if not all(root in on_path for root in roots):
        return False
    joins: dict[Any, Any] = {}
    for node in on_path:
        for leaf in _nodes([after for after in below[node] if after not in on_path]):
            if not below[leaf] and joins.setdefault(leaf, node) is not node:
                return False
    return True


def _nodes(roots: list[Any]) -> set[Any]:
    found: set[Any] = set()
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += [after for after, _ in node.next_functions if after is not None]
    return found
