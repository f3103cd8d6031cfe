"""Estimate the time of a step on given hardware, by simulating the traces of its ranks.

An operation takes its roofline time: arithmetic or memory traffic, whichever is slower. It starts when the host has
issued it, its stream is free and its inputs are ready. Each process group has its own stream for messages, which
overlap with computation unless an operation reads their result. The ranks of a pipeline are simulated together, because
they wait for each other's messages. This module has no code for single strategies: they show in the traces.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from rung.hardware.cluster import Cluster, Device, interpolate
from rung.hardware.collective_records import bus_factor
from rung.planner.dryrun import DryRun
from rung.planner.kernels import moving_name, name_of, pieces_name
from rung.planner.recorder import Message
from rung.planner.trace import Mark, Sent, Work
from rung.spec.strategy import Layout, coordinates, expert_axes

_TYPES = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float64": "fp64",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
}
_GATHERS = ("all-gather", "reduce-scatter")
_OPS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "broadcast": "broadcast",
    "all-to-all": "all_to_all",
    "send": "send_recv",
    "receive": "send_recv",
}
# The share of a matrix product's rate that other kernels reach.
_KERNELS = {"_scaled_dot_product": 0.55, "convolution": 0.5, "bmm": 0.7}


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, and how the busiest rank spends them."""

    seconds: float
    arithmetic: float  # operations limited by arithmetic
    memory: float  # operations limited by memory bandwidth
    messages: float  # waiting for a collective
    pipeline: float  # waiting for another stage
    host: float  # waiting for the host
    update: float = 0.0  # the part of arithmetic and memory in the optimizer and the gradient norm

    @property
    def own(self) -> float:
        """What a rank takes whose messages take no time."""
        return self.arithmetic + self.memory + self.host

    @property
    def computing(self) -> float:
        """Forward and backward without waiting."""
        return self.arithmetic + self.memory - self.update

    def slowed(self, slowdown: float) -> StepTime:
        """The step, if its operations take `slowdown` times as long and its messages as long as they do."""
        own = {name: getattr(self, name) * slowdown for name in ("arithmetic", "memory", "pipeline", "host", "update")}
        return replace(self, seconds=sum(own.values()) - own["update"] + self.messages, **own)

    @property
    def limit(self) -> str:
        """The category that takes most of the time."""
        parts = {
            "arithmetic": self.arithmetic,
            "memory bandwidth": self.memory,
            "communication": self.messages,
            "pipeline bubble": self.pipeline,
            "the host": self.host,
        }
        return max(parts, key=lambda name: parts[name])


@dataclass
class _RankClock:
    """The simulation state of one rank: when the host, streams, groups and tensors are free or ready."""

    run: DryRun
    host: float = 0.0
    streams: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    groups: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    ready: dict[int, tuple[float, str]] = field(default_factory=dict)  # allocation -> time, and what it waited for
    pending: dict[int, tuple[tuple[int, int], int]] = field(default_factory=dict)  # allocation -> message not arrived
    spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    forwards: list[tuple[float, dict[str, float]]] = field(default_factory=list)  # start of each, and `spent` then
    update: float = 0.0  # computing time in the update phase


def step_time(runs: Sequence[DryRun], cluster: Cluster, *, repeated: int = 0, slowdown: float = 1.0) -> StepTime:
    """Simulate the second step of these ranks, one for each stage of a pipeline.

    `repeated` is the number of micro-batches that the trace leaves out; each costs as much as its last but one. All
    operations take `slowdown` times what the records say; messages do not.
    """
    clocks = [_RankClock(run) for run in runs]
    arrivals: dict[tuple[int, int], list[float]] = defaultdict(list)
    simulations = [_simulate(clock, cluster, arrivals, slowdown) for clock in clocks]
    waiting = list(range(len(simulations)))
    while waiting:
        still = [number for number in waiting if next(simulations[number], "done") != "done"]
        if len(still) == len(waiting) and not any(_can_continue(clocks[number], arrivals) for number in still):
            raise AssertionError("deadlock: the stages wait for each other")
        waiting = still
    ends = [max([clock.host, *clock.streams.values(), *clock.groups.values()]) for clock in clocks]
    slowest = clocks[max(range(len(clocks)), key=lambda number: sum(clocks[number].spent[k] for k in _BUSY))]
    spent = slowest.spent
    seconds = max(ends)
    if repeated:
        (start, before), (stop, after) = slowest.forwards[-2:]
        seconds += repeated * (stop - start)
        for name in after:
            spent[name] += repeated * (after[name] - before.get(name, 0.0))
    waits = max(0.0, seconds - sum(spent.values()))  # at the end of the step
    pipeline = spent["pipeline"] + (waits if len(runs) > 1 else 0.0)
    messages = spent["messages"] + (waits if len(runs) == 1 else 0.0)
    return StepTime(seconds, spent["arithmetic"], spent["memory"], messages, pipeline, spent["host"], slowest.update)


