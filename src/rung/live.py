"""What all ranks of a run do at this moment, in a small file that rank 0 replaces from time to time.

`rung watch` reads it from another console. Imports no torch, so that looking is quick.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rung.untrusted import read_json

_MAX_BYTES = 2**26  # a few hundred for each rank


@dataclass(frozen=True)
class RankFigures:
    """Of one rank, for a step as of the last seconds."""

    seconds: dict[str, float]  # its own, by phase, without waiting for others
    samples_per_second: float
    memory_bytes: int  # the most so far


@dataclass(frozen=True)
class Slowness:
    """A rank that the others wait for."""

    rank: int
    phase: str
    seconds: float
    others_seconds: float
    text: str  # the same in a sentence


@dataclass(frozen=True)
class Live:
    """A moment of a run. The ranks are in their order; none before the first figures of a world."""

    step: int
    when: float  # time.time()
    step_seconds: float = 0.0
    ranks: list[RankFigures] = field(default_factory=list)
    slow: list[Slowness] = field(default_factory=list)


def live_path(run_dir: Path) -> Path:
    return run_dir / ".state" / "live.json"


def write_live(path: Path, live: Live) -> None:
    """In one go: whoever reads it sees the old one or the new one."""
    partial = path.with_name(f".{path.name}")
    partial.write_text(json.dumps(asdict(live)), encoding="utf-8")
    partial.replace(path)


def read_live(path: Path) -> Live | None:
    """What was written last; None where nothing was, or by a version that wrote something else."""
    try:
        told = read_json(path, _MAX_BYTES)
        return Live(
            step=_count(told["step"]),
            when=_number(told["when"]),
            step_seconds=_number(told["step_seconds"]),
            ranks=[
                RankFigures(
                    seconds={phase: _number(seconds) for phase, seconds in one["seconds"].items()},
                    samples_per_second=_number(one["samples_per_second"]),
                    memory_bytes=_count(one["memory_bytes"]),
                )
                for one in told["ranks"]
            ],
            slow=[
                Slowness(
                    _count(one["rank"]),
                    str(one["phase"]),
                    _number(one["seconds"]),
                    _number(one["others_seconds"]),
                    str(one["text"]),
                )
                for one in told["slow"]
            ],
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or not abs(value) < 1e30:  # nan is not, either
        raise ValueError(f"{value!r} is no number")
    return float(value)


def _count(value: Any) -> int:
    if not 0 <= _number(value) < 2**53:
        raise ValueError(f"{value!r} is no count")
    return int(value)
