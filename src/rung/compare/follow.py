"""The messages of one step: their bytes, how long they take, and how much of that is hidden behind computation."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import DeviceType, ProfilerActivity, profile

from rung.compare.spans import seconds_outside
from rung.data.batch_shard import LocalBatch
from rung.distributed.status_board import StatusWriter
from rung.distributed.world import World
from rung.planner.recorder import Message, Recorder
from rung.runtime.base import Runtime

Intervals = list[tuple[float, float]]


@dataclass(frozen=True)
class MessageTally:
    """The messages of one collective over one axis in one phase of a step."""

    collective: str
    axis: str
    phase: str
    calls: int
    num_bytes: int

    def as_json(self) -> dict[str, Any]:
        values = asdict(self)
        values["bytes"] = values.pop("num_bytes")
        return values


@dataclass(frozen=True)
class RankMessages:
    """One rank's messages in a step. `exposed_seconds` is None unless the backend is NCCL: with others the host itself
    waits, and the timed steps measure it."""

    messages: list[MessageTally]
    hidden_seconds: float
    exposed_seconds: float | None = None


def follow_messages(
    runtime: Runtime, world: World, status: StatusWriter, windows: tuple[LocalBatch, LocalBatch]
) -> RankMessages:
    """Count the messages of a step that computes the gradient norm, and measure the time hidden behind computation.

    It must not be the second step of a run, in which DDP rebuilds its buckets and sends a little for it. With NCCL the
    device waits, not the host: a profile of one more step, on `windows[1]`, shows which kernels were messages.
    """
    if world.backend == "nccl":
        recorder = Recorder(world, status)
        recorder.follow(runtime)
        with recorder:
            runtime.step(windows[0], want_norm=True)
        sent, computed = _kernel_times(runtime, windows[1])
        exposed = seconds_outside(sent, computed)  # the time of messages outside compute kernels
        return RankMessages(tally(recorder.messages), _length(sent) - exposed, exposed)
    log: list[tuple[str, float, float]] = []
    runtime.clock.log = log
    timer = _CollectiveTimer(world, status)
    timer.follow(runtime)
    try:
        with timer:
            runtime.step(windows[0], want_norm=True)
    finally:
        runtime.clock.log = None
    waits = [(start, end) for what, start, end in log if what == "wait"]
    return RankMessages(tally(timer.messages), seconds_outside(timer.finished(), waits))


def _kernel_times(runtime: Runtime, window: LocalBatch) -> tuple[Intervals, Intervals]:
    """The time spans of NCCL kernels and of all others in one step, in seconds."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        runtime.step(window, want_norm=True)
        torch.cuda.synchronize()
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    sent: Intervals = []
    computed: Intervals = []
    for event in profiler.profiler.kineto_results.events():
        if event.device_type() == DeviceType.CUDA:
            start = event.start_ns() / 1e9
            kernels = sent if "nccl" in event.name().lower() else computed
            kernels.append((start, start + event.duration_ns() / 1e9))
    return sent, computed


def _length(intervals: Iterable[tuple[float, float]]) -> float:
    return seconds_outside(intervals, [])


def tally(messages: list[Message]) -> list[MessageTally]:
    """Sum the calls and bytes of messages by operation, axis and phase."""
    sums: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for message in messages:
        found = sums[message.operation, message.axis, message.phase]
        found[0] += 1
        found[1] += message.num_bytes
    return [MessageTally(*key, calls, num_bytes) for key, (calls, num_bytes) in sums.items()]


class _CollectiveTimer(Recorder):  # type: ignore[no-untyped-call]
    """Records when each collective was called and when it completed."""

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
                # gloo does not report the end of a reduce-scatter. FSDP waits for it at once, so none is hidden.
                with contextlib.suppress(RuntimeError):
                    future = dist.Work.unbox(work).get_future()
                    future.then(lambda _: times.append(time.perf_counter()))
        return output

    def finished(self) -> list[tuple[float, float]]:
        return [(times[0], times[1]) for times in self._open if len(times) == 2]
