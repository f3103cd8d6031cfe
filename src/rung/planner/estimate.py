"""Estimate memory and step time of a layout from dry runs of one rank per stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rung.errors import RungError
from rung.hardware.cluster import Cluster
from rung.planner.at_hand import MeasuredRank
from rung.planner.block_cache import BlockTraceCache
from rung.planner.cost import StepTime, step_time
from rung.planner.dryrun import DryRun, dry_run
from rung.planner.memory import ROUNDING, Peak, find_peak, find_peaks, reserve
from rung.planner.truncated_model import shortened
from rung.spec.abilities import can, shards_parameters
from rung.spec.config import CP_FORMS, RunConfig
from rung.spec.strategy import Layout
from rung.spec.task import Task

_BY_CUBLAS = ("mm", "addmm", "bmm", "baddbmm", "addmv", "dot")  # which has workspaces of its own
# Blocks per stage in the first of the two dry runs from which deeper models are extrapolated; the second has one more.
# FSDP holds several blocks gathered at once: only beyond these does each further one add the same.
_FEW, _FEW_GATHERED = 2, 4
_WHOLE = 4  # up to this many blocks per stage are traced in full
# How much more memory than was said a job may need. Those of `benchmarks.foresight` needed up to 6 % more, and up to
# 26 % more if cuDNN computes in them, whose workspaces depend on the algorithms that it chooses. Even where all was
# measured, the allocator may take a segment more.
_DOUBT, _CUDNN_DOUBT, _MEASURED_DOUBT = 0.08, 0.27, 0.02
_SEGMENT = 20 * 2**20
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
    uses_cudnn: bool = False
    on_host: int = 0  # bytes that offloading keeps in the memory of the host
    phases: dict[str, Peak] = field(default_factory=dict)  # the peak of each, without workspaces

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
    is_measured: bool = False  # memory and kernels on this device; else both are modelled
    cp_form: str = "auto"  # the quickest, with context parallelism

    @property
    def most_bytes(self) -> int:
        """The upper end of what a process may need."""
        modelled = _CUDNN_DOUBT if self.memory.uses_cudnn else _DOUBT
        doubt = _MEASURED_DOUBT if self.is_measured else modelled
        return round(self.memory.process * (1 + doubt)) + _SEGMENT

    def fits(self, cluster: Cluster) -> bool:
        return self.most_bytes <= cluster.device.memory


class Estimator:
    """Estimates layouts of one task by dry runs, which share truncated models, tensor plans and block traces."""

    def __init__(self, task: Task, config: RunConfig, cluster: Cluster, num_blocks: int) -> None:
        if torch.get_float32_matmul_precision() != "highest":  # the task said so when it was loaded
            cluster = cluster.with_tf32()
        self.task, self.config, self.cluster, self.num_blocks = task, config, cluster, num_blocks
        self._proofs: dict[Any, Any] = {}
        self._shortened: dict[int, Task] = {}
        self._per_sample: dict[tuple[Any, str], float] = {}
        self._computing: dict[int, float] = {}  # tp size -> computing seconds, summed over devices
        self._forms: dict[str, str] = {}  # layout -> the quickest form of its context parallelism
        # Zero bubble splits a block's backward, which a recorded block cannot do.
        self._repeats = BlockTraceCache() if config.schedule != "zb" else None
        data = task.train_data()
        if hasattr(data, "__getitem__"):
            self.task = replace(task, train_data=lambda: data)

    def estimate(self, layout: Layout, checkpointing: str, micro_batch: int) -> Estimate:
        """Estimate the layout with this micro-batch, from fewer blocks and micro-batches where these are identical."""
        form = self._forms.get(layout.name, self.config.cp_form)
        if form != "auto" or not can(layout, "cp_form"):
            return self.estimate_form(layout, checkpointing, micro_batch, form)
        found: list[Estimate] = []
        refused: RungError | None = None
        for form in CP_FORMS:
            try:
                found.append(self.estimate_form(layout, checkpointing, micro_batch, form))
            except RungError as error:  # its heads do not divide, or it has a mask
                refused = error
        if not found:
            raise refused or RungError("no form of context parallelism was tried")
        best = min(found, key=lambda one: (not one.fits(self.cluster), one.time.seconds))
        self._forms[layout.name] = best.cp_form
        return best

    def estimate_form(
        self,
        layout: Layout,
        checkpointing: str,
        micro_batch: int,
        cp_form: str,
        measured: MeasuredRank | None = None,
    ) -> Estimate:
        """The estimate with one form of context parallelism; without that, `cp_form` is of no account.

        With a rank that was `measured` in the settings of `settings_of`, its memory counts, and its operations take as
        long as they did.
        """
        count = self._num_micro_batches(layout, micro_batch)
        traced = _num_traced(layout, count)
        config = self.settings_of(layout, checkpointing, micro_batch, cp_form)
        whole = self._whole(layout, config, micro_batch, traced, count - traced, measured)
        self._per_sample[_similarity_key(layout), checkpointing] = whole.memory.of_samples / micro_batch
        if layout.num_stages == 1 and checkpointing == self.config.activation_checkpointing:
            spent = whole.time.computing * layout.num_ranks
            self._computing[layout.tp] = min(spent, self._computing.get(layout.tp, spent))
        return replace(whole, num_micro_batches=count, cp_form=cp_form)

    def settings_of(self, layout: Layout, checkpointing: str, micro_batch: int, cp_form: str) -> RunConfig:
        """The settings of a step that stands for the whole one: with fewer micro-batches, if these are identical."""
        count = _num_traced(layout, self._num_micro_batches(layout, micro_batch))
        return replace(
            self.config,
            activation_checkpointing=checkpointing,
            micro_batch=micro_batch,
            batch_size=micro_batch * count * layout.num_data_ranks,
            cp_form=cp_form,
        )

    def _num_micro_batches(self, layout: Layout, micro_batch: int) -> int:
        return -(-max(1, self.config.batch_size // layout.num_data_ranks) // micro_batch)

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

    def _whole(
        self,
        layout: Layout,
        config: RunConfig,
        micro_batch: int,
        count: int,
        repeated: int,
        measured: MeasuredRank | None,
    ) -> Estimate:
        """The estimate with all blocks, traced or extrapolated from fewer."""
        stages = layout.num_stages
        each = -(-self.num_blocks // stages) if self.num_blocks else 0
        few = _FEW_GATHERED if shards_parameters(layout) else _FEW
        depths = [0] if each <= max(few, _WHOLE) else [few * stages, (few + 1) * stages]
        checkpointing = config.activation_checkpointing
        traced = [self._trace_layout(layout, config, blocks) for blocks in depths]

        def assemble(repeated: int, slowdown: float) -> Estimate:
            parts = []
            for runs in traced:
                memories = tuple(self._memory(run) for run in runs)
                notes = tuple(dict.fromkeys(note for run in runs for note in run.notes))
                time = step_time(runs, self.cluster, repeated=repeated, slowdown=slowdown)
                parts.append(
                    Estimate(layout, checkpointing, micro_batch, count, _fullest(memories), time, notes, memories)
                )
            return parts[0] if len(parts) == 1 else _extend(parts[0], parts[1], each - few)

        if measured is None:
            return assemble(repeated, 1.0)
        found = assemble(repeated, measured.seconds / assemble(0, 1.0).time.own)
        memory = found.memory
        around = memory.process - memory.reserved
        memory = replace(
            memory, allocated=measured.allocated, reserved=measured.reserved, process=measured.reserved + around
        )
        return replace(found, memory=memory, is_measured=True)

    def _trace_layout(self, layout: Layout, config: RunConfig, blocks: int) -> list[DryRun]:
        """The first rank of each stage, with so many blocks in all, or with all of them if 0."""
        if blocks not in self._shortened:
            self._shortened[blocks] = shortened(self.task, blocks) if blocks else self.task
        each = layout.num_ranks // layout.pp
        return [
            dry_run(
                self._shortened[blocks],
                layout,
                config,
                rank=stage * each,
                device=self.cluster.device.kind,
                proofs=self._proofs,
                repeats=self._repeats,
            )
            for stage in range(layout.pp)
        ]

    def _memory(self, run: DryRun) -> Memory:
        device = self.cluster.device_for(run.layout.num_ranks)
        on_gpu = device.kind == "cuda"
        phases = find_peaks(run.trace, rounding=ROUNDING if on_gpu else 1)
        peak = max(phases.values(), key=lambda peak: peak.num_bytes)
        used = {work.phase for work in run.trace.works() if work.name in _BY_CUBLAS}
        spaces = {phase: size for phase, size in device.workspaces.items() if on_gpu and phase in used}
        allocated = peak.num_bytes + sum(spaces.values())
        reserved = reserve(run.trace, spaces) if on_gpu else allocated
        groups = sum(size > 1 for size in run.layout.axes.values()) if run.layout.is_distributed else 0
        kinds = dict(peak.by_kind)
        if spaces:
            kinds["workspaces"] = sum(spaces.values())
        process = reserved + device.context + groups * device.communicator
        uses_cudnn = on_gpu and any(work.is_inner or "convolution" in work.name for work in run.trace.works())
        on_host = find_peak(run.trace, on_host=True).num_bytes
        return Memory(allocated, reserved, process, kinds, run.state_bytes, run.rank, uses_cudnn, on_host, phases)


def _num_traced(layout: Layout, count: int) -> int:
    """How many of `count` micro-batches stand for all. Once all stages are busy, each further one takes the same time
    if the number in flight is constant."""
    return min(count, _TRACED if layout.num_stages == 1 else layout.pp + 2 if layout.schedule == "1f1b" else count)


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
    # By phases: with more blocks, another one may have the peak.
    both = few.phases.keys() & more.phases.keys()
    sizes = {phase: _line(few.phases[phase].num_bytes, more.phases[phase].num_bytes, steps) for phase in both}
    fullest = max(sizes, key=lambda phase: sizes[phase])
    spaces = {kind: size for kind, size in few.by_kind.items() if kind == "workspaces"}
    allocated = round(sizes[fullest]) + sum(spaces.values())
    # What the allocator holds beside them comes in large pieces, of which one more or less says nothing of the next.
    reserved = allocated + max(one.reserved - one.allocated for one in (few, more))
    before, after = few.phases[fullest].by_kind, more.phases[fullest].by_kind
    return Memory(
        allocated,
        reserved,
        reserved + few.process - few.reserved,
        spaces | {k: max(0, round(_line(before.get(k, 0), after.get(k, 0), steps))) for k in {**before, **after}},
        {k: round(_line(few.state[k], more.state[k], steps)) for k in few.state},
        few.rank,
        few.uses_cudnn,
        round(_line(few.on_host, more.on_host, steps)),
    )


def _extend_time(few: StepTime, more: StepTime, steps: float) -> StepTime:
    values, others = vars(few), vars(more)
    return StepTime(**{name: max(0.0, _line(values[name], others[name], steps)) for name in values})


def _line(a: float, b: float, steps: float) -> float:
    return a + steps * (b - a)
