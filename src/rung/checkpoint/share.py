"""One rank's part of a checkpoint: what it holds, the copy in host memory, and the file."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rung.best import Best
from rung.checkpoint.files import Entry, dtype_name, write_tensors
from rung.checkpoint.own import common_tensors, own_tensors
from rung.checkpoint.plan import SharePlan
from rung.checkpoint.state import model_names, rank_tensors, small_state, topology
from rung.runtime.mesh import MeshRuntime
from rung.version import VERSION
from rung.world import World


@dataclass(frozen=True)
class Position:
    """Where in training a state belongs: after `step`."""

    step: int
    epoch: int
    samples: int  # counted from the first step
    sample: int  # of the epoch: the next one to be read
    evaluation_due: bool = False  # the step's evaluation was asked for and is still to be done
    evaluation: Mapping[str, float] | None = field(default=None, compare=False)  # the figures of the step's evaluation
    best: Best | None = None  # evaluation so far, by the setting keep_best
    finite: bool | None = field(default=None, compare=False)  # whether loss and gradient norm of the step were


@dataclass(frozen=True)
class Share:
    """One rank's part, in host memory."""

    step: int
    rank: int
    entries: list[Entry]
    values: list[Tensor]
    described: dict[str, Any]
    facts: dict[str, Any]
    arrived: Any = None

    @property
    def file(self) -> str:
        return f"rank-{self.rank:05d}.safetensors"

    @property
    def num_bytes(self) -> int:
        """Of its tensors; the header of the file comes on top."""
        return sum(entry.num_bytes for entry in self.entries)

    def write(self, folder: Path, touch: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """The rank's file. What the manifest must know of it. `touch` is called as it grows."""
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
    """Copies a rank's part of the state to host memory. All ranks call `stage` in the same steps."""

    def __init__(self, runtime: MeshRuntime, settings: Mapping[str, Any]) -> None:
        self._runtime, self._world = runtime, runtime.world
        self._settings = dict(settings)
        self._plan: SharePlan | None = None
        self._buffers: list[Tensor] = []

    @torch.no_grad()
    def stage(self, position: Position) -> Share:
        """Of what several ranks have alike, each copies some. The copy is the caller's until the next call."""
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
            torch._foreach_copy_(self._buffers, values, non_blocking=True)
        arrived = None
        if on_gpu:
            # The copies stand in the stream before the next step's work: training goes on while they run.
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        return make_share(self._runtime, position, self._plan, self._buffers, self._settings, arrived=arrived)

    def _plan_is_old(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether any rank has other tensors than in the last save: a parameter may get its optimizer state late."""
        changed = self._plan is None or not self._plan.fits(tensors)
        return any(row[0] > 0 for row in self._world.gather([float(changed)]))


def make_share(
    runtime: MeshRuntime,
    position: Position,
    plan: SharePlan,
    values: list[Tensor],
    settings: Mapping[str, Any],
    *,
    generators: Mapping[str, Tensor] | None = None,
    arrived: Any = None,
) -> Share:
    """A share of what `plan` lists, with the small state as it is now. `generators` if they are of another moment."""
    world = runtime.world
    own = {**own_tensors(runtime), **(generators if generators is not None else rank_tensors(world))}
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
    rows.sort(key=lambda row: -row[0].dtype.itemsize)  # so that each begins at a multiple of its size
    return Share(
        position.step,
        world.rank,
        [entry for entry, _ in rows],
        [value for _, value in rows],
        {**plan.describe(file), **described},
        {**small_state(runtime), **model_names(runtime), **_header(position, world), **settings},
        arrived,
    )


def merge(parts: list[dict[str, Any]], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The content of the manifest, from what every rank tells of its part."""
    first = min(parts, key=lambda part: int(part["rank"]))["facts"]
    values = {name: value for part in parts for name, value in part["facts"]["optimizer"]["values"].items()}
    return {
        **first,
        "optimizer": {**first["optimizer"], "values": values},
        "files": {name: told for part in parts for name, told in part["files"].items()},
        "tensors": tensors,
    }


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
        "saved_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "strategy": world.layout.name,
        "ranks": world.size,
        "topology": topology(world.layout),
        "device": world.device.type,
        "rung": VERSION,
        "torch": torch.__version__,
    }


def _figures(metrics: Mapping[str, float]) -> dict[str, float | str]:
    """JSON has no nan and no infinity; they become strings that say so."""
    return {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}
