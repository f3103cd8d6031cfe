"""Record every collective and point-to-point message of a rank, with its bytes.

A dispatch mode sees the calls in torch's dispatcher, so real and dry-run steps are recorded in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from rung.distributed.status_board import StatusWriter
from rung.distributed.torch_private import TorchDispatchMode, process_group, tree_flatten
from rung.distributed.world import World
from rung.runtime.base import Runtime
from rung.spec.strategy import expert_axes

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
    """One call of a collective, or one send or receive. `num_bytes` is the size of the whole result or message."""

    phase: str
    operation: str
    num_bytes: int
    axis: str  # the mesh axes of its group, or "all"
    num_ranks: int


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the messages of one rank while active. Enter it inside `world.tensors.mode()`."""

    def __init__(self, world: World, status: StatusWriter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.messages: list[Message] = []
        self._world, self._status = world, status
        self._message_phases = WeakTensorKeyDictionary()
        self._axes: dict[tuple[int, ...], str] = {tuple(range(world.size)): "all"}
        names = [name for name, size in world.layout.axes.items() if size > 1]
        if world.mesh is not None:
            if {"dp_replicate", "dp_shard"} <= set(names):
                self._axes[tuple(dist.get_process_group_ranks(world.gradient_group))] = "data"
            if world.samples_mesh is not None:
                self._axes[tuple(dist.get_process_group_ranks(world.data_group))] = "samples"
                self._axes[tuple(dist.get_process_group_ranks(world.axis("cp").get_group()))] = "cp"
            for name in ("expert_replicate", "expert_shard", "ep") if world.experts_mesh is not None else ():
                if expert_axes(world.layout)[name] > 1:
                    self._axes[tuple(dist.get_process_group_ranks(world.axis(name).get_group()))] = name
            for name in names:
                self._axes[tuple(dist.get_process_group_ranks(world.axis(name).get_group()))] = name

    def follow(self, runtime: Runtime) -> None:
        """Take the phase of a message from a pipeline's stages, which post some before the phase begins."""
        for stage in runtime.stages:
            stage.message_phases = self._message_phases

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            operation = _OPERATIONS.get(func.overloadpacket.__name__.rpartition(".")[2])
            if operation is not None:
                self._note(operation, args, is_functional=func.namespace != "c10d")
        return output

    def _note(self, operation: str, args: tuple[Any, ...], *, is_functional: bool) -> None:
        group = group_of(args)
        ranks = tuple(dist.get_process_group_ranks(group))
        if len(ranks) == 1:
            return  # a group of one sends nothing
        tensors = [[leaf for leaf in tree_flatten(arg)[0] if isinstance(leaf, Tensor)] for arg in args]
        num_bytes = max(sum(t.numel() * t.element_size() for t in some) for some in tensors)
        if is_functional and operation == "all-gather":
            num_bytes *= len(ranks)  # the functional collective takes the input only and returns the output
        phases = self._message_phases
        marked = [phases[t] for some in tensors for t in some if t in phases]
        phase = marked[0] if marked else self._status.current().phase
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
                return process_group(arg)
            except (RuntimeError, ValueError):
                continue
        if type(arg).__name__ == "ScriptObject":
            try:
                group: dist.ProcessGroup = dist.ProcessGroup.unbox(arg)
            except RuntimeError:
                continue
            return group
    raise AssertionError("a collective without a process group")
