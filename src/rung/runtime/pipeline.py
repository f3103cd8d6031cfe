"""The runtime of layouts with stages: pp, and its compositions with data and tensor parallelism.

A step is the same as without stages; only forward and backward of its micro-batches are driven by a schedule. Every
rank reads its share of the batch, whichever stage it has: shapes, shares and the loss's weights are then known to all,
and nothing but activations and their gradients is sent between stages.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rung.batches import MicroBatch, Window
from rung.parallel.materialize import is_absent
from rung.parallel.schedule import Chunk, Stage, forward_only, make_schedule, run_schedule
from rung.parallel.sharding import hold_gradients, set_gradient_sync
from rung.parallel.stages import crossing
from rung.runtime.forward import call_model
from rung.runtime.measure import measure, weighted
from rung.runtime.mesh import MeshRuntime


class PipelineRuntime(MeshRuntime):
    """Takes steps on one rank of a pipeline, which holds one stage or several."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        world, layout, spread = self.world, self.world.layout, self.spread
        assert spread.stages is not None
        assert spread.rehearser is not None
        self._cut, self._rehearse = spread.stages, spread.rehearser
        self._trainable = [(name, p) for name, p in self._trainable if not is_absent(p)]
        self._group = world.axis("pp").get_group()
        self.stages = [
            Stage(
                part,
                layout.num_stages,
                world.device,
                self._group,
                self._before_backward,
                self._enter,
                takes_apart=layout.schedule == "zb",
            )
            for part in spread.parts
        ]
        self._schedules: dict[int, Any] = {}
        self._ties = _Ties(self)
        if self._scaler is not None:
            self._scaler.scale(torch.zeros((), device=world.device))  # ranks without a loss need the factor, too

    # -- training -----------------------------------------------------------------------------------------------

    def _accumulate(
        self, micro_batches: list[MicroBatch], shares: list[float | Tensor], averaging: float
    ) -> tuple[Tensor, set[str]]:
        losses: list[Tensor] = []

        def body(micro: MicroBatch, share: float | Tensor) -> Callable[[], Any]:
            def run() -> Tensor:
                loss = self._forward(micro, share)  # ends here on every stage but the last
                part = weighted(loss, share)
                losses.append(part.detach())
                return self._scaled(part, averaging)

            return run

        bodies = [body(micro, share) for micro, share in zip(micro_batches, shares, strict=True)]
        self._begin(micro_batches, bodies)
        run_schedule(self.schedule_for(len(micro_batches)), len(micro_batches))
        for stage in self.stages:
            stage.clear_runtime_states()
            stage.part.show_parameters()
        return (torch.stack(losses).sum() if losses else torch.zeros((), device=self.world.device)), set()

    def schedule_for(self, num_chunks: int) -> Any:
        """torch's schedule object for so many micro-batches."""
        if num_chunks not in self._schedules:
            chosen = self.world.layout.schedule
            made = make_schedule(chosen, self.stages, num_chunks)
            self._schedules[num_chunks] = made
            if not made.is_as_asked:
                several = "es" if num_chunks > 1 else ""
                self.notes.append(
                    f"{chosen} cannot take {num_chunks} micro-batch{several} on {self.world.layout.num_stages} stages; "
                    f"steps with so many run as {made.runs_as}, with the same numbers"
                )
        return self._schedules[num_chunks].schedule

    def _begin(
        self, micro_batches: list[MicroBatch], bodies: list[Callable[[], Any]], *, training: bool = True
    ) -> None:
        """Tell every stage what each micro-batch is."""
        rehearsals = [self._rehearse(micro.data, training=training) for micro in micro_batches]
        crossings = [crossing(self._cut, rehearsal) for rehearsal in rehearsals]
        for stage in self.stages:
            number = stage.stage_index
            chunks = [
                Chunk(
                    rehearsal,
                    receives=cross[number],
                    sends=cross[number + 1] if number + 1 < len(cross) else [],
                    body=body,
                    around=lambda micro=micro: self._around(micro),  # type: ignore[misc]
                )
                for micro, rehearsal, cross, body in zip(micro_batches, rehearsals, crossings, bodies, strict=True)
            ]
            stage.begin(chunks, has_backward=training)

    @contextlib.contextmanager
    def _around(self, micro: MicroBatch) -> Iterator[None]:
        with self._micro_batch(micro):
            yield

    def _before_backward(self, part: nn.Module, is_last: bool) -> None:
        self._enter("backward")
        if not isinstance(part, FSDPModule):
            return
        if self.world.layout.schedule == "zb":
            hold_gradients(part)
        else:
            set_gradient_sync(part, self.world, is_last=is_last)

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

    # -- evaluation ---------------------------------------------------------------------------------------------

    def _measure_window(self, window: Window) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
        def body(micro: MicroBatch) -> Callable[[], Any]:
            def run() -> Any:
                with self._autocast():
                    output, target = call_model(self.task, self.model, micro.data)
                    return measure(self.task, output, target, micro, self.world.device)

            return run

        self._begin(window.micro_batches, [body(micro) for micro in window.micro_batches], training=False)
        yield from forward_only(self.stages, len(window.micro_batches))
        for stage in self.stages:
            stage.clear_runtime_states()

    # -- what is kept -------------------------------------------------------------------------------------------

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor from the first stage that holds it, through the ranks of the first pipeline, to the main rank."""
        self._share_buffers()
        own = {stage.stage_index for stage in self.stages}
        parts = {name: self._cut.stages_of_module(name) for name in dict.fromkeys(self._cut.calls)}
        canonical = _canonical_names(self.spread.rehearser.twin if self.spread.rehearser else self.model)
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

    def __init__(self, runtime: PipelineRuntime) -> None:
        world, cut = runtime.world, runtime._cut
        layout = world.layout
        trainable = dict(runtime._trainable)
        self._shared: list[tuple[nn.Parameter, dist.ProcessGroup]] = []
        self.counted_elsewhere: set[int] = set()
        self._device = world.device
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


def _group_of(stages: tuple[int, ...], runtime: PipelineRuntime) -> dist.ProcessGroup | None:
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
