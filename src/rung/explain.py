"""`rung explain`: what will happen under a strategy, read from the objects that would do it.

For each stage one rank is built in a pretend world, by the functions that train, and takes two steps. Its parameters
tell where everything lives; a recorder tells what is sent; its stages tell in which order they computed. Nothing here
knows how a strategy works.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor
from torch.distributed.tensor import DTensor

from rung.config import RunConfig
from rung.parallel.materialize import is_absent
from rung.record import Message, Recorder
from rung.runtime import build_runtime
from rung.runtime.mesh import MeshRuntime
from rung.runtime.pipeline import PipelineRuntime
from rung.status import StatusWriter
from rung.strategy import Layout
from rung.task import Task
from rung.train import make_batches
from rung.world import World, pretend_world


@dataclass(frozen=True)
class ParameterPlace:
    """One parameter on one rank."""

    name: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    dtype: str
    cut: dict[str, int]  # axis -> the dimension it cuts
    is_trained: bool


@dataclass(frozen=True)
class Slot:
    """One action of a pipeline on the time axis; the unit is the mean forward of a stage."""

    rank: int  # of the pipeline's ranks
    kind: str
    stage: int
    chunk: int
    start: float
    stop: float


@dataclass(frozen=True)
class RankView:
    """What one rank holds and does in a step. It stands for all that share its stage."""

    rank: int
    stage: int
    parameters: list[ParameterPlace]
    state_bytes: dict[str, int]
    messages: Counter[Message]
    actions: list[tuple[str, int, int]]  # kind, stage, chunk, in the order of computing


@dataclass(frozen=True)
class Explanation:
    task: str
    layout: Layout
    precision: str
    batch_size: int
    num_micro_batches: int
    micro_batch: int  # samples of one rank
    notes: list[str]
    ranks: list[RankView]
    stage_flops: list[int]
    chart: list[Slot]

    @property
    def bubble(self) -> float:
        """The share of the chart in which ranks are idle."""
        if not self.chart:
            return 0.0
        length = max(slot.stop for slot in self.chart) - min(slot.start for slot in self.chart)
        busy = sum(slot.stop - slot.start for slot in self.chart)
        return 1 - busy / (length * self.layout.pp)


def explain(task: Task, layout: Layout, config: RunConfig) -> Explanation:
    """Look at one rank of each stage. No process is started, and no tensor holds data."""
    config = replace(config, steps=2, epochs=None, device="cpu", compile=False, eval_every="never")
    each = layout.num_ranks // layout.pp
    views: list[RankView] = []
    notes: list[str] = []
    flops: list[int] = []
    sizes = (1, 1)
    for stage in range(layout.pp):
        with pretend_world(layout, rank=stage * each) as world:
            status = StatusWriter()
            batches = make_batches(task, config, world)
            runtime = build_runtime(task, world, config, total_steps=2, status=status)
            sizes = (batches.cut.num_micro_batches, -(-batches.cut.global_micro_batch // batches.cut.num_ranks))
            views.append(_look(runtime, world, status, batches))
            notes += [note for note in runtime.notes if note not in notes]
            cut = runtime.spread.stages
            if cut is not None and not flops:
                pairs = zip(cut.bounds, cut.bounds[1:], strict=False)
                flops = [sum(cut.flops[start:stop]) for start, stop in pairs]
    chart = lay_out([view.actions for view in views], flops) if layout.pp > 1 else []
    return Explanation(
        task.name,
        layout,
        config.precision,
        config.batch_size,
        sizes[0],
        sizes[1],
        notes,
        views,
        flops,
        chart,
    )


def lay_out(actions: Sequence[Sequence[tuple[str, int, int]]], flops: Sequence[int]) -> list[Slot]:
    """When everything happens if each rank computes in its order as soon as what it needs is there.

    Forward costs what the stage's arithmetic says, backward twice that, each part of a divided one once.
    """
    mean = sum(flops) / max(1, len(flops)) or 1.0
    cost = {stage: (count / mean if sum(flops) else 1.0) for stage, count in enumerate(flops)}
    weights = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
    done: dict[tuple[str, int, int], float] = {}
    free = [0.0] * len(actions)
    position = [0] * len(actions)
    last = len(flops) - 1
    slots: list[Slot] = []
    while any(position[rank] < len(order) for rank, order in enumerate(actions)):
        moved = False
        for rank, order in enumerate(actions):
            while position[rank] < len(order):
                kind, stage, chunk = order[position[rank]]
                ready = _ready(kind, stage, chunk, last, done)
                if ready is None:
                    break
                start = max(free[rank], ready)
                stop = start + weights[kind] * cost[stage]
                done[kind, stage, chunk] = free[rank] = stop
                slots.append(Slot(rank, kind, stage, chunk, start, stop))
                position[rank] += 1
                moved = True
        assert moved, "the order of actions is a deadlock"
    return slots


def _ready(kind: str, stage: int, chunk: int, last: int, done: dict[tuple[str, int, int], float]) -> float | None:
    """When what an action needs is there; None if that is not known yet."""
    if kind == "F":
        return 0.0 if stage == 0 else done.get(("F", stage - 1, chunk))
    if kind == "W":
        return done.get(("I", stage, chunk))
    own = done.get(("F", stage, chunk))
    if stage == last or own is None:
        return own
    return done.get(("B", stage + 1, chunk), done.get(("I", stage + 1, chunk)))


def _look(runtime: MeshRuntime, world: World, status: StatusWriter, batches: object) -> RankView:
    stages = runtime.stages if isinstance(runtime, PipelineRuntime) else []
    messages: list[Message] = []
    for window in runtime.place(batches):  # type: ignore[arg-type]
        for stage in stages:
            stage.log = []
        with world.tensors(), Recorder(world, status) as recorder:
            runtime.step(window, want_norm=True)
        messages = recorder.messages  # of the last step: the first also sets things up
    actions = sorted((a for stage in stages for a in stage.log or []), key=lambda action: action.start)
    return RankView(
        world.rank,
        world.stage,
        _places(runtime),
        _with_gradients(runtime),
        Counter(messages),
        [(action.kind, action.stage, action.chunk) for action in actions],
    )


def _places(runtime: MeshRuntime) -> list[ParameterPlace]:
    found = []
    for name, parameter in runtime.model.named_parameters():
        if is_absent(parameter):
            continue
        local, cut = _local(parameter), {}
        if isinstance(parameter, DTensor):
            axes = parameter.device_mesh.mesh_dim_names or ()
            for axis, placement in zip(axes, parameter.placements, strict=True):
                if not placement.is_replicate() and runtime.world.layout.axes[axis] > 1:
                    cut[axis] = placement.dim % max(1, parameter.dim())  # type: ignore[attr-defined]
        found.append(
            ParameterPlace(
                name,
                tuple(parameter.shape),
                tuple(local.shape),
                str(local.dtype).removeprefix("torch."),
                cut,
                parameter.requires_grad,
            )
        )
    return found


def _with_gradients(runtime: MeshRuntime) -> dict[str, int]:
    """What a rank keeps. Gradients come and go within a step; they are as large as the trained parameters."""
    kept = runtime.state_bytes()
    trained = [p for p in runtime.model.parameters() if p.requires_grad and not is_absent(p)]
    kept["gradients"] = sum(_local(p).numel() * _local(p).element_size() for p in trained)
    return kept


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
