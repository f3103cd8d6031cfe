"""Lines of metrics.jsonl that a failed run did not come to write.

Each rank saves its figures of the last steps with its state, and the run that goes on from there writes the lines.
Figures are exchanged some steps after they were computed, so that no rank waits for them; but a state that is saved on
failure is of the last step, so the steps before it are not done again.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rung.checkpoint.notes import UNREPORTED
from rung.train.figures import Sums, reduced
from rung.train.records import StepRecord

log = logging.getLogger("rung")

_TAIL_BYTES = 2**20  # of metrics.jsonl: thousands of steps


@dataclass(frozen=True)
class OwnFigures:
    """One rank's figures of a step. Those of the main rank count where all have the same."""

    step: int
    epoch: int
    num_samples: int  # of all ranks
    loss: float  # this rank's share
    grad_norm: float | None
    lr: float
    lrs: Mapping[str, float]
    seconds: float
    compile_seconds: float
    wait_seconds: float
    memory_bytes: int
    staleness: int | None
    logged: Sums

    def as_json(self) -> dict[str, Any]:
        found = {key: _plain(value) for key, value in vars(self).items() if key not in ("lrs", "logged")}
        logged = [[*key, _plain(total), _plain(weight)] for key, (total, weight) in self.logged.items()]
        return {**found, "lrs": {name: _plain(rate) for name, rate in self.lrs.items()}, "logged": logged}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> OwnFigures:
        whole = {key: int(saved[key]) for key in ("step", "epoch", "num_samples", "memory_bytes")}
        names = ("loss", "lr", "seconds", "compile_seconds", "wait_seconds")
        floats: dict[str, Any] = {key: float(saved[key]) for key in names}
        norm, staleness = saved["grad_norm"], saved["staleness"]
        return cls(
            **whole,
            **floats,
            grad_norm=float(norm) if norm is not None else None,
            lrs={str(name): float(rate) for name, rate in saved["lrs"].items()},
            staleness=int(staleness) if staleness is not None else None,
            logged={(str(n), str(how)): (float(total), float(weight)) for n, how, total, weight in saved["logged"]},
        )


def lost_records(manifest: Mapping[str, Any], metrics: Path) -> list[StepRecord]:
    """The steps up to a saved state that `metrics` has no lines of. For the main rank."""
    if UNREPORTED not in manifest:
        return []
    try:
        return _lost_records(manifest, _steps_written(metrics))
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        log.warning("metrics.jsonl lacks the last steps before the failure: their figures are invalid (%s).", error)
        return []


def _lost_records(manifest: Mapping[str, Any], written: set[int]) -> list[StepRecord]:
    saved, last, samples = manifest[UNREPORTED], int(manifest["step"]), int(manifest["samples"])
    ranks = [{int(row["step"]): row for row in saved.get(str(rank), [])} for rank in range(int(manifest["ranks"]))]
    steps = sorted((step for step in set().union(*ranks) if step <= last), reverse=True)
    records, lost = [], []
    for step in steps:
        rows = [OwnFigures.from_json(found[step]) for found in ranks if step in found]
        if step not in written and len(rows) == len(ranks):
            records.append(_record(rows, samples))
        elif step not in written:
            lost.append(step)
        samples -= rows[0].num_samples
    if lost:
        log.warning(
            "metrics.jsonl lacks %s: a rank that was lost had a part of their figures.",
            f"step {lost[0]}" if len(lost) == 1 else f"steps {lost[-1]} to {lost[0]}",
        )
    return records[::-1]


def _record(rows: list[OwnFigures], samples: int) -> StepRecord:
    main = rows[0]
    slowest = max(range(len(rows)), key=lambda rank: rows[rank].wait_seconds)
    return StepRecord(
        step=main.step,
        epoch=main.epoch,
        samples=samples,
        loss=math.fsum(row.loss for row in rows),
        grad_norm=main.grad_norm,
        lr=main.lr,
        step_seconds=main.seconds,
        samples_per_second=main.num_samples / main.seconds if main.seconds > 0 else math.nan,
        data_wait_seconds=rows[slowest].wait_seconds,
        slowest_reader=slowest,
        peak_memory_bytes=max(row.memory_bytes for row in rows),
        lrs=dict(main.lrs) or None,
        compile_seconds=main.compile_seconds or None,
        staleness=main.staleness,
        logged=reduced(row.logged for row in rows),
    )


def _steps_written(path: Path) -> set[int]:
    """The steps with a line since the run began, or was resumed last."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return set()
    found: set[int] = set()
    for line in lines:
        if line.startswith((b'{"event": "start"', b'{"event": "resume"')):
            found = set()
        elif line.startswith(b'{"step":'):
            try:
                found.add(int(json.loads(line)["step"]))
            except (ValueError, KeyError, TypeError):  # the line that a kill cut short
                continue
    return found


def _plain(value: float | int | None) -> float | int | str | None:
    """JSON has no infinities, and `float` reads these words."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
