"""Records of measured collectives: `rung bench collectives` writes them, the planner reads them.

Plain dataclasses and JSON. Imports no torch.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from rung.errors import ConfigError

# Default folder of `rung bench`; `rung calibrate` reads from it.
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
    """Bus bandwidth over algorithm bandwidth, as in nccl-tests: the share of the bytes that each rank's link carries.

    Bus bandwidth is comparable with the hardware's for any number of ranks; algorithm bandwidth is not.
    """
    if op == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if op in ("scatter", "gather", "all_gather", "reduce_scatter", "all_to_all"):
        return (ranks - 1) / ranks
    return 1.0  # broadcast, reduce, send_recv: one link carries all bytes


@dataclass(frozen=True)
class CollectiveRecord:
    """One collective of one size and type, on one backend and number of ranks.

    `bytes` is the size as in nccl-tests: that of the whole array, of which a rank has a part before or after a scatter,
    gather, all_gather, reduce_scatter or all_to_all; 0 for a barrier. `seconds` is the median over repetitions of the
    slowest rank's time, None unless the state is "ok".
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
    runs: int = 0  # timed calls
    why: str = ""  # the reason of a state other than "ok"

    @property
    def algorithm_bandwidth(self) -> float | None:
        """Bytes per second: size over time."""
        return self.bytes / self.seconds if self.seconds and self.bytes else None

    @property
    def bus_bandwidth(self) -> float | None:
        """Algorithm bandwidth times the bus factor of the operation."""
        rate = self.algorithm_bandwidth
        return rate * bus_factor(self.op, self.ranks) if rate is not None else None


@dataclass(frozen=True)
class Sweep:
    """All records of one run, and its environment."""

    environment: dict[str, Any]
    records: list[CollectiveRecord] = field(default_factory=list)

    @property
    def file_name(self) -> str:
        """The name without a suffix. A later run with the same backend, device, ranks and hosts replaces an earlier."""
        about = self.environment
        parts = ["collectives", about["backend"], str(about["ranks"])]
        if about["device"] == "cuda" and about["backend"] != "nccl":
            parts.insert(2, "cuda")
        if len(about["hosts"]) > 1:
            parts.append(f"{len(about['hosts'])}hosts")
        return "-".join(parts)

    def as_json(self) -> dict[str, Any]:
        """The JSON document, with bandwidths in GB/s (1e9 bytes) for other programs."""
        rows = []
        for record in self.records:
            row = asdict(record)
            for name, rate in (("algbw", record.algorithm_bandwidth), ("busbw", record.bus_bandwidth)):
                row[name] = rate / 1e9 if rate is not None else None
            rows.append(row)
        return {"format": _FORMAT, "environment": self.environment, "records": rows}


def write_sweep(sweep: Sweep, folder: Path) -> Path:
    """Write FOLDER/collectives-<backend>-<ranks>.json atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{sweep.file_name}.json"
    partial = path.with_suffix(f".{os.getpid()}")
    head = sweep.as_json()
    rows = head.pop("records")
    # One record per line, for reading and for line-wise diffs.
    opening = json.dumps(head, indent=2).removesuffix("\n}")
    lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    partial.write_text(f'{opening},\n  "records": [\n{lines}\n  ]\n}}\n')
    partial.replace(path)
    return path


def read_sweep(path: Path) -> Sweep:
    """Read a file of `write_sweep`."""
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
    """All sweeps in a folder, sorted by file name."""
    return [read_sweep(path) for path in sorted(folder.glob("collectives-*.json"))]
