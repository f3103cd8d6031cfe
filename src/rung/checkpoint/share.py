"""One rank's part of a checkpoint: its contents, the copy in host memory, and the file."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rung.checkpoint.files import Entry, dtype_name, write_tensors
from rung.checkpoint.plan import SharePlan
from rung.checkpoint.rank_local_state import common_tensors, rank_local_tensors
from rung.checkpoint.state import model_names, rank_tensors, small_state
from rung.checkpoint.stream_place import pack_place
from rung.data.shard_windows import StreamPlace
from rung.distributed.torch_private import foreach_copy_
from rung.distributed.world import World
from rung.runtime.base import Runtime
from rung.spec.abilities import topology
from rung.spec.best_metric import Best
from rung.spec.version import VERSION


@dataclass(frozen=True)
class Position:
    """The position in training after `step`."""

    step: int
    epoch: int
    samples: int  # since the first step
    sample: int  # of the epoch: the next to be read
    evaluation_due: bool = False  # the evaluation after this step has not been done yet
    evaluation: Mapping[str, float] | None = field(default=None, compare=False)  # metrics of this step
    best: Best | None = None  # evaluation so far, by the setting keep_best
    finite: bool | None = field(default=None, compare=False)  # loss and gradient norm of the step
    stream: StreamPlace | None = field(default=None, compare=False)  # where this rank reads its shards on
    skipped: tuple[str, ...] = ()  # samples that were left out since the first step, by name


@dataclass(frozen=True)
class Share:
    """One rank's part of a checkpoint, in host memory."""

    step: int
    rank: int
    entries: list[Entry]
    values: list[Tensor]
    described: dict[str, Any]  # the chunks by tensor, for the manifest
    facts: dict[str, Any]
    arrived: Any = None  # CUDA event after the copies to `values`

    @property
    def file(self) -> str:
        return f"rank-{self.rank:05d}.safetensors"

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors, without the header of the file."""
        return sum(entry.num_bytes for entry in self.entries)

    def write(self, folder: Path, touch: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Write the rank's file. Returns its entry for the manifest. `touch` is called as the file grows."""
        if self.arrived is not None:
            self.arrived.synchronize()
        size, digest = write_tensors(folder / self.file, self.entries, self.values, touch=touch)
        return {
            "rank": self.rank,
            "files": {self.file: {"bytes": size, "sha256": digest}},
            "tensors": self.described,
            "facts": self.facts,
        }


class Stager:
    """Copies a rank's part of the state to host memory. Collective: all ranks call `stage` in the same steps."""

    def __init__(self, runtime: Runtime, settings: Mapping[str, Any]) -> None:
        self._runtime, self._world = runtime, runtime.world
        self._settings = dict(settings)
        self._plan: SharePlan | None = None
        self._buffers: list[Tensor] = []

    @torch.no_grad()
    def stage(self, position: Position) -> Share:
        """Copy this rank's part. Buffers are reused: the share is valid until the next call."""
        world = self._world
        tensors = common_tensors(self._runtime)
        if self._plan_is_old(tensors):
            self._plan, self._buffers = SharePlan(tensors, world), []
        assert self._plan is not None
        values = self._plan.values(tensors)
        on_gpu = world.device.type == "cuda"
        if not self._buffers:
            self._buffers = [torch.empty(value.shape, dtype=value.dtype, pin_memory=on_gpu) for value in values]
        if values:
            foreach_copy_(self._buffers, values, non_blocking=True)
        arrived = None
        if on_gpu:
            # The copies are in the stream before the next step's kernels, so training need not wait for them.
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        return make_share(self._runtime, position, self._plan, self._buffers, self._settings, arrived=arrived)

    def _plan_is_old(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether the tensors of any rank changed since the last save: optimizer state may be created late."""
        changed = self._plan is None or not self._plan.fits(tensors)
        return any(row[0] > 0 for row in self._world.gather([float(changed)]))


def make_share(
    runtime: Runtime,
    position: Position,
    plan: SharePlan,
    values: list[Tensor],
    settings: Mapping[str, Any],
    *,
    arrived: Any = None,
) -> Share:
    """The share of the parts in `plan`, with the current small state and random generators."""
    world = runtime.world
    own = {**rank_local_tensors(runtime), **rank_tensors(world)}
    entries = [Entry(name, value.dtype, tuple(value.shape)) for name, value in own.items()]
    file = f"rank-{world.rank:05d}.safetensors"
    described = {
        entry.key: {
            "dtype": dtype_name(entry.dtype),
            "shape": list(entry.shape),
            "chunks": [{"file": file, "key": entry.key, "offsets": [0], "shape": list(entry.shape)}],
        }
        for entry in entries
    }
    rows = [*zip([part.entry for part in plan.parts], values, strict=True), *zip(entries, own.values(), strict=True)]
    # Wide types first: each tensor then starts at a multiple of its item size.
    rows.sort(key=lambda row: -row[0].dtype.itemsize)
    return Share(
        position.step,
        world.rank,
        [entry for entry, _ in rows],
        [value for _, value in rows],
        {**plan.describe(file), **described},
        {**small_state(runtime), **model_names(runtime), **_header(position, world), **settings},
        arrived,
    )


def _header(position: Position, world: World) -> dict[str, Any]:
    return {
        "step": position.step,
        "epoch": position.epoch,
        "samples": position.samples,
        "sample": position.sample,
        "evaluation_due": position.evaluation_due,
        "evaluation": _figures(position.evaluation) if position.evaluation is not None else None,
        "best": position.best.as_json() if position.best is not None else None,
        "finite": position.finite,
        "stream": pack_place(position.stream),
        "skipped": list(position.skipped),
        "saved_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "strategy": world.layout.name,
        "ranks": world.size,
        "topology": topology(world.layout),
        "device": world.device.type,
        "rung": VERSION,
        "torch": torch.__version__,
    }


def _figures(metrics: Mapping[str, float]) -> dict[str, float | str]:
    """Replace nan and infinity, which JSON lacks, by strings."""
    return {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}
