"""What one layout costs, from dry runs of its distinct ranks: memory of the fullest rank, time of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rung.config import RunConfig
from rung.planner.cost import StepTime, step_time
from rung.planner.dryrun import DryRun, dry_run
from rung.planner.hardware import Cluster
from rung.planner.memory import ROUNDING, find_peak, reserve
from rung.planner.shorten import shortened
from rung.strategy import Layout
from rung.task import Task

_FEW, _MORE = 2, 3  # blocks of a stage in the two looks from which the rest is added up
_TRACED = 3  # micro-batches: the first, one like all others, and the last, which may send more


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at its peak: alive, held by the allocator, and taken by the whole process."""

    allocated: int
    reserved: int
    process: int
    by_kind: dict[str, int]
    state: dict[str, int]
    rank: int


@dataclass(frozen=True)
class Estimate:
    """What a step of a layout costs."""

    layout: Layout
    checkpointing: str
    micro_batch: int
    num_micro_batches: int
    memory: Memory
    time: StepTime
    notes: tuple[str, ...] = ()

    def fits(self, cluster: Cluster) -> bool:
        return self.memory.process <= cluster.device.memory


class Estimator:
    """Dry-runs layouts of one task. Each look is kept: the same is not traced twice."""

    def __init__(self, task: Task, config: RunConfig, cluster: Cluster, num_blocks: int) -> None:
        self.task, self.config, self.cluster, self.num_blocks = task, config, cluster, num_blocks
        self._proofs: dict[Any, Any] = {}
        data = task.train_data()
        if hasattr(data, "__getitem__"):
            self.task = replace(task, train_data=lambda: data)

    def estimate(self, layout: Layout, checkpointing: str, micro_batch: int) -> Estimate:
        """Trace the layout with this micro-batch, shortened where its blocks are alike and its micro-batches many."""
        share = max(1, self.config.batch_size // layout.num_data_ranks)
        count = -(-share // micro_batch)
        few_enough = layout.pp + 2  # once all stages are busy, each one more takes the same
        if layout.pp > 1 and count > few_enough:
            few, more = (self._whole(layout, checkpointing, micro_batch, n, 0) for n in (few_enough - 1, few_enough))
            whole = _extend(few, more, count - few_enough + 1)
        else:
            traced = count if layout.pp > 1 else min(count, _TRACED)
            whole = self._whole(layout, checkpointing, micro_batch, traced, count - traced)
        return replace(whole, num_micro_batches=count)

    def _whole(self, layout: Layout, checkpointing: str, micro_batch: int, count: int, repeated: int) -> Estimate:
        """With all blocks: traced, or added up from fewer of them."""
        stages = layout.num_stages
        each = -(-self.num_blocks // stages) if self.num_blocks else 0
        if each <= _MORE:
            return self._look(layout, checkpointing, micro_batch, 0, count, repeated)
        few, more = (
            self._look(layout, checkpointing, micro_batch, blocks * stages, count, repeated) for blocks in (_FEW, _MORE)
        )
        return _extend(few, more, (each - _FEW) / (_MORE - _FEW))

    def _look(
        self, layout: Layout, checkpointing: str, micro_batch: int, blocks: int, count: int, repeated: int
    ) -> Estimate:
        task = shortened(self.task, blocks) if blocks else self.task
        device = self.cluster.device
        config = replace(
            self.config,
            activation_checkpointing=checkpointing,
            micro_batch=micro_batch,
            batch_size=micro_batch * count * layout.num_data_ranks,
        )
        each = layout.num_ranks // layout.pp
        runs = [
            dry_run(task, layout, config, rank=stage * each, device=device.kind, proofs=self._proofs)
            for stage in range(layout.pp)
        ]
        memories = [self._memory(run) for run in runs]
        notes = tuple(dict.fromkeys(note for run in runs for note in run.notes))
        return Estimate(
            layout,
            checkpointing,
            micro_batch,
            count,
            max(memories, key=lambda memory: memory.process),
            step_time(runs, self.cluster, repeated=repeated),
            notes,
        )

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


def _extend(few: Estimate, more: Estimate, steps: float) -> Estimate:
    """`few`, and `steps` times what `more` has in addition."""

    def line(a: float, b: float) -> float:
        return a + steps * (b - a)

    old, new = few.memory, more.memory
    allocated = round(line(old.allocated, new.allocated))
    reserved = max(allocated, round(line(old.reserved, new.reserved)))
    memory = Memory(
        allocated,
        reserved,
        reserved + old.process - old.reserved,
        {k: max(0, round(line(old.by_kind.get(k, 0), new.by_kind.get(k, 0)))) for k in {**old.by_kind, **new.by_kind}},
        {k: round(line(old.state[k], new.state[k])) for k in old.state},
        old.rank,
    )
    values = vars(few.time)
    time = StepTime(**{name: max(0.0, line(values[name], vars(more.time)[name])) for name in values})
    return replace(few, memory=memory, time=time)
