"""The interface of a runtime, which takes one training step on this rank's share of a global batch.

Other packages use only `Runtime`; `build_runtime` chooses the implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from rung.data.batch_shard import LocalBatch
from rung.data.batches import Batches
from rung.distributed import fake_world
from rung.distributed.world import World
from rung.errors import TaskError
from rung.parallel import ParallelModel
from rung.parallel.experts.rows import CountedRows
from rung.parallel.gradients import GradientFigures
from rung.parallel.pipeline.schedule import Stage
from rung.runtime.optimizer import LocalScaler, Schedule
from rung.runtime.phases import PhaseClock
from rung.runtime.rank_state import RankLocalState
from rung.system.units import human_size

AVERAGE = "average"  # the key in the optimizer's state under which --ema keeps the average of a parameter


@dataclass(frozen=True)
class LoggedValue:
    """One number of this rank. A tensor is on the GPU, in float64."""

    name: str
    reduce: str
    value: Tensor | float
    weight: Tensor | float = 1.0  # in a mean
    function: str = ""  # of the task


def figure_of(value: Any, name: str, where: str) -> Tensor | float:
    """A logged value as a number of its own: what it was read from may change before it is sent."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, Tensor) and not value.is_complex() and value.numel() == 1:
        number = value.detach().reshape(()).to(torch.float64, copy=True)
        return number.item() if number.device.type == "cpu" and not fake_world.is_fake(number) else number
    try:
        if not isinstance(value, Tensor | str | bytes):
            return float(value)
    except (TypeError, ValueError):
        pass
    got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise TaskError(f"{where}: log({name!r}, ...) takes one number, and got {got}. Log its mean, sum or maximum.")


@dataclass(frozen=True)
class LocalStep:
    """The result of a step on this rank, still on the device.

    The loss is this rank's share: the sum over all ranks is the global loss. The norm is global already.
    """

    loss_share: Tensor
    grad_norm: Tensor | None
    learning_rate: float
    learning_rates: dict[str, float] = field(default_factory=dict)  # of each of several optimizers, by name
    staleness: int | None = None  # updates that the gradient was late by, under ps-async
    logged: Sequence[LoggedValue] = ()  # by the task, on this rank
    rows: CountedRows | None = None  # of each expert, where `want_norm` was asked for


@dataclass(frozen=True)
class Probe:
    """The loss and the gradients of a window, as a step would compute them, without an update.

    The loss is this rank's share. The gradients are of this rank's parameters; None where ranks do not have the
    gradient of the global loss (compression, local steps).
    """

    loss_share: Tensor
    gradients: GradientFigures | None
    changes_state: bool = False  # whether forward changed buffers or attributes of modules, which were put back
    draws: bool = False  # whether it drew random numbers of the host, dropout aside


@dataclass
class Traffic:
    """Messages sent for one purpose."""

    messages: int = 0
    num_bytes: int = 0
    plain_bytes: int = 0  # without compression; 0 where nothing is compressed

    def add(self, num_bytes: int, messages: int = 1) -> None:
        self.messages += messages
        self.num_bytes += num_bytes

    def without(self, earlier: Traffic) -> Traffic:
        """What was sent since."""
        return Traffic(*(now - then for now, then in zip(astuple(self), astuple(earlier), strict=True)))

    def as_json(self) -> dict[str, int]:
        counts = {"messages": self.messages, "num_bytes": self.num_bytes}
        return {**counts, "plain_bytes": self.plain_bytes} if self.plain_bytes else counts

    def saving(self) -> str:
        """A line for the user about the effect of compression."""
        if not self.num_bytes:
            return f"sent nothing, instead of {human_size(self.plain_bytes)} from each rank"
        times = self.plain_bytes / self.num_bytes
        return f"sent {human_size(self.num_bytes)} from each rank, {times:.3g} times less than uncompressed"


@dataclass(frozen=True)
class ModelFacts:
    """Figures of the whole model, whatever part this rank holds."""

    num_trainable: int
    num_frozen: int
    buffer_names: list[str]

    @classmethod
    def of(cls, model: nn.Module) -> ModelFacts:
        parameters = list(model.parameters())
        trainable = sum(p.numel() for p in parameters if p.requires_grad)
        frozen = sum(p.numel() for p in parameters if not p.requires_grad)
        return cls(trainable, frozen, [name for name, _ in model.named_buffers()])


