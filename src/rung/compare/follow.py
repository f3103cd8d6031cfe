"""The messages of one step: what is sent, for how long it is under way, and how much of that computing hides."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from rung.compare.spans import hidden_seconds
from rung.record import Message, Recorder
from rung.runtime.mesh import MeshRuntime
from rung.status import StatusWriter
from rung.trace import Sent, Trace
from rung.windows import Window
from rung.world import World

Stretches = list[tuple[float, float]]


@dataclass(frozen=True)
class Tally:
    """Messages of one kind in a step."""

    collective: str
    axis: str
    phase: str
    calls: int
    num_bytes: int

    def as_json(self) -> dict[str, Any]:
        told = asdict(self)
        return {**{key: value for key, value in told.items() if key != "num_bytes"}, "bytes": self.num_bytes}


@dataclass(frozen=True)
class Followed:
    """What one rank sends in a step. `exposed_seconds` is known here only where the host does not wait for messages."""

    messages: list[Tally]
    hidden_seconds: float
    exposed_seconds: float | None = None


def follow_messages(
    runtime: MeshRuntime, world: World, status: StatusWriter, windows: tuple[Window, Window]
) -> Followed:
    """The messages of a step whose gradient norm is asked for, and for how long they travelled unnoticed.

    Not to be the second step of a run: DDP arranges its buckets anew in that one, and sends a little for it. With NCCL
    the device waits, not the host; a second step then tells which of its kernels were messages.
    """
    if world.backend == "nccl":
        with Recorder(world, status) as recorder:
            runtime.step(windows[0], want_norm=True)
        sent, computed = _kernels(runtime, windows[1])
        exposed = hidden_seconds(sent, computed)  # what one hides is what the other leaves
        return Followed(tally(recorder.messages), _length(sent) - exposed, exposed)
    log: list[tuple[str, float, float]] = []
    runtime.clock.log = log
    try:
        with _Works(world, status) as works:
            runtime.step(windows[0], want_norm=True)
    finally:
        runtime.clock.log = None
    waits = [(start, end) for what, start, end in log if what == "wait"]
    return Followed(tally(works.messages), hidden_seconds(works.finished(), waits))


def _kernels(runtime: MeshRuntime, window: Window) -> tuple[Stretches, Stretches]:
    """When the device sent, and when it computed, in seconds."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        runtime.step(window)
        torch.cuda.synchronize()
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    sent: Stretches = []
    computed: Stretches = []
    for event in profiler.profiler.kineto_results.events():
        if event.device_type() == DeviceType.CUDA:
            start = event.start_ns() / 1e9
            place = sent if "nccl" in event.name().lower() else computed
            place.append((start, start + event.duration_ns() / 1e9))
    return sent, computed


def _length(stretches: Iterable[tuple[float, float]]) -> float:
    return hidden_seconds(stretches, [])


def messages_of(trace: Trace, start: int) -> list[Message]:
    """What was sent and received from an event on."""
    return [event.message for event in trace.events[start:] if isinstance(event, Sent)]


def tally(messages: list[Message]) -> list[Tally]:
    """Messages of one operation, over the same ranks and in the same phase are told together."""
    sums: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for message in messages:
        found = sums[message.operation, message.axis, message.phase]
        found[0] += 1
        found[1] += message.num_bytes
    return [Tally(*key, calls, num_bytes) for key, (calls, num_bytes) in sums.items()]


class _Works(Recorder):  # type: ignore[no-untyped-call]
    """Follows every collective from its call to its end."""

    def __init__(self, world: World, status: StatusWriter) -> None:
        super().__init__(world, status)
        self._open: list[list[float]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        started, before = time.perf_counter(), len(self.messages)
        output = super().__torch_dispatch__(func, types, args, kwargs)
        if len(self.messages) > before and self.messages[-1].operation not in ("send", "receive"):
            work = output[-1] if isinstance(output, tuple) else output
            if type(work).__name__ == "ScriptObject":
                times = [started]
                self._open.append(times)
                # gloo does not tell of a reduce-scatter when it has ended; those of FSDP are waited for at once.
                with contextlib.suppress(RuntimeError):
                    future = dist.Work.unbox(work).get_future()
                    future.then(lambda _: times.append(time.perf_counter()))
        return output

    def finished(self) -> list[tuple[float, float]]:
        return [(times[0], times[1]) for times in self._open if len(times) == 2]
