"""ddp with local steps: each rank updates with its own gradient, and the ranks periodically average their weights.

A rank's gradient is that of its share of the global loss, times the number of ranks: with an average after every step
that is ddp, however uneven the shares are. Evaluations and saved weights use the mean over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from rung.parallel.averaging import Averaging, OuterStep
from rung.parallel.compression import Slots
from rung.runtime.base import Names
from rung.runtime.compressed import named_views, traffic_of
from rung.runtime.context import RuntimeContext
from rung.runtime.mesh import whole_model_parts
from rung.runtime.rank_state import SavedRankState, shaped_like
from rung.runtime.step import StepParts
from rung.runtime.update import OptimizerUpdate
from rung.runtime.weights import gathered_weights


def local_steps_parts(context: RuntimeContext) -> StepParts:
    parts = whole_model_parts(context)
    parts.gradient_figures = None  # each rank has the gradient of its own share
    config, world = context.config, context.world
    outer = OuterStep(config.outer_lr, config.outer_momentum) if config.outer == "diloco" else None
    with world.tensors.mode():
        averaging = Averaging(Slots(context.trainable, world.device), world, config.local_steps, outer)
    if config.clip is not None:
        context.notes.append(f"clip {config.clip:g} applies to each rank's own gradient")
    if context.sync_norms:
        context.notes.append(
            "batch norm still exchanges its statistics in every step; --set batch_norm=local keeps them local"
        )
    parts.update = LocalUpdate(context, averaging)
    parts.evaluated_weights = averaging.averaged
    parts.named_weights = partial(_averaged_weights, context, averaging)
    parts.rank_state = LocalWeights(context, averaging)
    parts.traffic = lambda: {"weights": traffic_of(averaging.wire)}
    return parts


class LocalUpdate:
    """Steps the optimizer on each rank's own gradient, and averages the weights every `local_steps` steps."""

    def __init__(self, context: RuntimeContext, averaging: Averaging) -> None:
        self._averaging = averaging
        # With fp16, all ranks skip a step that overflowed on one of them.
        self._update = OptimizerUpdate(context, has_equal_gradients=False)

    def __call__(self, want_norm: bool) -> Tensor | None:
        """Returns the root mean square of the norms of the ranks' own gradients."""
        self._averaging.begin()
        norm = self._update(want_norm)
        self._averaging.after_step()
        if norm is None or not want_norm:
            return None
        squared = norm.square().reshape(1)
        self._averaging.wire.all_reduce(squared)
        return squared.div_(self._averaging.wire.num_ranks).sqrt_().reshape(())


def _averaged_weights(
    context: RuntimeContext, averaging: Averaging, names: Names = None
) -> Iterator[tuple[str, Tensor]]:
    with averaging.averaged():
        for name, value in gathered_weights(context, names):
            yield name, value.clone()  # the model gets its local weights back


class LocalWeights:
    """Weights between two averagings, the optimizer's state, and DiLoCo's, which is the same on all ranks."""

    kind = "local"

    def __init__(self, context: RuntimeContext, averaging: Averaging) -> None:
        self._context, self.averaging = context, averaging

    def tensors(self) -> dict[str, Tensor]:
        found = {"steps": torch.tensor([self.averaging.num_steps])}
        weights, state = self._weights(), self._optimizer_state()
        return found | (weights if self.averaging.num_steps > 0 else {}) | state

    def common_tensors(self, found: dict[str, Tensor], *, alone: bool) -> dict[str, Tensor]:
        """The mean over the ranks. If `alone`, the reader of the checkpoint computes it."""
        averaging, slots = self.averaging, self.averaging.slots
        if not alone:
            # Only state that all ranks have: a rank has none for parameters that it has not used yet.
            known = set.intersection(*map(set, self._context.world.gather_objects(list(found))))
            trained = {f"model/{name}" for name in slots.names if averaging.num_steps > 0}
            for name in found:
                if name in trained or (name.startswith("optimizer/") and name in known):
                    found[name] = averaging.mean_of(found[name])
        for key, vector in (("momentum", averaging.momentum), ("anchor", averaging.anchor)):
            if vector is not None:
                found |= {f"outer/{name}/{key}": view for name, view in named_views(slots, vector)}
        return found

    def restore(self, saved: SavedRankState) -> bool:
        """Restores each rank's own weights and optimizer state; on another topology, the mean of all."""
        targets = self._weights() | self._optimizer_state()
        for name in saved.names():
            if name in targets:
                targets[name].copy_(shaped_like(saved.get(name), targets[name], name))
        self.averaging.num_steps = int(saved.get("steps"))
        if saved.own_rank is None:
            self._context.notes.append(
                f"every rank continues with the mean of the weights and optimizers of {saved.num_ranks} ranks"
            )
        if self.averaging.outer is not None:
            self._restore_outer(saved)
        return True

    def _restore_outer(self, saved: SavedRankState) -> None:
        slots = self.averaging.slots
        for key in ("momentum", "anchor"):
            if not any(name.startswith("outer/") and name.endswith(f"/{key}") for name in saved.manifest["tensors"]):
                continue
            vector = slots.zeros()
            for name, view in named_views(slots, vector):
                if view.numel() > 0:
                    place = f"outer/{name}/{key}"
                    view.copy_(shaped_like(saved.read(place), view, place))
            setattr(self.averaging, key, vector)

    def _weights(self) -> dict[str, Tensor]:
        slots = self.averaging.slots
        return {f"{name}/weight": parameter for name, parameter in zip(slots.names, slots.parameters, strict=True)}

    def _optimizer_state(self) -> dict[str, Tensor]:
        optimizer = self._context.optimizer
        names = {id(parameter): name for name, parameter in self._context.model.named_parameters()}
        held = [(names[id(p)], optimizer.state.get(p, {})) for group in optimizer.param_groups for p in group["params"]]
        return {f"{n}/state/{k}": v for n, state in held for k, v in state.items() if isinstance(v, Tensor)}