class Updates:
    """Counts a rank's updates. While one is running, the state must not be saved."""

    def __init__(self) -> None:
        self.count = 0
        self._is_running = False

    def begin(self) -> None:
        """Call before the first parameter changes."""
        self._is_running = True

    def end(self) -> None:
        self._is_running, self.count = False, self.count + 1

    @property
    def is_running(self) -> bool:
        return self._is_running


class ReplicaThreads(Protocol):
    """dp on the CPU: a model in each of several threads, for tools that observe what they compute."""

    models: list[nn.Module]

    def in_each_thread(self, run: Callable[[], Any]) -> None: ...


Names = Collection[str] | None  # of parameters; None: all, and all buffers

# The loop of a rank that works for servers at its own pace: takes the training batches and a function that makes the
# evaluation's, and returns why it ended: finished, or stopped.
Work = Callable[[Batches, Callable[[], Batches] | None], str]


class Runtime(Protocol):
    """Takes whole steps, since every kind of parallelism has its own order of forward, backward and update."""

    world: World
    model: nn.Module
    optimizer: Optimizer
    optimizer_groups: list[list[str]]  # names of all parameters of each group, also of those that other ranks hold
    schedule: Schedule | None
    scaler: LocalScaler | None
    total_steps: int | None  # of the schedule
    facts: ModelFacts
    parallel: ParallelModel  # the model with what `parallelize` did to it
    notes: list[str]
    updates: Updates
    clock: PhaseClock
    parameter_slices: Mapping[int, nn.Parameter]  # by a parameter's id: the slice that the optimizer has in its place
    counted_elsewhere: AbstractSet[int]  # ids of parameters that another rank saves
    # Parameters of which several stages have a copy: name, this rank's copy, the ranks that have one.
    copies_of_stages: Sequence[tuple[str, nn.Parameter, dist.ProcessGroup]]
    stages: Sequence[Stage]  # this rank's stages of a pipeline schedule
    replica_threads: ReplicaThreads | None
    rank_state: RankLocalState | None
    work: Work | None  # replaces the training loop on this rank
    # With --ema: the average of the weights in their place, while the context is open.
    averaged: Callable[[], AbstractContextManager[None]] | None
    evaluated_weights: Callable[[], AbstractContextManager[None]]  # swaps in other weights to evaluate

    def begin(self, start: int, batches: Batches) -> None:
        """Called once the state is that after step `start`, with the batches to come."""
        ...

    def place(self, windows: Iterable[LocalBatch]) -> Iterator[LocalBatch]:
        """Windows with their tensors on the device."""
        ...

    def step(self, window: LocalBatch, *, want_norm: bool = False) -> LocalStep: ...

    def probe(self, window: LocalBatch) -> Probe:
        """Compute loss and gradients without dropout, and leave the state as it was. Strategies that have `check`."""
        ...

    def evaluate(self, windows: Iterable[LocalBatch]) -> dict[str, float]:
        """Loss and metrics over every sample once, equal on all ranks."""
        ...

    def phase_seconds(self) -> dict[str, float]:
        """This rank's own time in each phase of the last step, without waiting for others."""
        ...

    def named_weights(self, names: Names = None) -> Iterator[tuple[str, Tensor]]:
        """The module's own state dict, whole tensors on the host; empty tensors on all ranks but the main one. With
        `names` only these parameters."""
        ...

    def share_weights(self) -> None:
        """Give the parameters that this rank's optimizer holds to the ranks that compute with them, after they were
        changed outside of a step. All ranks call it."""
        ...

    def reshard(self) -> None:
        """Bring the parameters into their state between steps, wherever a forward pass ended."""
        ...

    def state_bytes(self) -> dict[str, int]:
        """Bytes this rank keeps between steps: parameters, gradients, optimizer, buffers."""
        ...

    def traffic(self) -> dict[str, Traffic]:
        """Messages of this rank since it was built, by kind, where they are counted."""
        ...

    def device_0_bytes(self) -> dict[str, int]:
        """The most bytes that the first device of this process held in a step beyond the others; empty with one."""
        ...

    def is_consistent(self) -> bool:
        """Whether the state is that after the last step and all before it, so that a run may stop here. A collective
        of all ranks."""
        ...

    def close(self, *, stopped: bool) -> None:
        """The run is over."""
        ...
