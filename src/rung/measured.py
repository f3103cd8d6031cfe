"""What was measured of this hardware, as files: the times of collectives. `rung bench collectives` writes them.

Plain records and JSON, far below whoever measures, so that whoever predicts can read them, too. No torch.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from rung.errors import ConfigError

# Every run that is not told otherwise writes here, and whoever calibrates looks here.
BENCH_FOLDER = Path("runs/bench")
_FORMAT = "rung-collectives-1"

OPS = (
    "all_reduce",
    "broadcast",
    "reduce",
    "scatter",
    "gather",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "send_recv",
    "barrier",
)
REDUCING = ("all_reduce", "reduce", "reduce_scatter")


def bus_factor(op: str, ranks: int) -> float:
    """What nccl-tests multiply the algorithm bandwidth by: the share of the bytes that each rank's link carries.

    The bus bandwidth can be held against the hardware's, whatever the number of ranks; the algorithm bandwidth cannot.
    """
    if op == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if op in ("scatter", "gather", "all_gather", "reduce_scatter", "all_to_all"):
        return (ranks - 1) / ranks
    return 1.0  # broadcast, reduce, send_recv: one link carries it all


@dataclass(frozen=True)
class CollectiveRecord:
    """One collective of one size and type, on one backend and number of ranks.

    `bytes` is what nccl-tests call the size: of the whole array, of which each rank has a part before or after a
    scatter, gather, all_gather, reduce_scatter or all_to_all. A barrier has none. `seconds` is the median over
    repetitions of the time of the slowest rank, and is None where the state is not "ok".
    """

    op: str
    backend: str  # gloo, nccl or mpi
    device: str  # cpu or cuda
    dtype: str
    reduction: str  # sum, avg, min or max; empty where nothing is reduced
    bytes: int
    ranks: int
    hosts: int
    state: str  # "ok", "wrong", "failed" or "not supported"
    seconds: float | None = None
    fastest_seconds: float | None = None
    runs: int = 0  # timed ones
    why: str = ""  # of any other state than "ok"

    @property
    def algorithm_bandwidth(self) -> float | None:
        """Bytes a second: size over time."""
        return self.bytes / self.seconds if self.seconds and self.bytes else None

    @property
    def bus_bandwidth(self) -> float | None:
        """Bytes a second, as above, times the factor of the operation."""
        rate = self.algorithm_bandwidth
        return rate * bus_factor(self.op, self.ranks) if rate is not None else None


@dataclass(frozen=True)
class Sweep:
    """All records of one run, and where they were taken."""

    environment: dict[str, Any]
    records: list[CollectiveRecord] = field(default_factory=list)

    @property
    def file_name(self) -> str:
        """Without an ending. One for each backend, device and size of the world: a later run replaces an earlier."""
        about = self.environment
        parts = ["collectives", about["backend"], str(about["ranks"])]
        if about["device"] == "cuda" and about["backend"] != "nccl":
            parts.insert(2, "cuda")
        if len(about["hosts"]) > 1:
            parts.append(f"{len(about['hosts'])}hosts")
        return "-".join(parts)

    def as_json(self) -> dict[str, Any]:
        """With the bandwidths written out in GB/s (1e9 bytes) for other readers."""
        rows = []
        for record in self.records:
            row = asdict(record)
            for name, rate in (("algbw", record.algorithm_bandwidth), ("busbw", record.bus_bandwidth)):
                row[name] = rate / 1e9 if rate is not None else None
            rows.append(row)
        return {"format": _FORMAT, "environment": self.environment, "records": rows}


def write_sweep(sweep: Sweep, folder: Path) -> Path:
    """Write FOLDER/collectives-<backend>-<ranks>.json, at once or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{sweep.file_name}.json"
    half = path.with_suffix(f".{os.getpid()}")
    head = sweep.as_json()
    rows = head.pop("records")
    # A record a line: short enough to read, and a change of one is a change of one line.
    told = json.dumps(head, indent=2).removesuffix("\n}")
    lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    half.write_text(f'{told},\n  "records": [\n{lines}\n  ]\n}}\n')
    half.replace(path)
    return path


def read_sweep(path: Path) -> Sweep:
    """Read what `write_sweep` wrote."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as measured collectives: {error}.") from None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ConfigError(f"{path} holds no measured collectives; `rung bench collectives` writes them.")
    known = {field.name for field in fields(CollectiveRecord)}
    records = [
        CollectiveRecord(**{key: value for key, value in row.items() if key in known}) for row in content["records"]
    ]
    return Sweep(content["environment"], records)


def read_sweeps(folder: Path = BENCH_FOLDER) -> list[Sweep]:
    """All sweeps in a folder, by name; none where nothing was measured yet."""
    return [read_sweep(path) for path in sorted(folder.glob("collectives-*.json"))]
