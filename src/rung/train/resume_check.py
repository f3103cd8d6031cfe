"""Whether a resumed run goes on where it was: steps that are done again must have the losses they had before."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path

from rung.checkpoint import Checkpoint, is_same_topology
from rung.distributed.world import World
from rung.errors import ResumeError
from rung.spec.abilities import can
from rung.spec.config import RunConfig
from rung.train.records import StepRecord

log = logging.getLogger("rung")

_TAIL_BYTES = 2**20  # of metrics.jsonl: thousands of steps
_STEPS = 20  # after the resume; later ones may drift apart by rounding
_TOLERANCES = {"fp64": 1e-6, "fp32": 1e-3}
_HALF_TOLERANCE = 3e-2


class ResumeCheck:
    """Compares each of the first steps after a resume with the same step before it. All ranks decide alike."""

    def __init__(self, before: Mapping[int, float], config: RunConfig, *, stops: bool) -> None:
        self._before, self._stops = before, stops
        self._tolerance = _TOLERANCES.get(config.precision, _HALF_TOLERANCE)

    @classmethod
    def after(
        cls, path: Path, checkpoint: Checkpoint | None, world: World, config: RunConfig, *, restarted: bool
    ) -> ResumeCheck:
        """With the losses that the main rank's metrics.jsonl has of steps after the checkpoint."""
        saved = checkpoint.manifest.get("config", {}) if checkpoint is not None else {}
        same = [
            saved.get(name) == getattr(config, name)
            for name in ("batch_size", "batch_tokens", "micro_batch", "seed", "precision")
        ]
        # Under ps-async a step has no loss of its own: gradients are late by chance.
        is_repeatable = can(world.layout, "verify")
        if checkpoint is None or not is_repeatable or not all(same) or not is_same_topology(checkpoint.manifest, world):
            return cls({}, config, stops=False)
        found = losses_after(path, checkpoint.step) if world.is_main else {}
        pairs = world.gather_objects(list(found.items()))[0]
        return cls({int(step): float(loss) for step, loss in pairs}, config, stops=restarted)

    def check(self, record: StepRecord) -> None:
        before = self._before.get(record.step)
        if before is None or not math.isfinite(record.loss):
            return
        if abs(record.loss - before) <= self._tolerance * max(abs(before), 1e-3):
            return
        self._before = {}  # once is enough
        text = (
            f"step {record.step} had the loss {before:.6g} before the run was resumed and has {record.loss:.6g} now. "
            "Either the state was not restored as it was saved, or the data or the task changed"
        )
        if self._stops:
            raise ResumeError(f"{text}. --no-check goes on in spite of it.")
        log.warning("%s.", text)


def losses_after(path: Path, step: int) -> dict[int, float]:
    """The losses of the first steps after `step`, as they were logged last."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return {}
    found: dict[int, float] = {}
    for line in lines:
        if not line.startswith(b'{"step":'):
            continue
        try:
            row = json.loads(line)
            number, loss = int(row["step"]), float(row["loss"])
        except (ValueError, KeyError, TypeError):  # the line that a kill cut short
            continue
        if step < number <= step + _STEPS and math.isfinite(loss):
            found[number] = loss
    return found
