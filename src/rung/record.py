"""What a rank sends and computes in a step: every collective with its bytes, every action of a pipeline with its time.

It looks at the calls themselves, as they pass through torch's dispatcher, so a real step and a pretended one are read
alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from rung.status import StatusWriter
from rung.world import World

_OPERATIONS = {
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_": "reduce-scatter",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "alltoall_base_": "all-to-all",
    "alltoall_": "all-to-all",
    "all_to_all_single": "all-to-all",
    "send": "send",
    "recv_": "receive",
}


@dataclass(frozen=True)
class Message:
    """One call of a collective, or a message to a neighbour. The bytes are those of the whole result or message."""

    phase: str
    operation: str
    num_bytes: int
    axis: str  # the axes of the mesh that it runs over, or "all"
    num_ranks: int


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the messages of one rank while active. Enter it inside `world.tensors()`."""

    def __init__(self, world: World, status: StatusWriter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.messages: list[Message] = []
        self._world, self._status = world, status
        self._axes: dict[tuple[int, ...], str] = {tuple(range(world.size)): "all"}
        names = [name for name, size in world.layout.axes.items() if size > 1]
        if world.mesh is not None:
            if {"dp_replicate", "dp_shard"} <= set(names):
                self._axes[tuple(dist.get_process_group_ranks(world.data_group))] = "data"
            for name in names:
                self._axes[tuple(dist.get_process_group_ranks(world.axis(name).get_group()))] = name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            operation = _OPERATIONS.get(func._overloadpacket.__name__.rpartition(".")[2])
            if operation is not None:
                self._note(operation, args, is_functional=func.namespace != "c10d")
        return output

    def _note(self, operation: str, args: tuple[Any, ...], *, is_functional: bool) -> None:
        group = group_of(args)
        ranks = tuple(dist.get_process_group_ranks(group))
        if len(ranks) == 1:
            return  # nothing is sent
        tensors = [[leaf for leaf in tree_flatten(arg)[0] if isinstance(leaf, Tensor)] for arg in args]
        num_bytes = max(sum(t.numel() * t.element_size() for t in some) for some in tensors)
        if is_functional and operation == "all-gather":
            num_bytes *= len(ranks)  # only what goes in is among the arguments
        marked = [getattr(t, "rung_phase", None) for some in tensors for t in some]
        phase = next((mark for mark in marked if mark), self._status.current().phase)
        self.messages.append(Message(phase, operation, num_bytes, self._axis_of(ranks), len(ranks)))

    def _axis_of(self, ranks: tuple[int, ...]) -> str:
        """The axes along which the ranks of a group differ."""
        if ranks not in self._axes:
            places = [self._world.layout.coordinates(rank) for rank in ranks]
            names = [name for name in self._world.layout.axes if len({place[name] for place in places}) > 1]
            self._axes[ranks] = "+".join(names)
        return self._axes[ranks]


def group_of(args: tuple[Any, ...]) -> dist.ProcessGroup:
    """The process group among the arguments of a collective."""
    for arg in args:
        if isinstance(arg, str):
            try:
                resolve: Any = dist.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
                named: dist.ProcessGroup = resolve(arg)
                return named
            except (RuntimeError, ValueError):
                continue
        if type(arg).__name__ == "ScriptObject":
            try:
                group: dist.ProcessGroup = dist.ProcessGroup.unbox(arg)
            except RuntimeError:
                continue
            return group
    raise AssertionError("a collective without a process group")
