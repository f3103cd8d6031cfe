"""What one rank measures: a timed run without instruments, then a few profiled steps with all of them.

They are separate because instruments cost time. Both use the world, the runtime and the loop of a training job; nothing
here depends on the strategy.
"""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from rung.checkpoint import SaveRecord, save_weights
from rung.compare.follow import RankMessages, follow_messages
from rung.compare.report.data import KINDS
from rung.compare.spans import Span, spans_of_step
from rung.compare.threads import TracedThreads
from rung.data.batch_shard import LocalBatch
from rung.data.batches import Batches
from rung.distributed.status_board import StatusWriter
from rung.distributed.world import World, open_world
from rung.launch.entrypoint import redirect_output
from rung.planner.dryrun import take_two_steps
from rung.planner.memory import ROUNDING, find_peak
from rung.runtime import LocalStep, Runtime, build_runtime
from rung.spec.abilities import can, has_common_steps, works_at_own_pace
from rung.spec.strategy import parse
from rung.spec.task import Task
from rung.system.launcher_env import environment_local_size, environment_rank, environment_size
from rung.train.job import RankJob
from rung.train.loop import Outputs, Persistence, run
from rung.train.metrics import JsonLines, Observer
from rung.train.records import EvalRecord, StepRecord
from rung.train.step_buffer import peak_memory_bytes
from rung.train.worker import dropout_seed, make_batches, run_facts, work_for_servers

Send = Callable[[Any], None]  # sends a value to the process that started the ranks
_WARM_STEPS, _STAMPED_STEPS = 2, 5  # of a profile, after the traced steps
# The tracer's kinds as the report shows them; the others are "other". Gathered parameters count as parameters.
_KINDS = {
    "parameters": "parameters",
    "gathered": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
}


@dataclass(frozen=True)
class RankMeasurement:
    """One rank's figures of a timed run."""

    rank: int
    records: list[StepRecord]
    phases: list[dict[str, float]]  # of each step: seconds of this rank's own work
    waited: list[float]  # of each step: seconds of waiting for other ranks
    first_step_at: float  # perf_counter, which all processes of a machine share
    peak_bytes: int  # of the allocator on a GPU, else of the process
    process_bytes: int
    grown_bytes: int  # growth of the process from before the model was built to its peak
    state_bytes: dict[str, int]
    traffic: dict[str, dict[str, int]]


@dataclass(frozen=True)
class RankProfile:
    """One rank's figures of a few profiled steps."""

    rank: int
    kinds: dict[str, int] | None  # bytes at the peak; None if the tracer cannot see the strategy's operations
    followed: RankMessages | None  # None likewise
    steps: list[list[Span]]


def timed_run(job: RankJob, keep_weights: bool, send: Send) -> RankMeasurement:
    """Run the job and measure it. Rank 0 sends the number of each finished step."""
    before = _resident_bytes()
    assert job.run_dir is not None
    folder = Path(job.run_dir)
    redirect_output(folder / "logs" / f"rank-{environment_rank()}.log", job.strategy)
    with _open_runtime(job) as (task, world, runtime, batches, status):
        if runtime is None:
            work_for_servers(task, world, job.config, status)
            return _measurement(world, None, [], [], before)
        recording = _RecordingRuntime(runtime, send if world.is_main else lambda step: None)
        collector = _StepCollector()
        observers: list[Observer] = [collector]
        if world.is_main:
            observers.append(JsonLines(folder / "metrics.jsonl"))
        if world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(world.device)

        figures: list[RankMeasurement] = []

        def finish(step: int) -> None:
            # Before the weights are saved: gathering them takes memory of its own.
            figures.append(_measurement(world, runtime, recording.phases, recording.waited, before))
            if keep_weights:
                save_weights(runtime, folder / "model.safetensors", step=step)

        runtime.begin(0, batches)
        run(
            cast(Runtime, recording),
            batches,
            world=world,
            config=job.config,
            outputs=Outputs(observers, run_facts(task, world, runtime.facts), status),
            persistence=Persistence(at_end=finish),
        )
        for observer in observers:
            observer.close()
        runtime.close(stopped=False)
        world.barrier()
    return replace(figures[0], records=collector.records, first_step_at=recording.first_step_at)


def profile_steps(job: RankJob, send: Send) -> RankProfile | None:
    """Trace two steps as the planner's dry run does, then time the phases and waits of a few, then follow the messages
    of one from call to completion.

    Time that a rank waits for a message is exposed communication; the rest of the message's time is hidden behind
    computation. For messages between pipeline neighbours only the waits count: a receive is posted long before there
    is anything to receive.
    """
    assert job.run_dir is not None
    redirect_output(Path(job.run_dir) / "logs" / f"rank-{environment_rank()}.log", f"{job.strategy}, profiled")
    with _open_runtime(job) as (_, world, runtime, batches, status):
        if runtime is None or not has_common_steps(world.layout):
            return None
        kinds, followed = None, None
        runtime.begin(0, batches)
        if _can_be_traced(world):
            traced = take_two_steps(_with_traced_threads(runtime), world, status, batches)
            send("traced")
            rounding = ROUNDING if world.device.type == "cuda" else 1
            kinds = _by_report_kind(find_peak(traced.trace, rounding=rounding).by_kind)
        windows = runtime.place(batches)
        for _ in range(_WARM_STEPS):
            runtime.step(next(windows))
        steps = [_timed_spans(runtime, next(windows)) for _ in range(_STAMPED_STEPS)]
        if can(world.layout, "trace"):
            followed = follow_messages(runtime, world, status, (next(windows), next(windows)))
        runtime.close(stopped=False)
        world.barrier()
    return RankProfile(world.rank, kinds, followed, steps)


