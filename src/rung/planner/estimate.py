"""Estimate memory and step time of a layout from dry runs of one rank per stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rung.hardware.cluster import Cluster
from rung.planner.block_cache import BlockTraceCache
from rung.planner.cost import StepTime, step_time
from rung.planner.dryrun import DryRun, dry_run
from rung.planner.memory import ROUNDING, find_peak, reserve
from rung.planner.truncated_model import shortened
from rung.spec.config import RunConfig
from rung.spec.strategy import Layout
from rung.spec.task import Task

_FEW, _MORE = 2, 3  # blocks per stage in the two dry runs from which deeper models are extrapolated
_WHOLE = 4  # up to this many blocks per stage are traced in full
_TRACED = 3  # micro-batches: the first, one that represents the middle, and the last, which may send more


@dataclass(frozen=True)
class Memory:
    """Peak bytes of one rank: in live tensors, reserved by the allocator, and used by the whole process."""

    allocated: int
    reserved: int
    process: int
    by_kind: dict[str, int]
    state: dict[str, int]
    rank: int

    @property
    def of_samples(self) -> int:
        """The bytes that grow with the micro-batch."""
        return self.by_kind.get("activations", 0) + self.by_kind.get("temporary", 0)


@dataclass(frozen=True)
class Estimate:
    """The estimated cost of a step of a layout."""

    layout: Layout
    checkpointing: str
    micro_batch: int
    num_micro_batches: int
    memory: Memory
    time: StepTime
    notes: tuple[str, ...] = ()
    stages: tuple[Memory, ...] = ()  # memory of each traced stage

    def fits(self, cluster: Cluster) -> bool:
        return self.memory.process <= cluster.device.memory


class Estimator:
    """Estimates layouts of one task by dry runs, which share truncated models, tensor plans and block traces."""

    def __init__(self, task: Task, config: RunConfig, cluster: Cluster, num_blocks: int) -> None:
        self.task, self.config, self.cluster, self.num_blocks = task, config, cluster, num_blocks
        self._proofs: dict[Any, Any] = {}
        self._shortened: dict[int, Task] = {}
        self._per_sample: dict[tuple[Any, str], float] = {}
        self._computing: dict[int, float] = {}  # tp size -> computing seconds, summed over devices
        # Zero bubble splits a block's backward, which a recorded block cannot do.
        self._repeats = BlockTraceCache() if config.schedule != "zb" else None
        data = task.train_data()
        if hasattr(data, "__getitem__"):
            self.task = replace(task, train_data=lambda: data)

    def estimate(self, layout: Layout, checkpointing: str, micro_batch: int) -> Estimate:
        """Estimate the layout with this micro-batch, from fewer blocks and micro-batches where these are identical."""
        share = max(1, self.config.batch_size // layout.num_data_ranks)
        count = -(-share // micro_batch)
        # Once all stages are busy, each further micro-batch takes the same time if the number in flight is constant.
        traced = _TRACED if layout.num_stages == 1 else layout.pp + 2 if layout.schedule == "1f1b" else count
        traced = min(count, traced)
        whole = self._whole(layout, checkpointing, micro_batch, traced, count - traced)
        self._per_sample[_similarity_key(layout), checkpointing] = whole.memory.of_samples / micro_batch
        if layout.num_stages == 1 and checkpointing == self.config.activation_checkpointing:
            spent = whole.time.computing * layout.num_ranks
            self._computing[layout.tp] = min(spent, self._computing.get(layout.tp, spent))
        return replace(whole, num_micro_batches=count)

    def least_seconds(self, layout: Layout) -> float:
        """A lower bound of the step time: the computing time of earlier estimates with the same tp and no stages,
        divided evenly, plus the time in which a pipeline fills and drains. 0 without such an estimate.

        With P stages of equal cost, the best case, and M micro-batches, each stage is idle for P - 1 times the time of
        a micro-batch, unless its stages are interleaved or its backward is split.
        """
        computing = self._computing.get(layout.tp, 0.0) / layout.num_ranks
        if layout.num_stages == 1 or layout.schedule not in ("gpipe", "1f1b"):
            return computing
        count = max(1, self.config.batch_size // layout.num_data_ranks // (self.config.micro_batch or 1))
        return computing * (count + layout.pp - 1) / count

    def may_fit(self, layout: Layout, checkpointing: str, micro_batch: int, state: int) -> bool:
        """Whether a micro-batch may fit beside the state, judged by an earlier estimate of a similar layout."""
        each = self._per_sample.get((_similarity_key(layout), checkpointing), 0.0)
        # With 10 % slack, because layouts of one key differ a little.
        return state + 0.9 * each * micro_batch <= self.cluster.device.memory

    def _whole(self, layout: Layout, checkpointing: str, micro_batch: int, count: int, repeated: int) -> Estimate:
        """The estimate with all blocks, traced or extrapolated from fewer."""
        stages = layout.num_stages
        each = -(-self.num_blocks // stages) if self.num_blocks else 0
        if each <= _WHOLE:
            return self._trace_layout(layout, checkpointing, micro_batch, 0, count, repeated)
        few, more = (
            self._trace_layout(layout, checkpointing, micro_batch, blocks * stages, count, repeated)
            for blocks in (_FEW, _MORE)
        )
        return _extend(few, more, (each - _FEW) / (_MORE - _FEW))

    def _trace_layout(
        self, layout: Layout, checkpointing: str, micro_batch: int, blocks: int, count: int, repeated: int
    ) -> Estimate:
        if blocks not in self._shortened:
            self._shortened[blocks] = shortened(self.task, blocks) if blocks else self.task
        device = self.cluster.device
        config = replace(
            self.config,
            activation_checkpointing=checkpointing,
            micro_batch=micro_batch,
            batch_size=micro_batch * count * layout.num_data_ranks,
        )
        each = layout.num_ranks // layout.pp
        runs = [
            dry_run(
                self._shortened[blocks],
                layout,
                config,
                rank=stage * each,  # the first rank of the stage
                device=device.kind,
                proofs=self._proofs,
                repeats=self._repeats,
            )
            for stage in range(layout.pp)
        ]
        memories = tuple(self._memory(run) for run in runs)
        notes = tuple(dict.fromkeys(note for run in runs for note in run.notes))
        time = step_time(runs, self.cluster, repeated=repeated)
        return Estimate(layout, checkpointing, micro_batch, count, _fullest(memories), time, notes, memories)

    def _memory(self, run: DryRun) -> Memory:
        device = self.cluster.device_for(run.layout.num_ranks)
        on_gpu = device.kind == "cuda"
        peak = find_peak(run.trace, rounding=ROUNDING if on_gpu else 1)
        spaces = dict(device.workspaces) if on_gpu else {}
        allocated = peak.num_bytes + sum(spaces.values())
        reserved = reserve(run.trace, spaces) if on_gpu else allocated
        groups = sum(size > 1 for size in run.layout.axes.values()) if run.layout.is_distributed else 0
        kinds = dict(peak.by_kind)
        if spaces:
            kinds["workspaces"] = sum(spaces.values())
        process = reserved + device.context + groups * device.communicator
        return Memory(allocated, reserved, process, kinds, run.state_bytes, run.rank)


def _similarity_key(layout: Layout) -> tuple[Any, ...]:
    """A key of layouts in which a sample needs about the same memory."""
    return layout.pp, layout.tp, layout.schedule


def _fullest(memories: Sequence[Memory]) -> Memory:
    return max(memories, key=lambda memory: memory.process)


def _extend(few: Estimate, more: Estimate, steps: float) -> Estimate:
    """Extrapolate linearly: `few` plus `steps` times the difference between `more` and `few`."""
    stages = tuple(_extend_memory(a, b, steps) for a, b in zip(few.stages, more.stages, strict=True))
    return replace(few, memory=_fullest(stages), stages=stages, time=_extend_time(few.time, more.time, steps))


def _extend_memory(few: Memory, more: Memory, steps: float) -> Memory:
    allocated = round(_line(few.allocated, more.allocated, steps))
    reserved = max(allocated, round(_line(few.reserved, more.reserved, steps)))
    kinds = {**few.by_kind, **more.by_kind}
    return Memory(
        allocated,
        reserved,
        reserved + few.process - few.reserved,
        {k: max(0, round(_line(few.by_kind.get(k, 0), more.by_kind.get(k, 0), steps))) for k in kinds},
        {k: round(_line(few.state[k], more.state[k], steps)) for k in few.state},
        few.rank,
    )


def _extend_time(few: StepTime, more: StepTime, steps: float) -> StepTime:
    values, others = vars(few), vars(more)
    return StepTime(**{name: max(0.0, _line(values[name], others[name], steps)) for name in values})


def _line(a: float, b: float, steps: float) -> float:
    return a + steps * (b - a)
