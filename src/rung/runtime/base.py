"""What a runtime is: something that takes one training step on this rank's share of a global batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from rung.sizes import human_size
from rung.windows import Window


@dataclass(frozen=True)
class LocalStep:
    """What a step leaves on this rank, still on the device.

    The loss is this rank's share: the sum over all ranks is the global loss. The norm is the global one already.
    """

    loss_share: Tensor
    grad_norm: Tensor | None
    learning_rate: float
    staleness: int | None = None  # updates that the gradient was late by, where that can be


@dataclass
class Traffic:
    """What was sent for one purpose."""

    messages: int = 0
    num_bytes: int = 0
    plain_bytes: int = 0  # what the same would have been uncompressed; 0 where nothing is

    def add(self, num_bytes: int, messages: int = 1) -> None:
        self.messages += messages
        self.num_bytes += num_bytes

    def as_json(self) -> dict[str, int]:
        told = {"messages": self.messages, "num_bytes": self.num_bytes}
        return {**told, "plain_bytes": self.plain_bytes} if self.plain_bytes else told

    def saving(self) -> str:
        """A line about what was compressed."""
        if not self.num_bytes:
            return f"sent nothing, instead of {human_size(self.plain_bytes)} from each rank"
        times = self.plain_bytes / self.num_bytes
        return f"sent {human_size(self.num_bytes)} from each rank, {times:.3g} times less than uncompressed"


@dataclass(frozen=True)
class ModelFacts:
    """The whole model, whatever this rank keeps of it."""

    num_trainable: int
    num_frozen: int
    buffer_names: list[str]

    @classmethod
    def of(cls, model: nn.Module) -> ModelFacts:
        parameters = list(model.parameters())
        trainable = sum(p.numel() for p in parameters if p.requires_grad)
        frozen = sum(p.numel() for p in parameters if not p.requires_grad)
        return cls(trainable, frozen, [name for name, _ in model.named_buffers()])


class Runtime(Protocol):
    """The unit is a step, never forward, backward or update: the shape that every kind of parallelism shares."""

    notes: list[str]
    facts: ModelFacts

    def place(self, windows: Iterable[Window]) -> Iterator[Window]:
        """Windows with their tensors on the device."""
        ...

    def step(self, window: Window, *, want_norm: bool = False) -> LocalStep: ...

    def evaluate(self, windows: Iterable[Window]) -> dict[str, float]:
        """Loss and metrics over every sample once, equal on all ranks."""
        ...

    def phase_seconds(self) -> dict[str, float]:
        """This rank's own time in each phase of the last step, without waiting for others."""
        ...

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The module's own state dict, whole tensors on the host; empty tensors on all ranks but the main one."""
        ...

    def state_bytes(self) -> dict[str, int]:
        """Bytes this rank keeps between steps: parameters, gradients, optimizer, buffers."""
        ...

    def is_settled(self) -> bool:
        """Whether the state is that after the last step and all before it, so that a run may stop here."""
        ...

    def dismiss(self, *, stopped: bool) -> None:
        """The run is over."""
        ...

    def traffic(self) -> dict[str, Traffic]:
        """What this rank has sent since it was built, by kind, where somebody counted."""
        ...

    def device_0_bytes(self) -> dict[str, int]:
        """The most that the first device of this process held in a step beyond what its others did; empty with one."""
        ...
