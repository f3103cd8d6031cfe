"""`rung explain`: what will happen under a strategy, read from the objects that would do it.

For each stage one rank is built in a pretend world, by the functions that train, and takes two steps, of which the
second is read. Its parameters tell where everything lives; a recorder tells what is sent; its stages tell in which
order they computed. Nothing here knows how a strategy works.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.distributed.tensor import DTensor
from torch.utils.data import IterableDataset

from rung.batches import Batches
from rung.config import RunConfig
from rung.errors import ModelError
from rung.parallel.materialize import is_absent
from rung.record import Message, Recorder
from rung.runtime import build_runtime
from rung.runtime.mesh import MeshRuntime
from rung.runtime.pipeline import PipelineRuntime
from rung.status import StatusWriter
from rung.strategy import Layout
from rung.task import Task
from rung.train import make_batches
from rung.windows import Window
from rung.world import World, pretend_world


@dataclass(frozen=True)
class ParameterPlace:
    """One parameter on one rank."""

    name: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    dtype: str
    cut: dict[str, int]  # axis -> the dimension it cuts
    stages: tuple[int, ...]  # that use it; several if it is tied across a cut
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
    stage: int  # its place on the pp axis
    stages: tuple[int, ...]  # of the model that it computes: two if they are interleaved
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


def explain(task: Task, layout: Layout, config: RunConfig, *, tell: Callable[[str], None] | None = None) -> Explanation:
    """Look at one rank of each stage. No process is started, and no tensor holds data."""
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
        if tell is not None:
            tell(f"stage {stage + 1} of {layout.pp}" if layout.pp > 1 else "two pretended steps")
        with pretend_world(layout, rank=stage * each) as world:
            status = StatusWriter()
            batches = make_batches(task, config, world)
            try:
                runtime = build_runtime(task, world, config, total_steps=2, status=status)
                views.append(look(runtime, world, status, batches))
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise ModelError(
                    f"{task.name}: the model or the loss looks at the values of tensors ({error}), and in a pretended "
                    "step there are none. `rung train` can run it; it cannot be explained."
                ) from error
            sizes = _sizes(batches, layout)
            notes += [note for note in runtime.notes if note not in notes]
            cut = runtime.spread.stages
            if cut is not None and not flops:
                pairs = zip(cut.bounds, cut.bounds[1:], strict=False)
                flops = [sum(cut.flops[start:stop]) for start, stop in pairs]
    notes += _limits(layout, config, batches)
    backward = 3.0 if config.activation_checkpointing == "full" else 2.0
    chart = lay_out([view.actions for view in views], flops, backward) if layout.pp > 1 else []
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


def _sizes(batches: Batches, layout: Layout) -> tuple[int, int]:
    """Micro-batches of a step, and samples of a rank in one of them."""
    samples = batches.cut.batch_size
    if batches.num_samples is not None:
        samples = min(samples, batches.num_samples)
    micro = batches.cut.micro_sizes(samples)
    return len(micro), -(-micro[0] // layout.num_data_ranks)


def _limits(layout: Layout, config: RunConfig, batches: Batches) -> list[str]:
    """Where a real step differs from the pretended one, and what a real one would waste."""
    found = []
    if config.precision in ("bf16", "fp16") and config.gather == "auto" and layout.shards_parameters:
        found.append(
            f"bytes are those of a run on the CPU; on GPUs parameters are gathered in {config.precision}: half of it"
        )
    if layout.is_composed and batches.cut.global_micro_batch % layout.num_data_ranks:
        found.append(
            "micro-batches do not divide evenly: what is sent is that of a rank with one sample less than others"
        )
    without = layout.num_data_ranks - batches.cut.global_micro_batch
    if without > 0:
        found.append(
            f"{without} of {layout.num_data_ranks} data ranks get no sample of a micro-batch and compute for nothing; "
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
    """When everything happens if each rank computes in its order as soon as what it needs is there.

    Forward costs what the stage's arithmetic says, backward so many times that, each part of a divided one once.
    Messages cost nothing.
    """
    mean = sum(flops) / max(1, len(flops)) or 1.0
    cost = {stage: (count / mean if sum(flops) else 1.0) for stage, count in enumerate(flops)}
    weights = {"F": 1.0, "B": backward, "I": 1.0, "W": 1.0}
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


def look(runtime: MeshRuntime, world: World, status: StatusWriter, batches: Batches, *, warm_up: int = 1) -> RankView:
    """Take a step, which also sets things up, then another with the same batch, and read that."""
    stages = runtime.stages if isinstance(runtime, PipelineRuntime) else []
    window: Window = next(iter(runtime.place(batches)))
    # One micro-batch is enough to set up, but a pipeline greets its neighbours anew for each number of them.
    first = window if stages else replace(window, micro_batches=window.micro_batches[:1])
    for _ in range(warm_up):
        runtime.step(first, want_norm=True)
    for stage in stages:
        stage.log = []
    with world.tensors(), Recorder(world, status) as recorder:
        runtime.step(window, want_norm=True)
    actions = sorted((a for stage in stages for a in stage.log or []), key=lambda action: action.start)
    return RankView(
        world.rank,
        world.stage,
        tuple(stage.stage_index for stage in stages) or (0,),
        _places(runtime),
        _with_gradients(runtime),
        Counter(recorder.messages),
        [(action.kind, action.stage, action.chunk) for action in actions],
    )


def _places(runtime: MeshRuntime) -> list[ParameterPlace]:
    found = []
    holders = runtime.spread.stages.holders if runtime.spread.stages is not None else {}
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
                holders.get(name, (0,)),
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
