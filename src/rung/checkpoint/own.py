"""What ranks keep each for itself under `--compress` and `--local-steps`, in a checkpoint that any topology can read.

    rank/<number>/compress/<parameter>/gradient     what its messages have left out so far
    rank/<number>/compress/<parameter>/update       the same with momentum in it (topk under SGD)
    rank/<number>/compress/<parameter>/velocity     that momentum
    rank/<number>/local/<parameter>/weight          weights between two averagings
    rank/<number>/local/<parameter>/state/<key>     what its optimizer keeps
    outer/<parameter>/momentum, outer/<parameter>/anchor    of DiLoCo, the same on all ranks

On the same topology every rank gets its own again, and the run goes on bit by bit. On another one each gets the mean:
updates are means over ranks, so all that was still to be sent stays so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from rung.checkpoint.state import optimizer_parameters, tensors_to_save
from rung.errors import CheckpointError
from rung.parallel.compression import Slots
from rung.parallel.materialize import is_absent
from rung.runtime.compressed import CompressedRuntime
from rung.runtime.local_steps import LocalStepsRuntime
from rung.runtime.mesh import MeshRuntime


def common_tensors(runtime: MeshRuntime, *, alone: bool = False) -> dict[str, Tensor]:
    """What is written once, under names that no strategy changes. Under local steps: the mean over the ranks.

    `alone`: nobody else is there to take a mean with; a reader has to.
    """
    found = tensors_to_save(runtime, everything=alone)
    if not isinstance(runtime, LocalStepsRuntime):
        return found
    averaging = runtime.averaging
    if not alone:
        # An optimizer may have state for a parameter that another rank has not used yet.
        known = set.intersection(*map(set, runtime.world.gather_objects(list(found))))
        trained = {f"model/{name}" for name in averaging.slots.names if averaging.num_steps > 0}
        for name in found:
            if name in trained or (name.startswith("optimizer/") and name in known):
                found[name] = averaging.mean_of(found[name])
    for key, vector in (("momentum", averaging.momentum), ("anchor", averaging.anchor)):
        if vector is not None:
            found |= {f"outer/{name}/{key}": view for name, view in _named_views(averaging.slots, vector)}
    return found


def has_own_state(runtime: MeshRuntime) -> bool:
    """Whether ranks keep something that no other has, so that a state without one of them is none."""
    return isinstance(runtime, CompressedRuntime | LocalStepsRuntime)


def own_tensors(runtime: MeshRuntime) -> dict[str, Tensor]:
    """Copies on the host of what this rank keeps and no other does, as rows of numbers."""
    found: dict[str, Tensor] = {}
    if isinstance(runtime, CompressedRuntime):
        exchange = runtime.exchange
        for key, vector in exchange.vectors().items():
            found |= {f"compress/{name}/{key}": view for name, view in _named_views(exchange.slots, vector)}
        found |= {f"compress/{key}": tensor for key, tensor in exchange.extras().items()}
    if isinstance(runtime, LocalStepsRuntime):
        averaging = runtime.averaging
        found["local/steps"] = torch.tensor([averaging.num_steps])
        if averaging.num_steps > 0:
            weights = zip(averaging.slots.names, averaging.slots.parameters, strict=True)
            found |= {f"local/{name}/weight": parameter for name, parameter in weights}
        for name, parameter in optimizer_parameters(runtime):
            for key, value in runtime.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    found[f"local/{name}/state/{key}"] = value
    return {
        f"rank/{runtime.world.rank}/{name}": tensor.detach().reshape(-1).to("cpu", copy=True)
        for name, tensor in found.items()
        if tensor.numel() > 0
    }


@dataclass(frozen=True)
class Kept:
    """What the ranks of a checkpoint had of one kind, as this rank may see it."""

    manifest: Mapping[str, Any]
    read: Callable[[str], Tensor]
    kind: str  # compress or local
    own_rank: int | None  # the rank whose state goes on here; None on another topology

    def names(self) -> list[str]:
        first = f"rank/{self.own_rank or 0}/{self.kind}/"
        return [name.removeprefix(first) for name in self.manifest["tensors"] if name.startswith(first)]

    def get(self, name: str) -> Tensor:
        """This rank's own; on another topology the mean over all, in double precision until the end."""
        if self.own_rank is not None:
            return self.read(f"rank/{self.own_rank}/{self.kind}/{name}")
        ranks = range(int(self.manifest["ranks"]))
        found = [self.read(f"rank/{rank}/{self.kind}/{name}") for rank in ranks]
        if not found[0].is_floating_point():
            return found[0]
        if any(tensor.shape != found[0].shape for tensor in found):
            raise CheckpointError(f"the checkpoint's ranks have {name} in different shapes.")
        return torch.stack([tensor.to(torch.float64) for tensor in found]).mean(dim=0).to(found[0].dtype)