_BUSY = ("arithmetic", "memory")


def _can_continue(clock: _RankClock, arrivals: dict[tuple[int, int], list[float]]) -> bool:
    return any(len(arrivals[pair]) > index for pair, index in clock.pending.values())


def _simulate(
    clock: _RankClock, cluster: Cluster, arrivals: dict[tuple[int, int], list[float]], slowdown: float
) -> Iterator[str]:
    """Simulate one rank; yields while it waits for a message that another rank has not sent yet."""
    run = clock.run
    layout, device = run.layout, cluster.device_for(run.layout.num_ranks)
    stage = layout.coordinates(run.rank)["pp"]
    received: dict[tuple[int, int], int] = defaultdict(int)
    clock.host = device.begin * slowdown
    for event in run.trace.events[run.second_step :]:
        if isinstance(event, Mark) and event.what == "forward":
            clock.forwards.append((max(clock.host, clock.streams[0]), dict(clock.spent)))
        elif isinstance(event, Work):
            for number in event.reads:
                while number in clock.pending:
                    pair, index = clock.pending[number]
                    if len(arrivals[pair]) > index:
                        del clock.pending[number]
                        clock.ready[number] = arrivals[pair][index], "pipeline"
                    else:
                        yield "waits"
            _compute(clock, event, device, slowdown)
            continue
        if not isinstance(event, Sent):
            continue
        if device.overlaps:
            clock.host += (device.gather if event.message.operation in _GATHERS else device.send) * slowdown
        if event.message.operation in ("send", "receive"):
            assert event.peer is not None
            other = layout.coordinates(event.peer)["pp"]
            if event.message.operation == "send":
                starts = max([clock.host, *(clock.ready.get(n, (0.0, ""))[0] for n in event.touches)])
                if not device.overlaps:
                    starts = max(starts, clock.streams[0])
                arrivals[stage, other].append(starts + seconds_of(event.message, run, cluster))
            else:
                pair = other, stage
                for number in event.touches:
                    clock.pending[number] = pair, received[pair]
                received[pair] += 1
        else:
            _communicate(clock, event, cluster)
    for number in list(clock.pending):  # messages that no operation reads
        pair, index = clock.pending[number]
        while len(arrivals[pair]) <= index:
            yield "waits"
        del clock.pending[number]


def _compute(clock: _RankClock, work: Work, device: Device, slowdown: float) -> None:
    if work.place == "host":
        _compute_on_host(clock, work, device, slowdown)
        return
    issue = device.issue
    if work.is_inner:
        issue = device.inner
    elif work.phase == "update" and device.issue_in_update is not None:
        issue = device.issue_in_update
    elif work.is_large and device.issue_large is not None:
        issue = device.issue_large
    clock.host += (issue + work.calls * device.call) * slowdown
    free = clock.streams[work.stream]
    ready, why = max((clock.ready.get(number, (0.0, "")) for number in work.reads), default=(0.0, ""))
    start = max(free, clock.host, ready)
    seconds, limit = duration(work, device)
    seconds *= slowdown
    if work.stream == 0:
        if start > free:
            waits_for_host = start == clock.host and ready <= clock.host
            clock.spent["host" if waits_for_host else (why or "host")] += start - free
        clock.spent[limit] += seconds
        if work.phase == "update":
            clock.update += seconds
    end = start + seconds
    clock.streams[work.stream] = end
    if not device.overlaps:
        clock.host = end
    for number in work.writes:
        clock.ready[number] = end, "messages" if work.stream else ""


def _compute_on_host(clock: _RankClock, work: Work, device: Device, slowdown: float) -> None:
    """The host computes, with what offloading keeps there, and issues nothing meanwhile."""
    ready = max((clock.ready.get(number, (0.0, ""))[0] for number in work.reads), default=0.0)
    seconds = (device.issue + work.num_bytes / device.host_bandwidth) * slowdown
    clock.host = max(clock.host, ready) + seconds
    if clock.host > clock.streams[0]:
        clock.spent["host"] += clock.host - clock.streams[0]
        clock.streams[0] = clock.host
    for number in work.writes:
        clock.ready[number] = clock.host, "host"


