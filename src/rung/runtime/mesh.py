"""The runtime of every layout without stages: single, ddp, zero1, zero2, zero3/fsdp, hsdp, tp and compositions."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rung.batches import Batches
from rung.config import RunConfig
from rung.errors import ModelError, TaskError
from rung.nested import map_tensors
from rung.parallel import Spread, sync_batch_norms
from rung.parallel.gather import whole_tensor
from rung.parallel.gradients import clip, global_norm
from rung.parallel.materialize import is_absent
from rung.parallel.sharding import free_gathered, set_gradient_sync
from rung.parallel.tensor import settle_gradients
from rung.parallel.zero1 import ShardedUpdate
from rung.runtime.base import LocalStep, ModelFacts, Traffic
from rung.runtime.buffers import buffers_besides, note_of_changes
from rung.runtime.forward import LossModule, NoDropout, autocast, call_model, default_type, laid_out
from rung.runtime.measure import means, measure, shares_of, weighted
from rung.runtime.optimizer import LocalScaler, learning_rate, local_bytes
from rung.runtime.phases import PhaseClock
from rung.runtime.samples import refuse_different_samples
from rung.runtime.unused import UnusedParameters
from rung.status import StatusWriter
from rung.task import Task
from rung.windows import MicroBatch, Window
from rung.world import World, broadcast_from


class MeshRuntime:
    """Takes steps on one rank. Built by `build_runtime`, which hands it finished parts."""

    total_steps: int | None = None  # that the schedule was made for

    def __init__(
        self,
        *,
        task: Task,
        world: World,
        config: RunConfig,
        spread: Spread,
        optimizer: Optimizer,
        schedule: LRScheduler | None,
        sharded_update: ShardedUpdate | None,
        facts: ModelFacts,
        status: StatusWriter,
    ) -> None:
        self.task, self.world, self.config = task, world, config
        self.model, self.optimizer, self.schedule = spread.model, optimizer, schedule
        self.notes, self.facts, self.spread = spread.notes, facts, spread
        self._status = status
        # Compiled code must not see that waits are exchanged for measured ones while a step runs.
        self._clock = PhaseClock(waits=world.size > 1 and not world.pretend, functional_waits=not config.compile)
        self._sharded_update = sharded_update
        self._loss_module: nn.Module = LossModule(self.model, task, spread.plan)
        self._ddp: DistributedDataParallel | None = None
        layout, model = world.layout, self.model
        if layout.uses_ddp and not world.is_server:
            with world.tensors():
                self._ddp = self._replicate()
            self._loss_module = self._ddp or self._loss_module
        if config.compile and not layout.uses_fully_shard and not layout.is_composed:
            self._loss_module.compile()
        self._trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._sync_norms = sync_batch_norms(model)
        self._own_buffers = buffers_besides(model, self._sync_norms)
        self._scaler = LocalScaler(world.device.type) if config.precision == "fp16" else None
        self._copies: Any = None
        if world.device.type == "cuda" and not world.pretend:
            self._copies = torch.cuda.Stream(world.device)  # type: ignore[no-untyped-call]
        self._first_step = True
        self.num_updates = 0
        self.is_updating = False  # between the first parameter that changes and the last
        self._unused = UnusedParameters(model, self._trainable, world, config.unused_parameters)

    def _replicate(self) -> DistributedDataParallel | None:
        return self.world.replicate(self._loss_module, find_unused=self.config.unused_parameters == "allow")

    # -- batches ------------------------------------------------------------------------------------------------

    def place(self, windows: Iterable[Window]) -> Iterator[Window]:
        as_they_are = self.config.precision != "fp64" and self.config.memory_format == "contiguous"
        in_place = self.world.device.type == "cpu" and self.world.has_storage and as_they_are
        for window in windows:
            if in_place:
                yield window
                continue
            with self.world.tensors():
                placed = [dataclasses.replace(m, data=self._place(m.data)) for m in window.micro_batches]
            yield dataclasses.replace(window, micro_batches=placed)

    def _place(self, data: Any) -> Any:
        dtype = torch.float64 if self.config.precision == "fp64" else None
        if self._copies is None:
            return map_tensors(data, lambda t: laid_out(self.config, self.world.place(t, dtype)))
        # A stream of its own: the copy runs beside the step before, which the device is still busy with.
        here = torch.cuda.current_stream(self.world.device)
        with torch.cuda.stream(self._copies):
            placed = map_tensors(data, lambda t: laid_out(self.config, self.world.place(t, dtype)))
        here.wait_stream(self._copies)
        map_tensors(placed, lambda t: t.record_stream(here))
        return placed

    # -- training -----------------------------------------------------------------------------------------------

    def step(self, window: Window, *, want_norm: bool = False) -> LocalStep:
        clock = self._clock.begin(window.wait_seconds)
        with clock, self.world.tensors(), self._without_dropout(), self._default_type():
            if not self.model.training:
                self.model.train()
            if self._first_step:
                refuse_different_samples(self.world, window)
            self._enter("forward")
            shares, averaging = self._shares(window)
            versions = [buffer._version for _, buffer in self._own_buffers] if self._first_step else []
            loss_share, used = self._accumulate(window.micro_batches, shares, averaging)
            self._settle()
            self._unused.check(used)
            if not self.world.counts_loss:
                loss_share = torch.zeros_like(loss_share)
            rate = learning_rate(self.optimizer)
            self._enter("update")
            norm = self._update(want_norm)
            if self._first_step:
                if self.world.layout.num_data_ranks > 1:
                    self.notes += note_of_changes(self.model, self._own_buffers, versions)
                self._first_step = False
        return LocalStep(loss_share, norm, rate)

    def phase_seconds(self) -> dict[str, float]:
        return self._clock.seconds()

    @property
    def clock(self) -> PhaseClock:
        return self._clock

    def _enter(self, phase: str) -> None:
        self._status.phase(phase)
        self._clock.enter(phase)

    def _accumulate(
        self, micro_batches: list[MicroBatch], shares: list[float | Tensor], averaging: float
    ) -> tuple[Tensor, set[str]]:
        """Forward and backward of every micro-batch: this rank's share of the loss, and the parameters it used."""
        loss_share: Tensor | None = None
        used: set[str] = set()
        last = len(micro_batches) - 1
        for number, (micro, share) in enumerate(zip(micro_batches, shares, strict=True)):
            with self._micro_batch(micro):
                before = self._unused.versions() if number == last > 0 and self._ddp is not None else None
                with self._synchronising(is_last=number == last):
                    loss = self._forward(micro, share)
                    used |= self._unused.reachable(loss)
                    part = weighted(loss, share)
                    self._backward(part, averaging)
                self._unused.check_last_micro_batch(before)
            loss_share = part.detach() if loss_share is None else loss_share + part.detach()
        assert loss_share is not None, "a window holds at least one micro-batch"
        return loss_share, used

    def _settle(self) -> None:
        """Whatever gradients need before anyone looks at them."""
        if self.spread.plan is not None:
            settle_gradients([p for _, p in self._trainable])

    def _norm(self, parameters: list[nn.Parameter]) -> Tensor:
        return global_norm(parameters)

    def _shares(self, window: Window) -> tuple[list[float | Tensor], float]:
        """Each micro-batch's part of the global mean, and what undoes the average over ranks that reducing applies."""
        return shares_of(self.task, self.world, window), float(self.world.layout.num_data_ranks)

    def _forward(self, micro: MicroBatch, share: float | Tensor) -> Tensor:
        self._enter("forward")
        # A piece without a counted unit may have a mean of 0/0, whose gradient must not reach the model.
        counted = share > 0 if isinstance(share, Tensor) else None
        try:
            with self._autocast():
                loss: Tensor = self._loss_module(micro.data, counted)
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" in str(error) and self.world.layout.uses_fully_shard:
                raise ModelError(
                    "a parameter was used outside of the model's own forward, where sharded parameters are not "
                    "gathered. Let forward(model, batch) call the model itself, not one of its methods or parts."
                ) from error
            raise
        if self._first_step:
            if not isinstance(loss, Tensor) or loss.dim() != 0:
                shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
                raise TaskError(
                    f"{self.task.name}: loss() must return one number, the mean over its units; it returned {shape}."
                )
            if not loss.requires_grad:
                raise TaskError(f"{self.task.name}: the loss does not depend on any trainable parameter.")
        return loss

    def _backward(self, part: Tensor, averaging: float) -> None:
        self._enter("backward")
        scaled = self._scaled(part, averaging)
        reduces = self._ddp is not None and self._ddp.require_backward_grad_sync
        self._clock.follow_backward(scaled, reduces=reduces)
        scaled.backward()  # type: ignore[no-untyped-call]
        self._clock.reduced()

    def _scaled(self, part: Tensor, averaging: float) -> Tensor:
        scaled = part * averaging if averaging != 1.0 else part
        return self._scaler.scale(scaled) if self._scaler is not None else scaled

    def _update(self, want_norm: bool) -> Tensor | None:
        parameters = [p for _, p in self._trainable]
        update = self._sharded_update
        if self._scaler is not None:
            if update is not None:
                update.take_gradients()  # the scaler looks at the optimizer's parameters
            self._scaler.unscale_(self.optimizer)
            self._agree_on_overflow()
        if update is not None and self._scaler is not None:
            parameters = update.slices()  # only these were unscaled
        norm = None
        if self.config.clip is not None or want_norm:
            norm = self._norm(parameters)
        if self.config.clip is not None:
            assert norm is not None
            clip(parameters, self.config.clip, norm)
        if update is not None and self._scaler is None:
            update.take_gradients()
        self.is_updating = True
        self._take_step()
        if update is not None:
            update.share_parameters()
            update.drop_gradients()
        self._after_update()
        return norm

    def _take_step(self) -> None:
        if self._scaler is not None:
            if any(p.grad is not None for group in self.optimizer.param_groups for p in group["params"]):
                self._scaler.step(self.optimizer)
            self._scaler.update()
        else:
            self._step_optimizer()

    def _after_update(self) -> None:
        for _, parameter in self._trainable:
            parameter.grad = None
        if self.schedule is not None:
            self.schedule.step()
        self.is_updating, self.num_updates = False, self.num_updates + 1

    def _step_optimizer(self) -> None:
        self.optimizer.step()

    @property
    def _sees_all_gradients(self) -> bool:
        return self.world.layout.zero == 0 and not self.world.layout.is_composed

    def _agree_on_overflow(self) -> None:
        """Every rank skips a step that overflowed on any of them: each has seen its own part of the gradients."""
        if self._scaler is not None and not self._sees_all_gradients:
            self._scaler.agree(self.optimizer, self.world.device)

    @contextlib.contextmanager
    def _micro_batch(self, micro: MicroBatch) -> Iterator[None]:
        """What one micro-batch computes: a stand-in leaves no trace."""
        stand_in = micro.num_samples == 0
        saved = [(buffer, buffer.clone()) for _, buffer in self._own_buffers] if stand_in else []
        for norm in self._sync_norms:
            norm.counted = not stand_in
        yield
        for buffer, value in saved:
            buffer.data.copy_(value)

    def _synchronising(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """Who is told the gradients of one micro-batch."""
        if self.world.layout.uses_fully_shard:
            set_gradient_sync(self.model, self.world, is_last=is_last)
        return self._ddp.no_sync() if self._ddp is not None and not is_last else nullcontext()

    # -- evaluation ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, windows: Iterable[Window]) -> dict[str, float]:
        self._share_buffers()
        self.model.eval()
        sums: dict[str, list[Tensor]] = {}
        try:
            for window in self.place(windows):
                self._status.touch()
                with self.world.tensors(), self._default_type():
                    for measured in self._measure_window(window):
                        for name, (total, count) in measured.items():
                            known = sums.setdefault(name, [torch.zeros_like(total), torch.zeros_like(count)])
                            known[0], known[1] = known[0] + total, known[1] + count
        finally:
            # Also when the loop is asked to stop between two windows: what it then saves are the shards.
            with self.world.tensors():
                self.tidy_up()
        with self.world.tensors():
            own = self.world.read([tensor for name in sorted(sums) for tensor in sums[name]])
        return self._add_up({name: (own[2 * i], own[2 * i + 1]) for i, name in enumerate(sorted(sums))})

    def _add_up(self, found: dict[str, tuple[float, float]]) -> dict[str, float]:
        """Means over all ranks, from each one's sums and counts."""
        return means(self.world.gather_objects(found if self.world.counts_loss else {}))

    def _measure_window(self, window: Window) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
        for micro in window.micro_batches:
            for norm in self._sync_norms:
                norm.counted = micro.num_samples > 0
            with self._autocast():
                output, target = call_model(self.task, self.model, micro.data)
                yield measure(self.task, output, target, micro, self.world.device)

    # -- what is kept --------------------------------------------------------------------------------------------

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        self._share_buffers()
        for name, value in self.model.state_dict().items():
            if isinstance(value, Tensor):
                self._status.touch()
                whole = self._whole(value)
                yield name, whole.cpu() if self.world.is_main else torch.empty(0)

    def _whole(self, value: Tensor) -> Tensor:
        whole = value.detach()
        return whole_tensor(whole, self.world.device) if isinstance(whole, DTensor) else whole

    def tidy_up(self) -> None:
        """Parameters as they are between steps, wherever a forward pass ended."""
        for root in self.spread.roots:
            free_gathered(root)
        for part in self.spread.parts:
            part.show_parameters()

    def begin(self, start: int, batches: Batches) -> None:
        """The state is that after step `start`, and these windows come next. For runtimes that others work for."""

    def is_settled(self) -> bool:
        """Whether the state is that after the last step and all before it. Asked by all ranks together."""
        return True

    def dismiss(self, *, stopped: bool) -> None:
        """The run is over."""

    @property
    def scaler(self) -> LocalScaler | None:
        return self._scaler

    def parameter_slices(self) -> dict[int, nn.Parameter]:
        """What the optimizer has in the place of a parameter, by the parameter's identity."""
        return self._sharded_update.by_parameter() if self._sharded_update is not None else {}

    def counted_elsewhere(self) -> set[int]:
        """Parameters, by identity, that another rank answers for."""
        return set()

    def state_bytes(self) -> dict[str, int]:
        parameters = [p for p in self.model.parameters() if not is_absent(p)]
        state = [v for values in self.optimizer.state.values() for v in values.values() if isinstance(v, Tensor)]
        return {
            "parameters": sum(local_bytes(p) for p in parameters),
            "gradients": sum(local_bytes(p.grad) for p in parameters if p.grad is not None),
            "optimizer": sum(local_bytes(v) for v in state),
            "buffers": sum(local_bytes(b) for b in self.model.buffers() if not is_absent(b)),
        }

    def traffic(self) -> dict[str, Traffic]:
        return {}

    def device_0_bytes(self) -> dict[str, int]:
        return {}

    def _share_buffers(self) -> None:
        """The first data rank's buffers to all, where they may differ (running statistics of a local batch norm)."""
        if self.world.layout.num_data_ranks == 1:
            return
        with self.world.tensors():
            for _, buffer in self._own_buffers:
                if buffer.numel() > 0:
                    broadcast_from(self.world.data_source, buffer, self.world.data_group)

    # -- precision -----------------------------------------------------------------------------------------------

    def _autocast(self) -> AbstractContextManager[Any]:
        return autocast(self.config, self.world.device)

    def _default_type(self) -> AbstractContextManager[Any]:
        """Under fp64 also for tensors that the model makes in forward."""
        return default_type(torch.float64) if self.config.precision == "fp64" else nullcontext()

    def _without_dropout(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.config.dropout else NoDropout()