@contextlib.contextmanager
def _open_runtime(job: RankJob) -> Iterator[tuple[Task, World, Runtime | None, Batches, StatusWriter]]:
    """Build a rank of the job, ready for its first step. The runtime is None for a trainer that works for parameter
    servers at its own pace."""
    config, status, task = job.config, StatusWriter(), job.load()
    layout = parse(job.strategy, environment_size(), environment_local_size(), config.schedule, config.servers)
    with open_world(
        layout,
        device=config.device,
        backend=config.backend,
        timeout_seconds=2 * config.timeout,
        rpc_host=config.rpc_host,
    ) as world:
        batches = make_batches(task, config, world)
        if works_at_own_pace(layout, world.rank):
            yield task, world, None, batches, status
            return
        dataset = None if batches.is_stream else batches.dataset
        runtime = build_runtime(task, world, config, total_steps=batches.total_steps, status=status, dataset=dataset)
        torch.manual_seed(dropout_seed(config.seed, world))
        yield task, world, runtime, batches, status


# -- timed run -------------------------------------------------------------------------------------------------------


class _RecordingRuntime:
    """Wraps a runtime and records the phases and waits of each step."""

    def __init__(self, runtime: Runtime, send: Send) -> None:
        self._runtime, self._send = runtime, send
        runtime.clock.every_step = True
        self.phases: list[dict[str, float]] = []
        self.waited: list[float] = []
        self.first_step_at = 0.0

    def step(self, window: LocalBatch, *, want_norm: bool = False) -> LocalStep:
        result = self._runtime.step(window, want_norm=want_norm)
        if not self.phases:
            if result.loss_share.is_cuda:
                torch.cuda.synchronize()  # the first step ends when the GPU has finished it
            self.first_step_at = time.perf_counter()
        self.phases.append(self._runtime.phase_seconds())
        self.waited.append(self._runtime.clock.waited_seconds)
        self._send(window.step)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)


class _StepCollector:
    """An observer that collects the step records."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def on_start(self, facts: dict[str, Any], step: int) -> None: ...

    def on_steps(self, records: list[StepRecord]) -> None:
        self.records += records

    def on_evaluation(self, record: EvalRecord) -> None: ...

    def on_checkpoint(self, record: SaveRecord) -> None: ...

    def on_logged(self, figures: Any, step: int) -> None: ...

    def on_ranks(self, live: Any) -> None: ...

    def on_end(self, facts: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


def _measurement(
    world: World, runtime: Runtime | None, phases: list[dict[str, float]], waited: list[float], before: int
) -> RankMeasurement:
    on_gpu = world.device.type == "cuda"
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return RankMeasurement(
        rank=world.rank,
        records=[],
        phases=phases,
        waited=waited,
        first_step_at=0.0,
        peak_bytes=peak_memory_bytes(world),
        process_bytes=torch.cuda.max_memory_reserved(world.device) if on_gpu else resident,
        grown_bytes=max(0, resident - before),
        state_bytes=runtime.state_bytes() if runtime is not None else {},
        traffic={name: one.as_json() for name, one in runtime.traffic().items()} if runtime is not None else {},
    )


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


# -- profile ---------------------------------------------------------------------------------------------------------


def _can_be_traced(world: World) -> bool:
    """Whether the tracer sees the strategy's operations.

    On a GPU it misses the threads of dp's replicas and of RPC. On the CPU it misses only the backward of rpc-pp, in
    which hardly more memory is alive than after its forwards.
    """
    return can(world.layout, "trace") or world.device.type == "cpu"


def _with_traced_threads(runtime: Runtime) -> Runtime:
    threads = runtime.replica_threads
    return cast(Runtime, TracedThreads(runtime, threads)) if threads is not None else runtime


def _by_report_kind(kinds: dict[str, int]) -> dict[str, int]:
    found = dict.fromkeys(KINDS, 0)
    for kind, num_bytes in kinds.items():
        found[_KINDS.get(kind, "other")] += num_bytes
    return found


def _timed_spans(runtime: Runtime, window: LocalBatch) -> list[Span]:
    """Take one step and return its phases and waits; for a pipeline also every micro-batch on every stage."""
    stages = runtime.stages
    for stage in stages:
        stage.log = []
    log: list[tuple[str, float, float]] = []
    runtime.clock.log = log
    try:
        runtime.step(window)
    finally:
        runtime.clock.log = None
    actions = [(a.kind, a.chunk, a.start, a.stop) for stage in stages for a in stage.log or []]
    for stage in stages:
        stage.log = None
    return spans_of_step(log, actions, window.wait_seconds)