def _communicate(clock: _RankClock, event: Sent, cluster: Cluster) -> None:
    message, device = event.message, cluster.device_for(clock.run.layout.num_ranks)
    ready = max((clock.ready.get(number, (0.0, ""))[0] for number in event.touches), default=0.0)
    start = max(clock.host, ready, clock.groups[message.axis])
    if not device.overlaps:
        start = max(start, clock.streams[0])
    end = start + seconds_of(message, clock.run, cluster)
    clock.groups[message.axis] = end
    if not device.overlaps:  # the processor that computes also carries the messages
        clock.spent["messages"] += end - max(start, clock.streams[0])
        clock.host = clock.streams[0] = end
    for number in event.touches:
        clock.ready[number] = end, "messages"


def duration(work: Work, device: Device) -> tuple[float, str]:
    """The seconds of one operation, and whether arithmetic or memory limits it."""
    if work.place == "link":
        return device.launch + work.num_bytes / device.host_link, "memory"
    seconds, limit = _of_amounts(work, device)
    one_by_one = device.kernels.get(pieces_name(work)) if work.pieces else None
    if one_by_one is not None:
        seconds = max(seconds, device.launch + work.pieces / interpolate(one_by_one, work.pieces))
    return seconds, limit


def _of_amounts(work: Work, device: Device) -> tuple[float, str]:
    """The same where the number of pieces does not matter."""
    moving = device.kernels.get(moving_name(work)) if work.flops else None
    rate = interpolate(moving, work.num_bytes) if moving is not None else device.moving_rate(work.num_bytes)
    moved = work.num_bytes / rate
    own = device.kernels.get(name_of(work))
    if own is not None:
        amount = work.flops or work.num_bytes
        seconds = amount / interpolate(own, amount)
        # A convolution of separate channels computes little and reads as much as others.
        return device.launch + max(seconds, moved if work.flops else 0.0), "arithmetic" if work.flops else "memory"
    if not work.flops:
        return device.launch + moved, "memory"
    share = next((share for name, share in _KERNELS.items() if work.name.startswith(name)), 1.0)
    dtype = _TYPES.get(work.dtype, "fp32")
    if dtype == "fp32" and device.kind == "cuda" and work.name.startswith("convolution"):
        dtype = "tf32"  # torch's default for cuDNN
    computed = work.flops / (share * device.product_rate(dtype, work.flops))
    return device.launch + max(computed, moved), "arithmetic" if computed >= moved else "memory"


def seconds_of(message: Message, run: DryRun, cluster: Cluster) -> float:
    """The seconds of one message without contention."""
    ranks, each = _members(message.axis, run.layout, run.rank, cluster.per_node)
    op = _OPS[message.operation]
    link = cluster.link_of(ranks)
    measured = link.times.get((op, len(ranks)))
    if measured:
        besides = link.besides.get(run.layout.num_ranks, 0.0)
        return besides + interpolate(measured, max(1, message.num_bytes))
    rate = cluster.inside.bandwidth * cluster.inside.efficiency
    if link is not cluster.inside:
        rate = min(rate, link.bandwidth * link.efficiency * each)  # each device has its own network link
    # A tree of log2(n) hops; all-reduce takes two, a reduce and a broadcast.
    hops = max(1, (len(ranks) - 1).bit_length()) * (2 if op == "all_reduce" else 1)
    return link.latency * hops + bus_factor(op, len(ranks)) * message.num_bytes / rate


@functools.lru_cache(maxsize=1024)
def _members(axis: str, layout: Layout, rank: int, per_node: int) -> tuple[tuple[int, ...], int]:
    """The ranks of a message's group, and the largest number of them in one machine."""
    ranks = group_of(axis, layout, rank)
    return ranks, max(Counter(rank // per_node for rank in ranks).values())


# Who shares samples, and who reads different ones, among the ranks of the data axes.
_PARTS_OF_DATA: dict[str, Callable[[tuple[int, ...], int, int], tuple[int, ...]]] = {
    "cp": lambda ranks, at, size: ranks[at // size * size :][:size],
    "samples": lambda ranks, at, size: ranks[at % size :: size],
}


def group_of(axis: str, layout: Layout, rank: int) -> tuple[int, ...]:
    """The ranks of the group of `axis` that contains `rank`."""
    if axis == "all" or not axis:
        return tuple(range(layout.num_ranks))
    if axis in _PARTS_OF_DATA:
        data = group_of("data", layout, rank)
        return _PARTS_OF_DATA[axis](data, data.index(rank), layout.cp)
    names = ("dp_replicate", "dp_shard") if axis == "data" else tuple(axis.split("+"))
    axes = expert_axes(layout) if set(names) <= expert_axes(layout).keys() - layout.axes.keys() else layout.axes
    own = coordinates(axes, rank)
    ranks = [0]
    for name, size in axes.items():
        places = range(size) if name in names else (own[name],)
        ranks = [number * size + place for number in ranks for place in places]
    return tuple(sorted(ranks))
