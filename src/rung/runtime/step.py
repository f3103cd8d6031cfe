"""The runtime of ranks that compute: one order of a step, whose parts a strategy chooses.

A strategy is a function from a `RuntimeContext` to `StepParts`: `mesh`, `pipeline`, `compressed` and others each have
one, and `build_runtime` chooses among them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rung.data.batch_shard import LocalBatch, MicroBatch
from rung.data.rng import DeviceGenerators, GeneratorMarks
from rung.parallel.dropout import NoDropout, turn_off_dropout
from rung.parallel.gradients import GradientFigures
from rung.parallel.module_state import ModuleState
from rung.parallel.pipeline.schedule import Stage
from rung.runtime.base import LocalStep, Names, Probe, ReplicaThreads, Traffic
from rung.runtime.context import ContextRuntime, RuntimeContext
from rung.runtime.measure import Measured, add_measured, figures_of_set, shares_of
from rung.runtime.optimizer import learning_rate, learning_rates, takes_closure
from rung.runtime.placement import BatchPlacement
from rung.runtime.rank_state import RankLocalState
from rung.runtime.samples import check_same_samples
from rung.runtime.turns import norm_of, total_of
from rung.runtime.weights import NamedWeights, share_buffers


class Passes(Protocol):
    """Forward and backward over the micro-batches of a step, and the forward of an evaluation."""

    def run(
        self, micro_batches: list[MicroBatch], shares: list[float | Tensor], averaging: float
    ) -> tuple[Tensor, set[str]]:
        """Run forward and backward of every micro-batch; returns this rank's share of the loss and the used parameters.

        `shares` are the micro-batches' parts of the global mean; backward multiplies them by `averaging`.
        """
        ...

    def measure(self, window: LocalBatch) -> Iterator[Measured]:
        """Sums and counts of loss and metrics."""
        ...


# Updates the parameters and drops the gradients. Returns the global norm of the gradient if that is wanted.
UpdateStep = Callable[[bool], Tensor | None]


@dataclass
class StepParts:
    """A strategy's implementation of each part of a step. Parts without a default are required."""

    passes: Passes
    update: UpdateStep
    averaging: float  # undoes the average over ranks that reducing gradients applies; 1 where ranks sum
    named_weights: NamedWeights
    finalizers: list[Callable[[], None]] = field(default_factory=list)  # of gradients, after backward
    around_step: Callable[[], AbstractContextManager[Any]] = nullcontext  # open from before forward until after update
    evaluated_weights: Callable[[], AbstractContextManager[None]] = nullcontext  # swaps in other weights to evaluate
    share_weights: Callable[[], None] | None = None  # of `Runtime`, where servers hold them
    rank_state: RankLocalState | None = None
    counted_elsewhere: AbstractSet[int] = frozenset()
    copies_of_stages: Sequence[tuple[str, nn.Parameter, dist.ProcessGroup]] = ()
    stages: Sequence[Stage] = ()
    replica_threads: ReplicaThreads | None = None
    traffic: Callable[[], dict[str, Traffic]] = dict
    # Figures of the gradients after backward; None if those are not of the global loss.
    gradient_figures: Callable[[], GradientFigures] | None = None
    further_bytes: Callable[[], dict[str, int]] = dict  # kept between steps, by kind
    device_0_bytes: Callable[[], dict[str, int]] = dict


