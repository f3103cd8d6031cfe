"""What the host of a GPU takes in a step: from steps so small that the GPU waits for it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from rung.distributed.world import open_fake_world, open_world
from rung.planner.dryrun import dry_run
from rung.planner.trace import Work
from rung.runtime import build_runtime
from rung.spec.config import RunConfig
from rung.spec.strategy import parse
from rung.spec.task import Task
from rung.train.worker import make_batches

_SMALL_STEPS = 60
_ROUNDS = 3  # a host that others use, too, has slow moments


@dataclass(frozen=True)
class HostTimes:
    """What the host takes: fields of `Device`. On a CPU, which computes what it issues, all is in `issue`."""

    issue: float
    issue_large: float | None = None
    issue_in_update: float | None = None
    call: float = 0.0
    inner: float | None = None
    begin: float = 0.0
    send: float | None = None
    gather: float | None = None
    host_link: float | None = None
    host_bandwidth: float | None = None


def host_of_device() -> HostTimes:
    """From steps so small that a GPU waits for the host in them, which differ in one thing each."""
    few, many, called = SmallTask(6, modules=False), SmallTask(24, modules=False), SmallTask(24)
    scaled, apart = replace(many, scalings=4), replace(many, single=True)
    tasks = (few, many, called, scaled, apart)
    rounds = [{task: measure_small_step(task, "single", 1, "cuda") for task in tasks} for _ in range(_ROUNDS)]
    seconds = {task: statistics.median(one[task] for one in rounds) for task in tasks}
    works = {task: works_of(task, "cuda") for task in tasks}
    own = {task: sum(work.phase != "update" for work in works[task]) for task in tasks}
    large = {task: sum(work.is_large for work in works[task]) for task in tasks}
    small = {task: own[task] - large[task] for task in tasks}
    updates = {task: len(works[task]) - own[task] for task in tasks}
    issue = max(1e-6, (seconds[scaled] - seconds[many]) / (small[scaled] - small[many]))
    in_layers = seconds[many] - seconds[few] - issue * (small[many] - small[few])
    issue_large = max(issue, in_layers / (large[many] - large[few]))
    in_update = max(1e-6, (seconds[apart] - seconds[many]) / (updates[apart] - updates[many]))
    calls = sum(work.calls for work in works[called]) - sum(work.calls for work in works[many])
    call = max(0.0, (seconds[called] - seconds[many]) / calls)
    explained = small[few] * issue + large[few] * issue_large + updates[few] * in_update
    explained += call * sum(work.calls for work in works[few])
    begin = max(0.0, seconds[few] - explained)
    found = HostTimes(issue, issue_large, in_update, call, _inner_issue(), begin)
    send, gather = _message_time(found, "tp2", "cuda"), _message_time(found, "zero3", "cuda")
    link, bandwidth = _rates_of_offloading()
    return replace(found, send=send, gather=gather, host_link=link, host_bandwidth=bandwidth)


def _message_time(host: HostTimes, strategy: str, device: str) -> float:
    """The host's time for a message of this strategy and for the hooks around it, beyond the operations that these
    issue: from one rank of two, whose messages go nowhere."""
    apart, messages = 0.0, 0
    for layers, sign in ((8, -1), (32, 1)):
        task = SmallTask(layers, per_block=4)
        run = dry_run(task.task(), parse(strategy, 2), small_config(2), device=device)
        works = [event for event in run.trace.events[run.second_step :] if isinstance(event, Work)]
        rounds = [measure_small_step(task, strategy, 2, device, alone=True) for _ in range(_ROUNDS)]
        apart += sign * (statistics.median(rounds) - sum(_issue_time(work, host) for work in works))
        messages += sign * len(run.trace.messages(run.second_step))
    return max(0.0, apart / messages)


def _issue_time(work: Work, host: HostTimes) -> float:
    in_pass = host.issue_large if work.is_large else host.issue
    issue = host.issue_in_update if work.phase == "update" else in_pass
    return (host.issue if issue is None else issue) + work.calls * host.call


def _inner_issue() -> float:
    """The host's time for a product that cuDNN issues, from a recurrent layer whose products are small, but not so
    small that one kernel computes them all."""
    layer = nn.LSTM(768, 768, num_layers=2).cuda()
    short, long = 16, 80  # time steps, so few that the device's queue takes all
    times: dict[int, list[float]] = {short: [], long: []}
    for length in (short, long) * 12:
        input = torch.zeros(length, 4, 768, device="cuda")
        torch.cuda.synchronize()
        started = time.perf_counter()
        layer(input)[0].sum().backward()
        times[length].append(time.perf_counter() - started)
    torch.cuda.synchronize()
    apart = statistics.median(times[long][3:]) - statistics.median(times[short][3:])
    return max(1e-6, apart / ((long - short) * 2 * 3))  # of each layer one product in forward and two in backward


def _rates_of_offloading() -> tuple[float, float]:
    """Bytes per second from pinned memory to the device, and those that an update of the host reads and writes."""
    size = 2**28
    parameter = nn.Parameter(torch.zeros(size // 4, pin_memory=True))
    parameter.grad = torch.zeros(size // 4, pin_memory=True)
    on_device = torch.zeros(size // 4, device="cuda")
    optimizer = torch.optim.AdamW([parameter], fused=True)

    def seconds(function: Callable[[], Any]) -> float:
        times = []
        for _ in range(8):
            torch.cuda.synchronize()
            started = time.perf_counter()
            function()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
        return statistics.median(times[2:])

    copied = seconds(lambda: on_device.copy_(parameter.detach(), non_blocking=True))
    # A trace counts the parameter, its gradient and both averages twice, as read and as written.
    return size / copied, 8 * size / seconds(optimizer.step)


def works_of(task: SmallTask, device: str) -> list[Work]:
    run = dry_run(task.task(), parse("single", 1), small_config(1), device=device)
    return [event for event in run.trace.events[run.second_step :] if isinstance(event, Work)]


def measure_small_step(small: SmallTask, strategy: str, nproc: int, device: str, *, alone: bool = False) -> float:
    """The median seconds of a step of the small task; `alone`: of one rank, whose messages go nowhere."""
    layout, config, task = parse(strategy, nproc), small_config(nproc), small.task()
    times = []
    opened = (
        open_fake_world(layout, rank=0, device=device, fake=False)
        if alone
        else open_world(layout, device=device, timeout_seconds=120)
    )
    with opened as world:
        runtime = build_runtime(task, world, config, total_steps=_SMALL_STEPS)
        for window in runtime.place(make_batches(task, config, world)):
            started = time.perf_counter()
            runtime.step(window)
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def small_config(nproc: int) -> RunConfig:
    return RunConfig(batch_size=8 * nproc, steps=_SMALL_STEPS, clip=1.0, eval_every="never")


class _Chain(nn.Module):
    """Linear layers that one module computes."""

    def __init__(self, layers: int, scalings: int) -> None:
        super().__init__()
        self.scalings = scalings
        self.weights = nn.ParameterList(torch.zeros(16, 16) for _ in range(layers))
        self.biases = nn.ParameterList(torch.zeros(16) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for weight, bias in zip(self.weights, self.biases, strict=True):
            x = nn.functional.relu(nn.functional.linear(x, weight, bias))
            for _ in range(self.scalings):
                x = x * 1.5
        return x


@dataclass(frozen=True)
class SmallTask:
    """Linear layers so small that their arithmetic takes almost no time."""

    layers: int = 6
    modules: bool = True  # each layer by a module of its own
    per_block: int = 0  # layers in a block, if there are blocks
    scalings: int = 0  # after each layer that is no module
    single: bool = False  # the optimizer updates one parameter at a time

    def _model(self) -> nn.Module:
        if not self.modules:
            return _Chain(self.layers, self.scalings)
        if self.per_block:
            inside = replace(self, layers=self.per_block, per_block=0)
            return nn.Sequential(*(inside._model() for _ in range(self.layers // self.per_block)))
        return nn.Sequential(*(part for _ in range(self.layers) for part in (nn.Linear(16, 16), nn.ReLU())))

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), foreach=False if self.single else None)

    def task(self) -> Task:
        return Task(
            self._model,
            lambda: TensorDataset(torch.zeros(4096, 16), torch.zeros(4096, dtype=torch.long)),
            nn.functional.cross_entropy,
            self._optimizer,
            name="small",
        )
