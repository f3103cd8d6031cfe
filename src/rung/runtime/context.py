"""State shared by the parts of one rank's runtime, and the base class of all runtimes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from rung.data.batch_shard import LocalBatch, MicroBatch
from rung.data.batches import Batches
from rung.data.pytree import tensors_in
from rung.distributed.status_board import StatusWriter
from rung.distributed.world import World
from rung.parallel import ParallelModel, sync_batch_norms
from rung.parallel.batchnorm import SyncBatchNorm
from rung.parallel.experts.balance import WholeBatchBalance
from rung.parallel.experts.loads import ExpertLoads
from rung.parallel.experts.rows import RowCounter
from rung.parallel.materialize import is_absent
from rung.parallel.pipeline.schedule import Stage
from rung.parallel.sharding import free_gathered
from rung.parallel.zero1 import ShardedUpdate
from rung.runtime.base import ModelFacts, Probe, ReplicaThreads, Traffic, Updates, Work
from rung.runtime.batch_loss import BatchGather
from rung.runtime.buffers import OwnBuffers
from rung.runtime.forward import NoDropout, autocast, default_type
from rung.runtime.measure import weighted
from rung.runtime.optimizer import LocalScaler, Schedule, local_bytes
from rung.runtime.phases import PhaseClock
from rung.runtime.rank_state import RankLocalState
from rung.runtime.samples import RowCheck
from rung.runtime.step_log import StepLog
from rung.runtime.turns import StepTurns
from rung.runtime.unit_calls import UnitCalls
from rung.runtime.unused import UnusedParameters
from rung.spec.abilities import runs_units_together
from rung.spec.config import RunConfig
from rung.spec.task import Task


@dataclass
class RuntimeContext:
    """Made once by `build_runtime`, and passed to every part."""

    task: Task
    world: World
    config: RunConfig
    parallel: ParallelModel
    optimizer: Optimizer
    optimizer_groups: list[list[str]]
    schedule: Schedule | None
    sharded_update: ShardedUpdate | None
    facts: ModelFacts
    status: StatusWriter
    total_steps: int | None
    updates: Updates = field(default_factory=Updates)
    is_first_step: bool = True
    # For an optimizer that evaluates the loss itself: the global loss of this step's batch, with its gradients.
    evaluate: Callable[[], Tensor] | None = None
    is_probing: bool = False  # computes without an update and without dropout
    model: nn.Module = field(init=False)
    notes: list[str] = field(init=False)
    clock: PhaseClock = field(init=False)
    trainable: list[tuple[str, nn.Parameter]] = field(init=False)
    sync_norms: list[SyncBatchNorm] = field(init=False)
    counting: list[SyncBatchNorm | ExpertLoads | RowCounter | WholeBatchBalance] = field(
        init=False
    )  # what has statistics over all ranks
    own_buffers: OwnBuffers = field(init=False)
    _buffers: OwnBuffers = field(init=False)
    scaler: LocalScaler | None = field(init=False)
    unused: UnusedParameters = field(init=False)
    unit_calls: UnitCalls | None = field(init=False)  # compared in the first step
    batch_gather: BatchGather | None = field(init=False)  # of a loss over the whole micro-batch
    check_rows: RowCheck = field(init=False)
    step_log: StepLog = field(init=False)
    turns: StepTurns = field(init=False)

    def __post_init__(self) -> None:
        world, config = self.world, self.config
        self.model, self.notes = self.parallel.model, self.parallel.notes
        # Compiled code must not see wait_tensor replaced by a measured one during a step.
        self.clock = PhaseClock(waits=world.has_peers, functional_waits=not config.compile)
        self.trainable = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self.sync_norms = sync_batch_norms(self.model)
        experts, balance = self.parallel.experts, self.parallel.balance
        loads = experts.loads if experts is not None else None
        rows = self.parallel.rows if self.parallel.rows is not None and self.parallel.rows.layers else None
        self.counting = [*self.sync_norms, *(one for one in (loads, rows, balance) if one is not None)]
        self.own_buffers, self._buffers = OwnBuffers(self.model, self.sync_norms), OwnBuffers(self.model, [])
        self.scaler = LocalScaler(world.device.type) if config.precision == "fp16" else None
        # The comparison would become a part of compiled blocks.
        compares_units = world.has_peers and runs_units_together(world.layout) and not config.compile
        self.unit_calls = UnitCalls(self.model, world) if compares_units else None
        is_split = self.task.loss_scope == "batch" and world.layout.num_data_ranks > 1
        self.batch_gather = BatchGather(world) if is_split else None
        self.unused = UnusedParameters(
            self.model, self.trainable, world, config.unused_parameters, experts, self.parallel.parts
        )
        self.check_rows = RowCheck(self.task)
        self.step_log = StepLog(self.task, world, is_compiled=config.compile, loads=loads, rows=rows)
        self.task = self.step_log.task
        self.turns = StepTurns(self.task, config, self.optimizer, self.optimizer_groups, self.trainable)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that are trained: of several losses, by the one whose turn it is."""
        return [parameter for _, parameter in self.trainable if parameter.requires_grad]

    def enter(self, phase: str) -> None:
        self.status.phase(phase)
        self.clock.enter(phase)

    def scaled(self, loss: Tensor, share: float | Tensor, averaging: float) -> Tensor:
        """The loss for backward, from that of a micro-batch and its share of the global mean.

        `averaging` undoes the average over ranks that reducing gradients applies. Ranks with equal parts of one batch
        multiply by neither: the product is 1.
        """
        scaled = weighted(loss, share * averaging)
        return self.scaler.scale(scaled) if self.scaler is not None else scaled

    def micro_batch(self, micro: MicroBatch) -> AbstractContextManager[None]:
        """Wraps the computation of one micro-batch: a stand-in leaves buffers and statistics unchanged."""
        self.count(micro)
        if micro.num_samples:
            return nullcontext()
        # If no rank has a sample, statistics over all ranks stay as they are, too.
        return (self.own_buffers if micro.num_global_samples else self._buffers).kept()

    def count(self, micro: MicroBatch) -> None:
        """Let statistics over all ranks leave out a stand-in sample."""
        for one in self.counting:
            one.counted = micro.num_samples > 0

    # -- precision -----------------------------------------------------------------------------------------------

    def autocast(self) -> AbstractContextManager[Any]:
        return autocast(self.config, self.world.device)

    def default_type(self) -> AbstractContextManager[Any]:
        """Under fp64, also for tensors that the model creates in forward."""
        return default_type(torch.float64) if self.config.precision == "fp64" else nullcontext()

    def without_dropout(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.config.dropout else NoDropout()


class ContextRuntime:
    """The attributes of every runtime, and defaults for its methods, without `step`."""

    stages: Sequence[Stage] = ()
    replica_threads: ReplicaThreads | None = None
    rank_state: RankLocalState | None = None
    work: Work | None = None
    averaged: Callable[[], AbstractContextManager[None]] | None = None
    evaluated_weights: Callable[[], AbstractContextManager[None]] = nullcontext
    counted_elsewhere: AbstractSet[int] = frozenset()
    copies_of_stages: Sequence[tuple[str, nn.Parameter, dist.ProcessGroup]] = ()

    def __init__(self, context: RuntimeContext) -> None:
        self.context = context
        self.world, self.parallel, self.facts = context.world, context.parallel, context.facts
        self.model, self.optimizer, self.schedule = context.model, context.optimizer, context.schedule
        self.optimizer_groups, self.scaler = context.optimizer_groups, context.scaler
        self.total_steps = context.total_steps
        self.notes, self.updates, self.clock = context.notes, context.updates, context.clock
        update = context.sharded_update
        self.parameter_slices: Mapping[int, nn.Parameter] = update.by_parameter() if update is not None else {}

    def begin(self, start: int, batches: Batches) -> None:
        return None

    def probe(self, window: LocalBatch) -> Probe:
        raise NotImplementedError("only ranks that compute a loss can be compared with one process")

    def phase_seconds(self) -> dict[str, float]:
        return self.clock.seconds()

    def reshard(self) -> None:
        for root in self.parallel.roots:
            free_gathered(root)
        for part in self.parallel.parts:
            part.show_parameters()

    def state_bytes(self) -> dict[str, int]:
        parameters = [p for p in self.model.parameters() if not is_absent(p)]
        state = tensors_in(list(self.optimizer.state.values()))
        return {
            "parameters": sum(local_bytes(p) for p in parameters),
            "gradients": sum(local_bytes(p.grad) for p in parameters if p.grad is not None),
            "optimizer": sum(local_bytes(v) for v in state),
            "buffers": sum(local_bytes(b) for b in self.model.buffers() if not is_absent(b)),
        }

    def share_weights(self) -> None:
        if self.context.sharded_update is not None:
            self.context.sharded_update.share_parameters()

    def traffic(self) -> dict[str, Traffic]:
        return {}

    def device_0_bytes(self) -> dict[str, int]:
        return {}

    def is_consistent(self) -> bool:
        return True

    def close(self, *, stopped: bool) -> None:
        return None
