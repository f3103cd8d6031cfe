"""What runtimes with stages share, however their stages talk to each other.

Every rank reads its share of the batch, whichever stage it has: shapes, shares and the loss's weights are then known to
all, and nothing but activations and their gradients is sent between stages. Here is what each stage computes of a
micro-batch, what several stages hold in common, and how the whole comes together again.
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

from rung.parallel import own_stages
from rung.parallel.materialize import is_absent
from rung.parallel.schedule import Chunk
from rung.parallel.stages import crossing
from rung.runtime.forward import call_model
from rung.runtime.measure import measure, weighted
from rung.runtime.mesh import MeshRuntime
from rung.windows import MicroBatch


class StagedRuntime(MeshRuntime):
    """Takes steps on one rank of a pipeline, which holds one stage or several."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        world, spread = self.world, self.spread
        assert spread.stages is not None
        assert spread.rehearser is not None
        self._cut, self._rehearse = spread.stages, spread.rehearser
        self._trainable = [(name, p) for name, p in self._trainable if not is_absent(p)]
        group = world.axis("pp").get_group() if world.mesh is not None else dist.group.WORLD
        assert group is not None
        self._group: dist.ProcessGroup = group
        self._ties = _Ties(self)

    # -- what a stage computes ----------------------------------------------------------------------------------

    def _loss_bodies(
        self, micro_batches: list[MicroBatch], shares: list[float | Tensor], averaging: float, losses: list[Tensor]
    ) -> list[Callable[[], Tensor]]:
        """From each micro-batch to what backward starts from; the losses' shares are added to `losses`."""

        def run(micro: MicroBatch, share: float | Tensor) -> Tensor:
            loss = self._forward(micro, share)  # ends here on every stage but the last
            part = weighted(loss, share)
            losses.append(part.detach())
            return self._scaled(part, averaging)

        pairs = zip(micro_batches, shares, strict=True)
        return [functools.partial(run, micro, share) for micro, share in pairs]

    def _measure_bodies(self, micro_batches: list[MicroBatch]) -> list[Callable[[], Any]]:
        def run(micro: MicroBatch) -> Any:
            with self._autocast():
                output, target = call_model(self.task, self.model, micro.data)
                return measure(self.task, output, target, micro, self.world.device)

        return [functools.partial(run, micro) for micro in micro_batches]

    def _chunks(
        self, micro_batches: list[MicroBatch], bodies: list[Callable[[], Any]], *, training: bool = True
    ) -> dict[int, list[Chunk]]:
        """For each stage of this rank, what every micro-batch is to it."""
        found: dict[int, list[Chunk]] = {stage: [] for stage in own_stages(self.world)}
        for micro, body in zip(micro_batches, bodies, strict=True):
            rehearsal = self._rehearse(micro.data, training=training)
            cross = [*crossing(self._cut, rehearsal), []]
            for stage, chunks in found.items():
                around = functools.partial(self._micro_batch, micro)
                chunks.append(Chunk(rehearsal, cross[stage], cross[stage + 1], body, around))
        return found

    # -- gradients ----------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        super()._settle()
        self._ties.add_up()

    def _norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """Over all stages; a parameter that several share counts once."""
        own = super()._norm([p for p in parameters if id(p) not in self._ties.counted_elsewhere])
        squared = own.to(device=self.world.device, dtype=torch.promote_types(own.dtype, torch.float32)).square()
        dist.all_reduce(squared, group=self._group)
        return squared.sqrt()

    # -- what is kept -------------------------------------------------------------------------------------------

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor from the first stage that holds it, through the ranks of the first pipeline, to the main rank."""
        self._share_buffers()
        own = set(own_stages(self.world))
        parts = {name: self._cut.stages_of_module(name) for name in dict.fromkeys(self._cut.calls)}
        canonical = _canonical_names(self._rehearse.twin)
        in_first = self.world.layout.data_rank(self.world.rank) == 0 and self.world.rank % self.world.layout.tp == 0
        for name, value in self.model.state_dict().items():
            if not isinstance(value, Tensor):
                continue
            self._status.touch()
            home = self._home(canonical.get(name, name), parts)
            # All ranks of that stage gather it; of these, the one in the main rank's pipeline sends it.
            whole = self._whole(value).cpu() if home in own else torch.empty(0)
            source = home % self.world.layout.pp
            if in_first and source != 0:
                if home in own:
                    dist.send(whole.contiguous().reshape(-1).view(torch.uint8), group=self._group, group_dst=0)
                elif self.world.is_main:
                    whole = torch.empty(value.shape, dtype=value.dtype)
                    dist.recv(whole.reshape(-1).view(torch.uint8), group=self._group, group_src=source)
            yield name, whole if self.world.is_main else torch.empty(0)

    def counted_elsewhere(self) -> set[int]:
        return self._ties.counted_elsewhere

    def _home(self, name: str, parts: dict[str, set[int]]) -> int:
        if name in self._cut.holders:
            return self._cut.holders[name][0]
        return next((min(stages) for part, stages in parts.items() if name.startswith(f"{part}.")), 0)


class _Ties:
    """Parameters that several stages use: each has a copy, and all get the sum of the copies' gradients."""

    def __init__(self, runtime: StagedRuntime) -> None:
        world, cut = runtime.world, runtime._cut
        layout = world.layout
        trainable = dict(runtime._trainable)
        self._shared: list[tuple[nn.Parameter, dist.ProcessGroup]] = []
        self.counted_elsewhere: set[int] = set()
        groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        for name, stages in cut.shared().items():
            ranks = tuple(sorted({stage % layout.pp for stage in stages}))
            if len(ranks) == 1:
                continue  # one rank has both stages, and so one parameter
            if ranks not in groups:
                groups[ranks] = _group_of(ranks, runtime)
            parameter = trainable.get(name)
            if parameter is None or world.stage not in ranks:
                continue
            group = groups[ranks]
            assert group is not None
            self._shared.append((parameter, group))
            if world.stage != stages[0] % layout.pp:
                self.counted_elsewhere.add(id(parameter))

    def add_up(self) -> None:
        for parameter, group in self._shared:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            grad = parameter.grad
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            if local.numel() > 0:
                dist.all_reduce(local, group=group)


def _group_of(stages: tuple[int, ...], runtime: StagedRuntime) -> dist.ProcessGroup | None:
    """The ranks of this rank's pipeline that have these stages. All ranks make all such groups, in the same order."""
    world, layout = runtime.world, runtime.world.layout
    if len(stages) == layout.pp:
        return runtime._group
    found = None
    each = layout.num_ranks // layout.pp
    for offset in range(each):
        ranks = [stage * each + offset for stage in stages]
        group = dist.new_group(ranks)
        if world.rank in ranks:
            found = group
    return found


def _canonical_names(model: nn.Module) -> dict[str, str]:
    """For every name of a tensor, the one under which it is listed: tied tensors have several."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    every = itertools.chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    for name, tensor in every:
        names[name] = first.setdefault(id(tensor), name)
    return names
