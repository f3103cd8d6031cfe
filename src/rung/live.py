"""What all ranks of a run do at this moment, in a small file that rank 0 replaces from time to time.

`rung watch` reads it from another console. Imports no torch, so that looking is quick.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


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
        told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        ranks = [RankFigures(**one) for one in told.pop("ranks")]
        slow = [Slowness(**one) for one in told.pop("slow")]
        return Live(**told, ranks=ranks, slow=slow)
    except (OSError, ValueError, TypeError, KeyError):
        return None
