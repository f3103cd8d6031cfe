"""A snapshot of all ranks of a run, in a small file that rank 0 replaces periodically.

`rung watch` reads it in another process. Imports no torch, so that the command starts quickly.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rung.system.untrusted import read_json

_MAX_BYTES = 2**26  # a few hundred for each rank


@dataclass(frozen=True)
class RankFigures:
    """Figures of one rank, per step, over the last seconds."""

    seconds: dict[str, float]  # its own, by phase, without waiting for others
    samples_per_second: float
    memory_bytes: int  # the most so far


@dataclass(frozen=True)
class StragglerStatus:
    """A rank that the others wait for."""

    rank: int
    phase: str
    seconds: float
    others_seconds: float
    text: str  # the same in a sentence


@dataclass(frozen=True)
class JobSnapshot:
    """A moment of a run. `ranks` is in rank order, and empty before the first figures of a world."""

    step: int
    when: float  # time.time()
    step_seconds: float = 0.0
    ranks: list[RankFigures] = field(default_factory=list)
    slow: list[StragglerStatus] = field(default_factory=list)


def snapshot_path(run_dir: Path) -> Path:
    return run_dir / ".state" / "live.json"


def write_snapshot(path: Path, snapshot: JobSnapshot) -> None:
    """Replace the file atomically: a reader sees the old snapshot or the new one."""
    partial = path.with_name(f".{path.name}")
    partial.write_text(json.dumps(asdict(snapshot)), encoding="utf-8")
    partial.replace(path)


def read_snapshot(path: Path) -> JobSnapshot | None:
    """The latest snapshot; None if there is none, or if another version wrote it in another form."""
    try:
        content = read_json(path, _MAX_BYTES)
        return JobSnapshot(
            step=_count(content["step"]),
            when=_number(content["when"]),
            step_seconds=_number(content["step_seconds"]),
            ranks=[
                RankFigures(
                    seconds={phase: _number(seconds) for phase, seconds in rank["seconds"].items()},
                    samples_per_second=_number(rank["samples_per_second"]),
                    memory_bytes=_count(rank["memory_bytes"]),
                )
                for rank in content["ranks"]
            ],
            slow=[
                StragglerStatus(
                    _count(straggler["rank"]),
                    str(straggler["phase"]),
                    _number(straggler["seconds"]),
                    _number(straggler["others_seconds"]),
                    str(straggler["text"]),
                )
                for straggler in content["slow"]
            ],
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or not abs(value) < 1e30:  # also false for nan
        raise ValueError(f"{value!r} is not a number")
    return float(value)


def _count(value: Any) -> int:
    if not 0 <= _number(value) < 2**53:
        raise ValueError(f"{value!r} is not a count")
    return int(value)
