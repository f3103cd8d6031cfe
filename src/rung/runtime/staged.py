"""Shared by strategies with stages, however their stages communicate.

Every rank reads its share of the batch, whichever stage it has: all ranks then have shapes, shares and the loss's
weights, and only activations and their gradients are sent between stages. Here are the computations of each stage on a
micro-batch, the parameters that several stages share, the global norm, and the gathering of all weights.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rung.data.batch_shard import MicroBatch
from rung.parallel import own_stages
from rung.parallel.gradients import gradient_figures
from rung.parallel.pipeline.partition import Stages, crossing
from rung.parallel.pipeline.schedule import Chunk
from rung.runtime.base import Names
from rung.runtime.context import RuntimeContext
from rung.runtime.forward import call_model
from rung.runtime.measure import measure, weighted
from rung.runtime.mesh import gradient_finalizers, loss_module
from rung.runtime.passes import LossForward
from rung.runtime.step import Passes, StepParts
from rung.runtime.update import OptimizerUpdate, norm_over_ranks, norm_with_experts
from rung.runtime.weights import gathered, wanted_tensors


class StagedModel:
    """The stages of one rank: their computations, the norm over all stages, and the weights of all stages."""

    def __init__(self, context: RuntimeContext) -> None:
        world, parallel = context.world, context.parallel
        assert parallel.stages is not None
        assert parallel.forward_tracer is not None
        self._context, self._cut, self._trace_forward = context, parallel.stages, parallel.forward_tracer
        self._loss = LossForward(context, loss_module(context))
        group = world.axis("pp").get_group() if world.mesh is not None else dist.group.WORLD
        assert group is not None
        self.group: dist.ProcessGroup = group
        self._ties = _Ties(context, parallel.stages, group)

    def parts(self, passes: Passes, *, step_optimizer: Callable[[], object] | None = None) -> StepParts:
        return StepParts(
            passes,
            OptimizerUpdate(self._context, norm=self._norm, step_optimizer=step_optimizer),
            float(self._context.world.layout.num_data_ranks),
            self._named_weights,
            [*gradient_finalizers(self._context), self._ties.sum_gradients],
            counted_elsewhere=self._ties.counted_elsewhere,
            copies_of_stages=self._ties.copies,
            gradient_figures=functools.partial(gradient_figures, self._context.trainable, self._context.world.device),
        )

    # -- computations of a stage --------------------------------------------------------------------------------

    def training_chunks(
        self, micro_batches: list[MicroBatch], shares: list[float | Tensor], averaging: float, losses: list[Tensor]
    ) -> dict[int, list[Chunk]]:
        """The forward of each micro-batch, up to the scaled loss; the losses' shares are appended to `losses`."""

        def run(micro: MicroBatch, share: float | Tensor) -> Tensor:
            loss = self._loss(micro, share)  # does not return on any stage but the last
            losses.append(weighted(loss.detach(), share))
            return self._context.scaled(loss, share, averaging)

        pairs = zip(micro_batches, shares, strict=True)
        return self._chunks(micro_batches, [functools.partial(run, micro, share) for micro, share in pairs])

    def evaluation_chunks(self, micro_batches: list[MicroBatch]) -> dict[int, list[Chunk]]:
        context = self._context

        def run(micro: MicroBatch) -> Any:
            context.check_rows(micro, is_whole=context.world.layout.num_data_ranks == 1, trains=False)
            with context.autocast():
                output, target = call_model(context.task, context.model, micro.data)
                return measure(context.task, output, target, micro, context.world, context.batch_gather)

        bodies = [functools.partial(run, micro) for micro in micro_batches]
        return self._chunks(micro_batches, bodies, training=False)

    def sum_of(self, losses: list[Tensor]) -> Tensor:
        """The sum; 0 on all stages but the last, which have no losses."""
        return torch.stack(losses).sum() if losses else torch.zeros((), device=self._context.world.device)

    def _chunks(
        self, micro_batches: list[MicroBatch], bodies: list[functools.partial[Any]], *, training: bool = True
    ) -> dict[int, list[Chunk]]:
        """For each stage of this rank, its chunk of every micro-batch."""
        found: dict[int, list[Chunk]] = {stage: [] for stage in own_stages(self._context.world)}
        for micro, body in zip(micro_batches, bodies, strict=True):
            forward_trace = self._trace_forward(micro.data, training=training)
            cross = [*crossing(self._cut, forward_trace), []]
            for stage, chunks in found.items():
                around = functools.partial(self._context.micro_batch, micro)
                chunks.append(Chunk(forward_trace, cross[stage], cross[stage + 1], body, around))
        return found

    # -- over all stages ----------------------------------------------------------------------------------------

    def _norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """The norm over all stages; a parameter that several share counts once."""
        counted = [p for p in parameters if id(p) not in self._ties.counted_elsewhere]
        own = norm_with_experts(self._context, counted)
        return norm_over_ranks(own, self._context.world, self.group)

    def _named_weights(self, names: Names = None) -> Iterator[tuple[str, Tensor]]:
        """Each tensor from the first stage that holds it, through the ranks of the first pipeline, to the main rank."""
        context, world, layout = self._context, self._context.world, self._context.world.layout
        own = set(own_stages(world))
        parts = {name: self._cut.stages_of_module(name) for name in dict.fromkeys(self._cut.calls)}
        canonical = _canonical_names(self._trace_forward.meta_model)
        # In the main rank's pipeline.
        in_first = layout.data_rank(world.rank) == 0 and layout.is_first_of_samples(world.rank)
        for name, value in wanted_tensors(context, names):
            context.status.touch()
            home = self._home(canonical.get(name, name), parts)
            # All ranks of that stage gather it; the one in the main rank's pipeline sends it.
            whole = gathered(context, name, value).cpu() if home in own else torch.empty(0)
            source = home % layout.pp
            if in_first and source != 0:
                if home in own:
                    dist.send(whole.contiguous().reshape(-1).view(torch.uint8), group=self.group, group_dst=0)
                elif world.is_main:
                    whole = torch.empty(value.shape, dtype=value.dtype)
                    dist.recv(whole.reshape(-1).view(torch.uint8), group=self.group, group_src=source)
            yield name, whole if world.is_main else torch.empty(0)

    def _home(self, name: str, parts: dict[str, set[int]]) -> int:
        if name in self._cut.holders:
            return self._cut.holders[name][0]
        return next((min(stages) for part, stages in parts.items() if name.startswith(f"{part}.")), 0)