@torch.no_grad()
def restore_own(
    runtime: MeshRuntime, manifest: Mapping[str, Any], read: Callable[[str], Tensor], *, is_same: bool
) -> None:
    """After weights and optimizer were restored. What changes with the topology is noted for the user."""
    own_rank = runtime.world.rank if is_same else None
    for kind, restore in (("compress", _restore_compression), ("local", _restore_local)):
        kept = Kept(manifest, read, kind, own_rank)
        if names := kept.names():
            restore(runtime, kept, names)
    if isinstance(runtime, LocalStepsRuntime):
        _restore_outer(runtime, manifest, read)


def _restore_compression(runtime: MeshRuntime, kept: Kept, names: list[str]) -> None:
    num_ranks = int(kept.manifest["ranks"])
    saved = {name.rpartition("/")[2] for name in names if "/" in name}
    if isinstance(runtime, CompressedRuntime) and saved == set(runtime.exchange.vectors()):
        exchange = runtime.exchange
        for key, vector in exchange.vectors().items():
            for name, view in _named_views(exchange.slots, vector):
                if view.numel() > 0:
                    view.copy_(_shaped(kept.get(f"{name}/{key}"), view, f"{name}/{key}"))
        exchange.restore({name: kept.get(name) for name in names if "/" not in name})
        if kept.own_rank is None and saved:
            runtime.notes.append(
                f"what {num_ranks} ranks had not yet sent of their gradients: each rank now begins with the mean of it"
            )
        return
    if "velocity" in saved:
        _give_back_momentum(runtime, kept, set(names))
    if saved:
        runtime.notes.append(
            f"what {num_ranks} ranks had not yet sent of their gradients is dropped: it was left by another --compress"
        )


def _give_back_momentum(runtime: MeshRuntime, kept: Kept, names: set[str]) -> None:
    """topk had taken it over from SGD; the mean over the ranks is what SGD would have."""
    mean = replace(kept, own_rank=None)
    for name, parameter in optimizer_parameters(runtime):
        buffer = runtime.optimizer.state.get(parameter, {}).get("momentum_buffer")
        if buffer is not None and f"{name}/velocity" in names:
            buffer.add_(_cut_like(mean.get(f"{name}/velocity"), buffer, f"{name}/velocity"))


def _restore_local(runtime: MeshRuntime, kept: Kept, names: list[str]) -> None:
    """On the same topology each rank's own weights and optimizer state, on another the mean of all."""
    if not isinstance(runtime, LocalStepsRuntime):
        kept = replace(kept, own_rank=None)
    targets: dict[str, Tensor] = {f"{name}/weight": p for name, p in runtime.model.named_parameters()}
    for owner, parameter in optimizer_parameters(runtime):
        state = runtime.optimizer.state.get(parameter, {})
        targets |= {f"{owner}/state/{key}": value for key, value in state.items() if isinstance(value, Tensor)}
    for name in names:
        if name in targets and not is_absent(targets[name]):
            targets[name].copy_(_cut_like(kept.get(name), targets[name], name))
    if isinstance(runtime, LocalStepsRuntime):
        runtime.averaging.num_steps = int(kept.get("steps"))
        if kept.own_rank is None:
            runtime.notes.append(
                f"the weights and optimizers of {kept.manifest['ranks']} ranks are averaged: each goes on with that"
            )


def _restore_outer(runtime: LocalStepsRuntime, manifest: Mapping[str, Any], read: Callable[[str], Tensor]) -> None:
    averaging, tensors = runtime.averaging, manifest["tensors"]
    if averaging.outer is None:
        return
    for key in ("momentum", "anchor"):
        if not any(name.startswith("outer/") and name.endswith(f"/{key}") for name in tensors):
            continue
        vector = averaging.slots.zeros()
        for name, view in _named_views(averaging.slots, vector):
            if view.numel() > 0:
                view.copy_(_shaped(read(f"outer/{name}/{key}"), view, f"outer/{name}/{key}"))
        setattr(averaging, key, vector)


def _shaped(flat: Tensor, target: Tensor, name: str) -> Tensor:
    if flat.numel() != target.numel():
        raise CheckpointError(
            f"the checkpoint is of another model: {name} has {flat.numel()} elements there and {target.numel()} here."
        )
    return flat.reshape(target.shape)


def _cut_like(whole: Tensor, target: Tensor, name: str) -> Tensor:
    """Numbers of a whole tensor in the form that it has here."""
    shaped = _shaped(whole, target, name).to(device=target.device, dtype=target.dtype)
    if not isinstance(target, DTensor):
        return shaped
    mesh = target.device_mesh
    everywhere = DTensor.from_local(shaped, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(mesh, target.placements)


def _named_views(slots: Slots, vector: Tensor) -> list[tuple[str, Tensor]]:
    return list(zip(slots.names, slots.views(vector), strict=True))
