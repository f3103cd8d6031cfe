"""What one rank measures: a run with nothing in its way, and a look at a few steps with every instrument.

The two are apart because instruments cost time. Both are real: the world, the runtime and the loop are those of a
training job, and no strategy is known here.
"""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch

from rung.batches import Batches
from rung.checkpoint import SaveRecord, save_weights
from rung.compare.follow import Followed, follow_messages
from rung.compare.spans import Span, spans_of_step
from rung.compare.threads import WatchedThreads
from rung.environment import environment_local_size, environment_rank, environment_size
from rung.launch.rank import speak_into
from rung.loop import run
from rung.metrics import EvalRecord, JsonLines, Observer, StepRecord, peak_memory_bytes
from rung.planner.dryrun import take_two_steps
from rung.planner.memory import ROUNDING, find_peak
from rung.runtime import LocalStep, Runtime, build_runtime
from rung.runtime.data_parallel import DataParallelRuntime
from rung.runtime.mesh import MeshRuntime
from rung.runtime.pipeline import PipelineRuntime
from rung.status import StatusWriter
from rung.strategy import parse
from rung.task import Task
from rung.train import Job, dropout_seed, make_batches, work_for_servers
from rung.windows import Window
from rung.world import World, open_world

Tell = Callable[[Any], None]
_WARM_STEPS, _STAMPED_STEPS = 2, 5  # of a look, after those that are traced
# What the tracer tells apart, as a reader sees it. Parameters are what is held of them, gathered or not.
_KINDS = {
    "parameters": "parameters",
    "gathered": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
}
KINDS = ("parameters", "gradients", "optimizer", "activations", "other")


@dataclass(frozen=True)
class RankFigures:
    """What one rank has to tell of a measured run."""

    rank: int
    records: list[StepRecord]
    phases: list[dict[str, float]]  # of each step: this rank's own seconds
    waited: list[float]  # of each step: seconds that it waited for others
    first_step_at: float  # on the steady clock that all processes of a machine share
    peak_bytes: int  # of the allocator on a GPU, else of the process
    process_bytes: int
    grown_bytes: int  # by which the process was larger at its peak than before it had built anything
    state_bytes: dict[str, int]
    traffic: dict[str, dict[str, int]]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Look:
    """What one rank has to tell of a few steps that were looked at closely."""

    rank: int
    kinds: dict[str, int] | None  # bytes at the peak; None where no tracer sees what the strategy does
    followed: Followed | None  # its messages, likewise
    steps: list[list[Span]]  # each with its spans


def take_run(job: Job, keep_weights: bool, tell: Tell) -> RankFigures:
    """A whole run, and its figures. `tell` gets the number of each step that rank 0 has taken."""
    before = _resident_bytes()
    assert job.run_dir is not None
    folder = Path(job.run_dir)
    speak_into(folder / "logs" / f"rank-{environment_rank()}.log", job.strategy)
    with _built(job) as (task, world, runtime, batches, status):
        if runtime is None:
            work_for_servers(task, world, job.config, status)
            return _figures_of(world, None, [], [], before)
        noted = _Noted(runtime, tell if world.is_main else lambda step: None)
        kept = _Kept()
        observers: list[Observer] = [kept]
        if world.is_main:
            observers.append(JsonLines(folder / "metrics.jsonl"))
        if world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(world.device)

        figures: list[RankFigures] = []

        def finish(step: int) -> None:
            figures.append(_figures_of(world, runtime, noted.phases, noted.waited, before))
            if keep_weights:
                save_weights(runtime, folder / "model.safetensors", step=step)

        facts = {
            "task": task.name,
            "strategy": world.layout.name,
            "ranks": world.size,
            "device": world.device.type,
            "parameters": runtime.facts.num_trainable + runtime.facts.num_frozen,
            "buffers": runtime.facts.buffer_names,
        }
        runtime.begin(0, batches)
        run(
            cast(Runtime, noted),
            batches,
            world=world,
            config=job.config,
            observers=observers,
            facts=facts,
            status=status,
            at_end=finish,
        )
        for observer in observers:
            observer.close()
        runtime.dismiss(stopped=False)
        world.barrier()
    return replace(figures[0], records=kept.records, first_step_at=noted.first_step_at)