class StepRuntime(ContextRuntime):
    """Takes steps on one rank."""

    def __init__(self, context: RuntimeContext, parts: StepParts) -> None:
        super().__init__(context)
        self.parts = parts
        self.rank_state, self.counted_elsewhere = parts.rank_state, parts.counted_elsewhere
        self.stages, self.replica_threads = parts.stages, parts.replica_threads
        self.copies_of_stages, self.evaluated_weights = parts.copies_of_stages, parts.evaluated_weights
        self._probe_traffic: dict[str, Traffic] = {}  # no traffic of a step
        self._takes_closure = takes_closure(context.optimizer)
        self._placement = BatchPlacement(context.world, context.config)

    def place(self, windows: Iterable[LocalBatch]) -> Iterator[LocalBatch]:
        return self._placement.place(windows)

    def step(self, window: LocalBatch, *, want_norm: bool = False) -> LocalStep:
        context, is_first = self.context, self.context.is_first_step
        context.step_log.want_rows(want_norm)  # the figures of the step are read, or it is saved
        with self._computing(window):
            buffers = context.own_buffers.versions() if is_first else {}
            # Before the schedule's step in `update` changes them.
            rate, rates = learning_rate(self.optimizer), learning_rates(self.optimizer)
            shares, norms = [], []
            for turn in context.turns.names:
                with context.turns.take(turn):
                    shares.append(self._run_passes(window))
                    if self._takes_closure:
                        context.evaluate = self._evaluations(window, shares[-1])
                    context.enter("update")
                    norms.append(self.parts.update(want_norm))
            if is_first:
                if self.world.layout.num_data_ranks > 1:
                    self.notes += context.own_buffers.change_notes(buffers)
                    if any(micro.collate_draws for micro in window.micro_batches):
                        self.notes.append(
                            "collate draws random numbers for the samples of a rank, so batches depend on the number "
                            "of ranks. Draw them in the data set, for each sample, to have the same on any number"
                        )
                if self.parallel.is_divided:
                    context.own_buffers.refuse_created(buffers)
                context.is_first_step = False
            rows = context.step_log.take_rows()
            context.step_log.want_rows(False)
        logged = context.step_log.take()
        return LocalStep(total_of(shares), norm_of(norms), rate, rates, logged=logged, rows=rows)

    def probe(self, window: LocalBatch) -> Probe:
        context, figures = self.context, self.parts.gradient_figures
        kept = ModuleState(self.model)
        generators, scaler = DeviceGenerators(self.world.device), context.scaler
        context.scaler, context.is_probing = None, True
        turn_off_dropout(self.model)
        kept.begin()
        marks = GeneratorMarks()
        try:
            with self._computing(window), NoDropout():
                shares = []
                for turn in context.turns.names:  # gradients of all parameters, each of its own loss
                    with context.turns.take(turn):
                        shares.append(self._run_passes(window))
                found = Probe(total_of(shares), figures() if figures is not None else None)
        finally:
            context.scaler, context.is_probing = scaler, False
            context.step_log.take()  # no figures of a step
            self._probe_traffic = copy.deepcopy(self.parts.traffic())
            for parameter in self.model.parameters():
                parameter.grad = None
            self.reshard()
            changed, draws = kept.restore(), not marks.hold()
            generators.restore()
        return replace(found, changes_state=changed, draws=draws)

    @contextmanager
    def _computing(self, window: LocalBatch) -> Iterator[None]:
        context = self.context
        with (
            self.parts.around_step(),
            context.clock.begin(window.wait_seconds),
            self.world.tensors.mode(),
            context.without_dropout(),
            context.default_type(),
        ):
            yield

    def _run_passes(self, window: LocalBatch) -> Tensor:
        """Forward and backward; returns this rank's share of the loss."""
        context, parts, world = self.context, self.parts, self.world
        if not self.model.training:
            self.model.train()
        if context.is_first_step:
            check_same_samples(world, window)
        context.enter("forward")
        shares = shares_of(context.task, world, window)
        compares = context.is_first_step and context.unit_calls is not None
        with context.unit_calls.compared() if compares and context.unit_calls is not None else nullcontext():
            try:
                loss_share, used = parts.passes.run(window.micro_batches, shares, parts.averaging)
            except Exception as error:
                # torch's words, of a batch norm. Not `str`, which a user's own exception may refuse.
                if any(isinstance(word, str) and "more than 1 value per channel" in word for word in error.args):
                    error.add_note(_too_few(window))
                raise
        for finalize in parts.finalizers:
            finalize()
        context.unused.check(used)
        # Ranks of one tensor group compute the same loss, and so do all with a loss of the whole batch; one counts it.
        counts = world.role.counts_loss and (context.batch_gather is None or world.role.data_rank == 0)
        return loss_share if counts else torch.zeros_like(loss_share)

    def _evaluations(self, window: LocalBatch, first: Tensor) -> Callable[[], Tensor]:
        """The global loss of a batch: as computed already, and in further calls with the weights as they are then."""
        shares = [first]

        def evaluate() -> Tensor:
            if not shares:
                for parameter in self.context.parameters:
                    parameter.grad = None
                shares.append(self._run_passes(window))
                self.context.enter("update")
            loss = shares.pop().detach().clone()
            if self.world.has_peers:
                dist.all_reduce(loss)
            return loss

        return evaluate

    @torch.no_grad()
    def evaluate(self, windows: Iterable[LocalBatch]) -> dict[str, float]:
        context, world = self.context, self.world
        with self.evaluated_weights():
            share_buffers(context)
            self.model.eval()
            sums: Measured = {}
            try:
                for window in self.place(windows):
                    context.status.touch()
                    with world.tensors.mode(), context.default_type():
                        for measured in self.parts.passes.measure(window):
                            add_measured(sums, measured)
            finally:
                # Also when a stop between two windows ends the loop, which then saves the shards.
                with world.tensors.mode():
                    self.reshard()
            with world.tensors.mode():
                names = sorted(name for name, value in sums.items() if isinstance(value, tuple))
                own = world.tensors.read([tensor for name in names for tensor in sums[name]])
            pairs = {name: (own[2 * i], own[2 * i + 1]) for i, name in enumerate(names)}
            return figures_of_set(world, *((pairs, sums) if world.role.counts_loss else ({}, {})))

    def named_weights(self, names: Names = None) -> Iterator[tuple[str, Tensor]]:
        return self.parts.named_weights(names)

    def share_weights(self) -> None:
        (self.parts.share_weights or super().share_weights)()

    def state_bytes(self) -> dict[str, int]:
        return {**super().state_bytes(), **self.parts.further_bytes()}

    def traffic(self) -> dict[str, Traffic]:
        probe = self._probe_traffic
        return {
            name: sent.without(probe[name]) if name in probe else sent for name, sent in self.parts.traffic().items()
        }

    def device_0_bytes(self) -> dict[str, int]:
        return self.parts.device_0_bytes()


def _too_few(window: LocalBatch) -> str:
    sizes = ", ".join(str(micro.num_global_samples) for micro in window.micro_batches)
    return (
        f"A batch norm cannot train on one value. The samples of step {window.step} come in micro-batches of {sizes} "
        "over all ranks: the last batch of an epoch is short, and so is the last micro-batch of a batch. Use another "
        "--batch-size or --micro-batch, or leave some samples out of train_data()."
    )