class _Ties:
    """Tied parameters of several stages: each stage has a copy, and all get the sum of the copies' gradients."""

    def __init__(self, context: RuntimeContext, cut: Stages, pipeline: dist.ProcessGroup) -> None:
        world, layout = context.world, context.world.layout
        trainable = dict(context.trainable)
        self._allows_unused, self._device = context.config.unused_parameters == "allow", world.device
        self.copies: list[tuple[str, nn.Parameter, dist.ProcessGroup]] = []
        self.counted_elsewhere: set[int] = set()
        groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        for name, stages in cut.shared().items():
            ranks = tuple(sorted({stage % layout.pp for stage in stages}))
            if len(ranks) == 1:
                continue  # one rank has all these stages, and one parameter for them
            if ranks not in groups:
                groups[ranks] = pipeline if len(ranks) == layout.pp else _group_of(ranks, context)
            parameter = trainable.get(name)
            if parameter is None or world.role.stage not in ranks:
                continue
            group = groups[ranks]
            assert group is not None
            self.copies.append((name, parameter, group))
            if world.role.stage != stages[0] % layout.pp:
                self.counted_elsewhere.add(id(parameter))

    def sum_gradients(self) -> None:
        for _, parameter, group in self.copies:
            if self._allows_unused and not self._is_used(parameter, group):
                continue  # without a gradient an optimizer leaves it alone; with zeros it would decay
            if parameter.grad is None:  # every stage of the group must join the all-reduce
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad.is_sparse:  # an embedding's, whose other copy has a dense one
                parameter.grad = parameter.grad.to_dense()
            grad = parameter.grad
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            if local.numel() > 0:
                dist.all_reduce(local, group=group)

    def _is_used(self, parameter: nn.Parameter, group: dist.ProcessGroup) -> bool:
        """Whether a stage of the group has a gradient for it."""
        flag = torch.tensor(float(parameter.grad is not None), device=self._device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
        return bool(flag)


def _group_of(stages: tuple[int, ...], context: RuntimeContext) -> dist.ProcessGroup | None:
    """The group of the ranks in this rank's pipeline that have these stages. `new_group` is a collective: all ranks
    create the groups of all pipelines, in the same order."""
    layout = context.world.layout
    found = None
    each = layout.num_ranks // layout.pp
    for offset in range(each):
        ranks = [stage * each + offset for stage in stages]
        group = dist.new_group(ranks, timeout=context.world.timeout)
        if context.world.rank in ranks:
            found = group
    return found


def _canonical_names(model: nn.Module) -> dict[str, str]:
    """For every name of a tensor, the first one: tied tensors have several."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    every = itertools.chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    for name, tensor in every:
        names[name] = first.setdefault(id(tensor), name)
    return names
