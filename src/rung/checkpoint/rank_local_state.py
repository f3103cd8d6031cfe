"""State that differs between ranks under `--compress` and `--local-steps`, in a form that any topology can restore.

    rank/<number>/compress/<parameter>/gradient     error feedback: the part of gradients not sent yet
    rank/<number>/compress/<parameter>/update       of updates, which topk sends in place of gradients under SGD
    rank/<number>/compress/<parameter>/velocity     the momentum in those updates
    rank/<number>/local/<parameter>/weight          weights between two averagings
    rank/<number>/local/<parameter>/state/<key>     the rank's optimizer state
    outer/<parameter>/momentum, outer/<parameter>/anchor    of DiLoCo, the same on all ranks

On the same topology each rank restores its own state, and the run continues bit by bit. On another, each rank gets the
mean: a step applies the mean over ranks, so what is still to be sent keeps its weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rung.checkpoint.state import optimizer_parameters, tensors_to_save
from rung.parallel.materialize import is_absent
from rung.runtime.base import Runtime
from rung.runtime.rank_state import SavedRankState, shaped_like


def common_tensors(runtime: Runtime, *, alone: bool = False) -> dict[str, Tensor]:
    """The state that is saved once for all ranks; under local steps, the mean over ranks.

    `alone`: do not communicate; the reader takes the mean instead.
    """
    found, state = tensors_to_save(runtime, everything=alone), runtime.rank_state
    return found if state is None else state.common_tensors(found, alone=alone)


def has_rank_local_state(runtime: Runtime) -> bool:
    """Whether ranks hold state of their own, so that a save without one of them is incomplete."""
    return runtime.rank_state is not None


def rank_local_tensors(runtime: Runtime) -> dict[str, Tensor]:
    """Host copies of the state that only this rank holds, flat."""
    state = runtime.rank_state
    if state is None:
        return {}
    return {
        f"rank/{runtime.world.rank}/{state.kind}/{name}": tensor.detach().reshape(-1).to("cpu", copy=True)
        for name, tensor in state.tensors().items()
        if tensor.numel() > 0
    }


@torch.no_grad()
def restore_rank_local(
    runtime: Runtime, manifest: Mapping[str, Any], read: Callable[[str], Tensor], *, is_same: bool
) -> None:
    """Restore rank-local state, after weights and optimizer. Adds notes for the user where the topology changes it."""
    own_rank = runtime.world.rank if is_same else None
    state = runtime.rank_state
    for kind, otherwise in (("compress", _drop_unsent), ("local", _average_local)):
        saved = SavedRankState(manifest, read, kind, own_rank)
        fits = bool(saved.names()) and state is not None and state.kind == kind and state.restore(saved)
        if saved.names() and not fits:
            otherwise(runtime, replace(saved, own_rank=None))


def _drop_unsent(runtime: Runtime, saved: SavedRankState) -> None:
    """Drop error feedback of another --compress. topk holds SGD's momentum: give SGD the mean over ranks."""
    names = set(saved.names())
    for name, parameter in optimizer_parameters(runtime):
        buffer = runtime.optimizer.state.get(parameter, {}).get("momentum_buffer")
        velocity = f"{name}/velocity"
        if buffer is not None and velocity in names:
            buffer.add_(shaped_like(saved.get(velocity), buffer, velocity))
    if any("/" in name for name in names):  # a parameter's tensor; other names are of numbers
        runtime.notes.append(
            f"gradients that {saved.num_ranks} ranks had not sent yet are dropped: they are of another --compress"
        )


def _average_local(runtime: Runtime, saved: SavedRankState) -> None:
    """Give every rank the mean of the weights and optimizer states that local steps left on the ranks."""
    targets: dict[str, Tensor] = {f"{name}/weight": p for name, p in runtime.model.named_parameters()}
    for owner, parameter in optimizer_parameters(runtime):
        state = runtime.optimizer.state.get(parameter, {})
        targets |= {f"{owner}/state/{key}": value for key, value in state.items() if isinstance(value, Tensor)}
    for name in saved.names():
        if name in targets and not is_absent(targets[name]):
            targets[name].copy_(shaped_like(saved.get(name), targets[name], name))