def look_closely(job: Job, tell: Tell) -> Look | None:
    """Two steps under a tracer, as the planner pretends them; then some with every phase and wait stamped, and one
    that follows each message from the moment it is handed over to the moment it has arrived.

    What a rank waits for is communication that is not hidden. What a message takes beyond that is hidden behind
    computing. Of messages between neighbours only the waits are counted: they are handed over long before there is
    anything to send.
    """
    assert job.run_dir is not None
    speak_into(Path(job.run_dir) / "logs" / f"rank-{environment_rank()}.log", f"{job.strategy}, looked at closely")
    with _built(job) as (_, world, runtime, batches, status):
        if runtime is None or world.layout.kind == "ps-async":
            return None
        kinds, followed = None, None
        runtime.begin(0, batches)
        if _can_be_traced(world):
            traced = take_two_steps(_watched(runtime), world, status, batches)
            tell("traced")
            rounding = ROUNDING if world.device.type == "cuda" else 1
            kinds = _as_read(find_peak(traced.trace, rounding=rounding).by_kind)
        windows = runtime.place(batches)
        for _ in range(_WARM_STEPS):
            runtime.step(next(windows))
        steps = [_stamped(runtime, next(windows)) for _ in range(_STAMPED_STEPS)]
        if world.layout.kind == "mesh":
            followed = follow_messages(runtime, world, status, (next(windows), next(windows)))
        runtime.dismiss(stopped=False)
        world.barrier()
    return Look(world.rank, kinds, followed, steps)


@contextlib.contextmanager
def _built(job: Job) -> Iterator[tuple[Task, World, MeshRuntime | None, Batches, StatusWriter]]:
    """A rank of the job, ready for its first step. No runtime where a trainer works for servers at its own pace."""
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
        if layout.kind == "ps-async" and not world.is_server:
            yield task, world, None, batches, status
            return
        dataset = None if batches.is_stream else batches.dataset
        runtime = build_runtime(task, world, config, total_steps=batches.total_steps, status=status, dataset=dataset)
        torch.manual_seed(dropout_seed(config.seed, world))
        yield task, world, runtime, batches, status


# -- a run -----------------------------------------------------------------------------------------------------------


class _Noted:
    """A runtime whose steps are noted. All else is the runtime's own."""

    def __init__(self, runtime: MeshRuntime, tell: Tell) -> None:
        self._runtime, self._tell = runtime, tell
        self.phases: list[dict[str, float]] = []
        self.waited: list[float] = []
        self.first_step_at = 0.0

    def step(self, window: Window, *, want_norm: bool = False) -> LocalStep:
        result = self._runtime.step(window, want_norm=want_norm)
        if not self.phases:
            if result.loss_share.is_cuda:
                torch.cuda.synchronize()
            self.first_step_at = time.perf_counter()
        self.phases.append(self._runtime.phase_seconds())
        self.waited.append(self._runtime.clock.waited_seconds)
        self._tell(window.step)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)


class _Kept:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def on_start(self, facts: dict[str, Any], step: int) -> None: ...

    def on_steps(self, records: list[StepRecord]) -> None:
        self.records += records

    def on_evaluation(self, record: EvalRecord) -> None: ...

    def on_checkpoint(self, record: SaveRecord) -> None: ...

    def on_ranks(self, live: Any) -> None: ...

    def on_end(self, facts: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


def _figures_of(
    world: World, runtime: MeshRuntime | None, phases: list[dict[str, float]], waited: list[float], before: int
) -> RankFigures:
    on_gpu = world.device.type == "cuda"
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return RankFigures(
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
        notes=list(runtime.notes) if runtime is not None else [],
    )


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


# -- a look ----------------------------------------------------------------------------------------------------------


def _can_be_traced(world: World) -> bool:
    """On a GPU, the threads of replicas and of calls between processes are not seen; on the CPU all but the backward
    of rpc-pp is, in which hardly more is alive than at the end of its forwards."""
    return world.layout.kind == "mesh" or world.device.type == "cpu"


def _watched(runtime: MeshRuntime) -> MeshRuntime:
    return cast(MeshRuntime, WatchedThreads(runtime)) if isinstance(runtime, DataParallelRuntime) else runtime


def _as_read(kinds: dict[str, int]) -> dict[str, int]:
    found = dict.fromkeys(KINDS, 0)
    for kind, num_bytes in kinds.items():
        found[_KINDS.get(kind, "other")] += num_bytes
    return found


def _stamped(runtime: MeshRuntime, window: Window) -> list[Span]:
    """One step with every phase and wait in it, and for a pipeline every micro-batch on every stage."""
    stages = runtime.stages if isinstance(runtime, PipelineRuntime) else []
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
