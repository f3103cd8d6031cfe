"""`rung explain`: placement, messages and schedule of a strategy, read from the training code in a fake world.

For each stage, one rank is built and takes two steps; the second is recorded. The placement comes from its parameters,
the messages from a recorder, the schedule from its stages' logs. This module has no code for single strategies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import IterableDataset

from rung.data.batch_shard import LocalBatch
from rung.data.batches import Batches
from rung.distributed import fake_world
from rung.distributed.status_board import StatusWriter
from rung.distributed.world import World, open_fake_world
from rung.errors import ModelError
from rung.parallel.materialize import is_absent
from rung.parallel.sharding import HALF_TYPES
from rung.planner.recorder import Message, Recorder
from rung.runtime import Runtime, build_runtime
from rung.spec.abilities import shards_parameters
from rung.spec.config import RunConfig
from rung.spec.strategy import Layout
from rung.spec.task import Task
from rung.train.worker import make_batches


@dataclass(frozen=True)
class ParameterPlace:
    """The placement of one parameter on one rank."""

    name: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    dtype: str
    cut: dict[str, int]  # mesh axis -> the dimension that it shards; -1 if its ranks hold whole ones of several alike
    stages: tuple[int, ...]  # stages that use it; several if it is tied across stages
    is_trained: bool


@dataclass(frozen=True)
class Slot:
    """One action of a pipeline on the time axis; the unit is the mean forward of a stage."""

    rank: int  # on the pp axis
    kind: str
    stage: int
    chunk: int
    start: float
    stop: float


@dataclass(frozen=True)
class RankView:
    """The placement, messages and actions of one rank, which represents all ranks of its stage."""

    rank: int
    stage: int  # its coordinate on the pp axis
    stages: tuple[int, ...]  # stages of the model that it computes: two if they are interleaved
    parameters: list[ParameterPlace]
    state_bytes: dict[str, int]
    messages: Counter[Message]
    actions: list[tuple[str, int, int]]  # (kind, stage, chunk) in execution order


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
        """The idle share of the chart."""
        return idle_share(self.chart, self.layout.pp)

    def as_json(self) -> dict[str, Any]:
        """Plain values, for a file."""
        document = asdict(replace(self, ranks=[], layout=Layout("")))
        document["layout"] = {**self.layout.axes, "name": self.layout.name, "schedule": self.layout.schedule}
        document["bubble"] = self.bubble
        for view in self.ranks:
            messages = [{**asdict(message), "times": times} for message, times in view.messages.items()]
            document["ranks"].append({**asdict(replace(view, messages=Counter())), "messages": messages})
        return document


def explain(
    task: Task, layout: Layout, config: RunConfig, *, progress: Callable[[str], None] | None = None
) -> Explanation:
    """Explain a layout from one rank of each stage, without processes and on fake tensors."""
    config = replace(config, steps=2, epochs=None, device="cpu", compile=False, eval_every="never", workers=0)
    data = task.train_data()
    if hasattr(data, "__getitem__") and not isinstance(data, IterableDataset):  # read once for all stages
        task = replace(task, train_data=lambda: data)
    each = layout.num_ranks // layout.pp
    views: list[RankView] = []
    notes: list[str] = []
    flops: list[int] = []
    sizes = (1, 1)
    for stage in range(layout.pp):
        if progress is not None:
            progress(f"stage {stage + 1} of {layout.pp}" if layout.num_stages > 1 else "two dry-run steps")
        with open_fake_world(layout, rank=stage * each) as world:
            status = StatusWriter()
            batches = make_batches(task, config, world)
            try:
                runtime = build_runtime(task, world, config, total_steps=2, status=status)
                with fake_world.known_indices(world.tensors.fake_mode):
                    views.append(record_step(runtime, world, status, batches))
            except fake_world.NEEDS_VALUES as error:
                raise ModelError(
                    f"{task.name}: the model or the loss reads tensor values ({error}), which fake tensors do not "
                    "have. `rung train` can run it; it cannot be explained."
                ) from error
            sizes = _sizes(batches, layout)
            notes += [note for note in runtime.notes if note not in notes]
            cut = runtime.parallel.stages
            if cut is not None and not flops:
                pairs = zip(cut.bounds, cut.bounds[1:], strict=False)
                flops = [sum(cut.flops[start:stop]) for start, stop in pairs]
    notes += _limits(layout, config, batches)
    backward = 3.0 if config.activation_checkpointing == "full" else 2.0  # recomputation adds a forward
    chart = lay_out([view.actions for view in views], flops, backward) if layout.num_stages > 1 else []
    return Explanation(task.name, layout, config.precision, config.batch_size, *sizes, notes, views, flops, chart)


def _sizes(batches: Batches, layout: Layout) -> tuple[int, int]:
    """The number of micro-batches in a step, and the samples of a rank in one of them."""
    samples = batches.cut.batch_size
    if batches.num_samples is not None:
        samples = min(samples, batches.num_samples)
    micro = batches.cut.micro_sizes(samples)
    return len(micro), -(-micro[0] // layout.num_data_ranks)


def _limits(layout: Layout, config: RunConfig, batches: Batches) -> list[str]:
    """Notes on how a real step differs from the dry run, and on ranks that would do useless work."""
    found = []
    if config.precision in HALF_TYPES and config.gather == "auto" and shards_parameters(layout):
        found.append(
            "bytes are those of a run on the CPU; on GPUs parameters are gathered in half precision: half of it"
        )
    if layout.is_composed and batches.cut.global_micro_batch % layout.num_data_ranks:
        found.append(
            "micro-batches do not divide evenly: the messages are those of a rank with one sample less than others"
        )
    without = layout.num_data_ranks - batches.cut.global_micro_batch
    if without > 0:
        found.append(
            f"{without} of {layout.num_data_ranks} data ranks get no sample of a micro-batch and do useless work; "
            "a larger --batch-size or --micro-batch would use them"
        )
    return found


def idle_share(chart: Sequence[Slot], num_ranks: int) -> float:
    if not chart:
        return 0.0
    length = max(slot.stop for slot in chart) - min(slot.start for slot in chart)
    busy = sum(slot.stop - slot.start for slot in chart)
    return 1 - busy / (length * num_ranks)


def lay_out(
    actions: Sequence[Sequence[tuple[str, int, int]]], flops: Sequence[int], backward: float = 2.0
) -> list[Slot]:
    """Place actions on the time axis: each rank keeps its order and starts an action as soon as its inputs are ready.

    A forward costs the stage's FLOPs, a backward `backward` times that, each half of a split backward the same as a
    forward. Messages cost nothing.
    """
    mean = sum(flops) / max(1, len(flops)) or 1.0
    cost = {stage: (count / mean if sum(flops) else 1.0) for stage, count in enumerate(flops)}
    factors = {"F": 1.0, "B": backward, "I": 1.0, "W": 1.0}
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
                stop = start + factors[kind] * cost[stage]
                done[kind, stage, chunk] = free[rank] = stop
                slots.append(Slot(rank, kind, stage, chunk, start, stop))
                position[rank] += 1
                moved = True
        assert moved, "the order of actions is a deadlock"
    return slots


def _ready(kind: str, stage: int, chunk: int, last: int, done: dict[tuple[str, int, int], float]) -> float | None:
    """The time at which the inputs of an action are ready; None if that is not known yet."""
    if kind == "F":
        return 0.0 if stage == 0 else done.get(("F", stage - 1, chunk))
    if kind == "W":
        return done.get(("I", stage, chunk))
    own = done.get(("F", stage, chunk))
    if stage == last or own is None:
        return own
    return done.get(("B", stage + 1, chunk), done.get(("I", stage + 1, chunk)))


def record_step(
    runtime: Runtime, world: World, status: StatusWriter, batches: Batches, *, warm_up: int = 1
) -> RankView:
    """Take a warm-up step, then another with the same batch, and record the second."""
    stages = runtime.stages
    window: LocalBatch = next(iter(runtime.place(batches)))
    # One micro-batch is enough to warm up, except for a pipeline; see `take_two_steps`.
    first = window if stages else replace(window, micro_batches=window.micro_batches[:1])
    for _ in range(warm_up):
        runtime.step(first, want_norm=True)
    for stage in stages:
        stage.log = []
    recorder = Recorder(world, status)
    recorder.follow(runtime)
    with world.tensors.mode(), recorder:
        runtime.step(window, want_norm=True)
    actions = sorted((a for stage in stages for a in stage.log or []), key=lambda action: action.start)
    return RankView(
        world.rank,
        world.role.stage,
        tuple(stage.stage_index for stage in stages) or (0,),
        _places(runtime),
        _with_gradients(runtime),
        Counter(recorder.messages),
        [(action.kind, action.stage, action.chunk) for action in actions],
    )


def _places(runtime: Runtime) -> list[ParameterPlace]:
    found = []
    holders = runtime.parallel.stages.holders if runtime.parallel.stages is not None else {}
    own = dict(runtime.model.named_parameters())
    for name, parameter in own.items():
        experts = runtime.parallel.experts
        shared = experts.share_of(name) if experts is not None else None
        # An expert on another rank is placed there as this rank's own are here.
        parameter = own.get(shared.alike(name), parameter) if shared is not None else parameter
        if is_absent(parameter):
            continue
        local = _local(parameter)
        cut = {} if shared is None else {"ep": -1}
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            for axis, size, placement in zip(mesh.mesh_dim_names or (), mesh.shape, parameter.placements, strict=True):
                if not placement.is_replicate() and size > 1:
                    cut[axis] = placement.dim % max(1, parameter.dim())  # type: ignore[attr-defined]
        shape, local_shape, dtype = tuple(parameter.shape), tuple(local.shape), str(local.dtype).removeprefix("torch.")
        stages = holders.get(name, (0,))
        found.append(ParameterPlace(name, shape, local_shape, dtype, cut, stages, parameter.requires_grad))
    return found


def _with_gradients(runtime: Runtime) -> dict[str, int]:
    """The state bytes of a rank, plus gradients, which have the size of the trained parameters."""
    kept = runtime.state_bytes()
    trained = [p for p in runtime.model.parameters() if p.requires_grad and not is_absent(p)]
    kept["gradients"] = sum(_local(p).numel() * _local(p).element_size() for p in trained)
    return kept


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
